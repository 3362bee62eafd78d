"""Blocks cut by layers: slice 0 of each goes out while the blocks are read, the rest from memory afterwards."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import contextmanager

import xxhash
from isal import isal_zlib

from kvstore.errors import InvalidArgument
from kvstore.profile.base import Profile
from kvstore.profile.layout import SLICES_MAX, LayerSlice, layer_slices
from kvstore.service import encode
from kvstore.service.reader import Read
from kvstore.service.staging import Staging
from kvstore.types import BytesLike
from kvstore.v1 import cache_pb2 as pb

Part = tuple[pb.ItemHeader, BytesLike]
"""One item of a fetch on its way out."""


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
    return layer_slices(profile, slices)


@contextmanager
def room_for(staging: Staging, length: int) -> Iterator[None]:
    """Memory for blocks whose later slices wait. LimitExceeded at once where there is none: whole blocks need none."""
    staging.take_for_readers(length)
    try:
        yield
    finally:
        staging.give_back(length)


async def sliced(
    reads: AsyncIterator[Read], cuts: Sequence[LayerSlice], *, first_block: int
) -> AsyncGenerator[Part, None]:
    """Slice 0 of every block as it is read, then slice 1 of every block, and so on."""
    kept: list[Read] = []
    async for read in reads:
        yield _part(first_block + len(kept), read, 0, cuts[0])
        kept.append(read)
    for number, cut in enumerate(cuts[1:], 1):
        for offset, read in enumerate(kept):
            yield _part(first_block + offset, read, number, cut)


def _part(block: int, read: Read, number: int, cut: LayerSlice) -> Part:
    if read.item is None or read.payload is None:
        return pb.ItemHeader(kind=pb.BLOCK, index=block, slice=number, missing=True), b""
    # The whole block had its writer's checksums when it was read.
    payload = memoryview(read.payload)[cut.offset : cut.end]
    header = pb.ItemHeader(
        kind=pb.BLOCK,
        index=block,
        slice=number,
        length=len(payload),
        crc32=isal_zlib.crc32(payload),
        xxh3_64=xxhash.xxh3_64_intdigest(payload),
        has_xxh3=True,
        lineage=encode.put_lineage(read.item.lineage),
    )
    return header, payload
