from __future__ import annotations

import pytest

from kvstore.core import Core, ReserveOutcome
from kvstore.core.steps import collected
from kvstore.pool import StatePool
from kvstore.store.base import Place
from kvstore.types import ItemId, ItemKind, StateSource, Tier
from tests.support.core import TINY, B, CoreRig, identity

HOUR = 3600.0


@pytest.fixture
def rig() -> CoreRig:
    return CoreRig()


def totals(rig: CoreRig) -> dict[str, int]:
    return {
        name.removesuffix("_total"): value for name, value in rig.core.statistics().totals.items() if value
    }


def test_eviction_frees_about_what_is_asked_and_states_in_the_pool_do_not_count(rig: CoreRig) -> None:
    rig.store(range(8 * B), pool=range(B, 8 * B, B))
    gone = rig.core.plan_eviction(3 * TINY.block_bytes, prefer_states=False, now_wall=rig.clock.wall())
    assert sum(each.place.length for each in gone) == 3 * TINY.block_bytes
    assert rig.core.statistics().blocks == 5
    assert rig.pool.statistics().states == 5, "a state in the pool leaves with its block"
    rig.core.check_integrity()


def of_tenant(rig: CoreRig, tenant: str, *, need: int) -> list[ItemId]:
    gone, freed = collected(rig.core.eviction_of(tenant, need, now_wall=rig.clock.wall()))
    assert freed == sum(each.place.length for each in gone)
    rig.core.check_integrity()
    return [each.item for each in gone]


def test_a_tenants_eviction_takes_its_own_tails_by_age_from_all_its_namespaces(rig: CoreRig) -> None:
    core = rig.core
    first = core.open_namespace("a1", identity(tenant_salt="a"), "endpoints").digest
    second = core.open_namespace("a2", identity(tenant_salt="a", adapter="x"), "endpoints").digest
    rig.store(range(4 * B), ssd=[B])
    old = rig.store(range(3 * B), namespace=first)
    rig.clock.advance(10)
    new = rig.store(range(3 * B), namespace=second)
    assert core.tenant_bytes("a") == (6 * TINY.block_bytes, 0)
    assert core.tenant_bytes("") == (4 * TINY.block_bytes + TINY.state_bytes, 0)
    gone = of_tenant(rig, "a", need=4 * TINY.block_bytes)
    assert [item.key for item in gone] == [old[2], old[1], old[0], new[2]]
    assert core.tenant_bytes("a")[0] == 2 * TINY.block_bytes
    assert core.statistics().blocks == 6
    assert totals(rig)["quota_evicted_blocks"] == 4
    assert of_tenant(rig, "nobody", need=1) == []


def test_a_tenants_eviction_spares_what_is_leased_or_built_on_and_says_what_it_could_not_free(
    rig: CoreRig,
) -> None:
    keys = rig.store(range(6 * B), ssd=[2 * B])
    rig.lookup(keys[:3], 3 * B + 1)
    more = rig.store(range(1000, 1000 + 2 * B))
    rig.reserve(rig.block_items(rig.keys(range(1000, 1000 + 3 * B)))[2:])
    held, promised = rig.core.tenant_bytes("")
    assert promised == TINY.block_bytes
    gone = of_tenant(rig, "", need=10**9)
    assert {item.key for item in gone if item.kind is ItemKind.BLOCK} == set(keys[3:])
    assert rig.core.tenant_bytes("")[0] == held - sum(
        TINY.block_bytes if item.kind is ItemKind.BLOCK else TINY.state_bytes for item in gone
    )
    assert rig.core.statistics().blocks == 3 + len(more)


def test_a_tenants_eviction_finds_what_may_go_behind_thousands_that_are_held(rig: CoreRig) -> None:
    long = rig.store(range(2000 * B))
    rig.lookup(long, 2000 * B + 1)
    rig.clock.advance(10)
    short = rig.store(range(10**6, 10**6 + 2 * B))
    assert [item.key for item in of_tenant(rig, "", need=2 * TINY.block_bytes)] == [short[1], short[0]]


