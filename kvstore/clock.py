"""Time as a parameter. Leases use monotonic time; expiry uses wall time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds since an arbitrary point; never runs backwards."""

    def wall(self) -> float:
        """Seconds since the Unix epoch; may jump."""


class SystemClock:
    # The functions themselves: a call of the service reads a clock several times.
    monotonic = staticmethod(time.monotonic)
    wall = staticmethod(time.time)


class ManualClock:
    """A clock that moves only when told to; the two times move apart on request."""

    def __init__(self, *, monotonic: float = 1_000.0, wall: float = 1_800_000_000.0) -> None:
        self._monotonic = monotonic
        self._wall = wall

    def monotonic(self) -> float:
        return self._monotonic

    def wall(self) -> float:
        return self._wall

    def advance(self, seconds: float) -> None:
        """Both times move forward together."""
        if seconds < 0:
            raise ValueError(
                f"advance takes seconds >= 0, got {seconds}; use jump_wall to set the wall clock back"
            )
        self._monotonic += seconds
        self._wall += seconds

    def jump_wall(self, seconds: float) -> None:
        """Only the wall clock moves, as when an administrator sets it."""
        self._wall += seconds
