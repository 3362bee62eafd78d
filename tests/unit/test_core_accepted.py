"""What is visible before it is durable: who may build on it, and what becomes of it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvstore.core import Limits, ReserveItem, ReserveOutcome, Written
from kvstore.core.accepted import accepted_place, is_accepted
from kvstore.store.base import Place
from kvstore.types import ItemId, ItemKind, Lineage
from tests.support.core import TINY, B, CoreRig, checks_of

GRANTED, HELD, IN_FLIGHT, _ = ReserveOutcome


@pytest.fixture
def rig() -> CoreRig:
    return CoreRig()


def accept(rig: CoreRig, items: Sequence[ReserveItem], *, session: str = "w") -> int:
    """Reserve them and show them; the reservation."""
    made = rig.reserve(items, session=session)
    assert made.reservation_id is not None
    arrived = [
        (
            each,
            Written(checks_of(each.item.key), None, bytes(each.item.length) if each.item.to_pool else None),
        )
        for each in rig.core.commit_list(made.reservation_id, session)
    ]
    shown = rig.core.accept(made.reservation_id, session, arrived, **rig.now)
    assert shown == [item.item_id for item in items]
    rig.core.check_integrity()
    return made.reservation_id


def settle(
    rig: CoreRig, number: int, *, without: Sequence[ItemId] = (), session: str = "w"
) -> tuple[dict[Place, Place], list[ItemId], list[ItemId]]:
    """(What moved, what was taken back, what is durable and visible.)"""
    results = {
        each.item.item_id: rig.written(each.item)
        for each in rig.core.granted(number, session)
        if each.item.item_id not in without
    }
    [step] = rig.core.settling(number, session, results)
    rig.core.check_integrity()
    report = rig.core.committed(number, session, results, **rig.now)
    rig.core.check_integrity()
    return step.moved, [each.item for each in step.gone], list(report.visible)


def test_it_is_found_and_leased_at_once_and_counts_apart_until_it_is_durable(rig: CoreRig) -> None:
    keys = rig.keys(range(3 * B))
    number = accept(rig, [*rig.block_items(keys), rig.state_item(keys, 3 * B, pool=True)])
    found = rig.lookup(keys, 3 * B + 1)
    assert found.coverage.blocks == 3
    assert found.coverage.checkpoints == found.coverage.pool_states == (3 * B,)
    statistics = rig.core.statistics()
    assert (statistics.blocks, statistics.ssd_states, statistics.block_bytes) == (0, 0, 0)
    assert (statistics.accepted_blocks, statistics.accepted_states) == (3, 1)
    assert statistics.accepted_bytes == 3 * TINY.block_bytes + TINY.state_bytes
    assert found.lease_id is not None
    lease = rig.core.lease(found.lease_id, "r", rig.clock.monotonic())
    where = rig.core.fetch_places(lease, first_block=0, block_count=3)
    assert where == [accepted_place(number, index, TINY.block_bytes) for index in range(3)]
    moved, gone, visible = settle(rig, number)
    assert (len(moved), gone, len(visible)) == (4, [], 4)
    assert [moved[place] for place in where] == rig.core.fetch_places(lease, first_block=0, block_count=3)
    statistics = rig.core.statistics()
    assert (statistics.blocks, statistics.ssd_states, statistics.accepted_bytes) == (3, 1, 0)
    assert statistics.totals["stored_blocks_total"] == 3


def test_it_is_not_called_held_before_it_is_durable(rig: CoreRig) -> None:
    keys = rig.keys(range(2 * B))
    items = [*rig.block_items(keys), rig.state_item(keys, 2 * B)]
    number = accept(rig, items)
    rig.clock.advance(3)
    asked = rig.reserve(items, session="other").outcomes
    assert [(each.outcome, each.owner_age_seconds) for each in asked] == [(IN_FLIGHT, 3)] * 3
    settle(rig, number)
    assert [each.outcome for each in rig.reserve(items, session="other").outcomes] == [HELD] * 3


def test_what_was_accepted_below_a_block_that_turns_out_damaged_is_lost(rig: CoreRig) -> None:
    keys = rig.keys(range(4 * B))
    durable = accept(rig, rig.block_items(keys)[:1])
    settle(rig, durable)
    number = accept(rig, [*rig.block_items(keys)[1:3], rig.state_item(keys, 3 * B)])
    assert rig.core.statistics().totals["accepted_lost_total"] == 0
    gone = rig.core.forget(rig.main, ItemId(keys[0], ItemKind.BLOCK))
    assert len(gone) == 4
    totals = rig.core.statistics().totals
    assert (totals["accepted_lost_total"], totals["orphaned_blocks_total"]) == (3, 2)
    # Its write being over changes nothing any more.
    settle(rig, number)
    assert rig.core.statistics().totals["accepted_lost_total"] == 3


def test_approximate_blocks_count_apart_until_they_are_durable(rig: CoreRig) -> None:
    keys = rig.keys(range(2 * B))
    number = accept(rig, [item._replace(lineage=Lineage.BOUNDED) for item in rig.block_items(keys)])
    assert (rig.core.statistics().blocks, rig.core.statistics().bounded_blocks) == (0, 0)
    rig.core.check_integrity()
    settle(rig, number)
    assert (rig.core.statistics().blocks, rig.core.statistics().bounded_blocks) == (2, 2)
    again = accept(
        rig, [item._replace(lineage=Lineage.BOUNDED) for item in rig.block_items(rig.keys(range(B, 3 * B)))]
    )
    rig.core.clear(rig.main)
    assert rig.core.statistics().bounded_blocks == 0
    rig.core.check_integrity()
    settle(rig, again)


def test_a_write_that_failed_takes_it_back_with_what_follows_it(rig: CoreRig) -> None:
    keys = rig.keys(range(4 * B))
    first = accept(rig, rig.block_items(keys)[:2])
    second = accept(rig, [*rig.block_items(keys)[2:3], rig.state_item(keys, 3 * B)], session="b")
    found = rig.lookup(keys, 4 * B + 1)
    assert found.coverage.blocks == 3
    moved, gone, visible = settle(rig, first, without=[ItemId(keys[1], ItemKind.BLOCK)])
    assert len(moved) == len(visible) == 1
    assert gone == [
        ItemId(keys[2], ItemKind.STATE),
        ItemId(keys[2], ItemKind.BLOCK),
        ItemId(keys[1], ItemKind.BLOCK),
    ]
    assert rig.core.statistics().totals["accepted_lost_total"] == 3
    assert found.lease_id is not None
    lease = rig.core.lease(found.lease_id, "r", rig.clock.monotonic())
    left = rig.core.fetch_list(lease, first_block=0, block_count=3, want_state=False)
    assert [each is not None for each in left] == [True, False, False]
    # Its bytes are on the disk, and nothing above them is.
    assert settle(rig, second, session="b") == ({}, [], [])
    assert rig.lookup(keys, 4 * B + 1, lease=False).coverage.blocks == 1


def test_nothing_durable_follows_what_is_not(rig: CoreRig) -> None:
    """A child whose commit began before its parent's, and so is durable before it."""
    keys = rig.keys(range(2 * B))
    items = [*rig.block_items(keys), rig.state_item(keys, 2 * B)]
    parent = rig.reserve(items[:1]).reservation_id
    child = rig.reserve(items[1:]).reservation_id
    assert parent is not None
    assert child is not None
    rig.core.commit_list(parent, "w")
    arrived = [(rig.core.granted(parent, "w")[0], Written(checks_of(keys[0])))]
    assert rig.core.accept(parent, "w", arrived, **rig.now) == [items[0].item_id]
    report = rig.commit(child)
    assert (list(report.visible), list(report.left_out), len(report.discard)) == ([], [0, 1], 2)
    assert settle(rig, parent)[2] == [items[0].item_id]


