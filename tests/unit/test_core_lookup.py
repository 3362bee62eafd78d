from __future__ import annotations

import time

import pytest

from kvstore.core import Limits
from kvstore.errors import InvalidArgument, LimitExceeded, UnknownNamespace
from kvstore.plan import Costs
from kvstore.prefix import block_keys
from kvstore.profile.registry import get_profile
from kvstore.types import Exactness, ItemId, ItemKind, Lineage, StateSource
from tests.support.core import TINY, B, CoreRig, checks_of, identity


@pytest.fixture
def rig() -> CoreRig:
    return CoreRig()


@pytest.mark.parametrize("n", [0, 1, B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1])
def test_a_prompt_that_is_held_wholly_leaves_a_token_to_compute_and_a_longer_one_uses_all_blocks(
    rig: CoreRig, n: int
) -> None:
    keys = rig.store(range(n), pool=range(B, n + 1, B))
    same = rig.lookup(keys, n)
    assert same.plan.compute_from == max(n - 1, 0) // B * B
    longer = rig.lookup(rig.keys(range(n + 64)), n + 64)
    assert longer.plan.compute_from == n // B * B
    for result in (same, longer):
        if result.lease_id is not None:
            lease = rig.core.lease(result.lease_id, "r", rig.clock.monotonic())
            items = rig.core.fetch_list(
                lease, first_block=0, block_count=lease.blocks, want_state=bool(lease.state_at)
            )
            blocks = [item for item in items if item is not None and item.item.kind is ItemKind.BLOCK]
            assert len(blocks) * B == result.plan.compute_from, "what lookup promises is what fetch lists"
        else:
            assert result.plan.compute_from == 0
    rig.core.check_integrity()


def test_every_changed_identity_field_misses_in_every_tier(rig: CoreRig) -> None:
    tokens = range(4 * B + 1)
    rig.store(tokens, pool=[4 * B], ssd=[2 * B])
    for field in ("weights_revision", "numerics", "adapter", "tenant_salt"):
        other = rig.core.open_namespace(f"other-{field}", identity(**{field: "X"}))
        keys = rig.keys(tokens, other.digest)
        assert rig.lookup(keys, 4 * B + 1, namespace=other.digest).plan.compute_from == 0
        # Not even the very keys of the other namespace find anything in this one.
        stolen = rig.lookup(rig.keys(tokens), 4 * B + 1, namespace=other.digest)
        assert (stolen.coverage.blocks, stolen.coverage.pool_states, stolen.coverage.checkpoints) == (
            0,
            (),
            (),
        )
    assert rig.lookup(rig.keys(tokens), 4 * B + 1).plan.compute_from == 4 * B


def test_one_group_held_and_another_not(rig: CoreRig) -> None:
    tokens = 8 * B + 20
    keys = rig.store(range(tokens), ssd=[4 * B, 8 * B])
    assert rig.lookup(keys, tokens, lease=False).coverage.checkpoints == (4 * B, 8 * B)
    first = rig.lookup(keys, tokens, lease=False).plan
    assert (first.compute_from, first.state_source, first.replay_tokens) == (8 * B, StateSource.CHECKPOINT, 0)
    rig.core.forget(rig.main, ItemId(keys[7], ItemKind.STATE))
    second = rig.lookup(keys, tokens, lease=False)
    assert second.coverage.checkpoints == (4 * B,)
    assert second.coverage.blocks == 8
    rig.core.forget(rig.main, ItemId(keys[3], ItemKind.STATE))
    third = rig.lookup(keys, tokens, lease=False)
    assert (third.coverage.checkpoints, third.plan.state_source) == ((), StateSource.REPLAY)
    assert third.plan.replay_tokens == TINY.exact_replay_tokens


def test_a_hit_ends_at_the_first_block_that_is_not_held(rig: CoreRig) -> None:
    rig.store(range(6 * B))
    for shared in range(7):
        tokens = [*range(shared * B), *range(10_000, 10_000 + 4 * B)]
        result = rig.lookup(rig.keys(tokens), len(tokens), lease=False)
        assert result.coverage.blocks == shared
        assert result.plan.blocks_missing == 4


