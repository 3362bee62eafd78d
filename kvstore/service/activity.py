"""Waiting until what is under way has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Activity:
    """Knows of calls that move bytes, and wakes whoever waits for open work to end. `open_work` counts what is open."""

    def __init__(self, open_work: Callable[[], int]) -> None:
        self._open_work = open_work
        self._changed = asyncio.Event()
        self.transfers = 0

    def note(self) -> None:
        """Something may have ended."""
        self._changed.set()

    @contextmanager
    def transfer(self) -> Iterator[None]:
        """For the length of a call that moves bytes."""
        self.transfers += 1
        try:
            yield
        finally:
            self.transfers -= 1
            self.note()

    async def wait_idle(self, seconds: float, *, quiet_seconds: float | None = None) -> int:
        """Wait until nothing is open, `seconds` at most; with `quiet_seconds` only while, for so long, something ends
        or bytes move. What is still open then."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        quiet = seconds if quiet_seconds is None else quiet_seconds
        while self._open_work() or self.transfers:
            self._changed.clear()
            try:
                async with asyncio.timeout(max(min(quiet, end - loop.time()), 0.0)):
                    await self._changed.wait()
            except TimeoutError:
                if loop.time() >= end or not self.transfers:
                    break
        return self._open_work()