def test_it_takes_the_place_of_nothing_that_is_durable(rig: CoreRig) -> None:
    """A crash would take both."""
    keys = rig.store(range(2 * B), lineage=Lineage.BOUNDED)
    made = rig.reserve(rig.block_items(keys)).reservation_id
    assert made is not None
    arrived = [(each, Written(checks_of(each.item.key))) for each in rig.core.commit_list(made, "w")]
    assert rig.core.accept(made, "w", arrived, **rig.now) == []
    assert len(settle(rig, made)[2]) == 2
    assert rig.lookup(keys, 2 * B + 1, lease=False).coverage.blocks == 2


def test_what_leaves_when_it_is_durable_is_not_shown_again_by_its_commit(rig: CoreRig) -> None:
    """Its place has been given back."""
    keys = rig.keys(range(2 * B))
    items = [*rig.block_items(keys), rig.state_item(keys, B)]
    number = accept(rig, items)
    results = {each.item.item_id: rig.written(each.item) for each in rig.core.granted(number, "w")}
    list(rig.core.settling(number, "w", results))
    lost = [results[item.item_id].place for item in items[1:]]
    assert {each.place for each in rig.core.forget_places([place for place in lost if place])} == set(lost)
    report = rig.core.committed(number, "w", results, **rig.now)
    rig.core.check_integrity()
    assert (list(report.visible), list(report.left_out), list(report.discard)) == (
        [items[0].item_id],
        [1, 2],
        [],
    )
    coverage = rig.lookup(keys, 2 * B + 1, lease=False).coverage
    assert (coverage.blocks, coverage.checkpoints) == (1, ())


