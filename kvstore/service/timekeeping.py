"""The service's two times, neither of which follows a wall clock that jumps."""

from __future__ import annotations

from kvstore.clock import Clock

LAST_SECOND = float(2**32 - 2**27)
"""In the year 2102. The index counts seconds in 32 bits, and a clock that has lost its sense must not stop a service."""


class ServiceTime:
    """Monotonic seconds for leases, and wall seconds for last uses and expiry. A Clock, and the only one that the log
    and the index are given: two clocks of which one jumps would make what is written look older than it is.

    Wall time is read once, at the start, and then carried on by the monotonic clock, so that setting the system's
    clock changes nothing while the process lives. It starts no earlier than `not_before`, the newest last use that
    recovery found: a clock that was set back over a restart makes nothing older than it is.
    """

    def __init__(self, clock: Clock, *, not_before: float = 0.0) -> None:
        self.monotonic = clock.monotonic
        self._start = clock.monotonic()
        self._wall_at_start = _usable(max(clock.wall(), not_before))

    def start_no_earlier(self, wall: float) -> None:
        """Move the start to `wall` if that is later."""
        self._wall_at_start = _usable(max(self._wall_at_start, wall))

    def wall(self) -> float:
        return self.wall_at(self.monotonic())

    def wall_at(self, monotonic: float) -> float:
        """Wall seconds at this monotonic time."""
        return self._wall_at_start + (monotonic - self._start)

    def uptime(self) -> float:
        return self.monotonic() - self._start


def _usable(wall: float) -> float:
    return min(max(wall, 0.0), LAST_SECOND)
