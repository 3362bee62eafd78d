"""What a reader of mapped memory is told of each item: the rows of a Map, made when a payload comes into memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvstore.core.base import FetchItem
from kvstore.memory import Slot
from kvstore.types import ItemKind, Lineage
from kvstore.v1 import cache_pb2 as pb

_LINEAGES: dict[Lineage, int] = {
    Lineage.EXACT: pb.LINEAGE_EXACT,
    Lineage.BOUNDED: pb.LINEAGE_BOUNDED,
}
_KINDS: dict[ItemKind, int] = {
    ItemKind.BLOCK: pb.BLOCK,
    ItemKind.STATE: pb.STATE,
    ItemKind.ROWS: pb.WINDOW_ROWS,
}


class Row(NamedTuple):
    """One item of a MapReply but for its index. `slot`, `generation`: as the wire calls them."""

    extent: int
    offset: int
    length: int
    slot: int
    generation: int
    crc32: int
    xxh3_64: int
    has_xxh3: bool
    lineage: int
    kind: int


def row_of(item: FetchItem, slot: Slot) -> Row:
    """Of what lies in the slot now: good until its generation changes."""
    checks = item.checks
    return Row(
        slot.extent.number,
        slot.offset,
        slot.length,
        slot.index,
        slot.generation,
        checks.crc32,
        checks.xxh3_64,
        checks.has_xxh3,
        _LINEAGES[item.lineage],
        _KINDS[item.item.kind],
    )


def absent(kind: ItemKind) -> Row:
    """Of what does not lie in memory."""
    return Row(0, 0, 0, 0, 0, 0, 0, False, pb.LINEAGE_UNSPECIFIED, _KINDS[kind])


def reply_of(rows: Sequence[Row], index: Sequence[int]) -> pb.MapReply:
    """One row at least."""
    extent, offset, length, slot, generation, crc32, xxh3, has_xxh3, lineage, kind = zip(*rows, strict=True)
    return pb.MapReply(
        extent=extent,
        offset=offset,
        length=length,
        slot=slot,
        generation=generation,
        crc32=crc32,
        xxh3_64=xxh3,
        has_xxh3=has_xxh3,
        lineage=lineage,
        kind=kind,
        index=index,
    )
