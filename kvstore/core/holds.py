"""Holds: which blocks may not be evicted, and for whom."""

from __future__ import annotations


class Holds:
    """A set of owners (numbers that are never given twice) per held slot.

    A hold on a block protects its whole chain, since only childless blocks are evicted. Damage and clearing take a block
    away all the same; its owners are then told (`removed`), and a hold that is released later harms no other block
    that has got the slot meanwhile.
    """

    def __init__(self) -> None:
        self._owners: dict[int, set[int]] = {}

    def hold(self, slot: int, owner: int) -> None:
        owners = self._owners.get(slot)
        if owners is None:
            self._owners[slot] = {owner}
        else:
            owners.add(owner)

    def release(self, slot: int, owner: int) -> None:
        owners = self._owners.get(slot)
        if owners is not None:
            owners.discard(owner)
            if not owners:
                del self._owners[slot]

    def is_held(self, slot: int) -> bool:
        return slot in self._owners

    def removed(self, slot: int) -> set[int]:
        """The slot's block has left: its holds are gone. Who had them."""
        return self._owners.pop(slot, set())

    def pairs(self) -> set[tuple[int, int]]:
        """(slot, owner) of every hold."""
        return {(slot, owner) for slot, owners in self._owners.items() for owner in owners}
