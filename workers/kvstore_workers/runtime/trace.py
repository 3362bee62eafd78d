"""Spans of one request: what took how long, on which line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.clock import Clock
from kvstore_workers.runtime.values import Span

SPANS_MAX = 4096
"""Of one request, for all its samples together; what comes later is not kept, since a trace is for people."""


class Trace:
    """Collects spans while `enabled`; else it costs next to nothing. Several threads may add. `process` names whose spans
    they are: a span's line is `process: track`."""

    def __init__(
        self, clock: Clock, *, enabled: bool, process: str = "worker", limit: int = SPANS_MAX
    ) -> None:
        self._clock = clock
        self._limit = limit
        self._process = process
        self._enabled = enabled
        self._spans: list[Span] = []
        self._count = 0
        # Spans of several processes meet on one line of wall time; within one process monotonic time keeps them in order.
        self._wall_less_monotonic = clock.wall() - clock.monotonic()

    @contextmanager
    def span(self, name: str, track: str, **detail: object) -> Iterator[None]:
        """The time that the body takes, also where it raises."""
        began = self._clock.monotonic()
        try:
            yield
        finally:
            self.add(name, track, began=began, ended=self._clock.monotonic(), **detail)

    def add(self, name: str, track: str, *, began: float, ended: float, **detail: object) -> None:
        """A span between two monotonic times."""
        if self._enabled and self._count < self._limit:
            self._count += 1
            pairs = tuple((key, str(value)) for key, value in detail.items())
            line = f"{self._process}: {track}"
            self._spans.append(Span(name, line, began + self._wall_less_monotonic, ended - began, pairs))

    def take(self) -> tuple[Span, ...]:
        """What was added since the last call."""
        taken, self._spans = self._spans, []
        return tuple(taken)
