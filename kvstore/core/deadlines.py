"""Deadlines by number: which are due, without a walk over those that are not."""

from __future__ import annotations

import heapq


class Deadlines:
    """A heap of (deadline, number). Setting a number's deadline anew or discarding it leaves the old pair in the heap,
    where it is recognised and skipped when it comes up."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        self._current: dict[int, float] = {}

    def set(self, number: int, deadline: float) -> None:
        self._current[number] = deadline
        heapq.heappush(self._heap, (deadline, number))

    def discard(self, number: int) -> None:
        self._current.pop(number, None)
        if len(self._heap) > 2 * len(self._current) + 64:
            self._heap = [(deadline, each) for each, deadline in self._current.items()]
            heapq.heapify(self._heap)

    def due(self, now: float, *, limit: int | None = None) -> list[int]:
        """Numbers whose deadline is not after `now`, earliest first, `limit` of them at most; they are discarded."""
        found: list[int] = []
        while self._heap and self._heap[0][0] <= now and len(found) != limit:
            deadline, number = heapq.heappop(self._heap)
            if self._current.get(number) == deadline:
                del self._current[number]
                found.append(number)
        return found
