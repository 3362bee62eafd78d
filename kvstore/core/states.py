"""Window states on SSD: a small table beside the blocks, in an order of use of its own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.store.base import Place
from kvstore.types import Checks, Lineage

# Of one row with its dict entry, place and checks; measured, and far below the megabytes of a state.
ROW_BYTES = 560


@dataclass(slots=True, eq=False)
class StateRow:
    """The state at the end of one block. `leases` counts who protects it; a row that was replaced or removed is another
    object than the one in the table, which is how a lease knows. `noted_until`: uses before it are persisted."""

    place: Place
    checks: Checks
    lineage: Lineage
    used: int
    leases: int = 0
    use_queued: bool = False
    noted_until: int = 0


class StateTable:
    """States by the slot of their block, least recently used first."""

    def __init__(self) -> None:
        self._rows: OrderedDict[int, StateRow] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def bytes(self) -> int:
        """Payload bytes of all states on SSD."""
        return self._bytes

    def get(self, slot: int) -> StateRow | None:
        return self._rows.get(slot)

    def add(self, slot: int, row: StateRow) -> None:
        assert slot not in self._rows, "a block has one state"
        self._rows[slot] = row
        self._bytes += row.place.length

    def remove(self, slot: int) -> StateRow:
        row = self._rows.pop(slot)
        self._bytes -= row.place.length
        return row

    def move(self, slot: int, place: Place) -> None:
        row = self._rows[slot]
        assert row.place.length == place.length, "a record is moved as it is"
        row.place = place

    def touch(self, slot: int, used: int) -> None:
        row = self._rows[slot]
        row.used = max(row.used, used)
        self._rows.move_to_end(slot)

    def victim(self) -> int | None:
        """Slot of the state to go first, of those that nobody leases. A leased one was used when it was leased, so that
        few or none stand before it."""
        return next((slot for slot, row in self._rows.items() if not row.leases), None)

    def oldest(self) -> Iterator[tuple[int, StateRow]]:
        return iter(self._rows.items())

    def memory_bytes(self) -> int:
        return len(self._rows) * ROW_BYTES

    def check_integrity(self) -> None:
        assert sum(row.place.length for row in self._rows.values()) == self._bytes, "bytes of states"
