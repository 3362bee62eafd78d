"""Policies of one or two queues: SIEVE, SLRU, S3-FIFO, 2Q."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore.policy.base import Handles
from kvstore.policy.ghosts import Ghosts, Trial
from kvstore.policy.leaves import LeafPolicy

_TRIED, _PROVEN = 0, 1


class SievePolicy(LeafPolicy):
    """SIEVE: in order of arrival a hand goes from old to new, takes what was not used since it last came by, and begins anew at
    the end. Two queues: what lies before the hand, and what behind."""

    name = "sieve"
    QUEUES = 2

    def __init__(self) -> None:
        super().__init__()
        self._used = bytearray()
        self._hand = -1
        self._ahead = 0

    def on_request(self, chain: Handles, now: float) -> None:
        np.frombuffer(self._used, np.uint8)[chain] = 1

    def _place_of_new(self, handle: int, tag: int) -> tuple[int, int]:
        return self._ahead, self._tick()

    def _order(self) -> Sequence[int]:
        if not self._heaps[self._ahead]:
            self._ahead, self._hand = 1 - self._ahead, -1
        return self._ahead, 1 - self._ahead

    def _spare(self, handle: int) -> bool:
        if not self._used[handle]:
            return False
        self._used[handle] = 0
        self._hand = self._key[handle]
        self._rank(handle, 1 - self._ahead, self._hand)
        return True

    def _went(self, key: int) -> None:
        self._hand = key

    def _push(self, handle: int) -> None:
        queue = self._ahead if self._key[handle] > self._hand else 1 - self._ahead
        self._sizes[self._queue[handle]] -= 1
        self._sizes[queue] += 1
        self._queue[handle] = queue
        super()._push(handle)

    def _enter(self, handle: int, parent: int) -> None:
        super()._enter(handle, parent)
        self._used[handle] = 0

    def _grow(self, handle: int) -> None:
        super()._grow(handle)
        self._used += bytes(len(self._here) - len(self._used))

    def memory_bytes(self) -> int:
        return super().memory_bytes() + len(self._used)


class SlruPolicy(LeafPolicy):
    """Segmented LRU: what was used again is protected, up to four fifths of all; past that the least recently used of it goes
    first, else of what is on trial."""

    name = "slru"
    QUEUES = 2

    def __init__(self) -> None:
        super().__init__()
        self._trial = Trial(0.2)

    def on_request(self, chain: Handles, now: float) -> None:
        self._trial.begin()
        self._renew(chain, _PROVEN)

    def _place_of_new(self, handle: int, tag: int) -> tuple[int, int]:
        self._trial.bring()
        return _TRIED, self._tick()

    def _order(self) -> Sequence[int]:
        tried = self._sizes[_TRIED]
        return (_PROVEN, _TRIED) if tried < self._trial.size(self._count) else (_TRIED, _PROVEN)


class S3FifoPolicy(LeafPolicy):
    """S3-FIFO: a small queue on trial, a main one, and the tags of what left the small one. Who was used again, or is known by
    its tag, comes to main; there each use, up to three, is worth another round."""

    name = "s3fifo"
    remembers = True
    QUEUES = 2
    QUEUE_AT_START = _PROVEN
    USES_MAX = 3

    def __init__(self) -> None:
        super().__init__()
        self._uses = bytearray()
        self._ghosts = Ghosts()
        self._trial = Trial(0.1)

    def on_request(self, chain: Handles, now: float) -> None:
        self._trial.begin()
        uses = np.frombuffer(self._uses, np.uint8)
        uses[chain] = np.minimum(uses[chain] + 1, self.USES_MAX)

    def on_remove(self, handle: int, tag: int = 0) -> None:
        if self._queue[handle] == _TRIED:
            self._ghosts.add(tag, self._count)
        super().on_remove(handle, tag)

    def _place_of_new(self, handle: int, tag: int) -> tuple[int, int]:
        self._trial.bring()
        return _PROVEN if self._ghosts.take(tag) else _TRIED, self._tick()

    def _order(self) -> Sequence[int]:
        tried = self._sizes[_TRIED]
        return (_TRIED, _PROVEN) if tried > self._trial.size(self._count) else (_PROVEN, _TRIED)

    def _spare(self, handle: int) -> bool:
        if not self._uses[handle]:
            return False
        self._uses[handle] = self._uses[handle] - 1 if self._queue[handle] == _PROVEN else 0
        self._rank(handle, _PROVEN, self._tick())
        return True

    def _enter(self, handle: int, parent: int) -> None:
        super()._enter(handle, parent)
        self._uses[handle] = 0

    def _grow(self, handle: int) -> None:
        super()._grow(handle)
        self._uses += bytes(len(self._here) - len(self._uses))

    def memory_bytes(self) -> int:
        return super().memory_bytes() + len(self._uses) + self._ghosts.memory_bytes()

    def check_integrity(self) -> None:
        super().check_integrity()
        assert len(self._ghosts) <= max(len(self._here), 1), "ghosts"


class TwoQueuePolicy(LeafPolicy):
    """2Q: first in, first out on trial, whatever is used there; who is known by its tag when it comes again is ranked by
    recency."""

    name = "2q"
    remembers = True
    QUEUES = 2
    QUEUE_AT_START = _PROVEN

    def __init__(self) -> None:
        super().__init__()
        self._ghosts = Ghosts()
        self._trial = Trial(0.25)

    def on_request(self, chain: Handles, now: float) -> None:
        self._trial.begin()
        proven = chain[self._queues_of(chain) == _PROVEN]
        self._renew(proven, _PROVEN)

    def on_remove(self, handle: int, tag: int = 0) -> None:
        if self._queue[handle] == _TRIED:
            self._ghosts.add(tag, self._count)
        super().on_remove(handle, tag)

    def _place_of_new(self, handle: int, tag: int) -> tuple[int, int]:
        self._trial.bring()
        return _PROVEN if self._ghosts.take(tag) else _TRIED, self._tick()

    def _order(self) -> Sequence[int]:
        tried = self._sizes[_TRIED]
        return (_TRIED, _PROVEN) if tried > self._trial.size(self._count) else (_PROVEN, _TRIED)

    def memory_bytes(self) -> int:
        return super().memory_bytes() + self._ghosts.memory_bytes()

    def check_integrity(self) -> None:
        super().check_integrity()
        assert len(self._ghosts) <= max(len(self._here), 1), "ghosts"
