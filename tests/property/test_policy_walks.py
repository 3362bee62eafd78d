"""Walks of victims in steps, with anything between them: nothing is lost to later walks, and nothing comes up twice in one step."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvstore.policy.base import NO_HANDLE
from kvstore.policy.leaves import LeafPolicy
from kvstore.policy.registry import EVICTION_POLICIES, make_policy
from tests.support.long import examples

HANDLES = 200
LOOK_EVERY = 25


class Walker:
    """A policy, and what it is told of: trees of handles, some of which are held by somebody and stay."""

    def __init__(self, name: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.policy = make_policy(name)
        self.parent: dict[int, int] = {}
        self.children: dict[int, int] = {}
        self.free = list(range(HANDLES))
        self.held: set[int] = set()
        self.now = 1000.0
        self.start = NO_HANDLE

    def ask(self) -> None:
        """A request finds a chain, or nothing, and may bring more."""
        found = self.random.choice([NO_HANDLE, *self.parent])
        chain = []
        at = found
        while at != NO_HANDLE:
            chain.append(at)
            at = self.parent[at]
        if self.random.random() < 0.8:
            # Who writes only is no request.
            self.policy.on_request(np.array(chain[::-1], np.int32), self.now)
        if chain:
            self.policy.on_touch(chain)
        for _ in range(self.random.choice([0, 0, 1, 3, 6])):
            if self.free:
                handle = self.free.pop(self.random.randrange(len(self.free)))
                self.parent[handle], self.children[handle] = found, 0
                if found != NO_HANDLE:
                    self.children[found] += 1
                self.policy.on_insert(handle, found, self.random.getrandbits(6))
                found = handle

    def lose(self) -> None:
        """A handle and all below it leave though nobody wants room."""
        if not self.parent:
            return
        tree = [self.random.choice(list(self.parent))]
        for at in tree:
            tree += [each for each, above in self.parent.items() if above == at]
        for each in reversed(tree):
            self.remove(each)

    def hold(self) -> None:
        """Others hold some, or do no more."""
        self.held ^= set(self.random.sample(list(self.parent), min(len(self.parent), 5)))

    def step(self) -> None:
        """Of a walk: of a new one, or of the one before."""
        goes_on = self.start in self.parent and self.random.random() < 0.8
        shown: set[int] = set()
        walk, self.start = self.policy.victims(self.start if goes_on else NO_HANDLE), NO_HANDLE
        for handle in walk:
            assert handle in self.parent, "what is shown is here"
            if len(shown) == self.random.randint(1, 8):
                self.start = handle
                break
            if isinstance(self.policy, LeafPolicy):
                assert not self.children[handle], "what is shown has no child"
                assert handle not in shown, "it comes up once"
            shown.add(handle)
            if not self.children[handle] and handle not in self.held:
                self.remove(handle)

    def remove(self, handle: int) -> None:
        self.policy.on_remove(handle, self.random.getrandbits(6))
        above = self.parent.pop(handle)
        if above != NO_HANDLE:
            self.children[above] -= 1
        del self.children[handle]
        self.held.discard(handle)
        self.free.append(handle)

    def check(self) -> None:
        self.policy.check_integrity()
        assert len(self.policy) == len(self.parent)
        if isinstance(self.policy, LeafPolicy):
            shown, self.start = list(self.policy.victims()), NO_HANDLE
            leaves = sorted(handle for handle, count in self.children.items() if not count)
            assert sorted(shown) == leaves, "a walk from the beginning shows all that has no child, once"


@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_a_walk_in_steps_loses_nothing_whatever_happens_between_them(name: str) -> None:
    for seed in range(examples(2)):
        walker = Walker(name, seed)
        for number in range(1500):
            walker.now += walker.random.random()
            does = walker.random.choices(
                (walker.ask, walker.step, walker.hold, walker.lose), weights=(50, 35, 10, 5)
            )
            does[0]()
            if number % LOOK_EVERY == 0:
                walker.check()
