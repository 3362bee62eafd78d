"""What follows from an approximate turn: who sees its bytes, and how exact ones take their place."""

from __future__ import annotations

import pytest

from kvstore.core import ReserveOutcome
from kvstore.types import Exactness, Lineage, StateSource
from tests.support.core import B, CoreRig

EXACT, BOUNDED = Lineage.EXACT, Lineage.BOUNDED
GRANTED, HELD = ReserveOutcome.GRANTED, ReserveOutcome.HELD
TOKENS = 6 * B + 1


@pytest.fixture
def rig() -> CoreRig:
    """Two blocks of an exact turn; then a bounded turn added four, and states at its end in both tiers."""
    made = CoreRig()
    made.store(range(2 * B))
    keys = made.keys(range(6 * B))
    made.write(
        [
            *made.block_items(keys, lineage=BOUNDED)[2:],
            made.state_item(keys, 6 * B, pool=True, lineage=BOUNDED),
        ]
    )
    return made


def test_an_exact_turn_after_a_bounded_one_sees_the_exact_part_stores_its_own_and_then_hits(
    rig: CoreRig,
) -> None:
    keys = rig.keys(range(6 * B))
    assert rig.lookup(keys, TOKENS, exact_only=False, lease=False).plan.compute_from == 6 * B
    before = rig.lookup(keys, TOKENS, lease=False)
    assert (before.plan.compute_from, before.plan.blocks_missing) == (2 * B, 4)
    assert (before.coverage.pool_states, before.coverage.checkpoints) == ((), ())
    items = [*rig.block_items(keys), rig.state_item(keys, 6 * B, pool=True)]
    made = rig.reserve(items)
    assert [each.outcome for each in made.outcomes] == [HELD] * 2 + [GRANTED] * 5
    assert made.reservation_id is not None
    granted = rig.core.granted(made.reservation_id, "w")
    assert (granted[-1].item.to_pool, granted[-1].item.to_ssd) == (True, True)
    rig.commit(made.reservation_id)
    after = rig.lookup(keys, TOKENS, lease=False)
    assert (after.plan.compute_from, after.plan.state_source, after.plan.exactness) == (
        6 * B,
        StateSource.POOL,
        Exactness.EXACT,
    )
    assert after.coverage.checkpoints == (6 * B,)
    assert rig.core.statistics().bounded_blocks == 0
    rig.core.check_integrity()


def test_a_bounded_state_in_the_pool_keeps_no_exact_one_out(rig: CoreRig) -> None:
    keys = rig.keys(range(6 * B))
    state = rig.state_item(keys, 6 * B, pool=True, ssd=False)
    assert [each.outcome for each in rig.reserve([state], session="a").outcomes] == [GRANTED]
    rig.core.end_session("a", rig.clock.monotonic())
    rig.store(range(6 * B))
    rig.write([state])
    found = rig.lookup(keys, TOKENS, lease=False)
    assert (found.coverage.pool_states, found.plan.exactness) == ((6 * B,), Exactness.EXACT)


def test_a_pooled_bounded_state_that_is_leased_stays(rig: CoreRig) -> None:
    keys = rig.keys(range(6 * B))
    loose = rig.lookup(keys, TOKENS, exact_only=False)
    assert loose.plan.state_source is StateSource.POOL
    state = rig.state_item(keys, 6 * B, pool=True, ssd=False)
    assert [each.outcome for each in rig.reserve([state]).outcomes] == [HELD]


@pytest.mark.parametrize("lineage", [EXACT, BOUNDED])
def test_a_bounded_writer_replaces_nothing(lineage: Lineage) -> None:
    rig = CoreRig()
    keys = rig.store(range(2 * B), ssd=[2 * B], pool=[2 * B], rows=[1], lineage=lineage)
    items = [
        *rig.block_items(keys, lineage=BOUNDED),
        rig.state_item(keys, 2 * B, pool=True, lineage=BOUNDED),
        rig.rows_item(keys, 1, lineage=BOUNDED),
    ]
    assert {each.outcome for each in rig.reserve(items).outcomes} == {HELD}
    assert rig.core.statistics().bounded_blocks == (2 if lineage is BOUNDED else 0)


def test_a_bounded_block_that_someone_leases_is_not_replaced_until_they_are_done(rig: CoreRig) -> None:
    keys = rig.keys(range(6 * B))
    reader = rig.lookup(keys[:4], 4 * B + 1, exact_only=False)
    outcomes = [each.outcome for each in rig.reserve(rig.block_items(keys), session="a").outcomes]
    assert outcomes == [HELD] * 4 + [GRANTED] * 2, "leased is the chain up to the reader's last block"
    rig.core.end_session("a", rig.clock.monotonic())
    rig.core.release(reader.lease_id or 0, "r", rig.clock.monotonic())
    outcomes = [each.outcome for each in rig.reserve(rig.block_items(keys)).outcomes]
    assert outcomes == [HELD] * 2 + [GRANTED] * 4


def test_exact_bytes_behind_bounded_ones_are_no_exact_hit_until_those_are_replaced(rig: CoreRig) -> None:
    keys = rig.keys(range(6 * B))
    rig.write(rig.block_items(keys)[4:])
    assert rig.lookup(keys, TOKENS, lease=False).coverage.blocks == 2
    rig.write(rig.block_items(keys)[2:4])
    assert rig.lookup(keys, TOKENS, lease=False).coverage.blocks == 6


def test_a_commit_says_which_exact_items_could_not_take_the_place_of_approximate_ones(rig: CoreRig) -> None:
    keys = rig.keys(range(6 * B))
    made = rig.reserve(rig.block_items(keys))
    assert made.reservation_id is not None
    # Somebody leases them after they were promised.
    loose = rig.lookup(keys, TOKENS, exact_only=False)
    assert loose.lease_id is not None
    report = rig.commit(made.reservation_id)
    assert list(report.left_out) == [2, 3, 4, 5]
    assert (list(report.visible), len(report.discard)) == ([], 4)
    assert rig.lookup(keys, TOKENS, lease=False).plan.compute_from == 2 * B
    # Of equally good bytes the first writer's stay, and the second one's are held all the same.
    first, second = rig.keys(range(50, 50 + B)), rig.keys(range(50, 50 + B))
    both = [rig.reserve(rig.block_items(each), session=name) for each, name in ((first, "a"), (second, "b"))]
    assert [each.outcomes[0].outcome for each in both] == [GRANTED, ReserveOutcome.IN_FLIGHT]