def test_states_leave_before_blocks_when_asked_to_and_with_their_block_otherwise(rig: CoreRig) -> None:
    keys = rig.store(range(2 * B), ssd=[B, 2 * B])
    first = rig.core.plan_eviction(1, prefer_states=True, now_wall=rig.clock.wall())
    assert [each.item for each in first] == [ItemId(keys[0], ItemKind.STATE)]
    second = rig.core.plan_eviction(1, prefer_states=False, now_wall=rig.clock.wall())
    assert [each.item.kind for each in second] == [ItemKind.STATE, ItemKind.BLOCK]
    assert {each.item.key for each in second} == {keys[1]}
    rest = rig.core.plan_eviction(1 << 40, prefer_states=True, now_wall=rig.clock.wall())
    assert [each.item for each in rest] == [ItemId(keys[0], ItemKind.BLOCK)]
    assert totals(rig) == {
        "stored_blocks": 2,
        "stored_states": 2,
        "evicted_states": 2,
        "evicted_blocks": 2,
        "retention_shortfall": 2,
    }


def test_a_branch_that_is_shared_stays_until_both_tails_are_gone(rig: CoreRig) -> None:
    stem = list(range(2 * B))
    left = rig.store([*stem, *range(1000, 1000 + B)])
    rig.clock.advance(2)
    right = rig.store([*stem, *range(2000, 2000 + B)])
    order = [item.key for item in rig.evict(10)]
    assert order == [left[2], right[2], left[1], left[0]]


def test_a_block_lives_its_retention_and_leaving_earlier_is_a_counted_shortfall(rig: CoreRig) -> None:
    rig.store(range(3 * B))
    rig.clock.advance(72 * HOUR - 1)
    assert rig.core.expire_blocks(rig.clock.wall()) == []
    rig.evict(1)
    rig.clock.advance(2)
    assert len(rig.core.expire_blocks(rig.clock.wall(), limit=1)) == 1
    rig.evict(1)
    assert totals(rig)["retention_shortfall"] == 1
    assert totals(rig)["expired_blocks"] == 2, "evicted after its time is expiry by another name"
    assert rig.core.statistics().retention_attained == pytest.approx(2 / 3)


def test_expiry_goes_tails_first_and_takes_states_along(rig: CoreRig) -> None:
    keys = rig.store(range(3 * B), ssd=[3 * B], pool=[2 * B])
    rig.clock.advance(80 * HOUR)
    gone = rig.core.expire_blocks(rig.clock.wall(), limit=2)
    assert [(each.item.key, each.item.kind) for each in gone] == [
        (keys[2], ItemKind.STATE),
        (keys[2], ItemKind.BLOCK),
        (keys[1], ItemKind.BLOCK),
    ]
    assert rig.pool.statistics().states == 0
    assert len(rig.core.expire_blocks(rig.clock.wall())) == 1
    assert rig.core.statistics().blocks == 0


def test_a_used_block_lives_on_with_its_ancestors(rig: CoreRig) -> None:
    keys = rig.store(range(3 * B))
    rig.clock.advance(70 * HOUR)
    assert rig.lookup(keys[:2], 2 * B + 1).lease_id is not None
    rig.clock.advance(3 * HOUR)
    rig.core.expire_leases(rig.clock.monotonic())
    assert [each.item.key for each in rig.core.expire_blocks(rig.clock.wall())] == [keys[2]]


def test_a_leased_chain_does_not_expire_under_its_reader(rig: CoreRig) -> None:
    keys = rig.store(range(2 * B))
    result = rig.lookup(keys, 2 * B + 1)
    assert result.lease_id is not None
    assert rig.core.expire_blocks(rig.clock.wall() + 100 * HOUR) == []