def test_keys_that_are_no_chain_find_no_more_than_the_chain_they_start(rig: CoreRig) -> None:
    keys = rig.store(range(8 * B))
    other = rig.keys(range(50_000, 50_000 + 8 * B))
    for mixed, blocks in (
        ([*other[:3], *keys[3:]], 0),
        ([keys[0], other[1], *keys[2:]], 1),
        (keys[1:], 0),
        ([*keys[:4], keys[3], *keys[4:7]], 4),
        (keys[::-1], 0),
    ):
        assert rig.lookup(mixed, 8 * B, lease=False).coverage.blocks == blocks


def test_a_probe_grants_and_touches_nothing(rig: CoreRig) -> None:
    old, new = rig.store(range(2 * B)), rig.store(range(1000, 1000 + 2 * B))
    rig.clock.advance(10)
    assert rig.lookup(old, 2 * B + 1, lease=False).lease_id is None
    assert rig.core.statistics().leases == 0
    assert rig.evict(1) == [ItemId(old[1], ItemKind.BLOCK)], "still the least recently used"
    assert new


def test_a_used_chain_is_evicted_last_and_tails_first(rig: CoreRig) -> None:
    old, new = rig.store(range(3 * B)), rig.store(range(1000, 1000 + 3 * B))
    rig.clock.advance(10)
    result = rig.lookup(old, 3 * B + 1)
    assert result.lease_id is not None
    rig.core.release(result.lease_id, "r", rig.clock.monotonic())
    left = [item.key for item in rig.evict(6)]
    assert left == [*new[::-1], *old[::-1]]


def test_only_the_blocks_that_the_plan_reads_are_leased_and_used(rig: CoreRig) -> None:
    keys = rig.store(range(4 * B))
    result = rig.lookup(keys, 4 * B)
    assert result.lease_id is not None
    assert rig.core.lease(result.lease_id, "r", rig.clock.monotonic()).blocks == 3
    assert [item.key for item in rig.evict(4)] == [keys[3]]


def test_expired_blocks_are_not_held_even_before_they_are_taken_out(rig: CoreRig) -> None:
    keys = rig.store(range(6 * B))
    rig.clock.advance(71 * 3600)
    result = rig.lookup(keys[:2], 2 * B + 1)
    assert result.coverage.blocks == 2
    rig.clock.advance(3600 + 1)
    assert rig.lookup(keys, 6 * B + 1, lease=False).coverage.blocks == 2
    assert [o.outcome.name for o in rig.reserve(rig.block_items(keys)).outcomes] == ["HELD"] * 6
    assert rig.lookup(keys, 6 * B + 1, lease=False).coverage.blocks == 6, "a writer who has them revives them"


def test_bounded_bytes_count_only_for_who_accepts_them(rig: CoreRig) -> None:
    keys = rig.keys(range(6 * B))
    items = rig.block_items(keys)
    rig.write(
        [
            *items[:3],
            *rig.block_items(keys, lineage=Lineage.BOUNDED)[3:],
            rig.state_item(keys, 2 * B, lineage=Lineage.BOUNDED),
        ]
    )
    strict = rig.lookup(keys, 6 * B + 1, lease=False)
    assert (strict.coverage.blocks, strict.coverage.checkpoints, strict.plan.exactness) == (
        3,
        (),
        Exactness.EXACT,
    )
    loose = rig.lookup(keys, 6 * B + 1, lease=False, exact_only=False)
    assert (loose.coverage.blocks, loose.coverage.checkpoints, loose.plan.exactness) == (
        6,
        (2 * B,),
        Exactness.BOUNDED,
    )


def test_blocks_on_their_way_in_another_session_are_named(rig: CoreRig) -> None:
    keys = rig.store(range(2 * B))
    tokens = range(6 * B)
    more = rig.keys(tokens)
    rig.reserve(rig.block_items(more)[:4], session="w")
    assert rig.lookup(more, 6 * B, lease=False, session="r").plan.wait_for == (2, 3)
    assert rig.lookup(more, 6 * B, lease=False, session="w").plan.wait_for == ()
    assert keys == more[:2]


