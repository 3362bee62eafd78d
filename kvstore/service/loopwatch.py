"""How long the event loop was held up: what every call of every client waits for."""

from __future__ import annotations

import asyncio

PERIOD_SECONDS = 0.01
LONG_SECONDS = 0.02
"""A gap that is counted: no piece of the service's own work is to take longer."""

WINDOW_SECONDS = 60.0


class LoopWatch:
    """Measures by how much a short sleep is late. On a machine that others use the system's own delays are in it."""

    def __init__(self) -> None:
        self.long_total = 0
        self._begun = 0.0
        self._now = self._before = 0.0

    @property
    def longest_seconds(self) -> float:
        """Of the last one to two minutes."""
        return max(self._now, self._before)

    def note(self, gap_seconds: float, now: float) -> None:
        if now - self._begun >= WINDOW_SECONDS:
            self._begun, self._before, self._now = now, self._now, 0.0
        self._now = max(self._now, gap_seconds)
        self.long_total += gap_seconds >= LONG_SECONDS

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            before = loop.time()
            await asyncio.sleep(PERIOD_SECONDS)
            now = loop.time()
            self.note(max(0.0, now - before - PERIOD_SECONDS), now)
