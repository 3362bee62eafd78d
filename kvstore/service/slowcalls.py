"""Which calls took longest of late, for people who look."""

from __future__ import annotations

import heapq
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

KEPT = 8
WINDOW_SECONDS = 300.0
LONG_BY_NATURE = frozenset({"EraseTenant", "Session", "Verify", "Drain"})
"""They last as long as their caller wants."""

Handler = Callable[[Any, Any], Awaitable[Any]]


class SlowCall(NamedTuple):
    """`seconds`: from the request to the answer's end, what it waited for others and for its caller included."""

    seconds: float
    ended_mono: float
    name: str


class SlowCalls:
    """The KEPT longest calls of this window of WINDOW_SECONDS, and of the one before. The event loop's thread only."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._now: list[SlowCall] = []
        self._before: list[SlowCall] = []
        self._began = monotonic()
        # What a call has to have taken to be kept, while this window lasts.
        self._least = -1.0
        self._ends = self._began + WINDOW_SECONDS

    def around(self, name: str, handler: Handler) -> Handler:
        """The same handler, timed: two looks at the clock, and more for a call that is kept only."""
        if name in LONG_BY_NATURE:
            return handler
        monotonic = self._monotonic

        async def call(request: Any, context: Any) -> Any:
            begin = monotonic()
            try:
                return await handler(request, context)
            finally:
                now = monotonic()
                if now - begin > self._least or now >= self._ends:
                    self._keep(SlowCall(now - begin, now, name))

        return call

    def _keep(self, ended: SlowCall) -> None:
        self._turn(ended.ended_mono)
        if len(self._now) < KEPT:
            heapq.heappush(self._now, ended)
        elif ended.seconds > self._now[0].seconds:
            heapq.heapreplace(self._now, ended)
        self._least = self._now[0].seconds if len(self._now) == KEPT else -1.0

    def longest(self) -> list[SlowCall]:
        """The longest first."""
        self._turn(self._monotonic())
        return heapq.nlargest(KEPT, [*self._now, *self._before])

    def _turn(self, now: float) -> None:
        windows = int((now - self._began) / WINDOW_SECONDS)
        if windows:
            self._before = self._now if windows == 1 else []
            self._now = []
            self._least = -1.0
            self._began += windows * WINDOW_SECONDS
            self._ends = self._began + WINDOW_SECONDS
