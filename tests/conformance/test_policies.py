"""Laws of every eviction policy: whatever is used and stored, children go before their parents, everything may go, nothing is
kept of more than was held, and a switch loses nothing."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.core import Core
from kvstore.errors import InvalidArgument
from kvstore.policy import EVICTION_POLICIES, EvictionPolicy, LeafPolicy, LruPolicy, make_policy
from kvstore.policy.base import NO_HANDLE
from kvstore.pool import StatePool
from tests.support.core import B, CoreRig, identity
from tests.support.long import examples

NAMES = tuple(EVICTION_POLICIES)


class Tree:
    """What the core does with a policy: a tree of tags under handles that are used again."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.tag: dict[int, int] = {}
        self.parent: dict[int, int] = {}
        self.free: list[int] = []
        self.most = 0
        self.now = 0.0

    def chain(self, handle: int) -> list[int]:
        found = []
        while handle >= 0:
            found.append(handle)
            handle = self.parent[handle]
        return found[::-1]

    def childless(self) -> set[int]:
        return set(self.parent) - set(self.parent.values())

    def request(self, path: tuple[int, ...]) -> int:
        """Read what is held of a path of tags and store the rest; how much was held."""
        handle, chain = -1, list[int]()
        below = {(self.parent[each], self.tag[each]): each for each in self.parent}
        for depth, _ in enumerate(path, 1):
            found = below.get((handle, hash(path[:depth])))
            if found is None:
                break
            chain.append(found)
            handle = found
        self.now += 1
        self.policy.on_request(np.array(chain, np.int32), self.now)
        if chain:
            self.policy.on_touch(chain[::-1])
        for depth in range(len(chain) + 1, len(path) + 1):
            new = self.free.pop() if self.free else len(self.parent)
            self.tag[new], self.parent[new] = hash(path[:depth]), handle
            self.policy.on_insert(new, handle, self.tag[new] & (1 << 64) - 1)
            handle = new
        self.most = max(self.most, len(self.parent))
        return len(chain)

    def remove(self, handle: int) -> None:
        assert handle in self.childless(), "children go before their parents"
        self.policy.on_remove(handle, self.tag.pop(handle) & (1 << 64) - 1)
        del self.parent[handle]
        self.free.append(handle)

    def evict(self, count: int, held: frozenset[int] = frozenset()) -> int:
        """As the core does: what may not go is passed over."""
        gone = 0
        if count:
            for handle in self.policy.victims():
                if handle in self.childless() and handle not in held:
                    self.remove(handle)
                    gone += 1
                if gone == count:
                    break
        return gone

    def check(self) -> None:
        self.policy.check_integrity()
        assert len(self.policy) == len(self.parent)


def busy(policy: EvictionPolicy, seed: int, *, requests: int = 250, capacity: int = 60) -> Tree:
    chance, tree = random.Random(seed), Tree(policy)
    for _ in range(requests):
        first = chance.choice([chance.randrange(4), chance.randrange(1000)])
        path = (first, *(chance.choice([0, 0, 0, 1]) for _ in range(chance.randrange(12))))
        tree.request(path)
        tree.evict(max(len(tree.parent) - capacity, 0))
    return tree


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(3))
def test_after_any_requests_all_that_is_held_is_ranked_and_may_go(name: str, seed: int) -> None:
    tree = busy(make_policy(name), seed)
    tree.check()
    held = len(tree.parent)
    assert held == 60
    assert tree.evict(held) == held
    tree.check()
    assert list(tree.policy.victims()) == []


@pytest.mark.parametrize("name", [name for name in NAMES if name != "lru"])
def test_only_what_has_no_child_comes_up_each_once(name: str) -> None:
    tree = busy(make_policy(name), 9)
    order = list(tree.policy.victims())
    assert len(order) == len(set(order))
    assert set(order) == tree.childless()


@pytest.mark.parametrize("name", NAMES)
def test_what_is_passed_over_stays_and_comes_up_again(name: str) -> None:
    tree = busy(make_policy(name), 4)
    held = frozenset(random.Random(4).sample(sorted(tree.childless()), 5))
    tree.evict(10_000, held)
    tree.check()
    assert tree.childless() == held
    assert set(tree.policy.victims()) >= held


@pytest.mark.parametrize("name", NAMES)
def test_a_walk_goes_on_where_it_stopped(name: str) -> None:
    tree = busy(make_policy(name), 5)
    walk = tree.policy.victims()
    shown = [next(walk) for _ in range(4)]
    walk.close()
    rest = list(tree.policy.victims(shown[3]))
    assert rest[0] == shown[3]
    assert not set(rest) & set(shown[:3])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("step", [1, 3, 7])
