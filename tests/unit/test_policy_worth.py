"""What classes are worth at ages, and what our own policy makes of it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvstore.policy import make_policy
from kvstore.policy.density import DensityPolicy
from kvstore.policy.ghosts import Times
from kvstore.policy.worth import BUCKETS, HORIZON, SAMPLE_BYTES, SAMPLE_MAX, Worth, bucket_of, worth_of
from tests.conformance.test_policies import Tree


def observed(**counts: float) -> np.ndarray:
    row = np.zeros((1, BUCKETS))
    for age, count in counts.items():
        row[0, int(age[1:])] = count
    return row


@pytest.mark.parametrize(("age", "bucket"), [(0, 0), (1, 1), (2, 3), (3, 4), (4, 5), (1 << 30, BUCKETS - 1)])
def test_ages_lie_two_buckets_to_an_octave(age: int, bucket: int) -> None:
    assert bucket_of(age) == bucket


def test_what_is_never_used_again_is_worth_nothing() -> None:
    assert not worth_of(observed(), observed(a9=10)).any()


def test_what_comes_back_sooner_or_more_often_is_worth_more() -> None:
    never = observed(a30=50)
    soon, late = worth_of(observed(a5=50), never), worth_of(observed(a9=50), never)
    often = worth_of(observed(a9=100), never)
    assert soon[0, 0] > often[0, 0] > late[0, 0] > 0


def test_past_the_age_at_which_all_that_come_back_have_come_it_is_worth_nothing() -> None:
    worth = worth_of(observed(a5=50), observed(a30=50))
    assert worth[0, 5] > 0
    assert not worth[0, 6:].any()


def test_older_is_never_worth_more() -> None:
    chance = np.random.default_rng(3)
    worth = worth_of(chance.random((20, BUCKETS)), chance.random((20, BUCKETS)))
    assert (np.diff(worth, axis=1) <= 0).all()


def test_a_class_learns_from_its_own_uses() -> None:
    worth = Worth(2)
    for now in range(1, 2000):
        worth.learn(100, now)
        worth.use(now % 5, 0, now)
        worth.use(1000 + now, 1, now)
    assert worth.at(0, 1) > 2 * worth.at(1, 1)


def test_a_sample_stays_small_however_much_is_held() -> None:
    worth, chance = Worth(1), random.Random(2)
    for now in range(1, 8 * SAMPLE_MAX):
        worth.learn(SAMPLE_MAX, now)
        mark = chance.getrandbits(32)
        if not mark & worth.mask:
            worth.use(mark, 0, now)
    worth.check_integrity()
    assert 3 <= worth.mask < HORIZON


def test_times_of_what_has_left_are_known_once() -> None:
    times = Times()
    for mark in range(5000):
        times.add(mark, mark + 1, 2000)
    assert [times.take(4999), times.take(4999), times.take(7000)] == [5000, None, None]


def test_what_comes_back_is_kept_through_ever_new_requests_that_do_not() -> None:
    hits = {}
    for name in ("lru", "density"):
        tree, chance = Tree(make_policy(name)), random.Random(7)
        hits[name] = 0
        for number in range(3000):
            old = chance.random() < 0.3
            path = (chance.randrange(8) if old else 1000 + number, *range(5))
            hits[name] += tree.request(path)
            tree.evict(max(len(tree.parent) - 60, 0))
    assert hits["density"] > 1.5 * hits["lru"]


def test_before_it_has_learnt_anything_it_goes_by_recency() -> None:
    gone = {}
    for name in ("fifo", "density"):
        tree = Tree(make_policy(name))
        for number in range(10):
            tree.request((number, 0))
        gone[name] = [tree.tag[handle] for handle in tree.policy.victims()]
    assert gone["density"] == gone["fifo"]


def test_what_was_here_before_is_told_apart_when_it_is_used() -> None:
    """Alike, each would be seen to come back at once, in the place of the one before it."""
    chain = np.arange(200, dtype=np.int32)
    started, switched = DensityPolicy(), DensityPolicy()
    started.start(chain, chain - 1)
    for handle in chain.tolist():
        switched.adopt(handle, handle - 1, handle)
    for policy in (started, switched):
        before = policy.memory_bytes()
        policy.on_request(chain, 1.0)
        assert policy.memory_bytes() >= before + SAMPLE_BYTES * (len(chain) // 4)
