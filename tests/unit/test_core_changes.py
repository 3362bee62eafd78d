"""What the core tells of what comes and goes: in order, bounded, and the same as what it holds."""

from __future__ import annotations

from kvstore.core.changes import BlockCame, BlockWent, Journal, StateCame, block_events, state_events
from kvstore.core.steps import collected
from kvstore.events.base import BlockRemoved, BlockStored, StateRemoved, StateStored, short_hash
from kvstore.types import StateSource
from kvstore_client.events import HeldBlocks
from tests.support.core import TINY, B, CoreRig


def rig_with(journal: Journal, **options: int) -> CoreRig:
    rig = CoreRig(journal=journal, **options)
    journal.begin()
    return rig


def test_a_journal_tells_nothing_before_somebody_begins() -> None:
    journal = Journal()
    CoreRig(journal=journal).store(range(3 * B))
    assert journal.is_lost
    assert journal.take(100) == []


def test_blocks_of_one_commit_are_one_event_with_parent_and_whole_keys() -> None:
    rig = rig_with(journal := Journal())
    keys = rig.store(range(3 * B))
    [event] = block_events(journal.take(100))
    assert event == BlockStored(
        block_hashes=tuple(map(short_hash, keys)),
        parent_block_hash=None,
        block_size=B,
        medium="STORAGE",
        namespace=rig.main,
        block_keys=tuple(keys),
        parent_block_key=None,
    )
    longer = rig.store(range(5 * B))
    [event] = block_events(journal.take(100))
    assert isinstance(event, BlockStored)
    assert (event.block_keys, event.parent_block_key) == (tuple(longer[3:]), keys[-1])


def test_a_branch_is_an_event_of_its_own() -> None:
    rig = rig_with(journal := Journal())
    trunk = rig.store(range(2 * B))
    left = rig.store([*range(2 * B), *[300] * B])
    right = rig.store([*range(2 * B), *[301] * B])
    told = block_events(journal.take(100))
    assert [event.block_keys for event in told] == [(*trunk, left[2]), (right[2],)]
    assert [event.parent_block_key for event in told if isinstance(event, BlockStored)] == [None, trunk[1]]


def test_what_is_evicted_is_told_tails_first() -> None:
    rig = rig_with(journal := Journal())
    keys = rig.store(range(4 * B))
    journal.take(100)
    rig.evict(2)
    [event] = block_events(journal.take(100))
    assert isinstance(event, BlockRemoved)
    assert event.block_keys == (keys[3], keys[2])


def test_states_are_told_with_where_they_are_and_how_far_they_reach() -> None:
    rig = rig_with(journal := Journal())
    keys = rig.store(range(4 * B), ssd=[4 * B], pool=[3 * B])
    told = {(event.source, event.block_key): event for event in state_events(journal.take(100))}
    checkpoint, pooled = told[StateSource.CHECKPOINT, keys[3]], told[StateSource.POOL, keys[2]]
    assert isinstance(checkpoint, StateStored)
    assert isinstance(pooled, StateStored)
    assert (checkpoint.restorable_tokens, checkpoint.medium) == (4 * B, "STORAGE")
    assert (pooled.restorable_tokens, pooled.medium) == (3 * B, "CPU")
    rig.core.drop_states(rig.main)
    gone = state_events(journal.take(100))
    assert {(event.source, event.block_key) for event in gone} == told.keys()
    assert all(isinstance(event, StateRemoved) for event in gone)


def test_a_router_finds_as_much_restorable_as_a_lookup_does() -> None:
    for overlap in (False, True):
        for kind in ("ssd", "pool", "rows"):
            for chosen in ([1], [2], [3], [1, 2], [0, 1, 2, 3, 4], [2, 3, 4], []):
                rig = rig_with(journal := Journal())
                places = chosen if kind == "rows" else [(number + 1) * B for number in chosen]
                given = {"ssd": (), "pool": (), "rows": (), kind: places}
                keys = rig.store(range(6 * B), overlap=overlap, **given)
                held = HeldBlocks()
                held.apply([*block_events(changes := journal.take(1000)), *state_events(changes)])
                for blocks in range(7):
                    at = rig.lookup(keys[:blocks], blocks * B + 1, lease=False).coverage
                    edges = (*at.pool_states, *at.checkpoints, *at.rows, *at.rows_overlap)
                    assert held.restorable_tokens(rig.main, keys[:blocks]) == max(edges, default=0), (
                        kind,
                        overlap,
                        chosen,
                        blocks,
                    )


def test_past_its_limit_the_journal_forgets_all_and_says_so() -> None:
    rig = rig_with(journal := Journal(limit=3))
    rig.store(range(3 * B))
    assert not journal.is_lost
    rig.store(range(4 * B))
    assert journal.is_lost
    assert (journal.lost_total, len(journal)) == (1, 0)
    rig.store(range(5 * B))
    assert len(journal) == 0
    journal.begin()
    rig.store(range(6 * B))
    assert len(journal) == 1


def test_all_that_is_held_comes_parents_first_and_in_chains() -> None:
    rig = rig_with(journal := Journal())
    trunk = rig.store(range(4 * B), ssd=[4 * B], pool=[2 * B], rows=[0, 1])
    left = rig.store([*range(2 * B), *[300] * (3 * B)])
    other = rig.store([7] * (2 * B))
    changes, _ = collected(rig.core.all_held())
    seen: set[bytes] = set()
    for change in changes:
        if isinstance(change, BlockCame):
            assert change.parent is None or change.parent in seen
            seen.add(change.key)
    before = [change for change in journal.take(1000) if isinstance(change, BlockCame | BlockWent)]
    held = {change.key for change in before if isinstance(change, BlockCame)}
    held -= {change.key for change in before if isinstance(change, BlockWent)}
    assert seen == held
    assert seen <= {*trunk, *left, *other}
    chains = [event.block_keys for event in block_events(changes)]
    assert sum(map(len, chains)) == len(seen)
    assert len(chains) <= 4, "a chain is cut where it branches only"
    states = {(change.key, change.source) for change in changes if isinstance(change, StateCame)}
    assert states == {
        (trunk[3], StateSource.CHECKPOINT),
        (trunk[1], StateSource.POOL),
        (trunk[0], StateSource.ROWS),
        (trunk[1], StateSource.ROWS),
    }


def test_what_changes_while_all_is_told_is_told_after_it() -> None:
    rig = rig_with(journal := Journal())
    rig.store(range(900 * B))
    journal.begin()
    steps = rig.core.all_held()
    told = list(next(steps))
    rig.evict(500)
    rig.store([5] * B)
    for part in steps:
        told += part
    held = HeldBlocks()
    held.apply(block_events(told))
    assert len(held.keys(rig.main)) == 900, "as it was when the first step began"
    held.apply(block_events(journal.take(10_000)))
    assert len(held.keys(rig.main)) == 401


def test_an_empty_store_has_nothing_to_tell() -> None:
    changes, _ = collected(CoreRig().core.all_held())
    assert changes == []
    assert TINY.block_tokens == B
