from __future__ import annotations

import random

import numpy as np
import pytest

from kvstore.core import Core
from kvstore.policy import FifoPolicy
from kvstore.policy.base import NO_HANDLE
from kvstore.policy.leaves import LeafPolicy
from kvstore.policy.registry import make_policy
from kvstore.pool import StatePool
from tests.support.core import B, CoreRig, identity


def taken(policy: FifoPolicy, children: dict[int, set[int]], count: int) -> list[int]:
    """Remove up to `count` of what has no child."""
    gone: list[int] = []
    for handle in policy.victims():
        if len(gone) == count:
            break
        if not children.get(handle):
            policy.on_remove(handle)
            gone.append(handle)
            for inner in children.values():
                inner.discard(handle)
    policy.check_integrity()
    return gone


def test_the_oldest_without_a_child_goes_first_and_a_use_changes_nothing() -> None:
    fifo = FifoPolicy()
    for handle, below in ((0, -1), (1, 0), (5, -1), (2, 1), (6, 5)):
        fifo.on_insert(handle, below=below)
    fifo.on_touch([2, 1, 0])
    assert list(fifo.victims()) == [2, 6]
    assert taken(fifo, {0: {1}, 1: {2}, 5: {6}}, 5) == [2, 1, 0, 6, 5]


def test_who_is_passed_over_keeps_its_place() -> None:
    fifo = FifoPolicy()
    for handle in range(4):
        fifo.on_insert(handle)
    for handle in fifo.victims():
        if handle == 2:
            fifo.on_remove(handle)
            break
    fifo.check_integrity()
    assert list(fifo.victims()) == [0, 1, 3]


@pytest.mark.parametrize("name", ["fifo", "density"])
def test_a_step_of_a_walk_does_not_come_upon_what_the_steps_before_it_have_passed(name: str) -> None:
    policy = make_policy(name)
    assert isinstance(policy, LeafPolicy)
    count, step, start = 3_000, 100, NO_HANDLE
    for handle in range(count):
        policy.on_insert(handle)
    shown: list[int] = []
    pops: list[int] = []
    is_current = policy._is_current

    def counted(entry: tuple[int, int], number: int) -> bool:
        pops[-1] += 1
        return is_current(entry, number)

    policy._is_current = counted  # type: ignore[method-assign]
    while True:
        pops.append(0)
        for seen, handle in enumerate(policy.victims(start)):
            if seen == step:
                start = handle
                break
            shown.append(handle)
        else:
            break
    policy.check_integrity()
    assert sorted(shown) == list(range(count))
    # One looks at an entry when it comes up and when it goes.
    assert max(pops) <= 2 * step + 4
    # A walk of its own begins with all of them.
    assert sorted(policy.victims()) == list(range(count))


def test_a_start_keeps_the_order_that_it_is_told() -> None:
    fifo = FifoPolicy()
    fifo.start([7, 3, 5], np.full(3, -1))
    fifo.on_insert(4, below=5)
    fifo.check_integrity()
    assert list(fifo.victims()) == [7, 3, 4]
    fifo.on_remove(4)
    assert list(fifo.victims()) == [7, 3, 5]


@pytest.mark.parametrize("seed", range(20))
def test_the_order_is_that_of_a_list_of_insertions(seed: int) -> None:
    chance = random.Random(seed)
    fifo, inserted, parents = FifoPolicy(), [], {}
    for _ in range(1500):
        free = [handle for handle in range(40) if handle not in parents]
        if free and chance.random() < 0.55:
            handle = chance.choice(free)
            parents[handle] = chance.choice([-1, *parents]) if parents else -1
            fifo.on_insert(handle, below=parents[handle])
            inserted.append(handle)
        elif parents:
            childless = [handle for handle in inserted if handle not in parents.values()]
            assert list(fifo.victims()) == childless
            handle = chance.choice(childless)
            fifo.on_remove(handle)
            inserted.remove(handle)
            del parents[handle]
    fifo.check_integrity()
    assert len(fifo) == len(parents)


def test_a_core_evicts_and_expires_in_the_order_that_it_is_given() -> None:
    rig = CoreRig()
    rig.core = Core(pool=StatePool(0, 600.0), ranks=FifoPolicy(), retention_seconds=100.0)
    rig.main = rig.core.open_namespace("main", identity()).digest
    first = rig.store(range(2 * B))
    rig.clock.advance(10)
    second = rig.store(range(1000, 1000 + 2 * B))
    rig.clock.advance(10)
    rig.lookup(first, 2 * B + 1, lease=False)
    assert [item.key for item in rig.evict(1)] == [first[1]]
    rig.core.check_integrity()
    rig.clock.advance(85)
    gone = rig.core.expire_blocks(rig.clock.wall())
    assert [each.item.key for each in gone] == [first[0]]
    assert [each.item.key for each in rig.core.expire_blocks(rig.clock.wall() + 10)] == [second[1], second[0]]
    rig.core.check_integrity()


def test_a_handle_that_left_and_came_again_within_a_request_is_found_where_it_ranks_now() -> None:
    density = make_policy("density")
    density.on_request(np.array([], np.int32), 100.0)
    for handle in (0, 1):
        density.on_insert(handle, tag=handle)
    walk = density.victims()
    assert {next(walk), next(walk)} == {0, 1}
    walk.close()
    # It is known by its tag, so that its class is another one, and its key may be the one that it had.
    density.on_remove(0, tag=0)
    density.on_insert(0, tag=0)
    list(density.victims(1))
    density.check_integrity()
    assert sorted(density.victims()) == [0, 1]
