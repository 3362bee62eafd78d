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
from kvstore.policy.guard import LruGuard
from kvstore.policy.leaves import FIRST, Entry, LeafPolicy
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
    what a class is worth at an age; within a class, and among equals, by recency as LRU has it. By recency alone while
    `LruGuard` says that this would have found more.

    Ages are whole seconds. A key holds the number of the request of the last use above, and below it the place in the chain: root
    last."""

    name = "density"
    remembers = True
    QUEUES = _HELD_CLASSES * _GAP_CLASSES
    QUEUE_AT_START = _GAP_CLASSES - 1

    def __init__(self) -> None:
        super().__init__()
        self._mark = array("I")
        self._second = array("q")
        self._worth = Worth(self.QUEUES)
        self._left = Times()
        self._guard = LruGuard()
        self._began = self._now = 0
        self._number = 0
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
        if len(order):
            np.frombuffer(self._mark, np.uint32)[order] = _marks(order)
            np.frombuffer(self._second, np.int64)[order] = 0

    def adopt(self, handle: int, below: int, age: int) -> None:
        super().adopt(handle, below, age)
        self._mark[handle] = _mark(handle)
        self._second[handle] = 0

    def on_request(self, chain: Handles, now: float) -> None:
        # What was here before counts as used at the first request.
        self._began = self._began or max(int(now), 1)
        self._now = max(self._now, int(now), 1)
        self._number += 1
        marks = np.frombuffer(self._mark, np.uint32)[chain]
        self._guard.begin(marks[marks & np.uint32(self._guard.mask) == 0].tolist(), self._count)
        self._tip, self._found = (int(chain[-1]) if len(chain) else NO_HANDLE), len(chain)
        self._worth.learn(self._count, self._now)
        if not len(chain):
            return
        seconds = np.frombuffer(self._second, np.int64)
        gaps = self._now - np.maximum(seconds[chain], self._began)
        queues = _classes(len(chain), gaps)
        seconds[chain] = self._now
        last = _key(self._number, _LAST_TURN)
        self._rank_chain(chain, queues, np.arange(last, last - len(chain), -1))
        sampled = np.flatnonzero((marks & np.uint32(self._worth.mask)) == 0)[::-1]
        for mark, queue in zip(marks[sampled].tolist(), queues[sampled].tolist(), strict=True):
            self._worth.use(mark, queue, self._now)

    def on_remove(self, handle: int, tag: int = 0) -> None:
        if self._second[handle]:
            self._left.add(self._mark[handle], self._second[handle], self._count)
        self._guard.leave()
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
        number = self._number
        key = above - 1 if above >= _key(number, 1) else _key(number, _LAST_TURN)
        self._tip = handle
        self._second[handle] = now
        if not mark & self._guard.mask:
            self._guard.bring(mark)
        if not mark & self._worth.mask:
            self._worth.use(mark, queue, now)
        return queue, key

    # ---- going first ----------------------------------------------------------------------------------------

    def victims(self, start: int = NO_HANDLE) -> Iterator[int]:
        heaps, survived = self._heaps, self._survived
        if start == NO_HANDLE:
            self._return_passed()
        heads: list[tuple[Rank, int]] = []
        for number in range(self.QUEUES):
            self._offer(heads, number)
        while heads:
            rank, number = heapq.heappop(heads)
            heap = heaps[number]
            if not heap or heap[0][0] != rank[1]:
                continue
            entry = heapq.heappop(heap)
            if not self._is_current(entry, number):
                pass
            elif entry in survived:
                self._pass(entry, number)
            else:
                yield from self._shown(entry, number)
                handle = entry[1]
                if not self._here[handle]:
                    above = self._parent[handle]
                    if above != NO_HANDLE and not self._children[above]:
                        self._offer(heads, self._queue[above])
            self._offer(heads, number)

    def _offer(self, heads: list[tuple[Rank, int]], number: int) -> None:
        heap = self._heaps[number]
        # What is out of date would be ranked by what its handle has become.
        while heap and not self._is_current(heap[0], number):
            heapq.heappop(heap)
        if heap:
            heapq.heappush(heads, (self._rank_of(number, heap[0]), number))

    def _rank_of(self, number: int, entry: Entry) -> Rank:
        key, handle = entry
        if not self._guard.trusts:
            return 0.0, key
        return self._worth.at(number, self._now - max(self._second[handle], self._began)), key

    # ---- seen from outside ----------------------------------------------------------------------------------

    def _grow(self, handle: int) -> None:
        super()._grow(handle)
        more = len(self._here) - len(self._mark)
        self._mark.frombytes(bytes(self._mark.itemsize * more))
        self._second.frombytes(bytes(self._second.itemsize * more))

    def memory_bytes(self) -> int:
        own = self._mark.itemsize * len(self._mark) + self._second.itemsize * len(self._second)
        learned = self._worth.memory_bytes() + self._left.memory_bytes() + self._guard.memory_bytes()
        return super().memory_bytes() + own + learned

    def check_integrity(self) -> None:
        super().check_integrity()
        self._worth.check_integrity()
        self._guard.check_integrity()


def _key(number: int, turn: int) -> int:
    return FIRST + (number << _TURN_BITS) + turn


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
