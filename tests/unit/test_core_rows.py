"""Window rows as children of their blocks: who may write them, what they cover, how they are kept and how they leave."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.core import FetchItem, Lease, LookupResult, ReserveItem, ReserveOutcome
from kvstore.errors import GeometryMismatch, InvalidArgument
from kvstore.prefix import block_keys
from kvstore.store.base import Place
from kvstore.types import ItemId, ItemKind, Lineage, StateSource, Tier
from tests.support.core import TINY, B, CoreRig, identity

GRANTED, HELD = ReserveOutcome.GRANTED, ReserveOutcome.HELD
OVERLAP = TINY.overlap_tokens


@pytest.fixture
def rig() -> CoreRig:
    return CoreRig()


def outcome(rig: CoreRig, item: ReserveItem, *, session: str = "w") -> ReserveOutcome:
    made = rig.reserve([item], session=session)
    if made.reservation_id is not None:
        rig.core.abort(made.reservation_id, session)
    return made.outcomes[0].outcome


def leased(rig: CoreRig, result: LookupResult) -> Lease:
    assert result.lease_id is not None
    return rig.core.lease(result.lease_id, "r", rig.clock.monotonic())


def state_items(rig: CoreRig, lease: Lease) -> list[FetchItem | None]:
    return rig.core.fetch_list(lease, first_block=0, block_count=0, want_state=True)


# ---- writing ------------------------------------------------------------------------------------------------


def test_rows_are_reserved_like_states_and_go_to_ssd_alone(rig: CoreRig) -> None:
    keys = rig.keys(range(3 * B))
    assert outcome(rig, rig.rows_item(keys, 0)) is ReserveOutcome.PARENT_MISSING
    made = rig.reserve([*rig.block_items(keys), rig.rows_item(keys, 2)])
    assert {each.outcome for each in made.outcomes} == {GRANTED}
    assert outcome(rig, rig.rows_item(keys, 2), session="x") is ReserveOutcome.PARENT_MISSING
    assert outcome(rig, rig.rows_item(keys, 2)) is ReserveOutcome.IN_FLIGHT
    assert made.reservation_id is not None
    report = rig.commit(made.reservation_id)
    assert ItemId(keys[2], ItemKind.ROWS) in report.visible
    assert outcome(rig, rig.rows_item(keys, 2)) is HELD
    assert outcome(rig, rig.rows_item(keys, 1)) is GRANTED
    assert outcome(rig, rig.state_item(keys, 3 * B)) is GRANTED, "a state beside the rows of its block"
    rows = rig.rows_item(keys, 0)
    for changed, error, field in (
        ({"to_pool": True}, InvalidArgument, "items[0].to_pool"),
        ({"to_ssd": False}, InvalidArgument, "items[0].to_pool"),
        ({"length": TINY.rows_block_bytes + 1}, GeometryMismatch, "items[0].length"),
        ({"length": TINY.state_bytes}, GeometryMismatch, "items[0].length"),
        ({"position": 2 * B}, InvalidArgument, "items[0].position"),
    ):
        with pytest.raises(error) as caught:
            rig.reserve([rows._replace(**changed)])  # type: ignore[arg-type]
        assert caught.value.field == field
    rig.core.check_integrity()


def test_the_two_lengths_of_rows_are_named_in_the_refusal(rig: CoreRig) -> None:
    item = rig.rows_item(rig.keys(range(B)), 0)._replace(length=7)
    with pytest.raises(
        GeometryMismatch, match=f"{TINY.rows_block_bytes} or {TINY.rows_overlap_block_bytes} bytes"
    ):
        rig.reserve([item])


@pytest.mark.parametrize(
    ("held", "given", "replaced"),
    [
        (("EXACT", False), ("EXACT", False), False),
        (("EXACT", False), ("EXACT", True), True),
        (("EXACT", True), ("EXACT", False), False),
        (("BOUNDED", False), ("BOUNDED", True), True),
        (("BOUNDED", True), ("EXACT", False), True),
        (("BOUNDED", True), ("BOUNDED", False), False),
        (("EXACT", False), ("BOUNDED", True), False),
    ],
)
def test_better_rows_replace_worse_ones_unless_leased(
    rig: CoreRig, held: tuple[str, bool], given: tuple[str, bool], replaced: bool
) -> None:
    keys = rig.store(range(2 * B))
    old = rig.rows_item(keys, 1, overlap=held[1], lineage=Lineage[held[0]])
    new = rig.rows_item(keys, 1, overlap=given[1], lineage=Lineage[given[0]])
    rig.write([old])
    result = rig.lookup(keys, 2 * B + 1, exact_only=False)
    assert result.plan.state_source is StateSource.ROWS
    assert outcome(rig, new) is HELD, "someone leases what is held"
    rig.core.release(result.lease_id or 0, "r", rig.clock.monotonic())
    assert outcome(rig, new) is (GRANTED if replaced else HELD)
    if replaced:
        report = rig.write([new])
        assert [place.length for place in report.discard] == [old.length]
        assert rig.core.statistics().rows_bytes == new.length
    rig.core.check_integrity()


def test_rows_that_are_leased_between_reserve_and_commit_are_not_replaced(rig: CoreRig) -> None:
    keys = rig.store(range(2 * B), rows=[1])
    made = rig.reserve([rig.rows_item(keys, 1, overlap=True)])
    lease = leased(rig, rig.lookup(keys, 2 * B + 1))
    assert made.reservation_id is not None
    report = rig.commit(made.reservation_id)
    assert [place.length for place in report.discard] == [TINY.rows_overlap_block_bytes]
    [item] = state_items(rig, lease)
    assert item is not None
    assert item.place is not None
    assert item.place.length == TINY.rows_block_bytes
    rig.core.check_integrity()


# ---- coverage and plans -------------------------------------------------------------------------------------


def test_the_deepest_edge_with_rows_is_covered_and_never_one_past_the_prompts_last_token(
    rig: CoreRig,
) -> None:
    keys = rig.store(range(8 * B), rows=[0, 1, 2, 5, 7])
    for tokens, edge in ((8 * B + 1, 8), (8 * B, 6), (6 * B, 3), (3 * B + 1, 3), (2 * B, 1), (B, 0)):
        coverage = rig.lookup(keys[: tokens // B], tokens, lease=False).coverage
        assert coverage.rows == ((edge * B,) if edge else ()), f"{tokens} tokens"
        assert coverage.rows_overlap == ()
    rig.write([rig.rows_item(keys, 3, overlap=True)])
    coverage = rig.lookup(keys, 8 * B + 1, lease=False).coverage
    assert (coverage.rows, coverage.rows_overlap) == ((8 * B,), (4 * B,))


def test_exact_coverage_counts_exact_rows_only(rig: CoreRig) -> None:
    keys = rig.store(range(4 * B), rows=[0, 1])
    rig.write([rig.rows_item(keys, number, lineage=Lineage.BOUNDED) for number in (2, 3)])
    strict = rig.lookup(keys, 4 * B + 1, lease=False)
    loose = rig.lookup(keys, 4 * B + 1, lease=False, exact_only=False)
    assert (strict.coverage.rows, loose.coverage.rows) == ((2 * B,), (4 * B,))
    assert (strict.plan.exactness.name, loose.plan.exactness.name) == ("EXACT", "BOUNDED")


@pytest.mark.parametrize("overlap", [False, True])
def test_a_plan_from_rows_reads_their_items_in_order_and_protects_them(rig: CoreRig, overlap: bool) -> None:
    """With a window of more than a block, so that a resume reads the rows of two."""
    wide = replace(TINY, name="wide", window_tokens=B + 8)
    space = rig.core.open_namespace("wide", replace(identity(), profile=wide), "full")
    keys = block_keys(space.digest, range(6 * B), block_tokens=B)
    length = wide.rows_overlap_block_bytes if overlap else wide.rows_block_bytes
    rows = [ReserveItem(key, ItemKind.ROWS, b"", (i + 1) * B, length) for i, key in enumerate(keys)]
    rig.write([*rig.block_items(keys, namespace=space.digest), *rows], namespace=space.digest)
    result = rig.lookup(keys, 6 * B + 1, namespace=space.digest)
    assert (result.plan.state_source, result.plan.compute_from) == (StateSource.ROWS, 6 * B)
    assert result.plan.state_at == result.plan.replay_from == 6 * B - (0 if overlap else OVERLAP)
    lease = leased(rig, result)
    items = state_items(rig, lease)
    assert [item and item.item for item in items] == [ItemId(key, ItemKind.ROWS) for key in keys[4:]]
    assert [item and item.position for item in items] == [5 * B, 6 * B]
    assert all(item is not None and item.place is not None and item.payload is None for item in items)
    rig.core.check_integrity()
    assert len(rig.core.states_over_share(0)) == 4, "all but the leased ones"
    assert rig.core.drop_states(space.digest, Tier.SSD).kept == 2
    assert state_items(rig, lease) == items
    rig.core.release(lease.lease_id, "r", rig.clock.monotonic())
    assert len(rig.core.states_over_share(0)) == 2
    rig.core.check_integrity()


def test_a_lookup_uses_the_rows_that_its_plan_reads_and_no_others(rig: CoreRig) -> None:
    keys = rig.store(range(4 * B), rows=range(4))
    list(rig.core.take_uses())
    rig.clock.advance(2 * 3600)
    result = rig.lookup(keys, 4 * B + 1)
    used = [place.length for place, _ in rig.core.take_uses()]
    assert sorted(used) == sorted([TINY.block_bytes] * 4 + [TINY.rows_block_bytes])
    rig.core.release(result.lease_id or 0, "r", rig.clock.monotonic())
    gone = rig.core.states_over_share(TINY.rows_block_bytes)
    assert [each.item.key for each in gone] == keys[:3], "the one that was used goes last"


def test_states_and_rows_share_one_order_of_use(rig: CoreRig) -> None:
    keys = rig.store(range(3 * B), rows=[0])
    rig.write([rig.state_item(keys, 2 * B)])
    rig.write([rig.rows_item(keys, 2)])
    gone = rig.core.states_over_share(0)
    assert [(each.item.key, each.item.kind) for each in gone] == [
        (keys[0], ItemKind.ROWS),
        (keys[1], ItemKind.STATE),
        (keys[2], ItemKind.ROWS),
    ]


# ---- leaving ------------------------------------------------------------------------------------------------


def test_rows_leave_before_their_block_by_every_route(rig: CoreRig) -> None:
    def kinds(tokens: range, route: str) -> list[ItemKind]:
        keys = rig.store(tokens, rows=[0], ssd=[B])
        if route == "evict":
            gone = rig.core.plan_eviction(1, prefer_states=False, now_wall=rig.clock.wall())
        elif route == "expire":
            gone = rig.core.expire_blocks(rig.clock.wall() + 80 * 3600)
        elif route == "forget":
            gone = rig.core.forget(rig.main, ItemId(keys[0], ItemKind.BLOCK))
        else:
            gone = list(rig.core.clear(rig.main)[0].gone)
        rig.core.check_integrity()
        assert rig.core.statistics().ssd_states == 0
        return [each.item.kind for each in gone]

    for number, route in enumerate(("evict", "expire", "forget", "clear")):
        start = 1000 * number
        assert kinds(range(start, start + B), route) == [ItemKind.STATE, ItemKind.ROWS, ItemKind.BLOCK], route


def test_damaged_rows_are_forgotten_alone_and_their_lease_finds_them_missing(rig: CoreRig) -> None:
    keys = rig.store(range(2 * B), rows=[1], ssd=[B])
    lease = leased(rig, rig.lookup(keys, 2 * B + 1))
    [item] = state_items(rig, lease)
    assert item is not None
    assert rig.core.forget(rig.main, item.item, place=Place(99, 0, 1)) == []
    assert [each.item for each in rig.core.forget(rig.main, item.item, place=item.place)] == [item.item]
    assert state_items(rig, lease) == [None]
    again = rig.lookup(keys, 2 * B + 1, lease=False)
    assert (again.coverage.rows, again.coverage.checkpoints) == ((), (B,))
    rig.core.check_integrity()


def test_a_cleaned_segment_carries_rows_along_or_loses_them() -> None:
    rig = CoreRig(per_segment=5)
    keys = rig.store(range(2 * B), rows=[0, 1], ssd=[2 * B])
    lengths = [TINY.block_bytes] * 2 + [TINY.state_bytes] + [TINY.rows_block_bytes] * 2
    old = [Place(1, 4096 * (1 + number), length) for number, length in enumerate(lengths)]
    moved = {place: place._replace(segment_id=7) for place in old[:-1]}
    report = rig.core.relocate(1, moved)
    assert report.moved == 4
    assert [each.item for each in report.lost] == [ItemId(keys[1], ItemKind.ROWS)]
    assert rig.core.items_in_segments() == {7: 4}
    assert rig.lookup(keys, 2 * B + 1, lease=False).coverage.rows == (B,)
    rig.core.check_integrity()


# ---- branch points ------------------------------------------------------------------------------------------


def test_a_prompt_that_leaves_what_goes_on_without_it_has_a_branch_point(rig: CoreRig) -> None:
    stem = list(range(3 * B))
    keys = rig.store([*stem, *range(1000, 1000 + 2 * B)])

    def branch_at(tokens: list[int]) -> int:
        return rig.lookup(rig.keys(tokens), len(tokens), lease=False).coverage.branch_at

    assert branch_at([*stem, *range(2000, 2000 + B)]) == 3 * B
    assert branch_at([*stem[:B], *range(2000, 2000 + B)]) == B
    assert branch_at(stem) == 0, "the prompt ends there"
    assert branch_at([*stem, 7, 8]) == 0, "the prompt has no further whole block"
    assert branch_at(list(range(2000, 2000 + B))) == 0, "nothing is held"
    rig.core.forget(rig.main, ItemId(keys[3], ItemKind.BLOCK))
    assert branch_at([*stem, *range(2000, 2000 + B)]) == 0, "nothing else goes on any more"


def test_a_prompts_own_next_block_is_no_branch(rig: CoreRig) -> None:
    tokens = list(range(4 * B))
    keys = rig.keys(tokens)
    rig.write([*rig.block_items(keys)[:2], *rig.block_items(keys, lineage=Lineage.BOUNDED)[2:]])
    assert rig.lookup(keys, 4 * B, lease=False).coverage.branch_at == 0
    rig.store([*tokens[: 2 * B], *range(1000, 1000 + B)])
    assert rig.lookup(keys, 4 * B, lease=False).coverage.branch_at == 2 * B