def test_a_walk_in_steps_takes_the_same_in_the_same_order_as_one_in_one_go(name: str, step: int) -> None:
    def gone(step: int) -> list[int]:
        tree, start, left = busy(make_policy(name), 6), NO_HANDLE, list[int]()
        held = frozenset(random.Random(6).sample(sorted(tree.childless()), 3))
        while True:
            begun = len(left)
            for handle in tree.policy.victims(start):
                if len(left) == begun + step:
                    start = handle
                    break
                if handle in tree.childless() and handle not in held:
                    tree.remove(handle)
                    left.append(handle)
            else:
                return left

    assert gone(step) == gone(10_000)


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_bounded_by_what_was_held_however_much_has_come_and_gone(name: str) -> None:
    policy, sizes = make_policy(name), []
    tree = Tree(policy)
    chance = random.Random(1)
    for number in range(4000):
        path = (chance.choice([number, chance.randrange(8)]), 0)
        tree.request(path)
        tree.evict(max(len(tree.parent) - 40, 0))
        sizes.append(policy.memory_bytes())
    tree.check()
    # Columns for 1,024, some thousand outdated entries, and a ghost for each that is held; a policy that learns has a sample of
    # 64 for each that is held, and not more in a large store than SAMPLE_MAX.
    assert max(sizes) < (800_000 if name == "density" else 300_000)


@pytest.mark.parametrize("name", NAMES)
def test_a_start_ranks_everything_below_what_comes_later(name: str) -> None:
    policy = make_policy(name)
    # Two chains, 0 1 2 and 5 6, oldest first.
    policy.start([6, 2, 1, 5, 0], np.array([5, 1, 0, -1, -1]))
    policy.check_integrity()
    assert len(policy) == 5
    gone = []
    for handle in policy.victims():
        policy.on_remove(handle)
        gone.append(handle)
    assert gone in ([6, 2, 1, 5, 0], [6, 2, 5, 1, 0])
    policy.check_integrity()


def test_one_request_longer_than_a_share_on_trial_does_not_push_itself_out() -> None:
    for name in ("s3fifo", "2q", "slru", "arc"):
        tree = Tree(make_policy(name))
        for number in range(30):
            tree.request((7, *range(20)))
            tree.request((1000 + number, *range(20)))
            tree.evict(max(len(tree.parent) - 60, 0))
        assert tree.request((7, *range(20))) == 21, name


@pytest.mark.parametrize("name", ["s3fifo", "2q", "arc"])
def test_who_comes_back_is_known_by_its_tag(name: str) -> None:
    tree = Tree(make_policy(name))
    for number in range(12):
        tree.request((number,))
    tree.evict(2)
    assert tree.request((0,)) == 0
    for number in range(100, 130):
        tree.request((number,))
        tree.evict(len(tree.parent) - 12)
    assert tree.request((0,)) == 1


@pytest.mark.parametrize("name", ["lfu", "gdsf", "sieve", "s3fifo", "slru", "arc", "density"])
def test_what_is_used_again_and_again_outlives_a_scan(name: str) -> None:
    tree = Tree(make_policy(name))
    for number in range(200):
        if number % 4 == 0:
            tree.request((5, 5, 5))
        tree.request((1000 + number,))
        tree.evict(max(len(tree.parent) - 20, 0))
    for number in range(12):
        tree.request((5000 + number,))
        tree.evict(max(len(tree.parent) - 20, 0))
    assert tree.request((5, 5, 5)) == 3


def test_an_unknown_policy_is_refused_with_the_names_of_all() -> None:
    with pytest.raises(InvalidArgument, match="s3fifo") as refused:
        make_policy("best")
    assert (refused.value.field, refused.value.value) == ("eviction", "best")


# ---- in the core ------------------------------------------------------------------------------------------------


def rig_of(name: str, retention: float = 100.0) -> CoreRig:
    rig = CoreRig()
    rig.core = Core(pool=StatePool(0, 600.0), ranks=make_policy(name), retention_seconds=retention)
    rig.main = rig.core.open_namespace("main", identity()).digest
    return rig


