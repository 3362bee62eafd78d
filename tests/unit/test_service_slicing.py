"""Blocks cut into slices on their way out: order, checksums, what is missing, and bytes of one writer only."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import aclosing

import pytest
import xxhash

from kvstore.core import FetchItem
from kvstore.errors import InvalidArgument
from kvstore.profile.layout import SLICES_MAX, LayerSlice, block_layout, layer_slices, slice_ends
from kvstore.profile.registry import PROFILES, get_profile
from kvstore.service.delivery import Part, framed
from kvstore.service.frames import Incoming, Receiver
from kvstore.service.slicing import cuts_of, sliced
from kvstore.store import Place
from kvstore.store.format import SLICES_MAX as TABLE_MAX
from kvstore.types import Checks, ItemKind, Lineage
from kvstore.v1 import cache_pb2 as pb
from tests.support.reading import SIZE, Rig, item, payload_of, rig

CUTS = (LayerSlice(0, 1, 0, 100_000), LayerSlice(1, 3, 100_000, 250_000), LayerSlice(3, 4, 250_000, SIZE))


async def cut(
    made: Rig, *, first: int = 0, after: Callable[[], None] = lambda: None
) -> list[tuple[pb.ItemHeader, bytes]]:
    """Copies of all parts. `after` is called when the first slice of all blocks has come."""
    parts: list[tuple[pb.ItemHeader, bytes]] = []
    batches = sliced(made.reader, iter(made.items), made, CUTS, first_block=first)
    async with aclosing(batches):
        async for batch in batches:
            parts += [(header, bytes(payload)) for header, payload in batch]
            if len(parts) == len(made.items):
                after()
    return parts


def missing(parts: list[tuple[pb.ItemHeader, bytes]]) -> list[tuple[int, int]]:
    assert all(data == b"" for header, data in parts if header.missing)
    return [(header.slice, header.index) for header, _ in parts if header.missing]


def damage(made: Rig, number: int, at: int) -> None:
    block = made.items[number]
    assert block is not None
    assert block.place is not None
    [name] = [n for n in made.device.names() if n.endswith(f"{block.place.segment_id:016x}.log")]
    made.device.contents(name)[block.place.offset + at] ^= 4


async def test_slice_by_slice_each_block_in_order_and_together_they_are_the_blocks() -> None:
    with rig(14) as made:
        lent = made.items[1]
        assert lent is not None
        made.items[1] = lent._replace(lineage=Lineage.BOUNDED)
        parts = await cut(made, first=5)
        assert [(h.slice, h.index) for h, _ in parts] == [(s, 5 + b) for s in range(3) for b in range(14)]
        for number in range(14):
            mine = [(h, data) for h, data in parts if h.index == 5 + number]
            assert b"".join(data for _, data in mine) == payload_of(number)
            for header, data in mine:
                assert (header.kind, header.length, header.crc32) == (pb.BLOCK, len(data), zlib.crc32(data))
                assert (header.has_xxh3, header.xxh3_64) == (True, xxhash.xxh3_64_intdigest(data))
                assert header.lineage == (2 if number == 1 else 1)
        # Each byte was read once, in three turns.
        assert made.reader.read_bytes_total == 14 * SIZE


async def test_of_a_missing_block_all_slices_are_missing_and_the_others_come() -> None:
    with rig(4) as made:
        made.items[1] = None
        made.items[2] = item(2, Place(99, 4096, SIZE))
        parts = await cut(made)
        assert missing(parts) == [(s, b) for s in range(3) for b in (1, 2)]
        assert len(parts) == 12
        assert made.forgotten == [made.items[2]]


async def test_damage_is_a_miss_from_its_slice_on_and_counted_once() -> None:
    with rig(4) as made:
        damage(made, 2, CUTS[1].offset + 9)
        assert missing(await cut(made)) == [(1, 2), (2, 2)]
        assert made.forgotten == [made.items[2]]


def copied(made: Rig, number: int) -> FetchItem:
    """The block as it is when its copy has been made and its segment is gone."""
    before = made.items[number]
    assert before is not None
    assert before.place is not None
    moves = made.log.clean(before.place.segment_id)
    for each, block in enumerate(made.items):
        if block is not None and block.place is not None and block.place in moves:
            made.now[each] = block._replace(place=moves[block.place])
    moved = made.now[number]
    assert moved is not None
    return moved


async def test_blocks_that_move_between_slices_are_followed() -> None:
    with rig(20) as made:
        parts = await cut(made, after=lambda: assert_moved(copied(made, 3), made.items[3]))
        assert missing(parts) == []
        for number in range(20):
            assert b"".join(data for header, data in parts if header.index == number) == payload_of(number)
        assert made.forgotten == []


def assert_moved(now: FetchItem, before: FetchItem | None) -> None:
    assert before is not None
    assert now.place != before.place


@pytest.mark.parametrize("changed", [{"checks": Checks(7)}, {"lineage": Lineage.BOUNDED}])
async def test_slices_of_another_writer_s_bytes_do_not_go_on_with_a_block(changed: dict[str, object]) -> None:
    with rig(20) as made:

        def stored_again() -> None:
            made.now[3] = copied(made, 3)._replace(**changed)  # type: ignore[arg-type]

        assert missing(await cut(made, after=stored_again)) == [(1, 3), (2, 3)]
        assert made.forgotten == []


async def test_frames_hold_copies_and_nothing_of_a_slice_waits_for_the_next_one() -> None:
    with rig(14) as made:
        receiver = Receiver()
        found: list[tuple[pb.ItemHeader, Incoming]] = []
        announced: list[pb.ItemHeader] = []
        whole = framed(sliced(made.reader, iter(made.items), made, CUTS, first_block=0))
        async with aclosing(whole) as frames:
            kept = [pb.ItemFrame.FromString(frame) async for frame in frames]
        # All rooms have been given back by now.
        assert made.rooms.lent == made.rooms.taken_back
        for frame in kept:
            assert len({header.slice for header in frame.items}) <= 1
            announced += frame.items
            items = [
                Incoming(f"item {h.index}", h.length, Checks(h.crc32, h.xxh3_64, h.has_xxh3))
                for h in frame.items
            ]
            for done in receiver.accept(items, frame.data):
                found.append((announced[len(found)], done))
        receiver.finish()
        assert len(found) == 3 * 14
        for header, done in found:
            bounds = CUTS[header.slice]
            assert done.payload() == payload_of(header.index)[bounds.offset : bounds.end]


async def test_frames_of_whole_items_hold_copies_too() -> None:
    with rig(20) as made:

        async def batches() -> object:
            async with aclosing(made.reader.read(made.items, made)) as reading:
                async for reads in reading:
                    parts: list[Part] = [
                        (pb.ItemHeader(length=SIZE), read.payload)
                        for read in reads
                        if read.payload is not None
                    ]
                    yield parts

        kept = [pb.ItemFrame.FromString(frame).data async for frame in framed(batches())]  # type: ignore[arg-type]
        assert made.rooms.lent == made.rooms.taken_back
        assert b"".join(kept) == b"".join(payload_of(number) for number in range(20))


@pytest.mark.parametrize("name", sorted(PROFILES))
@pytest.mark.parametrize("count", [2, 4, 8, SLICES_MAX])
def test_the_slices_of_a_profile_cover_its_block_and_can_be_verified_alone(name: str, count: int) -> None:
    profile = get_profile(name)
    cuts = cuts_of(profile, slices=count, block_count=1)
    assert cuts == layer_slices(profile, count)
    assert 1 <= len(cuts) <= count
    assert [c.offset for c in cuts] == [0, *(c.end for c in cuts[:-1])]
    assert [c.first_layer for c in cuts] == [0, *(c.end_layer for c in cuts[:-1])]
    assert (cuts[-1].end, cuts[-1].end_layer) == (profile.block_bytes, profile.layer_count)
    assert all(c.end > c.offset for c in cuts)
    assert {c.end for c in cuts[:-1]} <= set(slice_ends(profile, ItemKind.BLOCK, profile.block_bytes))


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_a_payload_is_cut_where_a_layer_ends(name: str) -> None:
    profile = get_profile(name)
    blocks = slice_ends(profile, ItemKind.BLOCK, profile.block_bytes)
    assert set(blocks) < {section.end for section in block_layout(profile).sections}
    assert len(blocks) + 1 == sum(layer.kind.has_entries for layer in profile.layers) <= TABLE_MAX
    state = slice_ends(profile, ItemKind.STATE, profile.state_bytes)
    width = profile.window_rows * profile.row_bytes
    assert state == tuple(
        width * n for n in range(1, profile.layer_count + 1) if width * n < profile.state_bytes
    )
    rows = slice_ends(profile, ItemKind.ROWS, profile.rows_block_bytes)
    width = profile.block_tokens * profile.row_bytes
    assert rows == tuple(width * n for n in range(1, profile.layer_count))


def test_what_makes_no_sense_is_refused_by_name() -> None:
    profile = get_profile("tiny")
    with pytest.raises(InvalidArgument, match="slices=17"):
        cuts_of(profile, slices=SLICES_MAX + 1, block_count=4)
    with pytest.raises(InvalidArgument, match="none is asked for"):
        cuts_of(profile, slices=2, block_count=0)
