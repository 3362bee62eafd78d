"""Our own: of what has no child, what is worth least to keep goes first."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.policy.base import NO_HANDLE, Handles
from kvstore.policy.ghosts import Times
from kvstore.policy.leaves import FIRST, LeafPolicy
from kvstore.policy.worth import Worth

_HELD_CLASSES = 14
_GAP_CLASSES = 9
_GAPS = np.array([0] + [4**power for power in range(_GAP_CLASSES - 1)], np.int64)
_HELD = np.array([2**power - 1 for power in range(1, _HELD_CLASSES)], np.int64)
_TURN_BITS = 24
_LAST_TURN = (1 << _TURN_BITS) - 1

Rank = tuple[float, int]


class DensityPolicy(LeafPolicy):
    """A class for how long a prefix the request found, in octaves, with how long ago the handle had been used before, in steps of
    four: what comes back soon did so before, and a request that found nothing is often the last of its kind. `Worth` says
    what a class is worth at an age; within a class, and among equals, by recency as LRU has it.

    Time is counted in requests. A key holds the last use's number above, and below it the place in the chain: root last."""

    name = "density"
    remembers = True
    QUEUES = _HELD_CLASSES * _GAP_CLASSES
    QUEUE_AT_START = _GAP_CLASSES - 1

    def __init__(self) -> None:
        super().__init__()
        self._mark = array("I")
        self._worth = Worth(self.QUEUES)
        self._left = Times()
        self._now = 0
        # The handle that was inserted last, and how long a prefix its request had found.
        self._tip, self._found = NO_HANDLE, 0

    # ---- coming and going -----------------------------------------------------------------------------------

    def start(
        self, handles: Sequence[int] | NDArray[np.integer[Any]], parents: NDArray[np.integer[Any]]
    ) -> None:
        super().start(handles, parents)
        # No tags come with what was here before: its own number stands for it while it stays. Alike, all would be one thing
        # that is used again at once.
        order = np.asarray(handles, np.int64)
        np.frombuffer(self._mark, np.uint32)[order] = _marks(order)

    def adopt(self, handle: int, below: int, age: int) -> None:
        super().adopt(handle, below, age)
        self._mark[handle] = _mark(handle)

    def on_request(self, chain: Handles) -> None:
        self._now += 1
        self._tip, self._found = (int(chain[-1]) if len(chain) else NO_HANDLE), len(chain)
        self._worth.learn(self._count, self._now)
        if not len(chain):
            return
        keys = np.frombuffer(self._key, np.int64)[chain]
        gaps = self._now - (np.maximum(keys - FIRST, 0) >> _TURN_BITS)
        queues = _classes(len(chain), gaps)
        last = _key(self._now, _LAST_TURN)
        self._rank_chain(chain, queues, np.arange(last, last - len(chain), -1))
        marks = np.frombuffer(self._mark, np.uint32)[chain]
        sampled = np.flatnonzero((marks & np.uint32(self._worth.mask)) == 0)[::-1]
        for mark, queue in zip(marks[sampled].tolist(), queues[sampled].tolist(), strict=True):
            self._worth.use(mark, queue, self._now)

    def on_remove(self, handle: int, tag: int = 0) -> None:
        key = self._key[handle]
        if key >= FIRST:
            self._left.add(self._mark[handle], _time(key), self._count)
        super().on_remove(handle, tag)

    def _place_of_new(self, handle: int, tag: int) -> tuple[int, int]:
        parent, now = self._parent[handle], self._now
        if parent == NO_HANDLE or parent != self._tip:
            self._found = 0
        mark = _mark(tag)
        self._mark[handle] = mark
        before = self._left.take(mark)
        if before is not None:
            self._found += 1
        queue = _class(self._found, None if before is None else now - before)
        above = self._key[parent] if parent != NO_HANDLE else 0
        key = above - 1 if above >= _key(now, 1) else _key(now, _LAST_TURN)
        self._tip = handle
        if not mark & self._worth.mask:
            self._worth.use(mark, queue, now)
        return queue, key

    # ---- going first ----------------------------------------------------------------------------------------

    def victims(self, start: int = NO_HANDLE) -> Iterator[int]:
        heaps, survived = self._heaps, self._survived
        if start == NO_HANDLE:
            self._return_passed()
        heads = [(self._rank_of(number, heap[0][0]), number) for number, heap in enumerate(heaps) if heap]
        heapq.heapify(heads)
        while heads:
            rank, number = heapq.heappop(heads)
            heap = heaps[number]
            if not heap or heap[0][0] != rank[1]:
                continue
            entry = heapq.heappop(heap)
            if entry not in survived and self._is_current(entry, number):
                yield from self._shown(entry, number)
                handle = entry[1]
                if not self._here[handle]:
                    above = self._parent[handle]
                    if above != NO_HANDLE and not self._children[above]:
                        self._offer(heads, self._queue[above])
            self._offer(heads, number)

    def _offer(self, heads: list[tuple[Rank, int]], number: int) -> None:
        if self._heaps[number]:
            heapq.heappush(heads, (self._rank_of(number, self._heaps[number][0][0]), number))

    def _rank_of(self, number: int, key: int) -> Rank:
        return self._worth.at(number, self._now - _time(key)), key

    # ---- seen from outside ----------------------------------------------------------------------------------

    def _grow(self, handle: int) -> None:
        super()._grow(handle)
        self._mark.frombytes(bytes(4 * (len(self._here) - len(self._mark))))

    def memory_bytes(self) -> int:
        own = self._mark.itemsize * len(self._mark)
        return super().memory_bytes() + own + self._worth.memory_bytes() + self._left.memory_bytes()

    def check_integrity(self) -> None:
        super().check_integrity()
        self._worth.check_integrity()


def _key(now: int, turn: int) -> int:
    return FIRST + (now << _TURN_BITS) + turn


def _time(key: int) -> int:
    """Of the use that gave this key; what was here before counts as used at the start."""
    return max(key - FIRST, 0) >> _TURN_BITS


def _class(found: int, gap: int | None) -> int:
    held = min((found + 1).bit_length() - 1, _HELD_CLASSES - 1)
    if gap is None:
        return held * _GAP_CLASSES
    return held * _GAP_CLASSES + min(1 + max(gap.bit_length() - 1, 0) // 2, _GAP_CLASSES - 1)


def _classes(found: int, gaps: NDArray[np.int64]) -> NDArray[np.int64]:
    held = int(np.searchsorted(_HELD, found, "right"))
    return held * _GAP_CLASSES + np.maximum(np.searchsorted(_GAPS, gaps, "right") - 1, 1)


def _mark(tag: int) -> int:
    """32 evenly spread bits of a tag, whose own need not be (the finish of MurmurHash3)."""
    tag = (tag ^ tag >> 33) * 0xFF51AFD7ED558CCD & (1 << 64) - 1
    tag = (tag ^ tag >> 33) * 0xC4CEB9FE1A85EC53 & (1 << 64) - 1
    return (tag ^ tag >> 33) & 0xFFFFFFFF


def _marks(tags: NDArray[np.int64]) -> NDArray[np.uint32]:
    """As _mark of each."""
    mixed = tags.astype(np.uint64)
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        mixed = (mixed ^ mixed >> np.uint64(33)) * np.uint64(factor)
    return (mixed ^ mixed >> np.uint64(33)).astype(np.uint32)
