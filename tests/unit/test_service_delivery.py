"""Answers that break off while a write is under way, over a real connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from kvstore.errors import KvstoreError, UnknownSession
from kvstore.service.delivery import send, send_frames
from kvstore.service.session import Session
from kvstore.service.status import Context, refuse
from kvstore.service.waiting import Until

FRAMES, FRAME = 8, bytes(1 << 18)
NAME = "tests.Stream"


class _EndsWhileWriting:
    """The context of a call whose session ends when write `number` has begun."""

    def __init__(self, context: Context, session: Session, number: int) -> None:
        self._context = context
        self._session = session
        self._left = number

    async def write(self, message: object) -> None:
        writing = asyncio.ensure_future(self._context.write(message))
        self._left -= 1
        if self._left == 0:
            self._session.ended.get_loop().call_soon(self._session.ended.set_result, None)
        await writing


async def frame_by_frame(context: Context) -> None:
    for _ in range(FRAMES):
        await send(context, FRAME)


async def frames_ahead(context: Context) -> None:
    async def frames() -> AsyncIterator[bytes]:
        for _ in range(FRAMES):
            yield FRAME

    await send_frames(context, frames(), may_send=lambda: None)


@pytest.mark.parametrize("way", [frame_by_frame, frames_ahead])
async def test_a_caller_is_told_why_its_stream_ended_though_a_write_was_under_way(
    tmp_path: Path, way: Callable[[Context], Awaitable[None]]
) -> None:
    numbers = iter(range(1, FRAMES))

    async def stream(request: bytes, context: Context) -> None:
        session = Session("s", 0, asyncio.get_running_loop().create_future(), lambda: None, None)
        ending = cast(Context, _EndsWhileWriting(context, session, next(numbers)))
        try:
            with Until(session=session, seconds=lambda: 60.0, late=lambda: KvstoreError("late")):
                await way(ending)
        except UnknownSession as error:
            await refuse(context, error)

    server = grpc.aio.server()
    handler: Any = grpc.unary_stream_rpc_method_handler(stream)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, {"Take": handler}),))
    address = f"unix:{tmp_path / 'socket'}"
    server.add_insecure_port(address)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            take = channel.unary_stream(f"/{NAME}/Take")
            for _ in range(1, FRAMES):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    async for _ in take(b"", timeout=10.0):
                        pass
                assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    finally:
        await server.stop(0)
