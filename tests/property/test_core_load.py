"""The load of columns agrees, to the last rank, with a load that takes one record after the other."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core import Core, LoadReport, describe
from kvstore.core.forest import Candidates, whole_chains
from kvstore.pool import StatePool
from kvstore.prefix import NamespaceIdentity
from kvstore.store.base import Found, Place, RecordKind
from kvstore.types import BlockKey, Checks, Lineage, NamespaceDigest
from tests.support import load_reference
from tests.support.core import TINY, B, identity
from tests.support.long import examples

NOW = 1_800_000_000.0
STEP = 4096


class Log:
    """Records of random forests in random places, with whatever can be wrong with them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.records: list[Found] = []
        self.places = list(range(1, 4000))
        self.rng.shuffle(self.places)

    def add(
        self,
        kind: RecordKind,
        space: NamespaceDigest,
        key: bytes,
        *,
        parent: bytes,
        position: int,
        length: int,
    ) -> Found:
        number = self.places.pop()
        found = Found(
            kind,
            space,
            BlockKey(key),
            BlockKey(parent),
            position,
            self.rng.choice([Lineage.EXACT, Lineage.EXACT, Lineage.BOUNDED]),
            Checks(self.rng.getrandbits(32), self.rng.getrandbits(64), self.rng.random() < 0.5),
            Place(1 + number // 16, STEP * (1 + number % 16), length),
            len(self.records),
            # Many are used in the same hour, some later than the start.
            NOW - self.rng.choice([-50.0, 0.0, 0.4, 3600.0, self.rng.uniform(0, 7200)]),
        )
        self.records.append(found)
        return found

    def namespace(self, what: NamespaceIdentity, name: str) -> NamespaceDigest:
        digest = what.digest()
        payload = describe(what, name, "endpoints")
        found = self.add(
            RecordKind.NAMESPACE, digest, digest, parent=bytes(32), position=0, length=len(payload)
        )
        self.records[-1] = replace(found, payload=payload)
        return digest

    def forest(self, space: NamespaceDigest, blocks: int, *, branching: float, alike: bool) -> None:
        """Each block goes on from the one before or, now and then, from any other or from the root."""
        keys: list[tuple[bytes, int]] = [(space, 0)]
        at = 0
        for _ in range(blocks):
            if self.rng.random() < branching:
                at = self.rng.randrange(len(keys)) if self.rng.random() < 0.7 else 0
            parent, depth = keys[at]
            key = (b"the same" if alike else self.rng.randbytes(8)) + self.rng.randbytes(24)
            keys.append((key, depth + 1))
            at = len(keys) - 1
            end = (depth + 1) * B
            self.add(RecordKind.BLOCK, space, key, parent=parent, position=end, length=TINY.block_bytes)
            for kind, length in (
                (RecordKind.STATE, TINY.state_bytes),
                (RecordKind.ROWS, self.rng.choice([TINY.rows_block_bytes, TINY.rows_overlap_block_bytes])),
            ):
                if self.rng.random() < 0.1:
                    self.add(kind, space, key, parent=bytes(32), position=end, length=length)

    def spoil(self, share: float) -> None:
        """Lose some, bend some, and put a second copy next to some."""
        spoiled = []
        for found in self.records:
            if found.kind is RecordKind.NAMESPACE or self.rng.random() >= share:
                spoiled.append(found)
                continue
            place = Place(9000 + len(spoiled), STEP, found.place.length)
            short = place._replace(length=place.length - 1)
            spoiled += {
                "lost": [],
                "short": [replace(found, place=short)],
                "moved": [replace(found, position=found.position + self.rng.choice([1, B, 2**63]))],
                "twice": [found, replace(found, place=place)],
                "short and whole": [replace(found, place=short), found],
                "unknown": [replace(found, namespace=NamespaceDigest(b"?" * 32))],
            }[self.rng.choice(["lost", "short", "moved", "twice", "short and whole", "unknown"])]
        self.records = spoiled

    def shuffle(self) -> None:
        """Another order, in which copies of one thing stay together."""
        groups: dict[tuple[bytes, bytes, RecordKind], list[Found]] = {}
        for found in self.records:
            groups.setdefault((found.namespace, found.key, found.kind), []).append(found)
        mixed = list(groups.values())
        self.rng.shuffle(mixed)
        self.records = [found for group in mixed for found in group]


def new_core() -> Core:
    return Core(pool=StatePool(1 << 20, 600.0))


def picture(core: Core, report: LoadReport) -> dict[str, object]:
    """All that a load decides, slots left out: their numbers mean nothing."""
    live = core._live
    index = live.index

    def named(slot: int) -> tuple[int, bytes]:
        return index.space[slot], bytes(index.key(slot))

    return {
        "blocks": {
            named(slot): (
                index.number[slot],
                named(index.parent[slot]) if index.parent[slot] >= 0 else None,
                live.place(slot),
                index.used[slot],
                index.flags[slot],
                index.checks(slot),
                {named(child) for child in index.children(slot)},
            )
            for slot in index.slots()
        },
        "order": [named(slot) for slot in live.ranks.victims()],
        "states": [
            (named(~handle >> 1), ~handle & 1, entry.place, entry.used, entry.lineage)
            for handle, entry in live.states.oldest()
        ],
        "segments": live.segments.counts(),
        "figures": (live.block_bytes, live.bounded_blocks, report.namespaces, report.blocks, report.states),
        "discard": sorted((place.segment_id, place.offset, place.length) for place in report.discard),
    }


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    blocks=st.integers(0, 120),
    branching=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    share=st.sampled_from([0.0, 0.05, 0.4]),
    mixed=st.booleans(),
    alike=st.booleans(),
)
def test_both_loads_agree(
    *, seed: int, blocks: int, branching: float, share: float, mixed: bool, alike: bool
) -> None:
    log = Log(seed)
    spaces = [
        log.namespace(identity(), "one"),
        log.namespace(identity(adapter="a"), "two"),
        identity(adapter="never described").digest(),
    ]
    for space in spaces:
        log.forest(space, blocks, branching=branching, alike=alike)
    log.spoil(share)
    if mixed:
        log.shuffle()
    core, reference = new_core(), new_core()
    report = core.load(log.records, {}, now_wall=NOW)
    expected = load_reference.load(reference._live, log.records, {}, now_wall=NOW)
    assert picture(core, report) == picture(reference, expected), f"seed {seed}"
    core.check_integrity()


