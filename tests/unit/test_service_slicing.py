"""Blocks cut into slices on their way out: order, checksums, what is missing, and the memory that waits for its turn."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

import pytest
import xxhash

from kvstore.core import FetchItem
from kvstore.errors import InvalidArgument, LimitExceeded
from kvstore.profile.layout import SLICES_MAX, LayerSlice, layer_slices
from kvstore.profile.registry import PROFILES, get_profile
from kvstore.service.reader import Read
from kvstore.service.slicing import cuts_of, room_for, sliced
from kvstore.service.staging import Staging
from kvstore.types import BlockKey, Checks, ItemId, ItemKind, Lineage
from kvstore.v1 import cache_pb2 as pb

CUTS = (LayerSlice(0, 1, 0, 30), LayerSlice(1, 3, 30, 70), LayerSlice(3, 4, 70, 100))


def block(number: int, lineage: Lineage = Lineage.EXACT) -> Read:
    payload = bytes((number * 7 + i) % 256 for i in range(100))
    item = ItemId(BlockKey(bytes([number]) * 32), ItemKind.BLOCK)
    return Read(FetchItem(item, 128, lineage, Checks(zlib.crc32(payload))), payload)


async def cut(reads: Sequence[Read], first: int = 0) -> list[tuple[pb.ItemHeader, bytes]]:
    async def source() -> AsyncIterator[Read]:
        for read in reads:
            yield read

    async with aclosing(sliced(source(), CUTS, first_block=first)) as parts:
        return [(header, bytes(payload)) async for header, payload in parts]


async def test_slice_by_slice_each_block_in_order_and_together_they_are_the_blocks() -> None:
    reads = [block(0), block(1, Lineage.BOUNDED), block(2)]
    parts = await cut(reads, first=5)
    assert [(h.slice, h.index) for h, _ in parts] == [(s, b) for s in range(3) for b in (5, 6, 7)]
    for number, read in enumerate(reads):
        mine = [(h, data) for h, data in parts if h.index == 5 + number]
        assert b"".join(data for _, data in mine) == read.payload
        assert read.item is not None
        for header, data in mine:
            assert header.kind == pb.BLOCK
            assert (header.length, header.crc32) == (len(data), zlib.crc32(data))
            assert (header.has_xxh3, header.xxh3_64) == (True, xxhash.xxh3_64_intdigest(data))
            assert header.lineage == read.item.lineage


async def test_of_a_missing_block_all_slices_are_missing_and_the_others_come() -> None:
    lost = block(1)
    for gone in (Read(None, None), Read(lost.item, None)):
        parts = await cut([block(0), gone, block(2)])
        assert [(h.slice, h.index) for h, _ in parts if h.missing] == [(0, 1), (1, 1), (2, 1)]
        assert all(data == b"" for h, data in parts if h.missing)
        assert len([h for h, _ in parts if not h.missing]) == 6


@pytest.mark.parametrize("name", sorted(PROFILES))
@pytest.mark.parametrize("count", [2, 4, 8, SLICES_MAX])
def test_the_slices_of_a_profile_cover_its_block(name: str, count: int) -> None:
    profile = get_profile(name)
    cuts = cuts_of(profile, slices=count, block_count=1)
    assert cuts == layer_slices(profile, count)
    assert 1 <= len(cuts) <= count
    assert [c.offset for c in cuts] == [0, *(c.end for c in cuts[:-1])]
    assert [c.first_layer for c in cuts] == [0, *(c.end_layer for c in cuts[:-1])]
    assert (cuts[-1].end, cuts[-1].end_layer) == (profile.block_bytes, profile.layer_count)
    assert all(c.end > c.offset for c in cuts)


def test_what_makes_no_sense_is_refused_by_name() -> None:
    profile = get_profile("tiny")
    with pytest.raises(InvalidArgument, match="slices=17"):
        cuts_of(profile, slices=SLICES_MAX + 1, block_count=4)
    with pytest.raises(InvalidArgument, match="none is asked for"):
        cuts_of(profile, slices=2, block_count=0)


def test_memory_for_later_slices_is_bounded_named_and_given_back() -> None:
    # Half of it is left to writers.
    staging = Staging(2000)
    with room_for(staging, 600):
        assert staging.held_bytes == 600
        with pytest.raises(LimitExceeded, match=r"slices=600 bytes of blocks; allowed: 400 bytes now"):
            room_for(staging, 600).__enter__()
        staging.take(1400)
        staging.give_back(1400)
    assert staging.held_bytes == 0
    with pytest.raises(KeyError), room_for(staging, 1000):
        raise KeyError
    assert staging.held_bytes == 0
