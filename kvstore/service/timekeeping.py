"""The service's two times, neither of which follows a wall clock that jumps."""

from __future__ import annotations

from kvstore.clock import Clock


class ServiceTime:
    """Monotonic seconds for leases, and wall seconds for last uses and expiry.

    Wall time is read once, at the start, and then carried on by the monotonic clock, so that setting the system's
    clock changes nothing while the process lives. It starts no earlier than `not_before`, the newest last use that
    recovery found: a clock that was set back over a restart makes nothing older than it is.
    """

    def __init__(self, clock: Clock, *, not_before: float = 0.0) -> None:
        self._clock = clock
        self._start = clock.monotonic()
        self._wall_at_start = max(clock.wall(), not_before)

    def monotonic(self) -> float:
        return self._clock.monotonic()

    def wall(self) -> float:
        return self._wall_at_start + (self._clock.monotonic() - self._start)

    def uptime(self) -> float:
        return self._clock.monotonic() - self._start
