"""Of all that the segments hold: which copy of each thing is the newest, and what clears cover. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.store.segment import COVERED_KINDS, KINDS_END

_COVERING = np.zeros(256, dtype=bool)
_COVERING[list(COVERED_KINDS)] = True
# Odd numbers without a pattern: they spread kinds and namespaces over the words that are sorted.
_BY_SPACE, _BY_KIND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)


class Part(NamedTuple):
    """One segment's entries (dtype ENTRY), and for each the number of its namespace among all segments."""

    segment_id: int
    entries: NDArray[np.void]
    spaces: NDArray[np.uint32]


class Clear(NamedTuple):
    """The newest clear of its kind in its namespace, and where it is: a part and a row of that part."""

    space: int
    kind: int
    sequence: int
    part: int
    row: int


class Merged(NamedTuple):
    """alive: for each part, which of its entries are needed. clears: those that count, spent or not."""

    alive: list[NDArray[np.bool_]]
    clears: list[Clear]


def merge(parts: Sequence[Part]) -> Merged:
    """The newest copy of each (namespace, key, kind) lives unless a later clear of its namespace covers it. Copies made
    by cleaning have the same sequence, and the later place wins. Of clears the newest of its kind lives in each
    namespace, whatever its key: it covers what older ones did."""
    alive = _newest(parts)
    clears = _clears(parts, alive)
    if clears:
        spaces = 1 + max(int(part.spaces.max(initial=0)) for part in parts)
        covered = np.zeros((spaces, KINDS_END), np.uint64)
        for clear in clears:
            for kind in COVERED_KINDS[clear.kind]:
                covered[clear.space, kind] = max(int(covered[clear.space, kind]), clear.sequence)
        for number, part in enumerate(parts):
            alive[number] &= part.entries["sequence"] >= covered[part.spaces, part.entries["kind"]]
    return Merged(alive, clears)


def _newest(parts: Sequence[Part]) -> list[NDArray[np.bool_]]:
    starts = np.cumsum([0, *(len(part.entries) for part in parts)])
    alive = np.ones(starts[-1], dtype=bool)
    # Sorting one word of each brings copies together, and a few strangers; those are then told apart by all they are.
    words = np.concatenate([_words(part) for part in parts]) if parts else np.zeros(0, np.uint64)
    order = np.argsort(words)
    words = words[order]
    same = words[1:] == words[:-1]
    together = np.zeros(len(words), dtype=bool)
    together[1:] = same
    together[:-1] |= same
    rows = np.sort(order[together])
    if len(rows):
        alive[rows[_older(parts, starts, rows)]] = False
    return [alive[begin:end] for begin, end in pairwise(starts.tolist())]


def _words(part: Part) -> NDArray[np.uint64]:
    kinds = part.entries["kind"]
    own = np.where(_COVERING[kinds], 0, part.entries["key"][:, 0])
    return np.asarray(own ^ (part.spaces * _BY_SPACE) ^ (kinds * _BY_KIND), np.uint64)


def _older(parts: Sequence[Part], starts: NDArray[np.intp], rows: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Which of these rows (ascending, counted through all parts) have a newer copy among them."""
    ends = np.searchsorted(rows, starts)
    picked = [
        (part, rows[ends[number] : ends[number + 1]] - starts[number]) for number, part in enumerate(parts)
    ]
    entries = np.concatenate([part.entries[own] for part, own in picked])
    spaces = np.concatenate([part.spaces[own] for part, own in picked])
    segments = np.concatenate([np.full(len(own), part.segment_id, np.uint64) for part, own in picked])
    kinds = entries["kind"]
    keys = np.where(_COVERING[kinds][:, None], 0, entries["key"])
    identity = (*keys.T, kinds, spaces)
    order = np.lexsort((entries["offset"], segments, entries["sequence"], *identity))
    last = np.zeros(len(order), dtype=bool)
    last[-1] = True
    for column in identity:
        ordered = column[order]
        last[:-1] |= ordered[1:] != ordered[:-1]
    older = np.empty(len(order), dtype=bool)
    older[order] = ~last
    return older


def _clears(parts: Sequence[Part], alive: Sequence[NDArray[np.bool_]]) -> list[Clear]:
    return [
        Clear(
            int(part.spaces[row]),
            int(part.entries["kind"][row]),
            int(part.entries["sequence"][row]),
            number,
            row,
        )
        for number, (part, mask) in enumerate(zip(parts, alive, strict=True))
        for row in np.flatnonzero(mask & _COVERING[part.entries["kind"]]).tolist()
    ]
