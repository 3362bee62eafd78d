"""Orders that only rank what has no child: queues of the childless, by keys that each policy gives."""

from __future__ import annotations

import heapq
import sys
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from kvstore.policy.base import NO_HANDLE, Handles

FIRST = 1 << 53
"""Keys of what was here before it was ranked are below this, those of what came since above."""

FEW_ENTRIES = 64
"""Up to here each is pushed to its heap; beyond, the heap is made anew."""

_SPARE_ENTRIES = 1024
_GROWN_AT_LEAST = 1024

Entry = tuple[int, int]


class LeafPolicy(ABC):
    """EvictionPolicy by queue and key: of what has no child in the queue whose turn it is, the lowest key goes first. A
    parent comes up when its last child has gone, with the queue and key that it has then. So no policy can break a chain.

    Subclasses say where a handle that has come ranks, and move handles with `_rank` and `_rank_chain`."""

    name: ClassVar[str]
    remembers = False
    QUEUES = 1
    QUEUE_AT_START = 0
    """Of what was here before."""

    def __init__(self) -> None:
        self._key = array("q")
        self._parent = array("i")
        self._children = array("i")
        self._here = bytearray()
        self._queue = bytearray()
        self._count = 0
        self._sizes = [0] * self.QUEUES
        self._clock = FIRST
        # (key, handle). An entry counts while the handle is here, in that queue, and has that key; what is out of date is
        # dropped when it comes up.
        self._heaps: list[list[Entry]] = [[] for _ in range(self.QUEUES)]
        # What the last walk has shown and left here, in all, and by queue: out of the heaps until another walk begins, so
        # that its next steps do not come upon it again.
        self._survived: set[Entry] = set()
        self._passed: list[set[Entry]] = [set() for _ in range(self.QUEUES)]

    def __len__(self) -> int:
        return self._count

    def has(self, handle: int) -> bool:
        return handle < len(self._here) and bool(self._here[handle])

    def key_of(self, handle: int) -> int:
        """Another one whenever the handle ranks elsewhere."""
        return self._key[handle]

    # ---- coming and going -----------------------------------------------------------------------------------

    def start(
        self, handles: Sequence[int] | NDArray[np.integer[Any]], parents: NDArray[np.integer[Any]]
    ) -> None:
        assert not self._count, "a start comes before anything else"
        order, above = np.asarray(handles, np.int64), np.asarray(parents, np.int64)
        if not len(order):
            return
        self._grow(int(order.max()))
        np.frombuffer(self._here, np.uint8)[order] = 1
        np.frombuffer(self._queue, np.uint8)[order] = self.QUEUE_AT_START
        np.frombuffer(self._key, np.int64)[order] = np.arange(len(order))
        np.frombuffer(self._parent, np.int32)[order] = above
        children = np.bincount(above[above >= 0], minlength=len(self._here))
        np.frombuffer(self._children, np.int32)[:] = children
        self._count = self._sizes[self.QUEUE_AT_START] = len(order)
        childless = np.flatnonzero(children[order] == 0)
        # In order of their keys, which is a heap.
        self._heaps[self.QUEUE_AT_START] = list(
            zip(childless.tolist(), order[childless].tolist(), strict=True)
        )

    def adopt(self, handle: int, below: int, age: int) -> None:
        """A handle that another policy ranked until now, last used at `age` (a whole number below 2**53); its parent was adopted
        or inserted before it. It ranks before all that was inserted."""
        self._enter(handle, below)
        self._rank(handle, self.QUEUE_AT_START, age)

    def on_request(self, chain: Handles, now: float) -> None:  # noqa: B027 - a choice, not a gap
        """Nothing, unless a subclass says so."""

    def on_insert(self, handle: int, below: int = NO_HANDLE, tag: int = 0) -> None:
        self._enter(handle, below)
        queue, key = self._place_of_new(handle, tag)
        self._rank(handle, queue, key)

    def on_touch(self, handles: Iterable[int], below: int = NO_HANDLE) -> None:  # noqa: B027
        """No child goes after its parent anyhow."""

    def on_touch_many(self, handles: Handles, below: int = NO_HANDLE) -> None:  # noqa: B027
        """No child goes after its parent anyhow."""

    def on_remove(self, handle: int, tag: int = 0) -> None:
        assert self._here[handle], f"handle {handle} is not ranked"
        assert not self._children[handle], f"handle {handle} has children"
        parent = self._parent[handle]
        self._here[handle] = 0
        self._count -= 1
        self._sizes[self._queue[handle]] -= 1
        if parent != NO_HANDLE:
            self._children[parent] -= 1
            if not self._children[parent]:
                self._push(parent)

    # ---- going first ----------------------------------------------------------------------------------------

    def victims(self, start: int = NO_HANDLE) -> Iterator[int]:
        """All that have no child, and those that come to have none while it is walked. A walk that goes on passes over what
        the one before has shown and left here, and only that: a parent may have come up since, and its turn is now."""
        heaps, survived = self._heaps, self._survived
        if start == NO_HANDLE:
            self._return_passed()
        while (number := self._next_queue()) is not None:
            entry = heapq.heappop(heaps[number])
            key, handle = entry
            if not self._is_current(entry, number):
                continue
            if entry in survived:
                self._pass(entry, number)
                continue
            if not self._may_go(key):
                heapq.heappush(heaps[number], entry)
                return
            if self._spare(handle):
                continue
            yield from self._shown(entry, number)
            if not self._here[handle]:
                self._went(key)

    def _shown(self, entry: Entry, number: int) -> Iterator[int]:
        """Show one that was taken from its heap. Where it stays, the walk has passed it."""
        handle, is_last = entry[1], True
        try:
            yield handle
            is_last = False
        finally:
            # Where the walk ends with it, it may go on with it too.
            if is_last and self._here[handle]:
                heapq.heappush(self._heaps[number], entry)
        if self._here[handle]:
            self._survived.add(entry)
            self._pass(entry, number)

    def _pass(self, entry: Entry, number: int) -> None:
        """Out of its heap until another walk begins. It may have entered another queue since this one has shown it: where it is found
        again is where it ranks."""
        self._passed[number].add(entry)

    def _return_passed(self) -> None:
        """To the heaps. What has changed meanwhile has entered them anew; what it was is dropped when it comes up."""
        self._survived.clear()
        for number, entries in enumerate(self._passed):
            heap = self._heaps[number]
            if len(entries) < FEW_ENTRIES:
                for entry in entries:
                    heapq.heappush(heap, entry)
            else:
                heap += entries
                heapq.heapify(heap)
            entries.clear()

    def _next_queue(self) -> int | None:
        for number in self._order():
            if self._heaps[number]:
                return number
        return None

    @abstractmethod
    def _place_of_new(self, handle: int, tag: int) -> tuple[int, int]:
        """Queue and key of a handle that has just come."""

    def _order(self) -> Sequence[int]:
        """The queues, the one whose turn it is first."""
        return range(self.QUEUES)

    def _may_go(self, key: int) -> bool:
        """Whether the next one, which has this key, may be a victim now; if not, none after it may."""
        return True

    def _spare(self, handle: int) -> bool:
        """Whether the one whose turn it is stays for another round; it has been ranked anew then. Not without end."""
        return False

    def _went(self, key: int) -> None:  # noqa: B027 - a choice, not a gap
        """What came up with this key has been evicted."""

    # ---- ranks ----------------------------------------------------------------------------------------------

    def _tick(self, count: int = 1) -> int:
        """The last of so many keys that come after all others."""
        self._clock += count
        return self._clock

    def _rank(self, handle: int, queue: int, key: int) -> None:
        """The handle has this queue and key from now on."""
        self._sizes[self._queue[handle]] -= 1
        self._sizes[queue] += 1
        self._queue[handle] = queue
        self._key[handle] = key
        self._push(handle)

    def _rank_chain(self, chain: Handles, queue: int | NDArray[np.int64], keys: NDArray[np.int64]) -> None:
        """These, of one chain and first one first, have this queue, or each its own, and these keys from now on."""
        if not len(chain):
            return
        queues = np.frombuffer(self._queue, np.uint8)
        self._resize(queues[chain], -1)
        queues[chain] = queue
        self._resize(queues[chain], 1)
        np.frombuffer(self._key, np.int64)[chain] = keys
        # All others have a child.
        self._push(int(chain[-1]))

    def _resize(self, queues: NDArray[np.uint8], by: int) -> None:
        for number, count in enumerate(np.bincount(queues).tolist()):
            self._sizes[number] += by * count

    def _renew(self, chain: Handles, queue: int) -> None:
        """As _rank_chain, with keys after all others: the last one of the chain first, its root last."""
        last = self._tick(len(chain))
        self._rank_chain(chain, queue, np.arange(last, last - len(chain), -1))

    def _queues_of(self, chain: Handles) -> NDArray[np.uint8]:
        found: NDArray[np.uint8] = np.frombuffer(self._queue, np.uint8)[chain]
        return found

    def _push(self, handle: int) -> None:
        if self._children[handle]:
            return
        number = self._queue[handle]
        heap = self._heaps[number]
        heapq.heappush(heap, (self._key[handle], handle))
        if len(heap) > 2 * self._sizes[number] + _SPARE_ENTRIES // self.QUEUES:
            heap[:] = [entry for entry in set(heap) if self._is_current(entry, number)]
            heapq.heapify(heap)

    def _is_current(self, entry: Entry, number: int) -> bool:
        key, handle = entry
        return (
            bool(self._here[handle])
            and not self._children[handle]
            and self._queue[handle] == number
            and self._key[handle] == key
        )

    def _enter(self, handle: int, parent: int) -> None:
        self._grow(handle)
        assert not self._here[handle], f"handle {handle} is ranked already"
        assert parent == NO_HANDLE or self._here[parent], f"parent {parent} is not ranked"
        self._here[handle] = 1
        self._parent[handle] = parent
        self._children[handle] = 0
        self._queue[handle] = 0
        self._sizes[0] += 1
        self._count += 1
        if parent != NO_HANDLE:
            self._children[parent] += 1

    def _grow(self, handle: int) -> None:
        while handle >= len(self._here):
            grown = max(len(self._here), _GROWN_AT_LEAST)
            self._key.frombytes(bytes(8 * grown))
            self._parent.frombytes(bytes(4 * grown))
            self._children.frombytes(bytes(4 * grown))
            self._here += bytes(grown)
            self._queue += bytes(grown)

    # ---- seen from outside ----------------------------------------------------------------------------------

    def memory_bytes(self) -> int:
        columns = (
            self._key,
            self._parent,
            self._children,
            self._here,
            self._queue,
            self._survived,
            *self._heaps,
            *self._passed,
        )
        # An entry: a tuple and a large whole number; handles are the caller's, or small.
        return sum(map(sys.getsizeof, columns)) + 88 * sum(map(len, (*self._heaps, *self._passed)))

    def check_integrity(self) -> None:
        """Raise AssertionError unless every childless handle is in its queue with its key."""
        entries = [set(heap).union(passed) for heap, passed in zip(self._heaps, self._passed, strict=True)]
        here = [handle for handle, is_here in enumerate(self._here) if is_here]
        assert len(here) == self._count, f"{len(here)} handles here, {self._count} counted"
        children = [0] * len(self._here)
        for handle in here:
            parent = self._parent[handle]
            if parent != NO_HANDLE:
                assert self._here[parent], "a parent stays until its children have gone"
                children[parent] += 1
        sizes = [0] * self.QUEUES
        for handle in here:
            number = self._queue[handle]
            sizes[number] += 1
            assert children[handle] == self._children[handle], "children"
            is_ranked = (self._key[handle], handle) in entries[number]
            assert children[handle] or is_ranked, "a childless handle is ranked"
        assert sizes == self._sizes, f"queues have {sizes}, counted {self._sizes}"
        for heap in self._heaps:
            assert len(heap) <= 2 * max(self._count, len(self._here)) + _SPARE_ENTRIES + 1, "entries"


class FifoPolicy(LeafPolicy):
    """First in, first out, of what has no child."""

    name = "fifo"

    def _place_of_new(self, handle: int, tag: int) -> tuple[int, int]:
        return 0, self._tick()
