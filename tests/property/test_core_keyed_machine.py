"""Keyed namespaces against a plain set: what is held, what a lease keeps, and the laws after every step."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvstore.types import BlockKey, ItemId, ItemKind
from tests.support.long import examples
from tests.unit.test_core_keyed import KeyedRig

NAMES = st.lists(st.sampled_from("abcdefgh"), max_size=6, unique=True)


class KeyedMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.rig = KeyedRig()
        self.held: set[BlockKey] = set()
        self.leases: dict[int, list[BlockKey]] = {}

    @rule(names=NAMES)
    def keep(self, names: list[str]) -> None:
        self.held |= set(self.rig.keep(*names))

    @rule(names=NAMES, use=st.booleans(), lease=st.booleans())
    def contains(self, names: list[str], use: bool, lease: bool) -> None:
        keys = self.rig.names(*names)
        found = self.rig.contains(keys, use=use, lease=lease)
        assert list(found.held) == [key in self.held for key in keys]
        covered = [key for key in keys if key in self.held]
        assert (found.lease_id is not None) == (lease and bool(covered))
        if found.lease_id is not None:
            self.leases[found.lease_id] = covered

    @rule(name=st.sampled_from("abcdefgh"))
    def lose(self, name: str) -> None:
        [key] = self.rig.names(name)
        gone = self.rig.core.forget(self.rig.rows, ItemId(key, ItemKind.BLOCK))
        assert bool(gone) == (key in self.held)
        self.held.discard(key)
        for covered in self.leases.values():
            # Stored again, it is another's: the lease covers what was there when it was given.
            covered[:] = [BlockKey(b"") if each == key else each for each in covered]

    @rule(count=st.integers(1, 8))
    def evict(self, count: int) -> None:
        gone = self.rig.evict_rows(count)
        assert len(gone) == len(set(gone)) <= count
        assert set(gone) <= self.held
        assert not any(set(gone) & set(covered) for covered in self.leases.values())
        self.held -= set(gone)

    @rule(data=st.data())
    def end_a_lease(self, data: st.DataObject) -> None:
        if self.leases:
            lease_id = data.draw(st.sampled_from(sorted(self.leases)))
            assert self.rig.core.release(lease_id, "r", self.rig.clock.monotonic())
            del self.leases[lease_id]

    @rule()
    def time_passes(self) -> None:
        self.rig.clock.advance(3)

    @invariant()
    def leases_read_what_they_cover(self) -> None:
        for lease_id, covered in self.leases.items():
            lease = self.rig.core.lease(lease_id, "r", self.rig.clock.monotonic())
            items = self.rig.core.fetch_list(lease, first_block=0, block_count=len(covered), want_state=False)
            assert [item.item.key if item else b"" for item in items] == covered

    @invariant()
    def all_laws_hold(self) -> None:
        self.rig.core.check_integrity()


TestKeyedMachine = KeyedMachine.TestCase
TestKeyedMachine.settings = settings(max_examples=examples(25), stateful_step_count=20, deadline=None)
