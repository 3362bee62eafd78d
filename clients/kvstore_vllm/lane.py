"""A queue with a limit and the helper threads that work on it: who offers work never waits."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Lane(Generic[T]):
    """`work` is called in a helper thread with pieces of work in their order: as many as weigh `batch_weight` together, or one.
    It must come to an end by itself, and tell of each piece what became of it, whatever happens. `dropped` is called with
    pieces that will never be worked on, in the thread that finds that out.

    `most_weight` may wait at once; past it an offer is refused. Any number of threads may use it.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[Sequence[T]], None],
        dropped: Callable[[Sequence[T]], None],
        *,
        weigh: Callable[[T], int],
        most_weight: int,
        batch_weight: int = 1,
        threads: int = 1,
    ) -> None:
        self._work = work
        self._dropped = dropped
        self._weigh = weigh
        self._most = most_weight
        self._batch = batch_weight
        self._changed = threading.Condition()
        self._waiting: deque[T] = deque()
        self._weight = 0
        self._busy = 0
        self._alive = threads
        self._closed = False
        # A process that ends does not wait for them: what they do is safe to break off.
        self._threads = [
            threading.Thread(target=self._run, name=f"kvstore-{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def offer(self, piece: T) -> bool:
        """Whether it will be worked on."""
        weight = self._weigh(piece)
        with self._changed:
            if self._closed or self._weight + weight > self._most:
                return False
            self._waiting.append(piece)
            self._weight += weight
            self._changed.notify()
            return True

    @property
    def is_busy(self) -> bool:
        """Whether something waits or is being worked on, or was a moment ago."""
        return bool(self._waiting) or self._busy > 0

    def wait_idle(self, seconds: float | None = None) -> bool:
        """Whether nothing waits or is being worked on any more, within so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, seconds)

    def cancel(self) -> None:
        """Drop what has not begun."""
        with self._changed:
            left = list(self._waiting)
            self._waiting.clear()
            self._weight = 0
            self._changed.notify_all()
        if left:
            self._dropped(left)

    def close(self, seconds: float) -> bool:
        """Take nothing more, drop what has not begun, and wait so long for what has. Whether all threads have ended."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.cancel()
        for thread in self._threads:
            thread.join(seconds)
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        try:
            while batch := self._take():
                try:
                    self._work(batch)
                finally:
                    with self._changed:
                        self._busy -= 1
                        self._changed.notify_all()
        finally:
            self._ended()

    def _take(self) -> list[T]:
        """Empty once the lane is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            taken: list[T] = []
            weight = 0
            while self._waiting and not self._closed:
                next_weight = self._weigh(self._waiting[0])
                if taken and weight + next_weight > self._batch:
                    break
                taken.append(self._waiting.popleft())
                weight += next_weight
            self._weight -= weight
            self._busy += bool(taken)
            return taken

    def _ended(self) -> None:
        """By an error that `work` did not expect, or by `close`: the last thread leaves nobody waiting."""
        with self._changed:
            self._alive -= 1
            if self._alive:
                return
            self._closed = True
        self.cancel()
