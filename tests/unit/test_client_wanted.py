"""What a fetch brings: the order of whole and sliced fetches, and what a state is made of."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from kvstore.errors import DamagedBytes
from kvstore.profile.layout import LayerSlice, rows_needed
from kvstore.profile.registry import PROFILES, get_profile
from kvstore.types import Exactness, ItemKind, Lineage, StateSource
from kvstore.v1 import cache_pb2 as pb
from kvstore_client import Alternative, FetchedItem, FetchedSlice, Plan, SaveStates
from kvstore_client.checks import make_checks
from kvstore_client.reading import cut_block, read_slices
from kvstore_client.wanted import Place, Sliced, Whole, state_places

CUTS = (LayerSlice(0, 1, 0, 3), LayerSlice(1, 2, 3, 8))
STATE = Place(ItemKind.STATE, 640)


def plan(source: StateSource, state_at: int, compute_from: int) -> Plan:
    way = Alternative(
        compute_from=compute_from,
        state_source=source,
        state_at=state_at,
        replay_from=state_at,
        replay_layer_tokens=0,
        bytes_ssd=0,
        bytes_memory=0,
        seconds=0.0,
    )
    return Plan(
        prompt_tokens=compute_from + 1,
        chosen=way,
        runner_up=None,
        exactness=Exactness.EXACT,
        save_states=SaveStates(),
        blocks_missing=0,
    )


def test_columns_name_what_comes_at_each_place() -> None:
    for whole in (Whole(7, 3, (STATE, Place(ItemKind.ROWS, 9))), Whole(7, 3), Whole(7, 0, (STATE,))):
        places = [whole.place(number) for number in range(len(whole))]
        for begin in range(len(whole) + 1):
            for end in range(begin, len(whole) + 1):
                kinds, indexes = whole.columns(begin, end)
                assert [Place(*each) for each in zip(kinds, indexes, strict=True)] == places[begin:end]


def test_a_whole_fetch_ends_with_the_state_and_a_sliced_one_begins_with_it() -> None:
    whole = Whole(7, 2, (STATE,))
    assert [whole.place(i) for i in range(len(whole))] == [
        Place(ItemKind.BLOCK, 7),
        Place(ItemKind.BLOCK, 8),
        STATE,
    ]
    sliced = Sliced(7, 2, CUTS, (STATE,))
    assert [sliced.place(i) for i in range(len(sliced))] == [
        STATE,
        Place(ItemKind.BLOCK, 7, 0, 3),
        Place(ItemKind.BLOCK, 8, 0, 3),
        Place(ItemKind.BLOCK, 7, 1, 5),
        Place(ItemKind.BLOCK, 8, 1, 5),
    ]


def test_a_pooled_state_or_a_checkpoint_is_one_item_and_a_replay_needs_none() -> None:
    for source in (StateSource.POOL, StateSource.CHECKPOINT):
        assert state_places(plan(source, 640, 768), None) == (STATE,)
    for source in (StateSource.REPLAY, StateSource.NONE):
        assert state_places(plan(source, 768, 768), None) == ()


@pytest.mark.parametrize("name", sorted(PROFILES))
@pytest.mark.parametrize("overlap", [False, True])
def test_rows_are_those_that_the_plans_state_needs(name: str, overlap: bool) -> None:
    profile = get_profile(name)
    for edge in range(profile.block_tokens, 6 * profile.block_tokens + 1, profile.block_tokens):
        needed = rows_needed(profile, edge, overlap=overlap)
        # The plan may replay further than the edge that the rows reach.
        for compute_from in (edge, edge + 3 * profile.block_tokens):
            places = state_places(plan(StateSource.ROWS, needed.state_at, compute_from), profile)
            assert places == tuple(
                Place(ItemKind.ROWS, needed.first_block + i) for i in range(needed.blocks)
            ), (edge, compute_from)


def header(payload: bytes, block: int, number: int, **changed: object) -> pb.ItemHeader:
    checks = make_checks(payload)
    fields: dict[str, object] = {
        "kind": pb.BLOCK,
        "index": block,
        "slice": number,
        "length": len(payload),
        "crc32": checks.crc32,
        "xxh3_64": checks.xxh3_64,
        "has_xxh3": checks.has_xxh3,
        "lineage": pb.LINEAGE_EXACT,
        **changed,
    }
    return pb.ItemHeader(**fields)  # type: ignore[arg-type]


PARTS = [(b"abc", 0, 0), (b"xyz", 1, 0), (b"defgh", 0, 1), (b"uvwxy", 1, 1)]


def read(items: list[tuple[pb.ItemHeader, bytes]]) -> list[FetchedItem | FetchedSlice]:
    def frames() -> Generator[pb.ItemFrame, None, None]:
        for head, payload in items:
            yield pb.ItemFrame(items=[head], data=payload)

    return list(read_slices(frames(), Sliced(0, 2, CUTS), verify=True))


def test_slices_are_checked_by_place_length_and_checksum() -> None:
    good = [(header(payload, block, number), payload) for payload, block, number in PARTS]
    assert read(good) == [
        FetchedSlice(slice=number, index=block, payload=payload, lineage=Lineage.EXACT)
        for payload, block, number in PARTS
    ]
    missing = pb.ItemHeader(kind=pb.BLOCK, index=1, slice=1, missing=True)
    assert read([*good[:3], (missing, b"")])[3].payload is None
    for wrong in (
        [good[0], good[2], good[1], good[3]],
        [*good[:3], (header(b"uvwxy", 1, 0), b"uvwxy")],
        [*good[:3], (header(b"uvwx", 1, 1), b"uvwx")],
        [*good[:3], (header(b"uvwxy", 1, 1), b"uvwxz")],
        [*good[:3], (header(b"uvwxy", 1, 1, lineage=0), b"uvwxy")],
        good[:3],
        [*good, good[3]],
    ):
        with pytest.raises(DamagedBytes):
            read(wrong)


def test_a_block_that_came_whole_is_cut_as_the_service_would() -> None:
    item = FetchedItem(kind=ItemKind.BLOCK, index=4, payload=b"abcdefgh", lineage=Lineage.BOUNDED)
    assert [cut_block(item, i, cut) for i, cut in enumerate(CUTS)] == [
        FetchedSlice(slice=0, index=4, payload=b"abc", lineage=Lineage.BOUNDED),
        FetchedSlice(slice=1, index=4, payload=b"defgh", lineage=Lineage.BOUNDED),
    ]
    gone = FetchedItem(kind=ItemKind.BLOCK, index=4, payload=None, lineage=None)
    assert cut_block(gone, 1, CUTS[1]).payload is None