def test_the_checks_and_places_of_a_fetch_are_the_writers(rig: CoreRig) -> None:
    keys = rig.store(range(3 * B), pool=[2 * B])
    result = rig.lookup(keys, 3 * B + 1)
    assert result.lease_id is not None
    lease = rig.core.lease(result.lease_id, "r", rig.clock.monotonic())
    *blocks, state = rig.core.fetch_list(lease, first_block=1, block_count=2, want_state=True)
    assert [item.item.key for item in blocks if item] == keys[1:]
    assert [item.position for item in blocks if item] == [2 * B, 3 * B]
    assert all(
        item is not None and item.checks == checks_of(item.item.key) and item.place is not None
        for item in blocks
    )
    assert state is not None
    assert (state.position, state.place, state.payload) == (2 * B, None, bytes(TINY.state_bytes))


def test_fetch_is_refused_past_what_the_lease_covers(rig: CoreRig) -> None:
    keys = rig.store(range(3 * B))
    result = rig.lookup(keys, 3 * B + 1)
    assert result.lease_id is not None
    lease = rig.core.lease(result.lease_id, "r", rig.clock.monotonic())
    for first, more, state, field in (
        (-1, 1, False, "first_block"),
        (4, 0, False, "first_block"),
        (0, 4, False, "block_count"),
        (2, 2, False, "block_count"),
        (0, -1, False, "block_count"),
        (0, 3, True, "state"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            rig.core.fetch_list(lease, first_block=first, block_count=more, want_state=state)
        assert caught.value.field == field
    assert rig.core.fetch_list(lease, first_block=3, block_count=0, want_state=False) == []


def test_what_is_no_lookup_is_refused_by_name() -> None:
    rig = CoreRig(limits=Limits(keys=4, prompt_tokens=100 * B))
    keys = rig.keys(range(4 * B))
    for given, tokens, error, field in (
        ([b"short"], 10 * B, InvalidArgument, "keys[0]"),
        ([keys[0], "x" * 32], 10 * B, InvalidArgument, "keys[1]"),
        (keys, 3 * B, InvalidArgument, "keys"),
        ([*keys, keys[0]], 9 * B, LimitExceeded, "keys"),
        ([], 100 * B + 1, LimitExceeded, "prompt_tokens"),
        ([], -1, InvalidArgument, "prompt_tokens"),
    ):
        with pytest.raises(error) as caught:
            rig.lookup(given, tokens)  # type: ignore[arg-type]
        assert caught.value.field == field
    with pytest.raises(UnknownNamespace):
        rig.lookup([], 0, namespace=b"?" * 32)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument):
        rig.lookup(keys, 9 * B, costs=Costs(seconds_per_fetch=-1))
    assert rig.core.statistics().leases == 0


def test_a_million_tokens_are_looked_up_in_five_milliseconds() -> None:
    flash = get_profile("deepseek-v4-flash")
    rig = CoreRig()
    info = rig.core.open_namespace("long", identity(adapter="long"))
    keys = block_keys(info.digest, range(7_812 * B), block_tokens=B)
    items = rig.block_items(keys, namespace=info.digest)
    for start in range(0, len(items), 512):
        rig.write(items[start : start + 512], namespace=info.digest)
    missing = block_keys(info.digest, range(1, 1 + 7_812 * B), block_tokens=B)
    medians = []
    for prompt in (keys, [*keys[:3_906], *missing[3_906:]], missing):
        spent = []
        for _ in range(9):
            rig.clock.advance(2)
            start = time.thread_time()
            result = rig.lookup(prompt, 7_812 * B + 1, namespace=info.digest)
            spent.append(time.thread_time() - start)
            if result.lease_id is not None:
                rig.core.release(result.lease_id, "r", rig.clock.monotonic())
        medians.append(sorted(spent)[4] * 1e3)
    # The aim is 5 ms; a machine that runs other tests beside this one gets some room.
    assert max(medians) < 30, f"milliseconds, all held, half, none: {medians}"
    assert flash.block_tokens * 7_812 < 1_000_000
