from __future__ import annotations

import pytest

from kvstore.core import Limits
from kvstore.errors import LimitExceeded, UnknownLease
from kvstore.types import ItemId, ItemKind, StateSource
from tests.support.core import TINY, B, CoreRig


@pytest.fixture
def rig() -> CoreRig:
    rig = CoreRig()
    rig.store(range(3 * B), ssd=[3 * B])
    return rig


def leased(rig: CoreRig, session: str = "r", tokens: int = 3 * B + 1) -> int:
    result = rig.lookup(rig.keys(range(3 * B)), tokens, session=session)
    assert result.lease_id is not None
    return result.lease_id


def crowd(rig: CoreRig, blocks: int, seed: int) -> None:
    """Store many other blocks and evict as many, as a full disk would."""
    start = 1_000_000 * (seed + 1)
    rig.store(range(start, start + blocks * B))
    rig.core.plan_eviction(blocks * TINY.block_bytes, prefer_states=True, now_wall=rig.clock.wall())
    rig.core.check_integrity()


def is_held(rig: CoreRig) -> bool:
    return rig.lookup(rig.keys(range(3 * B)), 3 * B + 1, lease=False).coverage.blocks == 3


def test_a_thousand_lookups_without_a_fetch_protect_until_their_deadline_and_no_longer(rig: CoreRig) -> None:
    for _ in range(1000):
        leased(rig)
    for round_ in range(3):
        crowd(rig, 20, round_)
        assert is_held(rig), "nothing leased is evicted"
    assert rig.core.statistics().leases == 1000
    rig.clock.advance(60)
    assert rig.core.expire_leases(rig.clock.monotonic()) == 1000
    assert rig.core.statistics().leases == 0
    crowd(rig, 30, 9)
    assert not is_held(rig)


def test_the_end_of_a_session_ends_its_leases_and_no_others(rig: CoreRig) -> None:
    leased(rig, "dies")
    leased(rig, "dies")
    other = leased(rig, "lives")
    ended = rig.core.end_session("dies", rig.clock.monotonic())
    assert (ended.leases, ended.reservations) == (2, 0)
    assert rig.core.statistics().leases == 1
    crowd(rig, 20, 0)
    assert is_held(rig)
    assert rig.core.release(other, "lives", rig.clock.monotonic())
    crowd(rig, 23, 1)
    assert not is_held(rig)


def test_a_second_release_does_nothing_and_harms_no_other_lease(rig: CoreRig) -> None:
    first, second = leased(rig), leased(rig)
    assert rig.core.release(first, "r", rig.clock.monotonic())
    assert not rig.core.release(first, "r", rig.clock.monotonic())
    assert not rig.core.release(second, "thief", rig.clock.monotonic())
    assert not rig.core.release(99, "r", rig.clock.monotonic())
    crowd(rig, 20, 0)
    assert is_held(rig)
    rig.core.check_integrity()


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_moving_the_wall_clock_changes_no_lease(rig: CoreRig, jump: float) -> None:
    lease_id = leased(rig)
    rig.clock.jump_wall(jump)
    assert rig.core.lease(lease_id, "r", rig.clock.monotonic()).blocks == 3
    assert rig.core.expire_leases(rig.clock.monotonic()) == 0
    crowd(rig, 20, 0)
    assert is_held(rig)
    rig.clock.advance(60)
    assert rig.core.expire_leases(rig.clock.monotonic()) == 1


def test_a_lease_that_does_not_hold_says_why(rig: CoreRig) -> None:
    lease_id = leased(rig)
    now = rig.clock.monotonic()
    with pytest.raises(UnknownLease, match="never given"):
        rig.core.lease(lease_id + 1, "r", now)
    assert rig.core.lease(lease_id, "r", now + 59.9).lease_id == lease_id
    with pytest.raises(UnknownLease, match="past its deadline"):
        rig.core.lease(lease_id, "r", now + 60)
    rig.core.release(lease_id, "r", now)
    with pytest.raises(UnknownLease, match="released"):
        rig.core.lease(lease_id, "r", now)


def test_another_sessions_lease_is_refused_as_one_that_is_not_there(rig: CoreRig) -> None:
    lease_id = leased(rig)
    now = rig.clock.monotonic()
    said = []
    for number in (lease_id, lease_id + 1):
        for ask in (rig.core.lease, rig.core.renew):
            with pytest.raises(UnknownLease, match=f"lease_id={number}") as caught:
                ask(number, "thief", now)
            said.append(str(caught.value).replace(f"lease_id={number}", ""))
    assert len(set(said)) == 1, "numbers follow one another: whose they are must not be told"


def test_a_lease_is_renewed_up_to_its_longest_life(rig: CoreRig) -> None:
    lease_id = leased(rig)
    born = rig.clock.monotonic()
    while rig.clock.monotonic() < born + 3570:
        rig.clock.advance(30)
        assert rig.core.renew(lease_id, "r", rig.clock.monotonic()).deadline <= born + 3600
        assert rig.core.expire_leases(rig.clock.monotonic()) == 0
    rig.clock.advance(30)
    with pytest.raises(UnknownLease):
        rig.core.renew(lease_id, "r", rig.clock.monotonic())
    assert rig.core.expire_leases(rig.clock.monotonic()) == 1


def test_a_lease_on_the_deepest_block_protects_the_chain_and_its_state(rig: CoreRig) -> None:
    leased(rig)
    assert rig.evict(50, prefer_states=True) == []
    dropped = rig.core.drop_states()
    assert (dropped.dropped, dropped.kept) == (0, 1)
    assert rig.core.states_over_share(0) == []