@pytest.mark.parametrize("name", NAMES)
def test_retention_counts_from_the_last_use_under_every_policy(name: str) -> None:
    rig = rig_of(name)
    first = rig.store(range(3 * B))
    rig.clock.advance(50)
    second = rig.store(range(1000, 1000 + 2 * B))
    rig.clock.advance(40)
    found = rig.lookup(first[:2], 2 * B + 1)
    assert found.lease_id is not None
    assert rig.core.release(found.lease_id, "r", rig.clock.monotonic())
    rig.clock.advance(15)
    gone = rig.core.expire_blocks(rig.clock.wall())
    assert [each.item.key for each in gone] == [first[2]]
    rig.clock.advance(50)
    gone = rig.core.expire_blocks(rig.clock.wall())
    assert [each.item.key for each in gone] == [second[1], second[0]]
    rig.core.check_integrity()


@pytest.mark.parametrize("before", NAMES)
@pytest.mark.parametrize("after", NAMES)
def test_a_switch_keeps_everything_while_others_read_write_and_evict(before: str, after: str) -> None:
    rig = rig_of(before)
    prompts = [range(1000 * number, 1000 * number + 9 * B) for number in range(60)]
    keys = [rig.store(prompt) for prompt in prompts]
    blocks = rig.core.statistics().blocks
    policy = make_policy(after)
    for number, _ in enumerate(rig.core.switching_eviction(policy)):
        assert rig.core.eviction_name == before
        rig.core.check_integrity()
        rig.clock.advance(1)
        rig.lookup(keys[number], 9 * B + 1)
        keys.append(rig.store(range(90_000 + 1000 * number, 90_000 + 1000 * number + 2 * B)))
        blocks += 2 - len(rig.evict(1))
    assert rig.core.eviction_name == after
    assert rig.core.statistics().blocks == blocks
    rig.core.check_integrity()
    assert len(rig.evict(blocks)) == blocks - rig_leased(rig)
    rig.core.check_integrity()


def rig_leased(rig: CoreRig) -> int:
    return rig.core.statistics().blocks


def test_a_second_switch_waits_for_the_first_and_one_that_is_given_up_changes_nothing() -> None:
    rig = rig_of("lru")
    for number in range(60):
        rig.store(range(1000 * number, 1000 * number + 9 * B))
    first = rig.core.switching_eviction(make_policy("arc"))
    next(first)
    with pytest.raises(InvalidArgument, match="on its way"):
        next(rig.core.switching_eviction(make_policy("sieve")))
    first.close()
    assert rig.core.eviction_name == "lru"
    for _ in rig.core.switching_eviction(make_policy("sieve")):
        pass
    assert rig.core.eviction_name == "sieve"
    rig.core.check_integrity()


# ---- any order --------------------------------------------------------------------------------------------------


class PolicyMachine(RuleBasedStateMachine):
    tree: Tree

    @initialize(name=st.sampled_from(NAMES))
    def begin(self, name: str) -> None:
        self.tree = Tree(make_policy(name))

    @rule(path=st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple))
    def request(self, path: tuple[int, ...]) -> None:
        self.tree.request(path)

    @rule(count=st.integers(1, 8), data=st.data())
    def evict(self, count: int, data: st.DataObject) -> None:
        held = data.draw(st.frozensets(st.sampled_from(sorted(self.tree.parent) or [0]), max_size=3))
        may_go = len(self.tree.parent) - len({each for handle in held for each in self.kept_by(handle)})
        assert self.tree.evict(count, held) == min(count, may_go)

    def kept_by(self, handle: int) -> list[int]:
        return self.tree.chain(handle) if handle in self.tree.parent else []

    @precondition(lambda self: self.tree.parent)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """Cleared or damaged: not by the policy's choice."""
        self.tree.remove(data.draw(st.sampled_from(sorted(self.tree.childless()))))

    @precondition(lambda self: self.tree.parent)
    @rule(name=st.sampled_from([name for name in NAMES if name != LruPolicy.name]))
    def switch(self, name: str) -> None:
        policy = make_policy(name)
        assert isinstance(policy, LeafPolicy)
        for leaf in sorted(self.tree.childless()):
            for handle in self.tree.chain(leaf):
                if not policy.has(handle):
                    policy.adopt(handle, self.tree.parent[handle], age=handle)
        self.tree.policy = policy

    @invariant()
    def keeps_the_laws(self) -> None:
        if hasattr(self, "tree"):
            self.tree.check()


PolicyMachine.TestCase.settings = settings(
    max_examples=examples(25), stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestPolicyMachine = PolicyMachine.TestCase
