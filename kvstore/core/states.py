"""Window states on SSD, of both kinds: a small table beside the blocks, in one order of use of its own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.core.accepted import is_accepted
from kvstore.store.base import Place
from kvstore.types import Checks, ItemKind, Lineage

# Of one entry with its dict row, place and checks; measured, and far below the megabytes of a state.
ENTRY_BYTES = 560

STATE_KINDS = (ItemKind.STATE, ItemKind.ROWS)


def handle_of(slot: int, kind: ItemKind) -> int:
    """The name of a block's state or rows among handles, where the block itself is `slot`: always negative."""
    return ~(2 * slot + (kind is ItemKind.ROWS))


def slot_of(handle: int) -> int:
    """The block of any handle."""
    return handle if handle >= 0 else ~handle >> 1


def kind_of(handle: int) -> ItemKind:
    if handle >= 0:
        return ItemKind.BLOCK
    return ItemKind.ROWS if ~handle & 1 else ItemKind.STATE


@dataclass(slots=True, eq=False)
class StateEntry:
    """One state or one block's rows. `leases` counts who protects it; an entry that was replaced or removed is another
    object than the one in the table, which is how a lease knows. `noted_until`: uses before it are persisted."""

    place: Place
    checks: Checks
    lineage: Lineage
    used: int
    leases: int = 0
    use_queued: bool = False
    noted_until: int = 0


class StateTable:
    """Entries by handle, least recently used first; both kinds share the order."""

    def __init__(self) -> None:
        self._entries: OrderedDict[int, StateEntry] = OrderedDict()
        self._bytes = 0
        self._rows = self._rows_bytes = 0
        self.bounded: dict[ItemKind, set[int]] = {kind: set() for kind in STATE_KINDS}
        """Slots of the blocks whose state, or whose rows, are BOUNDED."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def bytes(self) -> int:
        """Payload bytes of all entries."""
        return self._bytes

    @property
    def rows(self) -> int:
        """How many entries are rows."""
        return self._rows

    @property
    def rows_bytes(self) -> int:
        return self._rows_bytes

    def get(self, handle: int) -> StateEntry | None:
        return self._entries.get(handle)

    def add(self, handle: int, entry: StateEntry) -> None:
        assert handle not in self._entries, "a block has one entry of a kind"
        self._entries[handle] = entry
        self._account(handle, entry, 1)

    def remove(self, handle: int) -> StateEntry:
        entry = self._entries.pop(handle)
        self._account(handle, entry, -1)
        return entry

    def move(self, handle: int, place: Place) -> None:
        entry = self._entries[handle]
        assert entry.place.length == place.length, "a record is moved as it is"
        entry.place = place

    def touch(self, handle: int, used: int) -> None:
        entry = self._entries[handle]
        entry.used = max(entry.used, used)
        self._entries.move_to_end(handle)

    def victim(self) -> int | None:
        """Handle of the entry to go first, of those that nobody leases and that are durable: to evict others would give back
        nothing. Those were used when they were leased or accepted, so that few or none stand before it."""
        return next((handle for handle, entry in self._entries.items() if _may_go(entry)), None)

    def may_go(self, handle: int) -> bool:
        """Whether nobody leases it and it is durable."""
        return _may_go(self._entries[handle])

    def handles(self) -> list[int]:
        """All of them, least recently used first."""
        return list(self._entries)

    def oldest(self) -> Iterator[tuple[int, StateEntry]]:
        return iter(self._entries.items())

    def memory_bytes(self) -> int:
        return len(self._entries) * ENTRY_BYTES

    def check_integrity(self) -> None:
        """Raise AssertionError unless the totals are those of the entries."""
        entries = self._entries
        rows = [entry for handle, entry in entries.items() if kind_of(handle) is ItemKind.ROWS]
        assert sum(entry.place.length for entry in entries.values()) == self._bytes, "bytes of states"
        assert sum(entry.place.length for entry in rows) == self._rows_bytes, "bytes of rows"
        assert len(rows) == self._rows, "rows"
        bounded = {handle for handle, entry in entries.items() if entry.lineage is Lineage.BOUNDED}
        noted = {handle_of(slot, kind) for kind, slots in self.bounded.items() for slot in slots}
        assert bounded == noted, "bounded states"

    def _account(self, handle: int, entry: StateEntry, sign: int) -> None:
        self._bytes += sign * entry.place.length
        kind, slot = kind_of(handle), slot_of(handle)
        if kind is ItemKind.ROWS:
            self._rows += sign
            self._rows_bytes += sign * entry.place.length
        if entry.lineage is Lineage.EXACT:
            return
        if sign > 0:
            self.bounded[kind].add(slot)
        else:
            self.bounded[kind].remove(slot)


def _may_go(entry: StateEntry) -> bool:
    return not entry.leases and not is_accepted(entry.place.segment_id)
