"""Slots that writers fill at their own pace, and how much of the cache those keep from everybody else."""

from __future__ import annotations

from collections import Counter

from kvstore.memory.extent import Extent, Slot

LENT_SHARE = 2
"""Extents with such slots are at most this part of the budget. One slot keeps its whole extent, for as long as its reservation lasts, so
that a few small ones, each of a size of its own, would have all of the cache."""


class Lent:
    """`bytes`: of the extents in which there are any."""

    def __init__(self) -> None:
        self.bytes = 0
        self._slots: set[Slot] = set()
        self._extents: Counter[Extent] = Counter()

    def allows(self, extent: Extent, budget_bytes: int) -> bool:
        """Whether one more may lie there."""
        return extent in self._extents or LENT_SHARE * (self.bytes + extent.bytes) <= budget_bytes

    def take(self, slot: Slot) -> None:
        self._slots.add(slot)
        if not self._extents[slot.extent]:
            self.bytes += slot.extent.bytes
        self._extents[slot.extent] += 1

    def give_back(self, slot: Slot) -> None:
        """Of one that was not taken there is nothing to do."""
        if slot not in self._slots:
            return
        self._slots.remove(slot)
        self._extents[slot.extent] -= 1
        if not self._extents[slot.extent]:
            del self._extents[slot.extent]
            self.bytes -= slot.extent.bytes

    def check(self) -> None:
        """Raise AssertionError unless the books add up."""
        assert self._extents == Counter(slot.extent for slot in self._slots)
        assert self.bytes == sum(extent.bytes for extent in self._extents)
        assert all(slot.pins for slot in self._slots), "what is lent is being filled"
