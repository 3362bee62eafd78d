"""Waiting for a client, never longer than its session or its deadline."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from kvstore.errors import UnknownLease, UnknownSession
from kvstore.service.session import Session
from kvstore.service.waiting import until_end


def session() -> Session:
    return Session(
        "s", 0, asyncio.get_running_loop().create_future(), lambda: None, lambda line, descriptor: False
    )


def late() -> UnknownLease:
    return UnknownLease("late")


async def test_the_first_of_result_session_end_and_deadline_ends_the_wait() -> None:
    async def quick() -> int:
        return 7

    async def never() -> int:
        await asyncio.get_running_loop().create_future()
        return 0

    mine = session()
    assert await until_end(quick(), session=mine, seconds=5.0, late=late) == 7
    with pytest.raises(UnknownLease):
        await until_end(never(), session=mine, seconds=0.01, late=late)
    asyncio.get_running_loop().call_later(0.01, mine.ended.set_result, None)
    with pytest.raises(UnknownSession):
        await until_end(never(), session=mine, seconds=5.0, late=late)


async def test_a_step_that_fails_when_its_call_is_cancelled_is_nobodys_error() -> None:
    async def send() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            raise OSError("the client is gone") from None

    heard: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: heard.append(context))
    waiting = asyncio.create_task(until_end(send(), session=session(), seconds=5.0, late=late))
    await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    del waiting
    gc.collect()
    await asyncio.sleep(0)
    assert heard == []
