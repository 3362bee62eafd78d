"""Blocks cut by layers: slice 0 of every block is read and goes out, then slice 1 of every block, and so on."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing

import xxhash
from isal import isal_zlib

from kvstore.core.base import FetchItem
from kvstore.errors import InvalidArgument
from kvstore.profile.base import Profile
from kvstore.profile.layout import SLICES_MAX, LayerSlice, layer_slices
from kvstore.service import encode
from kvstore.service.delivery import Part
from kvstore.service.reader import Reader, Sources
from kvstore.types import BytesLike
from kvstore.v1 import cache_pb2 as pb


def cuts_of(profile: Profile, *, slices: int, block_count: int) -> Sequence[LayerSlice]:
    """The slices of a fetch that asks for more than one. InvalidArgument for what makes no sense."""
    if slices > SLICES_MAX:
        raise InvalidArgument("too many slices", field="slices", value=slices, allowed=f"0 to {SLICES_MAX}")
    if not block_count:
        raise InvalidArgument(
            "only blocks are cut into slices, and none is asked for",
            field="slices",
            value=slices,
            allowed="0 or 1 with block_count = 0",
        )
    if profile.is_keyed:
        raise InvalidArgument(
            "payloads of a keyed namespace have no layers to be cut by",
            field="slices",
            value=slices,
            allowed="0 or 1",
        )
    return layer_slices(profile, slices)


async def sliced(
    reader: Reader,
    items: Iterator[FetchItem | None],
    sources: Sources,
    cuts: Sequence[LayerSlice],
    *,
    first_block: int,
) -> AsyncGenerator[list[Part], None]:
    """Batches of slices. Each slice of a block is read and checked when its turn comes, so that nothing is kept until then
    but the list. A block of which one slice is missing, or which another writer has stored again by then, is missing from
    there on: slices of two writers do not make a block."""
    listed: list[FetchItem | None] = []
    for number, cut in enumerate(cuts):
        block = 0
        reads = reader.read(list(listed) if number else items, sources, part=(cut.offset, cut.end))
        async with aclosing(reads) as batches:
            async for batch in batches:
                parts = []
                for read in batch:
                    item = None if read.payload is None else read.item
                    if not number:
                        listed.append(item)
                    elif not _is_same(listed[block], item):
                        item = None
                    listed[block] = item
                    parts.append(_part(first_block + block, item, read.payload, number))
                    block += 1
                yield parts


def _is_same(before: FetchItem | None, now: FetchItem | None) -> bool:
    if before is None or now is None:
        return False
    return (before.checks, before.lineage) == (now.checks, now.lineage)


def _part(block: int, item: FetchItem | None, payload: BytesLike | None, number: int) -> Part:
    if item is None or payload is None:
        return pb.ItemHeader(kind=pb.BLOCK, index=block, slice=number, missing=True), b""
    view = memoryview(payload)
    # The store has checked these bytes; the writer's checksums are the whole block's.
    header = pb.ItemHeader(
        kind=pb.BLOCK,
        index=block,
        slice=number,
        length=len(view),
        crc32=isal_zlib.crc32(view),
        xxh3_64=xxhash.xxh3_64_intdigest(view),
        has_xxh3=True,
        lineage=encode.put_lineage(item.lineage),
    )
    return header, view