def test_damage_takes_the_descendants_along_and_can_be_stored_again(rig: CoreRig) -> None:
    stem = list(range(2 * B))
    left = rig.store([*stem, *range(1000, 1000 + 2 * B)], ssd=[4 * B])
    right = rig.store([*stem, *range(2000, 2000 + B)], pool=[3 * B])
    gone = rig.core.forget(rig.main, ItemId(left[1], ItemKind.BLOCK))
    assert {each.item for each in gone} == {
        ItemId(left[1], ItemKind.BLOCK),
        ItemId(left[2], ItemKind.BLOCK),
        ItemId(left[3], ItemKind.BLOCK),
        ItemId(left[3], ItemKind.STATE),
        ItemId(right[2], ItemKind.BLOCK),
    }
    assert totals(rig)["damaged_blocks"] == 1
    assert totals(rig)["orphaned_blocks"] == 3
    assert rig.pool.statistics().states == 0
    assert rig.core.forget(rig.main, ItemId(left[1], ItemKind.BLOCK)) == []
    assert rig.core.forget(b"?" * 32, ItemId(left[0], ItemKind.BLOCK)) == []
    outcomes = rig.reserve(rig.block_items(left)).outcomes
    assert [each.outcome for each in outcomes] == [ReserveOutcome.HELD, *[ReserveOutcome.GRANTED] * 3]
    rig.core.check_integrity()


def test_damage_at_a_place_that_was_left_is_not_damage(rig: CoreRig) -> None:
    keys = rig.store(range(B), ssd=[B])
    for kind in (ItemKind.STATE, ItemKind.BLOCK):
        assert rig.core.forget(rig.main, ItemId(keys[0], kind), place=Place(77, 0, 1)) == []
    result = rig.lookup(keys, B + 1)
    assert result.lease_id is not None
    lease = rig.core.lease(result.lease_id, "r", rig.clock.monotonic())
    block, state = rig.core.fetch_list(lease, first_block=0, block_count=1, want_state=True)
    assert block is not None
    assert state is not None
    for item in (state, block):
        assert [each.item for each in rig.core.forget(rig.main, item.item, place=item.place)] == [item.item]


def test_a_damaged_pooled_state_is_forgotten_alone(rig: CoreRig) -> None:
    keys = rig.store(range(B), ssd=[B], pool=[B])
    assert rig.core.forget_pooled(rig.main, ItemId(keys[0], ItemKind.STATE))
    assert not rig.core.forget_pooled(rig.main, ItemId(keys[0], ItemKind.STATE))
    assert rig.lookup(keys, B + 1, lease=False).plan.state_source is StateSource.CHECKPOINT


def test_a_cleaned_segment_moves_its_items_and_what_was_not_carried_is_lost() -> None:
    rig = CoreRig(per_segment=4)
    keys = rig.store(range(6 * B), ssd=[2 * B])
    assert rig.core.items_in_segments() == {1: 4, 2: 3}
    rig.evict(1)
    before = {each: Place(1, 4096 * (1 + i), TINY.block_bytes) for i, each in enumerate(keys[:4])}
    moved = {place: Place(9, place.offset, place.length) for key, place in before.items() if key != keys[3]}
    moved[Place(1, 99 * 4096, 5)] = Place(9, 99 * 4096, 5)
    report = rig.core.relocate(1, moved)
    assert report.moved == 3
    assert [each.item.key for each in report.lost] == [keys[4], keys[3]], (
        "the block that was damaged, and what hangs on it"
    )
    assert list(report.discard) == [Place(9, 99 * 4096, 5)]
    assert rig.core.items_in_segments() == {2: 1, 9: 3}
    rig.core.check_integrity()
    result = rig.lookup(keys, 6 * B + 1)
    assert result.lease_id is not None
    lease = rig.core.lease(result.lease_id, "r", rig.clock.monotonic())
    items = rig.core.fetch_list(lease, first_block=0, block_count=3, want_state=False)
    assert [item.place for item in items if item] == [moved[before[key]] for key in keys[:3]]


