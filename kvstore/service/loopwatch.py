"""How long the event loop was held up: what every call of every client waits for."""

from __future__ import annotations

import asyncio
from time import process_time

PERIOD_SECONDS = 0.01
LONG_SECONDS = 0.02
"""A gap that is counted: no piece of the service's own work is to take longer."""

WINDOW_SECONDS = 60.0


class LoopWatch:
    """Measures by how much a short sleep is late. On a machine that others use the system's own delays are in it, so that what
    the process itself has used of a processor meanwhile, in all its threads, is told beside it: it held nobody up for longer."""

    def __init__(self) -> None:
        self.long_total = 0
        self._begun = 0.0
        self._now = self._before = (0.0, 0.0)

    @property
    def longest_seconds(self) -> float:
        """Of the last one to two minutes."""
        return max(self._now[0], self._before[0])

    @property
    def longest_own_seconds(self) -> float:
        """Of the same time: the longest that may be the process's own doing."""
        return max(self._now[1], self._before[1])

    def note(self, gap_seconds: float, now: float, own_seconds: float | None = None) -> None:
        """own_seconds: of the process, on all processors; None where nobody else is in it."""
        if now - self._begun >= WINDOW_SECONDS:
            self._begun, self._before, self._now = now, self._now, (0.0, 0.0)
        own = gap_seconds if own_seconds is None else min(gap_seconds, own_seconds)
        self._now = max(self._now[0], gap_seconds), max(self._now[1], own)
        self.long_total += gap_seconds >= LONG_SECONDS

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            before, spent = loop.time(), process_time()
            await asyncio.sleep(PERIOD_SECONDS)
            now = loop.time()
            self.note(max(0.0, now - before - PERIOD_SECONDS), now, process_time() - spent)
