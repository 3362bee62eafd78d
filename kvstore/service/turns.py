"""Long work in the event loop's thread, with turns for others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeVar

from kvstore.core.steps import ITEMS_AT_ONCE, Steps

S = TypeVar("S")
T = TypeVar("T")
R = TypeVar("R")


async def by_turns(steps: Steps[S, T], did: Callable[[S], object] = lambda each: None) -> T:
    """Run all of it; `did` is told of each step, and whoever waits has a turn after it. Who is cancelled closes it."""
    try:
        while True:
            try:
                step = next(steps)
            except StopIteration as end:
                result: T = end.value
                return result
            did(step)
            await asyncio.sleep(0)
    finally:
        steps.close()


async def mapped(make: Callable[[int, S], R], items: Sequence[S]) -> list[R]:
    """make(index, item) of each, with turns for others after some hundred."""
    made: list[R] = []
    async for part in in_parts(items):
        made += [make(index, item) for index, item in enumerate(part, len(made))]
    return made


async def in_parts(items: Sequence[S]) -> AsyncIterator[Sequence[S]]:
    """Some hundred at a time, with turns for others between them."""
    for first in range(0, len(items), ITEMS_AT_ONCE):
        if first:
            await asyncio.sleep(0)
        yield items[first : first + ITEMS_AT_ONCE]


def at_leisure(steps: Steps[S, T], then: Callable[[], object] = lambda: None) -> None:
    """Begin it at once, and go on whenever others have had a turn; `then` is called at its end. It must not raise."""
    try:
        next(steps)
    except StopIteration:
        then()
        return
    asyncio.get_running_loop().call_soon(at_leisure, steps, then)
