"""From what gRPC raises to the classes of kvstore.errors."""

from __future__ import annotations

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
    assert isinstance(error, grpc.Call), "every RpcError of a call is also a Call"
    details = error.details() or "no details"
    for name, value in error.trailing_metadata() or ():
        if name == ERROR_ENTRY:
            text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
            return ALL_ERRORS.get(text, KvstoreError)(details)
    code = error.code()
    if code is grpc.StatusCode.UNIMPLEMENTED and what in ("Map", "OpenArena"):
        # A service from before it could share memory gives all the rest.
        return MemoryUnavailable(f"{what} failed: {details}")
    return _BY_STATUS.get(code, KvstoreError)(f"{what} failed: {code.name.lower()}: {details}")