def test_it_is_not_evicted_and_goes_with_a_clear(rig: CoreRig) -> None:
    keys = rig.keys(range(2 * B))
    number = accept(rig, [*rig.block_items(keys), rig.state_item(keys, 2 * B)])
    assert rig.evict(10, prefer_states=True) == []
    assert rig.core.states_over_share(0) == []
    assert rig.core.expire_blocks(rig.clock.wall() + 1e9) == []
    cleared, _ = rig.core.clear()
    assert cleared.blocks == 2
    rig.core.check_integrity()
    assert settle(rig, number) == ({}, [], [])
    assert rig.core.open_work == 0


def test_what_arrives_when_its_write_is_over_is_not_accepted_any_more(rig: CoreRig) -> None:
    keys = rig.keys(range(B))
    made = rig.reserve(rig.block_items(keys)).reservation_id
    assert made is not None
    granted = rig.core.commit_list(made, "w")
    steps = rig.core.settling(made, "w", {})
    next(steps)
    assert rig.core.accept(made, "w", [(granted[0], Written(checks_of(keys[0])))], **rig.now) == []


def test_no_segment_of_a_log_has_the_number_of_an_accepted_place() -> None:
    for number in (1, 2**31 - 1, 2**31, 2**40):
        assert is_accepted(accepted_place(number, 0, 1).segment_id)
        assert accepted_place(number, 0, 1).segment_id < 2**32
    assert not is_accepted(2**31 - 1)


@pytest.mark.parametrize("limits", [Limits(reservations_per_session=4), Limits(reserved_items_per_session=8)])
def test_a_session_is_crowded_past_half_of_what_it_may_reserve_and_others_are_not(limits: Limits) -> None:
    rig = CoreRig(limits=limits)
    made = []
    for first in (0, 1000, 2000):
        assert not rig.core.is_crowded("w")
        made.append(accept(rig, rig.block_items(rig.keys(range(first, first + 2 * B)))))
    assert rig.core.is_crowded("w")
    assert not rig.core.is_crowded("other")
    settle(rig, made[0])
    assert not rig.core.is_crowded("w")


def test_all_are_crowded_past_half_of_what_all_may_reserve() -> None:
    rig = CoreRig(limits=Limits(reservations=4, reserved_items_in_all=8))
    for first in (0, 1000, 2000):
        assert not rig.core.is_crowded("other")
        accept(rig, rig.block_items(rig.keys(range(first, first + 2 * B))), session=f"w{first}")
    assert rig.core.is_crowded("other")


def test_what_is_durable_before_what_it_follows_is_taken_back(rig: CoreRig) -> None:
    """Else a later block would be acknowledged above one that a crash may lose."""
    items = rig.block_items(rig.keys(range(2 * B)))
    parent, child = accept(rig, items[:1]), accept(rig, items[1:], session="b")
    assert settle(rig, child, session="b") == ({}, [items[1].item_id], [])
    assert settle(rig, parent)[2] == [items[0].item_id]
