"""Orders that only rank what has no child: a heap of the childless, by a key that each policy gives."""

from __future__ import annotations

import heapq
import sys
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

NO_HANDLE = -1

_SPARE_ENTRIES = 1024


class LeafPolicy(ABC):
    """EvictionPolicy by key: among what has no child, the lowest key goes first. A parent comes up when its last child has
    gone, with the key that it has then. Subclasses set keys with `_rank`."""

    follows_uses = False

    def __init__(self) -> None:
        self._key = array("q")
        self._parent = array("i")
        self._children = array("i")
        self._here = bytearray()
        self._count = 0
        # (key, handle). An entry counts while the handle is here and has that key; what is out of date is dropped when it
        # comes up.
        self._heap: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return self._count

    def start(self, handles: Sequence[int] | NDArray[np.integer[Any]]) -> None:
        """Parents are not told at a start: who has children then comes up too, and the caller passes over it."""
        assert not self._count, "a start comes before anything else"
        for handle in np.asarray(handles).tolist():
            self._enter(handle, NO_HANDLE)
            self._rank(handle, self._key_of_new(handle))

    def on_insert(self, handle: int, below: int = NO_HANDLE) -> None:
        self._enter(handle, below)
        self._rank(handle, self._key_of_new(handle))

    def on_touch(self, handles: Iterable[int], below: int = NO_HANDLE) -> None:  # noqa: B027 - a choice, not a gap
        """A use changes nothing, unless a subclass says so."""

    def on_touch_many(self, handles: NDArray[np.int32], below: int = NO_HANDLE) -> None:
        self.on_touch(handles.tolist(), below)

    def on_remove(self, handle: int) -> None:
        assert self._here[handle], f"handle {handle} is not ranked"
        parent = self._parent[handle]
        self._here[handle] = 0
        self._count -= 1
        if parent != NO_HANDLE:
            self._children[parent] -= 1
            if not self._children[parent]:
                heapq.heappush(self._heap, (self._key[parent], parent))

    def victims(self, start: int = NO_HANDLE) -> Iterator[int]:
        """All that have no child, and those that come to have none while it is walked."""
        kept: list[tuple[int, int]] = []
        heap = self._heap
        first = None if start == NO_HANDLE else (self._key[start], start)
        try:
            while heap:
                entry = heapq.heappop(heap)
                handle = entry[1]
                if not self._is_current(entry) or (kept and kept[-1] == entry):
                    continue
                if not self._may_go(entry[0]):
                    kept.append(entry)
                    return
                kept.append(entry)
                if first is not None and entry < first:
                    continue
                yield handle
                if not self._here[handle]:
                    kept.pop()
        finally:
            for entry in kept:
                heapq.heappush(heap, entry)

    def memory_bytes(self) -> int:
        columns = (self._key, self._parent, self._children, self._here, self._heap)
        return sum(map(sys.getsizeof, columns)) + 88 * len(self._heap)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every childless handle is in the heap with its key."""
        entries = set(self._heap)
        here = [handle for handle, is_here in enumerate(self._here) if is_here]
        assert len(here) == self._count, f"{len(here)} handles here, {self._count} counted"
        children = [0] * len(self._here)
        for handle in here:
            parent = self._parent[handle]
            if parent != NO_HANDLE:
                assert self._here[parent], "a parent stays until its children have gone"
                children[parent] += 1
        for handle in here:
            assert children[handle] == self._children[handle], "children"
            assert children[handle] or (self._key[handle], handle) in entries, "a childless handle is ranked"

    @abstractmethod
    def _key_of_new(self, handle: int) -> int:
        """Where a handle that has just come ranks."""

    def _may_go(self, key: int) -> bool:
        """Whether the next one, which has this key, may be a victim now; if not, none after it may."""
        return True

    def _rank(self, handle: int, key: int) -> None:
        """The handle has this key from now on."""
        self._key[handle] = key
        if not self._children[handle]:
            heapq.heappush(self._heap, (key, handle))
            if len(self._heap) > 2 * self._count + _SPARE_ENTRIES:
                self._heap[:] = [entry for entry in set(self._heap) if self._is_current(entry)]
                heapq.heapify(self._heap)

    def _is_current(self, entry: tuple[int, int]) -> bool:
        key, handle = entry
        return bool(self._here[handle]) and not self._children[handle] and self._key[handle] == key

    def _enter(self, handle: int, parent: int) -> None:
        while handle >= len(self._here):
            grown = max(len(self._here), 1024)
            self._key.frombytes(bytes(8 * grown))
            self._parent.frombytes(bytes(4 * grown))
            self._children.frombytes(bytes(4 * grown))
            self._here += bytes(grown)
        assert not self._here[handle], f"handle {handle} is ranked already"
        self._here[handle] = 1
        self._parent[handle] = parent
        self._children[handle] = 0
        self._count += 1
        if parent != NO_HANDLE:
            self._children[parent] += 1


class FifoPolicy(LeafPolicy):
    """First in, first out, of what has no child."""

    def __init__(self) -> None:
        super().__init__()
        self._inserted = 0

    def _key_of_new(self, handle: int) -> int:
        self._inserted += 1
        return self._inserted
