"""What a Map says, held against what was asked for and what the session may read. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import repeat
from operator import add
from typing import cast

from kvstore.errors import DamagedBytes
from kvstore.types import Lineage
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.mapped import Columns, MappedItem
from kvstore_client.memory import GENERATION_BYTES, Extent
from kvstore_client.values import FetchedItem
from kvstore_client.wanted import Whole

_LINEAGES = frozenset(int(lineage) for lineage in Lineage)
_OWN = memoryview(bytes(GENERATION_BYTES)).cast("Q")
"""The generation of what nobody else writes to."""


def mapped_items(
    reply: pb.MapReply, wanted: Whole, seen: int, *, find: Callable[[int], Extent | None], verify: bool
) -> Sequence[MappedItem | None]:
    """The items of a message, which come as number `seen` of the wanted ones and after it; None for those that Fetch
    brings. `find` gives an extent by its number, None where it is no more. DamagedBytes where they are not the wanted items
    in their order, or would lie anywhere else than in their extent behind the generations."""
    numbers = reply.extent[:]
    count = len(numbers)
    if seen + count > len(wanted):
        raise DamagedBytes(
            "an item came that nobody asked for",
            field="items",
            value=seen + count,
            allowed=f"{len(wanted)} items",
        )
    kinds, indexes = wanted.columns(seen, seen + count)
    found = {number: find(number) if number else None for number in set(numbers)}
    columns = Columns(
        kinds=kinds,
        indexes=indexes,
        lineages=cast("Sequence[int]", reply.lineage[:]),
        extents=[found[number] for number in numbers],
        offsets=reply.offset[:],
        lengths=reply.length[:],
        slots=reply.slot[:],
        generations=reply.generation[:],
        crc32=reply.crc32[:],
        xxh3_64=reply.xxh3_64[:],
        has_xxh3=reply.has_xxh3[:],
        shared=True,
        verify=verify,
    )
    _check_lengths(columns, reply, count)
    came: object = (reply.kind[:], reply.index[:])
    if came != (kinds, indexes):
        raise DamagedBytes("an item came in another's place", field="item", value=f"number {seen} or later")
    if not _all_fit(columns, found.values()):
        _check_places(columns)
    if None in found.values():
        return [
            None if extent is None else MappedItem(columns, number)
            for number, extent in enumerate(columns.extents)
        ]
    return list(map(MappedItem, repeat(columns), range(count)))


def private_item(item: FetchedItem) -> MappedItem:
    """An item that came by Fetch, and was checked when it came."""
    extent = None if item.payload is None else Extent(memoryview(item.payload), _OWN)
    columns = Columns(
        kinds=[item.kind],
        indexes=[item.index],
        lineages=[item.lineage or 0],
        extents=[extent],
        offsets=[0],
        lengths=[len(item.payload or b"")],
        slots=[0],
        generations=[_OWN[0]],
        crc32=[0],
        xxh3_64=[0],
        has_xxh3=[False],
        shared=False,
        verify=False,
    )
    return MappedItem(columns, 0)


def _check_lengths(columns: Columns, reply: pb.MapReply, count: int) -> None:
    lists = (
        columns.lineages,
        columns.offsets,
        columns.lengths,
        columns.slots,
        columns.generations,
        columns.crc32,
        columns.xxh3_64,
        columns.has_xxh3,
        reply.kind,
        reply.index,
    )
    if any(len(each) != count for each in lists):
        raise DamagedBytes(
            "the lists of a message differ in length", field="items", value=count, allowed="one length"
        )


def _all_fit(columns: Columns, extents: Collection[Extent | None]) -> bool:
    """Whether all items would fit each of the extents wherever they lie: the rule, and seen without a step for each."""
    sizes = [0 if extent is None else len(extent.pages) for extent in extents]
    return bool(sizes) and (
        GENERATION_BYTES * (max(columns.slots) + 1) <= min(columns.offsets)
        and max(map(add, columns.offsets, columns.lengths)) <= min(sizes)
        and _LINEAGES.issuperset(columns.lineages)
    )


def _check_places(columns: Columns) -> None:
    for extent, offset, length, slot, lineage in zip(
        columns.extents, columns.offsets, columns.lengths, columns.slots, columns.lineages, strict=True
    ):
        if extent is None:
            continue
        size = len(extent.pages)
        if not GENERATION_BYTES * (slot + 1) <= offset <= size - length or lineage not in _LINEAGES:
            raise DamagedBytes(
                "an item does not lie in its extent",
                field="item",
                value=f"offset {offset} length {length} slot {slot} lineage {lineage}",
                allowed=f"{size} bytes, the generations first; EXACT or BOUNDED",
            )
