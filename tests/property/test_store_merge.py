"""Which copies live: sorting columns agrees with looking at one entry after the other."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.store.base import RecordKind
from kvstore.store.columns import ENTRY
from kvstore.store.format import POLICY_KIND
from kvstore.store.merge import Part, merge
from kvstore.store.segment import COVERED_KINDS
from tests.support.long import examples

KINDS = [*(int(kind) for kind in RecordKind), POLICY_KIND]
Identity = tuple[int, int, bytes]
At = tuple[int, int]


def random_parts(rng: random.Random, *, segments: int, records: int, alike: bool) -> list[Part]:
    keys = [(b"the same" if alike else rng.randbytes(8)) + rng.randbytes(24) for _ in range(8)]
    parts = []
    for number in range(segments):
        entries = np.zeros(records, ENTRY)
        for row in range(records):
            entry = entries[row]
            entry["key"] = np.frombuffer(rng.choice(keys), "<u8")
            entry["kind"] = rng.choice(KINDS if rng.random() < 0.3 else KINDS[:2])
            # Copies made by cleaning have the sequence of what they were made from.
            entry["sequence"] = rng.randrange(1, 40)
            entry["offset"] = 4096 * (row + 1)
        spaces = np.array([rng.choice([0, 1, 5]) for _ in range(records)], np.uint32)
        parts.append(Part(10 + number, entries, spaces))
    return parts


def one_by_one(parts: list[Part]) -> tuple[set[At], set[At]]:
    """(what lives, clears)."""
    newest: dict[Identity, tuple[tuple[int, int, int], At]] = {}
    for number, part in enumerate(parts):
        for row, entry in enumerate(part.entries):
            kind = int(entry["kind"])
            key = b"" if kind in COVERED_KINDS else entry["key"].tobytes()
            age = (int(entry["sequence"]), part.segment_id, int(entry["offset"]))
            identity = (int(part.spaces[row]), kind, key)
            if identity not in newest or newest[identity][0] < age:
                newest[identity] = (age, (number, row))
    covered = {
        (space, kind, age[0])
        for (space, clear, _), (age, _) in newest.items()
        for kind in COVERED_KINDS.get(clear, ())
    }
    lives = {
        at
        for (space, kind, _), (age, at) in newest.items()
        if not any((space, kind) == each[:2] and age[0] < each[2] for each in covered)
    }
    return lives, {at for (_, kind, _), (_, at) in newest.items() if kind in COVERED_KINDS}


@settings(max_examples=examples(200), deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    segments=st.integers(0, 4),
    records=st.integers(0, 40),
    alike=st.booleans(),
)
def test_both_merges_agree(seed: int, segments: int, records: int, alike: bool) -> None:
    parts = random_parts(random.Random(seed), segments=segments, records=records, alike=alike)
    alive, clears = merge(parts)
    lives = {(number, row) for number, mask in enumerate(alive) for row in np.flatnonzero(mask).tolist()}
    assert (lives, {(clear.part, clear.row) for clear in clears}) == one_by_one(parts), f"seed {seed}"
    for clear in clears:
        entry = parts[clear.part].entries[clear.row]
        assert (clear.kind, clear.sequence) == (entry["kind"], entry["sequence"])
        assert clear.space == parts[clear.part].spaces[clear.row]
