"""Long work in steps: each is small, what it works on is in order between two of them, and others may act there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvstore.core import Core, Gone, Limits, ReserveItem, ReserveOutcome, ReserveResult
from kvstore.core.steps import ITEMS_AT_ONCE, Steps
from kvstore.errors import LimitExceeded, UnknownReservation
from kvstore.service.loopwatch import LoopWatch
from kvstore.types import BlockKey, ItemKind, Lineage
from tests.support.core import EAGER, TINY, B, CoreRig
from tests.support.scale import CHAIN_BLOCKS, NOW, big_core

BLOCKS = 5_000


def long_chain(core_root: bytes, count: int) -> list[ReserveItem]:
    keys = [BlockKey(b"long" + number.to_bytes(28, "little")) for number in range(count)]
    parents = [core_root, *keys]
    return [
        ReserveItem(key, ItemKind.BLOCK, parents[number], (number + 1) * B, TINY.block_bytes)
        for number, key in enumerate(keys)
    ]


def first_blocks(root: bytes, seed: int, count: int) -> list[ReserveItem]:
    """Of as many prompts."""
    keys = [BlockKey(bytes([seed]) * 4 + number.to_bytes(28, "little")) for number in range(count)]
    return [ReserveItem(key, ItemKind.BLOCK, root, B, TINY.block_bytes) for key in keys]


def ending_in(ends: list[Any], steps: Steps[Any, Any]) -> Iterator[None]:
    """The steps; their result goes to `ends`."""
    ends.append((yield from steps))


@pytest.mark.parametrize(
    "begin",
    [
        lambda core: core.clearing(None),
        lambda core: core.dropping(None, None),
        lambda core: core.eviction(1 << 40, prefer_states=True, now_wall=NOW),
        lambda core: core.eviction(1 << 40, prefer_states=False, now_wall=NOW),
        lambda core: core.keeping_share(0),
    ],
    ids=["clear", "drop", "evict states first", "evict", "share"],
)
def test_every_step_takes_out_a_few_hundred_and_leaves_the_index_in_order(
    begin: Callable[[Core], Any],
) -> None:
    core, _, _ = big_core(BLOCKS, states=1_500, namespaces=3)
    parts: list[list[Gone]] = []
    for number, part in enumerate(begin(core)):
        parts.append(part)
        if number % 4 == 1:
            core.check_integrity()
    # A block leaves with its state and its rows.
    assert max(map(len, parts)) <= ITEMS_AT_ONCE + 3
    assert sum(map(len, parts)) >= 1_500
    assert len({(gone.namespace, gone.item) for part in parts for gone in part}) == sum(map(len, parts))
    core.check_integrity()


def test_between_two_steps_of_a_clear_prompts_are_held_to_a_shorter_length_and_time_goes_on() -> None:
    core, [digest], keys = big_core(BLOCKS)
    lengths = []
    chain = keys[:CHAIN_BLOCKS]
    lease_id = core.lookup(
        digest,
        chain,
        prompt_tokens=CHAIN_BLOCKS * B + 1,
        costs=EAGER,
        session="r",
        now_mono=0,
        now_wall=NOW,
        lease=True,
    ).lease_id
    for _ in core.clearing(digest):
        found = core.lookup(
            digest,
            chain,
            prompt_tokens=CHAIN_BLOCKS * B + 1,
            costs=EAGER,
            session="r",
            now_mono=0,
            now_wall=NOW,
            lease=False,
        )
        lengths.append(found.coverage.blocks)
        # What the clear was about to come to leaves by itself.
        core.expire_blocks(NOW + 1e9, limit=5)
        core.check_integrity()
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] == 0
    assert core.statistics().blocks == 0
    assert lease_id is not None
    assert core.release(lease_id, "r", 1.0)
    core.check_integrity()


def test_a_large_reservation_is_claimed_and_shown_step_by_step() -> None:
    rig = CoreRig()
    items = long_chain(rig.main, 3 * ITEMS_AT_ONCE)
    steps = rig.core.reserving("w", rig.main, items, **rig.now)
    claimed = []
    ends: list[ReserveResult] = []
    for _ in ending_in(ends, steps):
        claimed.append(rig.core.statistics().in_flight)
        rig.core.check_integrity()
    assert claimed == sorted(claimed)
    assert len(set(claimed)) > 2
    [result] = ends
    assert {each.outcome for each in result.outcomes} == {ReserveOutcome.GRANTED}
    results = {
        each.item.item_id: rig.written(each.item) for each in rig.core.commit_list(result.reservation_id, "w")
    }
    committing = rig.core.committing(result.reservation_id, "w", results, **rig.now)
    shown = []
    for _ in committing:
        shown.append(rig.core.statistics().blocks)
        # Until its end the session may build on what it was promised.
        child = ReserveItem(
            BlockKey(bytes([len(shown)]) * 32),
            ItemKind.BLOCK,
            items[-1].key,
            (len(items) + 1) * B,
            TINY.block_bytes,
        )
        [outcome] = rig.reserve([child]).outcomes
        assert outcome.outcome is ReserveOutcome.GRANTED
        rig.core.check_integrity()
    assert shown == sorted(set(shown))
    assert rig.core.statistics().blocks == len(items)


@pytest.mark.parametrize("way", ["session", "clear", "closed", "wrong item"])
def test_a_reservation_that_ends_between_two_steps_leaves_nothing(way: str) -> None:
    rig = CoreRig()
    items = long_chain(rig.main, 3 * ITEMS_AT_ONCE)
    if way == "wrong item":
        rig.write([ReserveItem(items[-1].key, ItemKind.BLOCK, rig.main, B, TINY.block_bytes)])
    steps = rig.core.reserving("w", rig.main, items, **rig.now)
    while not rig.core.statistics().in_flight:
        next(steps)
    if way == "session":
        rig.core.end_session("w", 0.0)
    elif way == "clear":
        rig.core.clear(rig.main)
    if way == "closed":
        steps.close()
    else:
        error = UnknownReservation if way in ("session", "clear") else Exception
        with pytest.raises(error, match=r"reservation_id|position"):
            for _ in steps:
                pass
    assert (rig.core.statistics().in_flight, rig.core.open_work) == (0, 0)
    rig.core.check_integrity()
    # Not swept yet, and another's all the same.
    [first] = rig.reserve(items[:1], session="other").outcomes
    assert first.outcome is ReserveOutcome.GRANTED
    for _ in rig.core.forgetting_claims():
        rig.core.check_integrity()
    assert rig.core.statistics().in_flight == 1
    [again] = rig.reserve(items[:1], session="third").outcomes
    assert again.outcome is ReserveOutcome.IN_FLIGHT


@pytest.mark.parametrize("way", ["session", "clear"])
def test_a_reservation_of_what_is_held_that_ends_between_two_steps_says_so(way: str) -> None:
    rig = CoreRig()
    items = long_chain(rig.main, 3 * ITEMS_AT_ONCE)
    rig.write(items)
    steps = rig.core.reserving("w", rig.main, items, **rig.now)
    # The last steps only note what was used.
    for _ in range(7):
        next(steps)
    if way == "session":
        rig.core.end_session("w", 0.0)
    else:
        rig.core.clear(rig.main)
    with pytest.raises(UnknownReservation, match="reservation_id"):
        for _ in steps:
            pass
    assert rig.core.open_work == 0
    rig.core.check_integrity()


def test_reservations_side_by_side_are_given_no_more_than_one_after_the_other() -> None:
    most = 3 * ITEMS_AT_ONCE
    asked = most // 2 + 100
    rig = CoreRig(limits=Limits(reserved_items_per_session=most))
    under_way = [
        rig.core.reserving("w", rig.main, first_blocks(rig.main, number, asked), **rig.now)
        for number in range(4)
    ]
    refused = 0
    while under_way:
        for steps in list(under_way):
            try:
                next(steps)
            except StopIteration:
                under_way.remove(steps)
            except LimitExceeded:
                under_way.remove(steps)
                refused += 1
    assert refused == 3
    assert rig.core.statistics().in_flight == asked
    rig.core.end_session("w", 0.0)
    rig.reserve(first_blocks(rig.main, 5, most))
    assert rig.core.statistics().in_flight == most


def test_what_is_leased_between_two_steps_of_a_commit_is_not_replaced() -> None:
    rig = CoreRig(limits=Limits())
    count = 3 * ITEMS_AT_ONCE
    items = long_chain(rig.main, count)
    rig.write([item._replace(lineage=Lineage.BOUNDED) for item in items])
    made = rig.reserve(items)
    assert made.reservation_id is not None
    results = {
        each.item.item_id: rig.written(each.item) for each in rig.core.commit_list(made.reservation_id, "w")
    }
    committing = rig.core.committing(made.reservation_id, "w", results, **rig.now)
    next(committing)
    lease_id = rig.core.lookup(
        rig.main,
        [item.key for item in items],
        prompt_tokens=count * B + 1,
        costs=EAGER,
        session="r",
        lease=True,
        exact_only=False,
        **rig.now,
    ).lease_id
    assert lease_id is not None
    lease = rig.core.lease(lease_id, "r", rig.clock.monotonic())
    before = rig.core.fetch_places(lease, first_block=0, block_count=count)
    for _ in committing:
        pass
    assert rig.core.fetch_places(lease, first_block=0, block_count=count) == before


def test_what_leaves_between_two_steps_of_an_eviction_leaves_once() -> None:
    core, _, _ = big_core(BLOCKS)
    gone: list[Gone] = []
    for part in core.eviction(1 << 40, prefer_states=False, now_wall=NOW):
        gone += [*part, *core.expire_blocks(NOW + 1e9, limit=5)]
        core.check_integrity()
    assert len({each.item for each in gone}) == len(gone)
    assert core.statistics().blocks == BLOCKS - len(gone)


def test_a_session_s_end_and_due_leases_go_in_steps() -> None:
    rig = CoreRig(limits=Limits())
    keys = rig.store(range(2 * B))
    for _ in range(2 * ITEMS_AT_ONCE):
        rig.lookup(keys, 2 * B + 1, session="a")
        rig.lookup(keys, 2 * B + 1, session="b")
    left = []
    for _ in rig.core.ending("a", rig.clock.monotonic()):
        left.append(rig.core.statistics().leases)
        rig.core.check_integrity()
    assert left[0] == 3 * ITEMS_AT_ONCE
    rig.clock.advance(61)
    count = sum(1 for _ in rig.core.expiring_leases(rig.clock.monotonic()))
    assert count >= 2
    assert rig.core.statistics().leases == 0
    rig.core.check_integrity()


def test_a_search_for_what_may_go_gives_turns_though_nothing_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.core.leaving.VISITS_AT_ONCE", 100)
    core, [digest], keys = big_core(1_000)
    for first in range(0, 1_000, CHAIN_BLOCKS):
        chain = keys[first : first + CHAIN_BLOCKS]
        core.lookup(
            digest,
            chain,
            prompt_tokens=len(chain) * B + 1,
            costs=EAGER,
            session="r",
            now_mono=0,
            now_wall=NOW,
            lease=True,
        )
    parts = []
    for number, part in enumerate(core.eviction(1, prefer_states=False, now_wall=NOW)):
        parts.append(part)
        if number == 4:
            # What the search had come to is used: it begins anew, and ends all the same.
            core.lookup(
                digest,
                keys[:CHAIN_BLOCKS],
                prompt_tokens=CHAIN_BLOCKS * B + 1,
                costs=EAGER,
                session="r",
                now_mono=0,
                now_wall=NOW + 9,
                lease=True,
            )
    assert len(parts) >= 10
    assert not any(parts)


def test_the_longest_gap_of_the_loop_is_kept_for_a_while_and_long_ones_are_counted() -> None:
    watch = LoopWatch()
    watch.note(0.5, 100.0)
    watch.note(0.01, 101.0)
    assert (watch.longest_seconds, watch.long_total) == (0.5, 1)
    watch.note(0.03, 161.0)
    assert (watch.longest_seconds, watch.long_total) == (0.5, 2)
    watch.note(0.0, 222.0)
    assert watch.longest_seconds == 0.03
