"""Which calls took longest of late, for people who look."""

from __future__ import annotations

import heapq
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from kvstore.service.logs import CURRENT_CALL, LoggedCall

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

    def around(self, name: str, handler: Handler) -> Handler:
        """The same handler, timed; lines of the log say that they are about this call."""

        async def call(request: Any, context: Any) -> Any:
            CURRENT_CALL.set(LoggedCall(name, context))
            begin = self._monotonic()
            try:
                return await handler(request, context)
            finally:
                if name not in LONG_BY_NATURE:
                    self.note(name, begin)

        return call

    def note(self, name: str, begin: float) -> None:
        """A call that began at `begin` has ended."""
        now = self._monotonic()
        self._turn(now)
        ended = SlowCall(now - begin, now, name)
        if len(self._now) < KEPT:
            heapq.heappush(self._now, ended)
        elif ended.seconds > self._now[0].seconds:
            heapq.heapreplace(self._now, ended)

    def longest(self) -> list[SlowCall]:
        """The longest first."""
        self._turn(self._monotonic())
        return heapq.nlargest(KEPT, [*self._now, *self._before])

    def _turn(self, now: float) -> None:
        windows = int((now - self._began) / WINDOW_SECONDS)
        if windows:
            self._before = self._now if windows == 1 else []
            self._now = []
            self._began += windows * WINDOW_SECONDS
