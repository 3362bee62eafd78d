"""From what a handler raises to a status on the wire, for servers whose handlers run in threads."""

from __future__ import annotations

import logging
import secrets
from typing import NoReturn

import grpc

from kvstore.errors import KvstoreError
from kvstore.service.status import CODES, ERROR_METADATA, MAX_MESSAGE_CHARS
from kvstore_workers.runtime.stop import Stopped

log = logging.getLogger(__name__)


def refuse(context: grpc.ServicerContext, error: Exception, *, method: str) -> NoReturn:
    """End the call with the status of `error`; to be called while it is being handled. Unexpected errors are logged
    whole, under a number that the caller gets too."""
    if isinstance(error, Stopped):
        context.abort(grpc.StatusCode.CANCELLED, "given up by the caller")
    if isinstance(error, KvstoreError):
        context.set_trailing_metadata(((ERROR_METADATA, error.code),))
        context.abort(CODES[error.code], str(error)[:MAX_MESSAGE_CHARS])
    number = secrets.token_hex(4)
    log.exception("unexpected error %s in %s", number, method)
    context.set_trailing_metadata(((ERROR_METADATA, KvstoreError.code),))
    context.abort(
        grpc.StatusCode.INTERNAL,
        f"unexpected error {number} in {method}; the worker's log has the details under this number",
    )
    raise AssertionError("abort raises")
