"""Items that lie in memory of the service: where they lie, and whether what was read of them counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.errors import InvalidArgument
from kvstore.pages import copy_from
from kvstore.types import ItemKind, Lineage
from kvstore_client.checks import crc32, xxh3_64
from kvstore_client.memory import Extent


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Items that came together, a list for each of their fields. Each lies in its extent, from its offset on; None: in the
    store it is missing. `generations` are what the extents' numbers at `slots` are while the items lie there. `shared`:
    whether the extents are the service's."""

    kinds: Sequence[ItemKind]
    indexes: Sequence[int]
    lineages: Sequence[int]
    extents: Sequence[Extent | None]
    offsets: Sequence[int]
    lengths: Sequence[int]
    slots: Sequence[int]
    generations: Sequence[int]
    crc32: Sequence[int]
    xxh3_64: Sequence[int]
    has_xxh3: Sequence[bool]
    shared: bool
    verify: bool


class MappedItem:
    """An item of a map. Its `payload` is the item's until the lease ends. Afterwards another's may come in its place, at any
    moment: what was read counts only if `is_current` says so after it was read. Nothing here waits or calls the service.
    """

    # A long prompt has thousands of them, which are made before its first byte is read: so they look up what they are when
    # they are asked.
    __slots__ = ("_columns", "_number")

    def __init__(self, columns: Columns, number: int) -> None:
        self._columns = columns
        self._number = number

    def __repr__(self) -> str:
        payload = self.payload
        size = "missing" if payload is None else f"{len(payload)} bytes"
        return f"MappedItem({self.kind.name}, index={self.index}, {size})"

    @property
    def kind(self) -> ItemKind:
        return self._columns.kinds[self._number]

    @property
    def index(self) -> int:
        """The block's place in the prompt, for its window rows too; the position in tokens of a state."""
        return self._columns.indexes[self._number]

    @property
    def lineage(self) -> Lineage | None:
        """None for a missing one."""
        columns, number = self._columns, self._number
        return None if columns.extents[number] is None else Lineage(columns.lineages[number])

    @property
    def payload(self) -> memoryview | None:
        """Its bytes where the service keeps them, or the caller's own where they could not be mapped; read-only. None: in
        the store it is missing."""
        columns, number = self._columns, self._number
        extent = columns.extents[number]
        if extent is None:
            return None
        offset = columns.offsets[number]
        return extent.pages[offset : offset + columns.lengths[number]]

    @property
    def is_shared(self) -> bool:
        """Whether the payload lies in memory of the service."""
        return self._columns.shared

    def is_current(self) -> bool:
        """Whether all that was read of the payload until now is the item's. False for a missing one."""
        columns, number = self._columns, self._number
        extent = columns.extents[number]
        # One aligned load: it is never half of one value and half of another.
        return extent is not None and extent.generations[columns.slots[number]] == columns.generations[number]

    def check(self) -> bool:
        """Whether the payload is there and has its checksum. It says nothing about what is read of it later."""
        payload = self.payload
        return payload is not None and self._is_right(payload) and self.is_current()

    def copy_to(self, target: bytearray | memoryview) -> bool:
        """Copy the payload to the beginning of `target`. Whether what lies there now is the item's; where not, treat it as a
        miss. InvalidArgument for a target that has no room for it or cannot be written."""
        payload = self.payload
        if payload is None:
            return False
        room = _room(target, len(payload))
        extent = self._columns.extents[self._number]
        if extent is not None and extent.address and payload:
            copy_from(extent.address + self._columns.offsets[self._number], room)
        else:
            room[:] = payload
        # The copy is what counts, and it lies in the processor's cache now. The generation comes last, and covers all that
        # was read before.
        return self._is_right(room) and self.is_current()

    def _is_right(self, payload: memoryview) -> bool:
        columns, number = self._columns, self._number
        if not columns.verify:
            return True
        if columns.has_xxh3[number] and xxh3_64 is not None:
            return xxh3_64(payload) == columns.xxh3_64[number]
        return crc32(payload) == columns.crc32[number]


def _room(target: bytearray | memoryview, length: int) -> memoryview:
    view = memoryview(target)
    if view.readonly or not view.c_contiguous or view.nbytes < length:
        raise InvalidArgument(
            "not a target for this item",
            field="target",
            value=f"{view.nbytes} bytes{', read-only' if view.readonly else ''}",
            allowed=f"{length} bytes or more that can be written, without gaps",
        )
    return view.cast("B")[:length]
