"""ARC: two queues by recency, and the tags of what left them, which say how large each should be."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.policy.base import Handles
from kvstore.policy.ghosts import Ghosts, Trial
from kvstore.policy.leaves import LeafPolicy

_ONCE, _AGAIN = 0, 1


class ArcPolicy(LeafPolicy):
    """Adaptive replacement. `once`: seen in one request; `again`: in more. What comes back soon after leaving `once` makes that
    one larger, after leaving `again` smaller."""

    name = "arc"
    remembers = True
    QUEUES = 2

    def __init__(self) -> None:
        super().__init__()
        self._left = (Ghosts(), Ghosts())
        self._trial = Trial(0.0)
        self._target = 0.0

    def on_request(self, chain: Handles, now: float) -> None:
        self._trial.begin()
        self._renew(chain, _AGAIN)

    def on_remove(self, handle: int, tag: int = 0) -> None:
        self._left[self._queue[handle]].add(tag, self._count)
        super().on_remove(handle, tag)

    def _place_of_new(self, handle: int, tag: int) -> tuple[int, int]:
        self._trial.bring()
        once, again = (max(len(each), 1) for each in self._left)
        if self._left[_ONCE].take(tag):
            self._target = min(self._target + max(1.0, again / once), float(self._count))
        elif self._left[_AGAIN].take(tag):
            self._target = max(self._target - max(1.0, once / again), 0.0)
        else:
            return _ONCE, self._tick()
        return _AGAIN, self._tick()

    def _order(self) -> Sequence[int]:
        allowed = max(self._target, self._trial.size(self._count))
        return (_ONCE, _AGAIN) if self._sizes[_ONCE] > allowed else (_AGAIN, _ONCE)

    def memory_bytes(self) -> int:
        return super().memory_bytes() + sum(each.memory_bytes() for each in self._left)

    def check_integrity(self) -> None:
        super().check_integrity()
        assert all(len(each) <= max(len(self._here), 1) for each in self._left), "ghosts"