def test_relocation_moves_states_and_reused_slots_rightly() -> None:
    rig = CoreRig(per_segment=100)
    for round_ in range(4):
        rig.store(range(round_ * 1000, round_ * 1000 + 5 * B), ssd=range(B, 6 * B, B))
        rig.core.plan_eviction(
            4 * TINY.block_bytes, prefer_states=bool(round_ % 2), now_wall=rig.clock.wall()
        )
    held = rig.core.items_in_segments()[1]
    places = [
        Place(1, 4096 * (1 + i), length)
        for i in range(100)
        for length in (TINY.block_bytes, TINY.state_bytes)
    ]
    report = rig.core.relocate(1, {place: Place(2, place.offset, place.length) for place in places})
    assert report.moved == held
    assert report.lost == []
    assert rig.core.items_in_segments() == {2: held}
    rig.core.check_integrity()


def test_the_share_of_states_is_held_to_its_limit(rig: CoreRig) -> None:
    keys = rig.store(range(6 * B), ssd=range(B, 7 * B, B))
    gone = rig.core.states_over_share(4 * TINY.state_bytes)
    assert [each.item for each in gone] == [ItemId(key, ItemKind.STATE) for key in keys[:2]]
    assert rig.core.states_over_share(4 * TINY.state_bytes) == []
    assert rig.core.statistics().ssd_state_bytes == 4 * TINY.state_bytes


def test_a_checkpoint_that_was_used_outlives_one_that_was_not(rig: CoreRig) -> None:
    keys = rig.store(range(3 * B), ssd=[B, 2 * B, 3 * B])
    result = rig.lookup(keys[:1], B + 1)
    assert result.plan.state_source is StateSource.CHECKPOINT
    assert result.lease_id is not None
    rig.core.release(result.lease_id, "r", rig.clock.monotonic())
    gone = rig.core.states_over_share(TINY.state_bytes)
    assert [each.item.key for each in gone] == [keys[1], keys[2]]


def test_an_idle_branch_keeps_one_of_its_boundaries() -> None:
    rig = CoreRig(pool_states=3)
    idle = rig.store(range(8 * B), pool=[4 * B])
    rig.write([rig.state_item(idle, 8 * B, pool=True, ssd=False)])
    busy = rig.store(range(50_000, 50_000 + 12 * B))
    for edge in range(B, 13 * B, B):
        rig.clock.advance(1)
        rig.write([rig.state_item(busy, edge, pool=True, ssd=False)])
        assert rig.lookup(idle, 8 * B + 1, lease=False).coverage.pool_states, (
            "not 0 while there is room for one"
        )
        rig.core.check_integrity()
    assert rig.lookup(busy, 12 * B + 1, lease=False).coverage.pool_states[-1] == 12 * B


def test_dropping_states_spares_the_leased_and_keeps_the_blocks(rig: CoreRig) -> None:
    keys = rig.store(range(3 * B), ssd=[B, 2 * B], pool=[B, 3 * B])
    other = rig.core.open_namespace("other", identity(adapter="o"))
    rig.store(range(B), ssd=[B], pool=[B], namespace=other.digest)
    result = rig.lookup(keys, 3 * B + 1)
    assert result.plan.state_source is StateSource.POOL
    pool = rig.core.drop_states(rig.main, Tier.POOL)
    assert (pool.dropped, pool.kept, pool.gone) == (1, 1, [])
    ssd = rig.core.drop_states(rig.main, Tier.SSD)
    assert (ssd.dropped, ssd.kept, len(ssd.gone)) == (2, 0, 2)
    everything = rig.core.drop_states()
    assert (everything.dropped, everything.kept) == (2, 1)
    assert rig.core.statistics().blocks == 4
    rig.core.check_integrity()


