"""Whoever follows the events holds what the store holds, whatever happens in between."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.changes import Change, Journal, block_events, state_events
from kvstore.core.states import kind_of
from kvstore.core.steps import collected
from kvstore.events.base import AllBlocksCleared
from kvstore.types import ItemId, ItemKind, StateSource, Tier
from kvstore_client.events import HeldBlocks
from tests.support.core import B, CoreRig, identity

PROMPTS = [
    [*range(6 * B)],
    [*range(3 * B), *[300] * (3 * B)],
    [*range(3 * B), *[300] * B, *[301] * (2 * B)],
    [7] * (4 * B),
]

OPERATIONS = st.one_of(
    st.tuples(
        st.just("store"),
        st.integers(0, len(PROMPTS) - 1),
        st.integers(1, 6),
        st.sampled_from(["none", "ssd", "pool", "rows", "both"]),
        st.booleans(),
    ),
    st.tuples(st.just("evict"), st.integers(1, 4), st.booleans()),
    st.tuples(st.just("clear"), st.booleans()),
    st.tuples(st.just("drop"), st.sampled_from([None, Tier.POOL, Tier.SSD])),
    st.tuples(st.just("expire"), st.booleans()),
    st.tuples(st.just("damage"), st.integers(0, 3), st.integers(0, 5), st.sampled_from(list(ItemKind))),
    st.tuples(st.just("tell")),
)


class Followed:
    """A core whose journal is short, its reader, and what tells the reader of it as the service does."""

    def __init__(self, limit: int) -> None:
        self.journal = Journal(limit)
        self.rig = CoreRig(journal=self.journal, pool_states=3)
        self.other = self.rig.core.open_namespace("other", identity(tenant_salt="t")).digest
        self.held = HeldBlocks()

    def tell(self) -> None:
        if self.journal.is_lost:
            self.journal.begin()
            everything, _ = collected(self.rig.core.all_held())
            self.held.apply([AllBlocksCleared()])
            self._apply(everything)
        self._apply(self.journal.take(10_000))

    def _apply(self, changes: list[Change]) -> None:
        for digest in (self.rig.main, self.other):
            own = [change for change in changes if change.namespace == digest]
            self.held.apply([*block_events(own), *state_events(own)])

    def do(self, operation: tuple[Any, ...]) -> None:
        rig, core = self.rig, self.rig.core
        match operation:
            case ("store", prompt, blocks, kind, in_main):
                tokens = PROMPTS[prompt][: blocks * B]
                edge = len(tokens) // B * B
                rig.store(
                    tokens,
                    ssd=[edge] if kind in ("ssd", "both") else (),
                    pool=[edge] if kind in ("pool", "both") else (),
                    rows=range(edge // B) if kind == "rows" else (),
                    namespace=rig.main if in_main else self.other,
                )
            case ("evict", blocks, prefer_states):
                rig.evict(blocks, prefer_states=prefer_states)
            case ("clear", whole):
                core.clear(None if whole else rig.main)
            case ("drop", tier):
                core.drop_states(rig.main, tier)
            case ("expire", far):
                rig.clock.advance(80 * 3600.0 if far else 700.0)
                core.expire_blocks(rig.clock.wall())
                core.pool.expire(rig.clock.monotonic())
            case ("damage", prompt, number, kind):
                keys = rig.keys(PROMPTS[prompt])
                if number < len(keys):
                    core.forget(rig.main, ItemId(keys[number], kind))
            case ("tell",):
                self.tell()

    def check(self) -> None:
        self.tell()
        live = self.rig.core._live
        for digest in (self.rig.main, self.other):
            number = self.rig.core.namespace(digest).number
            slots = [slot for slot in live.index.slots() if live.index.space[slot] == number]
            assert self.held.keys(digest) == {live.index.key(slot) for slot in slots}
            states = {(key, StateSource.POOL) for key, _ in live.pool.keys(digest)}
            for slot in slots:
                for handle in live.states_of(slot):
                    source = SOURCES[kind_of(handle)]
                    states.add((live.index.key(slot), source))
            assert self.held.states(digest) == states


SOURCES = {ItemKind.STATE: StateSource.CHECKPOINT, ItemKind.ROWS: StateSource.ROWS}


@settings(max_examples=120, deadline=None)
@given(st.integers(1, 40), st.lists(OPERATIONS, max_size=25))
def test_the_fold_of_the_events_is_what_is_held(limit: int, operations: list[tuple[Any, ...]]) -> None:
    followed = Followed(limit)
    followed.tell()
    for operation in operations:
        followed.do(operation)
    followed.check()
