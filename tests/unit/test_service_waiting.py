"""Waiting for a client, never longer than its session or its deadline."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from kvstore.errors import UnknownLease, UnknownSession
from kvstore.service.session import Session
from kvstore.service.waiting import Until, until_end


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


async def test_of_many_steps_the_first_of_session_end_and_deadline_ends_the_one_under_way() -> None:
    never = asyncio.get_running_loop().create_future()
    mine = session()
    with pytest.raises(UnknownLease), Until(session=mine, seconds=lambda: 0.0, late=late):
        await never
    asyncio.get_running_loop().call_later(0.01, mine.ended.set_result, None)
    never = asyncio.get_running_loop().create_future()
    with pytest.raises(UnknownSession), Until(session=mine, seconds=lambda: 60.0, late=late):
        await never
    # Its session has ended before.
    never = asyncio.get_running_loop().create_future()
    with pytest.raises(UnknownSession), Until(session=mine, seconds=lambda: 60.0, late=late):
        await never
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_deadline_that_moved_on_meanwhile_is_waited_for() -> None:
    left = iter([0.001, 0.002, 0.001, 0.0])
    asked: list[float] = []

    def seconds() -> float:
        asked.append(next(left))
        return asked[-1]

    with pytest.raises(UnknownLease), Until(session=session(), seconds=seconds, late=late):
        await asyncio.get_running_loop().create_future()
    assert asked[0] > 0
    assert asked[-1] == 0.0


async def test_what_ends_in_time_leaves_nothing_behind() -> None:
    mine = session()
    with Until(session=mine, seconds=lambda: 60.0, late=late):
        await asyncio.sleep(0)
    mine.ended.set_result(None)
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match="its own"), Until(session=session(), seconds=lambda: 1.0, late=late):
        raise ValueError("its own")


async def test_a_task_that_is_cancelled_by_another_is_cancelled_and_not_late() -> None:
    async def waits() -> None:
        with Until(session=session(), seconds=lambda: 60.0, late=late):
            await asyncio.get_running_loop().create_future()

    task = asyncio.create_task(waits())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
