"""From what gRPC raises to the classes of kvstore.errors."""

from __future__ import annotations

from typing import Any

import grpc

from kvstore.errors import (
    ALL_ERRORS,
    InvalidArgument,
    KvstoreError,
    LimitExceeded,
    MemoryUnavailable,
    Unavailable,
)

ERROR_ENTRY = "kvstore-error"

_BY_STATUS: dict[grpc.StatusCode, type[KvstoreError]] = {
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: Unavailable,
    # A call is cancelled under its caller only when the connection is dropped.
    grpc.StatusCode.CANCELLED: Unavailable,
    # No such method: a service of another version is as good as none.
    grpc.StatusCode.UNIMPLEMENTED: Unavailable,
    grpc.StatusCode.RESOURCE_EXHAUSTED: LimitExceeded,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
}


def translated(error: grpc.RpcError, *, what: str) -> KvstoreError:
    """The error that the service named, or the one that fits the status where gRPC itself failed the call `what`."""
    call = _as_call(error)
    details = call.details() or "no details"
    for name, value in call.trailing_metadata() or ():
        if name == ERROR_ENTRY:
            text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
            return ALL_ERRORS.get(text, KvstoreError)(details)
    code = call.code()
    if code is grpc.StatusCode.UNIMPLEMENTED and what in ("Map", "OpenArena", "OpenDock"):
        # A service from before it could share memory gives all the rest.
        return MemoryUnavailable(f"{what} failed: {details}")
    return _BY_STATUS.get(code, KvstoreError)(f"{what} failed: {code.name.lower()}: {details}")


def broke_off(failure: KvstoreError) -> bool:
    """Whether the way to the service broke under a call, or was not there: the service itself has said nothing, and the
    call's time is not over."""
    cause = failure.__cause__
    if type(failure) is not Unavailable or not isinstance(cause, grpc.RpcError):
        return False
    return _as_call(cause).code() is grpc.StatusCode.UNAVAILABLE and not _has_name(cause)


def was_answered(failure: KvstoreError) -> bool:
    """Whether the service itself has ended the call with this error, so that it does nothing for it any more."""
    cause = failure.__cause__
    return isinstance(cause, grpc.RpcError) and _has_name(cause)


def _has_name(error: grpc.RpcError) -> bool:
    return any(name == ERROR_ENTRY for name, _ in _as_call(error).trailing_metadata() or ())


def _as_call(error: grpc.RpcError) -> Any:
    """Whatever ends a call has its code, details and metadata, though not every kind of it says so in its class."""
    return error
