from __future__ import annotations

import random

import numpy as np
import pytest

from kvstore.policy import EvictionPolicy, LruPolicy


def order(policy: LruPolicy) -> list[int]:
    policy.check_integrity()
    return list(policy.victims())


def test_a_chain_is_ranked_leaf_first() -> None:
    lru = LruPolicy()
    lru.on_insert(0)
    lru.on_insert(1, below=0)
    lru.on_insert(2, below=1)
    assert order(lru) == [2, 1, 0]


def test_a_touched_chain_moves_behind_everything_else_root_last() -> None:
    lru = LruPolicy()
    for handle in (3, 0, 4):
        lru.on_insert(handle)
    lru.on_insert(1, below=0)
    lru.on_touch([1, 0])
    assert order(lru) == [3, 4, 1, 0]
    lru.on_touch([3])
    assert order(lru) == [4, 1, 0, 3]


def test_a_touch_below_an_ancestor_that_is_fresh_already_stays_below_it() -> None:
    lru = LruPolicy()
    for handle in (5, 6, 0, 7):
        lru.on_insert(handle)
    lru.on_touch([5, 6], below=0)
    assert order(lru) == [5, 6, 0, 7]
    lru.on_touch([7], below=0)
    assert order(lru) == [5, 6, 7, 0]


def test_what_was_yielded_may_be_removed_while_iterating() -> None:
    lru = LruPolicy()
    for handle in range(6):
        lru.on_insert(handle)
    for handle in lru.victims():
        if handle % 2:
            lru.on_remove(handle)
    assert order(lru) == [0, 2, 4]
    lru.on_insert(1)
    assert order(lru) == [0, 2, 4, 1]
    assert len(lru) == 4


def test_a_start_is_ranked_as_given() -> None:
    lru = LruPolicy()
    lru.start([4, 2, 9], np.full(3, -1))
    assert order(lru) == [4, 2, 9]
    lru.on_insert(3)
    lru.on_touch([4])
    assert order(lru) == [2, 9, 3, 4]
    empty = LruPolicy()
    empty.start([], np.empty(0, np.int32))
    assert order(empty) == []


@pytest.mark.parametrize("seed", range(20))
def test_any_sequence_of_events_ranks_as_a_plain_list_does(seed: int) -> None:
    rng = random.Random(seed)
    lru, model = LruPolicy(), list[int]()
    policy: EvictionPolicy = lru
    for _ in range(300):
        choice = rng.random()
        if choice < 0.4 or len(model) < 2:
            handle = next(h for h in range(400) if h not in model)
            below = rng.choice([-1, *model])
            policy.on_insert(handle, below)
            model.insert(len(model) if below < 0 else model.index(below), handle)
        elif choice < 0.8:
            chosen = rng.sample(model, rng.randint(1, min(8, len(model))))
            rest = [h for h in model if h not in chosen]
            below = rng.choice([-1, *rest])
            policy.on_touch(chosen, below)
            at = len(rest) if below < 0 else rest.index(below)
            model = [*rest[:at], *chosen, *rest[at:]]
        else:
            handle = rng.choice(model)
            policy.on_remove(handle)
            model.remove(handle)
        assert order(lru) == model, f"seed {seed}"
