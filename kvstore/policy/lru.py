"""Least recently used first, over two columns of links."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from kvstore.policy.base import Handles

# Slot 0 of the columns is the ring's own: its `newer` is the oldest handle, its `older` the newest.
_RING = 0
_ABSENT = -1


class LruPolicy:
    """EvictionPolicy by recency. Eight bytes per handle; handles index the columns, so keep them small.

    A chain is touched leaf first, root last, and a child enters just below its parent: no handle is ever older than
    its child.
    """

    name: ClassVar[str] = "lru"
    remembers = False

    def __init__(self) -> None:
        self._newer = array("i", (_RING,))
        self._older = array("i", (_RING,))
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def on_request(self, chain: Handles, now: float) -> None:
        """Touches say all."""

    def on_insert(self, handle: int, below: int = -1, tag: int = 0) -> None:
        """It ranks just before its parent, `below`, or last of all."""
        slot = handle + 1
        while len(self._newer) <= slot:
            self._newer.append(_ABSENT)
            self._older.append(_ABSENT)
        assert self._newer[slot] == _ABSENT, f"handle {handle} is ranked already"
        self._link(slot, slot, below + 1)
        self._count += 1

    def start(
        self, handles: Sequence[int] | NDArray[np.integer[Any]], parents: NDArray[np.integer[Any]]
    ) -> None:
        assert not self._count, "a start comes before anything else"
        ring = np.full(len(handles) + 2, _RING, np.int32)
        ring[1:-1] = np.asarray(handles, np.int32) + 1
        newer = np.full(int(ring.max()) + 1, _ABSENT, np.int32)
        older = newer.copy()
        newer[ring[:-1]] = ring[1:]
        older[ring[1:]] = ring[:-1]
        self._newer, self._older = array("i", newer.tobytes()), array("i", older.tobytes())
        self._count = len(handles)

    def on_touch(self, handles: Iterable[int], below: int = -1) -> None:
        newer = self._newer
        first = last = _RING
        # Runs that lie together already move as one: a chain that was touched before costs two unlinks, not n.
        for handle in handles:
            slot = handle + 1
            if last != _RING and newer[last] == slot:
                last = slot
                continue
            if last != _RING:
                self._move(first, last, below + 1)
            first = last = slot
        if last != _RING:
            self._move(first, last, below + 1)

    def on_touch_many(self, handles: Handles, below: int = -1) -> None:
        """As on_touch, for many, each once and none of them `below`."""
        slots = handles + np.int32(1)
        lie_together = np.frombuffer(self._newer, np.int32)[slots[:-1]] == slots[1:]
        ends = np.flatnonzero(~lie_together)
        firsts, lasts = slots[[0, *(ends + 1)]], slots[[*ends, -1]]
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            self._move(first, last, below + 1)

    def on_remove(self, handle: int, tag: int = 0) -> None:
        slot = handle + 1
        assert self._newer[slot] != _ABSENT, f"handle {handle} is not ranked"
        self._unlink(slot, slot)
        self._newer[slot] = self._older[slot] = _ABSENT
        self._count -= 1

    def victims(self, start: int = -1) -> Iterator[int]:
        slot = self._newer[_RING] if start < 0 else start + 1
        while slot != _RING:
            following = self._newer[slot]
            yield slot - 1
            slot = following

    def memory_bytes(self) -> int:
        return self._newer.itemsize * len(self._newer) + self._older.itemsize * len(self._older)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the two columns describe one ring."""
        slot, seen = _RING, 0
        while True:
            following = self._newer[slot]
            assert self._older[following] == slot, f"links of {slot - 1} and {following - 1} disagree"
            if following == _RING:
                break
            slot, seen = following, seen + 1
            assert seen <= self._count, "the ring does not close"
        assert seen == self._count, f"{seen} handles in the ring, {self._count} counted"

    def _move(self, first: int, last: int, below: int) -> None:
        if last == below:
            return
        self._unlink(first, last)
        self._link(first, last, below)

    def _unlink(self, first: int, last: int) -> None:
        before, after = self._older[first], self._newer[last]
        self._newer[before] = after
        self._older[after] = before

    def _link(self, first: int, last: int, below: int) -> None:
        """Put the run first..last just older than `below`; the ring itself stands above the newest."""
        before = self._older[below]
        self._newer[before] = first
        self._older[first] = before
        self._newer[last] = below
        self._older[below] = last
