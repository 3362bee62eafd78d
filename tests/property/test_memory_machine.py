"""The block cache against a model: whatever is asked in whatever order, what it hands out is what was put there, what is
pinned stays as it is, and its books add up."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.memory import BlockCache, Extent, Slot, why_not_mapped
from kvstore.memory.cache import Key
from tests.support.long import examples

DOMAINS = ["", "a", "b"]
SIZES = [100, 4096, 5000, 20_000]
BUDGET = 1 << 20
EXTENT = 128 << 10


def bytes_of(domain: str, key: Key) -> bytes:
    return (f"{domain} {key} ".encode() * (key[2] // 8 + 1))[: key[2]]


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.given: list[Extent] = []
        """As often as sessions have it."""
        self.cache = BlockCache(BUDGET, extent_bytes=EXTENT)
        self.content: dict[tuple[str, Key], bytes] = {}
        """What lies where, by what is held or was pinned when it was."""
        self.pinned: list[tuple[Slot, int, bytes]] = []
        """With the generation at which it was pinned."""
        self.begun: list[tuple[Slot, str, Key]] = []
        self.places = 0

    @rule(domain=st.sampled_from(DOMAINS), size=st.sampled_from(SIZES), for_writer=st.booleans())
    def begin(self, domain: str, size: int, for_writer: bool) -> None:
        self.places += 1
        key = (1, self.places, size)
        slot = self.cache.begin(domain, key, room_bytes=size + 100, for_writer=for_writer)
        if slot is not None:
            assert slot.generation % 2 == 1
            assert self.cache.begin(domain, key, room_bytes=size + 100) is None
            assert self.cache.find(domain, key) is None
            slot.pages[100 : 100 + size] = bytes_of(domain, key)
            self.begun.append((slot, domain, key))

    @precondition(lambda self: self.begun)
    @rule(data=st.data(), does_come=st.booleans(), keep=st.booleans())
    def end(self, data: st.DataObject, does_come: bool, keep: bool) -> None:
        slot, domain, key = self.begun.pop(data.draw(st.integers(0, len(self.begun) - 1)))
        if not does_come:
            self.cache.abandon(slot)
            return
        self.cache.finish(slot, begin=100, length=key[2])
        self.content[domain, key] = bytes_of(domain, key)
        if keep:
            self.pinned.append((slot, slot.generation, self.content[domain, key]))
        else:
            self.cache.unpin([slot])

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def find(self, data: st.DataObject) -> None:
        domain, key = data.draw(st.sampled_from(sorted(self.content)))
        slot = self.cache.find(domain, key)
        if slot is not None:
            assert slot.extent.domain == domain
            assert bytes(slot.payload) == self.content[domain, key]
            self.pinned.append((slot, slot.generation, self.content[domain, key]))

    @precondition(lambda self: self.content)
    @rule(data=st.data(), other=st.sampled_from(DOMAINS))
    def another_domain_finds_nothing(self, data: st.DataObject, other: str) -> None:
        domain, key = data.draw(st.sampled_from(sorted(self.content)))
        if other != domain:
            assert self.cache.find(other, key) is None

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        slot, _, _ = self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1)))
        self.cache.unpin([slot])

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        slot, _, _ = data.draw(st.sampled_from(self.pinned))
        self.cache.give(slot.extent)
        self.given.append(slot.extent)

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def a_session_ends(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, len(self.given)))
        ended, self.given = self.given[:count], self.given[count:]
        self.cache.take_back(ended)

    @rule(budget=st.sampled_from([0, EXTENT, BUDGET // 2, BUDGET]))
    def resize(self, budget: int) -> None:
        self.cache.resize(budget)
        if not (self.pinned or self.begun or self.given):
            assert self.cache.allocated_bytes <= budget

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        domain, key = data.draw(st.sampled_from(sorted(self.content)))
        self.cache.forget([key])
        del self.content[domain, key]
        assert self.cache.find(domain, key) is None

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        domain, old = data.draw(st.sampled_from(sorted(self.content)))
        self.places += 1
        new = (2, self.places, old[2])
        self.cache.move({old: new})
        self.content[domain, new] = self.content.pop((domain, old))
        assert self.cache.find(domain, old) is None

    @precondition(lambda self: self.begun)
    @rule(data=st.data(), keep=st.booleans())
    def forget_what_was_begun(self, data: st.DataObject, keep: bool) -> None:
        """It comes, and only who began it may have it."""
        slot, domain, key = self.begun.pop(data.draw(st.integers(0, len(self.begun) - 1)))
        self.cache.forget([key])
        self.cache.check()
        self.cache.finish(slot, begin=100, length=key[2])
        assert self.cache.find(domain, key) is None
        if keep:
            self.pinned.append((slot, slot.generation, bytes_of(domain, key)))
            return
        generation = slot.generation
        self.cache.unpin([slot])
        # Where the budget has shrunk its extent may have gone with it.
        assert slot.extent.descriptor < 0 or slot.generation != generation

    @precondition(lambda self: self.begun)
    @rule(data=st.data())
    def move_what_was_begun(self, data: st.DataObject) -> None:
        slot, domain, old = self.begun.pop(data.draw(st.integers(0, len(self.begun) - 1)))
        self.places += 1
        new = (2, self.places, old[2])
        self.cache.move({old: new})
        self.cache.finish(slot, begin=100, length=old[2])
        self.content[domain, new] = bytes_of(domain, old)
        assert self.cache.find(domain, old) is None
        self.pinned.append((slot, slot.generation, bytes_of(domain, old)))

    @precondition(lambda self: self.content)
    @rule(data=st.data(), other=st.sampled_from(DOMAINS))
    def find_all(self, data: st.DataObject, other: str) -> None:
        """All of them or none: of one domain, and held."""
        names = data.draw(st.lists(st.sampled_from(sorted(self.content)), min_size=1, max_size=5))
        slots = self.cache.find_all(other, [key for _, key in names])
        held = [self.cache.find(domain, key) for domain, key in names]
        self.cache.unpin(slot for slot in held if slot is not None)
        if None in held or any(domain != other for domain, _ in names):
            assert slots is None
        else:
            assert slots == held
            self.cache.pin(slots)
            self.pinned += [
                (slot, slot.generation, self.content[each]) for slot, each in zip(slots, names, strict=True)
            ]

    @invariant()
    def what_is_pinned_does_not_change(self) -> None:
        for slot, generation, content in self.pinned:
            assert slot.generation == generation
            assert generation % 2 == 0
            assert bytes(slot.payload) == content

    @invariant()
    def books_add_up(self) -> None:
        self.cache.check()

    @invariant()
    def what_sessions_have_is_not_given_up(self) -> None:
        assert all(extent.descriptor >= 0 for extent in self.given)


TestMachine = pytest.mark.skipif(bool(why_not_mapped()), reason=why_not_mapped() or "it is mapped")(
    Machine.TestCase
)
TestMachine.settings = settings(max_examples=examples(60), stateful_step_count=60, deadline=None)