def test_one_chain_of_a_hundred_thousand_blocks_and_as_many_roots_load_alike_and_soon() -> None:
    count = 100_000
    keys = np.random.default_rng(7).integers(0, 2**63, (count, 4)).astype(np.uint64)
    space = np.zeros(count, np.uint32)
    step = np.full(count, B)
    for parent, position, root in (
        (np.vstack([keys[:1], keys[:-1]]), np.arange(1, count + 1) * B, np.arange(count) == 0),
        (keys, np.full(count, B), np.ones(count, bool)),
    ):
        whole = whole_chains(Candidates(space, keys, parent, position, step, root))
        assert len(whole.rows) == count
        assert np.count_nonzero(whole.parent < 0) == np.count_nonzero(root)


@pytest.mark.parametrize("lost", [0, 49_999])
def test_a_chain_without_one_of_its_blocks_ends_there(lost: int) -> None:
    count = 100_000
    keys = np.random.default_rng(8).integers(0, 2**63, (count, 4)).astype(np.uint64)
    found = Candidates(
        np.zeros(count, np.uint32),
        keys,
        np.vstack([keys[:1], keys[:-1]]),
        np.arange(1, count + 1) * B,
        np.full(count, B),
        np.arange(count) == 0,
    )
    left = np.flatnonzero(np.arange(count) != lost)
    assert len(whole_chains(found.take(left)).rows) == lost
