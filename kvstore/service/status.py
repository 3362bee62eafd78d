"""The one table from errors to gRPC status codes, and the wrapper that puts it around every handler."""

from __future__ import annotations

import asyncio
import functools
import logging
import secrets
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, NoReturn, Protocol, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from kvstore.errors import ALL_ERRORS, InvalidArgument, KvstoreError
from kvstore.service.handlers import Unreadable

log = logging.getLogger(__name__)

ERROR_METADATA = "kvstore-error"
MAX_MESSAGE_CHARS = 1000

_Code = grpc.StatusCode

CODES: dict[str, grpc.StatusCode] = {
    "INTERNAL": _Code.INTERNAL,
    "INVALID_ARGUMENT": _Code.INVALID_ARGUMENT,
    "UNKNOWN_NAMESPACE": _Code.NOT_FOUND,
    "MEMORY_UNAVAILABLE": _Code.FAILED_PRECONDITION,
    "UNKNOWN_LEASE": _Code.NOT_FOUND,
    "UNKNOWN_RESERVATION": _Code.NOT_FOUND,
    "UNKNOWN_TICKET": _Code.NOT_FOUND,
    "UNKNOWN_SESSION": _Code.FAILED_PRECONDITION,
    "UNAUTHENTICATED": _Code.UNAUTHENTICATED,
    "FORBIDDEN": _Code.PERMISSION_DENIED,
    "GEOMETRY_MISMATCH": _Code.FAILED_PRECONDITION,
    "PARENT_MISSING": _Code.FAILED_PRECONDITION,
    "DAMAGED_BYTES": _Code.DATA_LOSS,
    "LIMIT_EXCEEDED": _Code.RESOURCE_EXHAUSTED,
    "POLICY_TOO_LARGE": _Code.FAILED_PRECONDITION,
    "NO_SPACE": _Code.RESOURCE_EXHAUSTED,
    "DEVICE_ERROR": _Code.INTERNAL,
    "DRAINING": _Code.UNAVAILABLE,
    "UNAVAILABLE": _Code.UNAVAILABLE,
    "DIRECTORY_IN_USE": _Code.FAILED_PRECONDITION,
    "FORMAT_TOO_NEW": _Code.FAILED_PRECONDITION,
    "STORE_DAMAGED": _Code.FAILED_PRECONDITION,
    "CONFIG": _Code.FAILED_PRECONDITION,
    "PROFILE": _Code.INVALID_ARGUMENT,
}
assert CODES.keys() == ALL_ERRORS.keys(), "every error has a status code, and every code an error"

Context = grpc.aio.ServicerContext[Any, Any]


class Guarded(Protocol):
    """A servicer; `check_ready` raises while it may not be asked yet."""

    def check_ready(self) -> None: ...


S = TypeVar("S", bound=Guarded)
R = TypeVar("R")
A = TypeVar("A")


_REFUSAL: ContextVar[str] = ContextVar("kvstore_refusal", default="")


async def refuse(context: Context, error: KvstoreError) -> NoReturn:
    """End the call with the error's status."""
    _REFUSAL.set(error.code)
    await context.abort(CODES[error.code], str(error)[:MAX_MESSAGE_CHARS], ((ERROR_METADATA, error.code),))


def refusal_of_call() -> str:
    """The name of the error with which this task's call was refused."""
    return _REFUSAL.get() or KvstoreError.code


async def _abort_unexpected(context: Context, method: str) -> NoReturn:
    """Answer INTERNAL with a number that the log has too; to be called while the exception is being handled."""
    number = secrets.token_hex(4)
    log.exception("unexpected error %s in %s", number, method)
    message = f"unexpected error {number} in {method}; the service's log has the details under this number"
    await context.abort(_Code.INTERNAL, message, ((ERROR_METADATA, KvstoreError.code),))


def answering(method: Callable[[S, R, Context], Awaitable[A]]) -> Callable[[S, R, Context], Awaitable[A]]:
    """Around a handler, unary or streaming by `context.read` and `context.write`: what it raises becomes a status."""

    @functools.wraps(method)
    async def call(servicer: S, request: R, context: Context) -> A:
        try:
            servicer.check_ready()
            if isinstance(request, Unreadable):
                raise InvalidArgument(f"not a message of this call: {request.why}", field="request")
            return await method(servicer, request, context)
        except Exception as error:  # noqa: BLE001 -- the last line of defence
            # What ends well, as most calls do, is not to pay for a second coroutine around it.
            await _end(context, error, method.__name__)

    return call


async def _end(context: Context, error: Exception, method: str) -> NoReturn:
    """End the call for what its handler raised; to be called while that is being handled."""
    try:
        if isinstance(error, KvstoreError):
            await refuse(context, error)
        if isinstance(error, DecodeError):
            # Of a frame of a stream.
            await refuse(context, InvalidArgument(f"not a message of this call: {error}", field="frame"))
        if isinstance(error, grpc.aio.InternalError):
            raise error
        await _abort_unexpected(context, method)
    except grpc.aio.InternalError as gone:
        # gRPC takes no more for a caller that has gone, and logs with a traceback whatever else is raised here.
        raise asyncio.CancelledError from gone
