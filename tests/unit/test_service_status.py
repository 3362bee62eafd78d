"""How a handler's end becomes the call's."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc.aio
import pytest

from kvstore.errors import KvstoreError, LimitExceeded
from kvstore.service.status import answering


class Gone:
    """The context of a caller that has gone: gRPC takes nothing for it."""

    async def write(self, message: object) -> None:
        raise grpc.aio.InternalError("Failed execute_batch")

    async def abort(self, *status: object) -> None:
        raise grpc.aio.InternalError("Failed execute_batch")


class Servicer:
    def check_ready(self) -> None:
        return None

    @answering
    async def send(self, request: object, context: Any) -> None:
        await context.write(request)

    @answering
    async def refuse(self, request: KvstoreError, context: Any) -> None:
        raise request


async def test_a_caller_that_goes_before_its_answer_is_no_error_of_the_service(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    context: Any = Gone()
    with pytest.raises(asyncio.CancelledError):
        await Servicer().send("bytes", context)
    with pytest.raises(asyncio.CancelledError):
        await Servicer().refuse(LimitExceeded("too many"), context)
    assert caplog.records == []