def test_clear_takes_one_namespace_in_every_tier_leased_or_not(rig: CoreRig) -> None:
    keys = rig.store(range(3 * B), ssd=[2 * B], pool=[3 * B])
    other = rig.core.open_namespace("other", identity(adapter="o"))
    kept = rig.store(range(2 * B), namespace=other.digest)
    result = rig.lookup(keys, 3 * B + 1)
    pending = rig.reserve(rig.block_items(rig.keys(range(700, 700 + B))))
    writing = rig.reserve(rig.block_items(rig.keys(range(800, 800 + B))))
    assert writing.reservation_id is not None
    rig.core.commit_list(writing.reservation_id, "w")
    cleared, given_back = rig.core.clear(rig.main)
    assert (cleared.blocks, cleared.states, len(cleared.gone)) == (3, 2, 4)
    assert len(given_back) == 1
    assert pending.reservation_id is not None
    assert result.lease_id is not None
    lease = rig.core.lease(result.lease_id, "r", rig.clock.monotonic())
    assert rig.core.fetch_list(lease, first_block=0, block_count=3, want_state=True) == [None] * 4
    report = rig.commit(writing.reservation_id)
    assert (report.visible, len(report.discard)) == ([], 1), "what was under way does not come back"
    assert rig.lookup(kept, 2 * B + 1, lease=False, namespace=other.digest).coverage.blocks == 2
    rig.core.release(result.lease_id, "r", rig.clock.monotonic())
    cleared, _ = rig.core.clear()
    assert cleared.blocks == 2
    stats = rig.core.statistics()
    assert (stats.blocks, stats.block_bytes, stats.ssd_states, stats.ssd_state_bytes, stats.pool.bytes) == (
        0,
        0,
        0,
        0,
        0,
    )
    assert rig.core.items_in_segments() == {}
    rig.core.check_integrity()


def test_books_are_empty_after_every_way_out(rig: CoreRig) -> None:
    def fill() -> list[bytes]:
        return rig.store(range(5 * B), ssd=[B, 3 * B], pool=[2 * B, 5 * B])  # type: ignore[return-value]

    ways = [
        lambda keys: rig.core.plan_eviction(1 << 40, prefer_states=False, now_wall=rig.clock.wall()),
        lambda keys: rig.core.plan_eviction(1 << 40, prefer_states=True, now_wall=rig.clock.wall()),
        lambda keys: rig.core.expire_blocks(rig.clock.wall() + 100 * HOUR),
        lambda keys: rig.core.forget(rig.main, ItemId(keys[0], ItemKind.BLOCK)),
        lambda keys: rig.core.clear(rig.main),
        lambda keys: [rig.core.relocate(segment, {}) for segment in list(rig.core.items_in_segments())],
    ]
    for way in ways:
        way(fill())
        stats = rig.core.statistics()
        assert (
            stats.blocks,
            stats.block_bytes,
            stats.ssd_states,
            stats.ssd_state_bytes,
            stats.pool.states,
            stats.pool.bytes,
        ) == (0,) * 6
        assert rig.core.items_in_segments() == {}
        rig.core.check_integrity()


def test_uses_are_told_once_an_hour_and_rounded_up(rig: CoreRig) -> None:
    keys = rig.store(range(3 * B), ssd=[3 * B])
    assert list(rig.core.take_uses()) == [], "a new block's use is in its record"
    for minutes, told in ((1, 4), (1, 0), (70, 4)):
        rig.clock.advance(60.0 * minutes)
        result = rig.lookup(keys, 3 * B + 1)
        assert result.lease_id is not None
        rig.core.release(result.lease_id, "r", rig.clock.monotonic())
        uses = list(rig.core.take_uses())
        assert len(uses) == told, f"after {minutes} minutes"
        assert all(use >= rig.clock.wall() and use % HOUR == 0 for _, use in uses)
    rig.lookup(keys, 3 * B + 1)
    rig.core.clear()
    assert list(rig.core.take_uses()) == []


def test_a_block_takes_at_most_200_bytes_of_index() -> None:
    rig = CoreRig()
    stored = 0
    for number in range(300):
        rig.store(range(number * 100_000, number * 100_000 + 64 * B))
        stored += 64
    stats = rig.core.statistics()
    assert stats.blocks == stored
    assert stats.index_bytes_per_block <= 200


def test_a_core_needs_nothing_but_a_pool() -> None:
    core = Core(pool=StatePool(0, 1.0))
    assert core.statistics().retention_attained is None
    assert "0 blocks" in repr(core)
    core.check_integrity()