def test_a_pooled_state_is_pinned_while_leased() -> None:
    rig = CoreRig(pool_states=1)
    keys = rig.store(range(2 * B), pool=[2 * B])
    result = rig.lookup(keys, 2 * B + 1)
    assert result.plan.state_source is StateSource.POOL
    rig.store(range(5000, 5000 + B), pool=[B])
    rig.clock.advance(59)
    assert rig.pool.expire(rig.clock.monotonic() + 10_000) == 0
    assert result.lease_id is not None
    lease = rig.core.lease(result.lease_id, "r", rig.clock.monotonic())
    [state] = rig.core.fetch_list(lease, first_block=0, block_count=0, want_state=True)
    assert state is not None
    rig.core.release(result.lease_id, "r", rig.clock.monotonic())
    assert rig.pool.statistics().pinned == 0
    rig.core.check_integrity()


def test_a_leased_block_that_is_damaged_is_missing_and_what_is_before_it_stays_protected(
    rig: CoreRig,
) -> None:
    keys = rig.keys(range(3 * B))
    lease_id = leased(rig)
    gone = rig.core.forget(rig.main, ItemId(keys[1], ItemKind.BLOCK))
    assert [each.item for each in gone] == [
        ItemId(keys[2], ItemKind.STATE),
        ItemId(keys[2], ItemKind.BLOCK),
        ItemId(keys[1], ItemKind.BLOCK),
    ]
    lease = rig.core.lease(lease_id, "r", rig.clock.monotonic())
    items = rig.core.fetch_list(lease, first_block=0, block_count=3, want_state=True)
    assert [item is not None for item in items] == [True, False, False, False]
    # Slots of what was lost are given to others; the lease must not hand those over.
    rig.store(range(9000, 9000 + 6 * B))
    items = rig.core.fetch_list(lease, first_block=0, block_count=3, want_state=True)
    assert [item is not None for item in items] == [True, False, False, False]
    assert ItemId(keys[0], ItemKind.BLOCK) not in rig.evict(50)
    rig.core.release(lease_id, "r", rig.clock.monotonic())
    assert ItemId(keys[0], ItemKind.BLOCK) in rig.evict(50)
    rig.core.check_integrity()


def test_a_restored_state_is_not_the_one_that_was_leased(rig: CoreRig) -> None:
    keys = rig.keys(range(3 * B))
    lease_id = leased(rig)
    rig.core.forget(rig.main, ItemId(keys[2], ItemKind.STATE))
    rig.write([rig.state_item(keys, 3 * B)])
    lease = rig.core.lease(lease_id, "r", rig.clock.monotonic())
    assert rig.core.fetch_list(lease, first_block=0, block_count=0, want_state=True) == [None]
    rig.core.release(lease_id, "r", rig.clock.monotonic())
    rig.core.check_integrity()


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        (Limits(leases=2), "leases"),
        (Limits(leases_per_session=2), "leases_per_session"),
        (Limits(leased_blocks=8), "leased_blocks"),
    ],
    ids=["leases", "leases_per_session", "leased_blocks"],
)
def test_past_a_limit_a_lookup_is_refused_by_name_and_grants_nothing(limits: Limits, field: str) -> None:
    rig = CoreRig(limits=limits)
    rig.store(range(3 * B), ssd=[3 * B])
    leased(rig)
    leased(rig)
    with pytest.raises(LimitExceeded) as caught:
        leased(rig)
    assert caught.value.field == field
    assert rig.core.statistics().leases == 2
    rig.core.check_integrity()
    rig.core.end_session("r", rig.clock.monotonic())
    leased(rig)


def test_a_leased_bounded_block_is_not_replaced(rig: CoreRig) -> None:
    from kvstore.types import Lineage

    keys = rig.store(range(70_000, 70_000 + 3 * B), lineage=Lineage.BOUNDED)
    result = rig.lookup(keys, 3 * B + 1, exact_only=False)
    assert result.lease_id is not None
    made = rig.reserve(rig.block_items(keys))
    assert [each.outcome.name for each in made.outcomes] == ["HELD"] * 3
    rig.core.release(result.lease_id, "r", rig.clock.monotonic())
    made = rig.reserve(rig.block_items(keys))
    assert [each.outcome.name for each in made.outcomes] == ["GRANTED"] * 3
    again = rig.lookup(keys, 3 * B + 1, exact_only=False)
    assert again.lease_id is not None
    assert made.reservation_id is not None
    report = rig.commit(made.reservation_id)
    assert len(report.discard) == 3, "leased meanwhile: the new bytes are given back"
    assert rig.core.statistics().bounded_blocks == 3
    rig.core.check_integrity()


def test_no_session_has_all_that_can_be_leased_or_reserved() -> None:
    rig = CoreRig(limits=Limits(leased_blocks_per_session=3, reserved_items_per_session=6))
    keys = rig.store(range(2 * B))
    lease_id = rig.lookup(keys, 2 * B + 1, session="greedy").lease_id
    with pytest.raises(LimitExceeded, match="leased_blocks_per_session=4; allowed: 3"):
        rig.lookup(keys, 2 * B + 1, session="greedy")
    assert rig.lookup(keys, 2 * B + 1, session="other").lease_id is not None
    assert rig.core.release(lease_id or 0, "greedy", rig.clock.monotonic())
    assert rig.lookup(keys, 2 * B + 1, session="greedy").lease_id is not None
    items = [rig.block_items(rig.keys(range(100 * n, 100 * n + 4 * B))) for n in range(1, 4)]
    held = rig.reserve(items[0], session="greedy")
    with pytest.raises(LimitExceeded, match="reserved_items_per_session=8; allowed: 6"):
        rig.reserve(items[1], session="greedy")
    assert rig.reserve(items[1], session="other").reservation_id is not None
    rig.core.abort(held.reservation_id or 0, "greedy")
    assert rig.reserve(items[2], session="greedy").reservation_id is not None
    rig.core.check_integrity()
