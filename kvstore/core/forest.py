"""Blocks that were found, as a forest in columns: which chains are whole, when each block was last used, and in which
order they go. A million blocks take a fraction of a second: no step visits them one by one, or level by level."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Rows = NDArray[np.int64]
Mask = NDArray[np.bool_]

NONE = -1

_BY_SPACE = np.uint64(0x9E3779B97F4A7C15)
"""An odd number without a pattern: it spreads namespaces over the words that are sorted."""


class Candidates(NamedTuple):
    """Blocks that fit their namespace by themselves. space: number of the namespace; key, parent: (n, 4) words; position:
    token count at the block's end; step: tokens of a block; root: its parent is the namespace itself."""

    space: NDArray[np.uint32]
    key: Words
    parent: Words
    position: Rows
    step: Rows
    root: Mask

    def take(self, rows: Rows) -> Candidates:
        return Candidates(
            self.space[rows],
            self.key[rows],
            self.parent[rows],
            self.position[rows],
            self.step[rows],
            self.root[rows],
        )


class Whole(NamedTuple):
    """The candidates whose chain is whole, ascending, and for each which of them is its parent: an index into `rows`,
    or NONE for a first block."""

    rows: Rows
    parent: Rows


class Order(NamedTuple):
    """used: last uses such that no block was used later than its parent. oldest: all blocks, the first to go first."""

    used: Rows
    oldest: Rows


def whole_chains(found: Candidates) -> Whole:
    """Of blocks with the same key in a namespace the first counts. A chain begins with a first block at one step, and
    goes on from block to block by one step; a block whose chain does not is an orphan, and so is all below it."""
    words = _words(found.key, found.space)
    order = np.argsort(words)
    words = words[order]
    twins = _twins(words)
    if twins.any() and len(first := _first_of_each(found, np.sort(order[twins]))) < len(order):
        inner = whole_chains(found.take(first))
        return Whole(first[inner.rows], inner.parent)
    parent = _parents(found, words, order)
    follows = ~found.root & (parent != NONE) & (found.position[parent] + found.step == found.position)
    begins = found.root & (found.position == found.step)
    kept = _lead_to_begin(np.where(follows, parent, NONE), begins)
    rows = np.flatnonzero(kept)
    number = np.cumsum(kept) - 1
    return Whole(rows, np.where(begins[rows], NONE, number[parent[rows]]))


def settle(parent: Rows, number: Rows, used: Rows, place: NDArray[np.uint64]) -> Order:
    """Last uses and order of eviction of whole chains. For each block its parent (or NONE), its place in its chain, when
    it was used, and where it lies in the log.

    A parent was used whenever a child was: last uses are persisted by the segment and may say otherwise. Blocks go by
    last use; among equal ones, which are many since last uses are persisted by the hour, chain by chain as they lie in
    the log, each from its tail to its root. The newest chain takes its ancestors with it to the end of the order; an
    older branch keeps only its own blocks. So children go before their parents, and evicting in this order empties one
    segment after the other instead of thinning out all of them.
    """
    count = len(parent)
    inner = parent != NONE
    children = np.bincount(parent[inner], minlength=count)
    # A run is a way down without branches. What is asked of all blocks below one is asked of its run's rest, and of the
    # runs below that.
    bottom, used = _runs(parent, inner & (children[parent] == 1), used)
    is_bottom = bottom == np.arange(count)
    run = (np.cumsum(is_bottom) - 1)[bottom]
    heads = np.flatnonzero(~inner | (children[parent] != 1))
    above = np.full(len(heads), NONE, np.int64)
    above[run[heads]] = np.where(inner[heads], run[parent[heads]], NONE)
    latest = np.zeros(len(heads), np.int64)
    latest[run[heads]] = used[heads]
    tails = np.flatnonzero(children == 0)
    newest = np.full(len(heads), NONE, np.int64)
    newest[run[tails[np.argsort(place[tails], kind="stable")]]] = np.arange(len(tails))
    _raise_to_greatest_below(above, latest, newest)
    branches = np.zeros(len(heads), np.int64)
    np.maximum.at(branches, above[above != NONE], latest[above != NONE])
    used = np.maximum(used, branches[run])
    # Two sorts of one word each: chain by chain from tail to root, then by last use.
    turns = np.argsort(_word(newest[run], count - number))
    turn = np.empty(count, np.int64)
    turn[turns] = np.arange(count)
    return Order(used, np.argsort(_word(used, turn)))


def _words(keys: Words, spaces: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """One word for each key: equal ones have equal words, and a few others too."""
    return np.asarray(keys[:, 0] ^ (spaces * _BY_SPACE), np.uint64)


def _word(high: Rows, low: Rows) -> NDArray[np.uint64]:
    """Two numbers below 2**32 as one that sorts by the first, then by the second."""
    return high.astype(np.uint64) << np.uint64(32) | low.astype(np.uint64)


def _twins(words: NDArray[np.uint64]) -> Mask:
    """Which of sorted words are there more than once."""
    twins = np.zeros(len(words), dtype=bool)
    twins[1:] = words[1:] == words[:-1]
    twins[:-1] |= twins[1:]
    return twins


def _first_of_each(found: Candidates, rows: Rows) -> Rows:
    """All candidates, ascending, but for those of `rows` that have the key of an earlier one of them."""
    identity = (*found.key[rows].T, found.space[rows])
    order = np.lexsort((rows, *identity))
    again = np.ones(len(rows), dtype=bool)
    again[:1] = False
    for column in identity:
        ordered = column[order]
        again[1:] &= ordered[1:] == ordered[:-1]
    kept = np.ones(len(found.key), dtype=bool)
    kept[rows[order[again]]] = False
    return np.flatnonzero(kept)


def _parents(found: Candidates, words: NDArray[np.uint64], order: Rows) -> Rows:
    """The candidate that is each one's parent, or NONE. words: of all candidates in their order."""
    parent = np.full(len(order), NONE, np.int64)
    # In most logs a block's parent was written just before it.
    near = (found.parent[1:] == found.key[:-1]).all(axis=1) & (found.space[1:] == found.space[:-1])
    parent[1:][near] = np.flatnonzero(near)
    rows = np.flatnonzero((parent == NONE) & ~found.root)
    if not len(rows):
        return parent
    wanted = _words(found.parent[rows], found.space[rows])
    # In their order, so that the search walks through memory once.
    sorting = np.argsort(wanted)
    rows, wanted = rows[sorting], wanted[sorting]
    at = np.minimum(np.searchsorted(words, wanted), len(words) - 1)
    held = order[at]
    same = (found.key[held] == found.parent[rows]).all(axis=1) & (found.space[held] == found.space[rows])
    parent[rows[same]] = held[same]
    unsure = rows[~same & (words[at] == wanted)]
    if len(unsure):
        # Keys that share their first word, which somebody has to choose: told apart by Python's seeded hash.
        twins = order[_twins(words)]
        known = dict(zip(_named(found.space, found.key, twins), twins.tolist(), strict=True))
        names = _named(found.space, found.parent, unsure)
        parent[unsure] = [known.get(name, NONE) for name in names]
    return parent


def _named(spaces: NDArray[np.uint32], keys: Words, rows: Rows) -> list[tuple[int, bytes]]:
    return [(space, key.tobytes()) for space, key in zip(spaces[rows].tolist(), keys[rows], strict=True)]


def _lead_to_begin(parent: Rows, begins: Mask) -> Mask:
    """Which rows lead, from parent to parent, to one that begins."""
    count = len(parent)
    good, bad = count, count + 1
    up = np.concatenate([np.where(begins, good, np.where(parent == NONE, bad, parent)), [good, bad]])
    under_way = np.flatnonzero(up < count)
    while len(under_way):
        up[under_way] = up[up[under_way]]
        under_way = under_way[up[under_way] < count]
    return np.asarray(up[:count] == good)


def _runs(parent: Rows, sole: Mask, used: Rows) -> tuple[Rows, Rows]:
    """For each row the last row of its run, and the latest use from the row to that one. sole: it is its parent's only
    child."""
    bottom = np.arange(len(parent))
    bottom[parent[sole]] = np.flatnonzero(sole)
    latest = used.copy()
    while True:
        following = bottom[bottom]
        latest = np.maximum(latest, latest[bottom])
        if np.array_equal(following, bottom):
            return bottom, latest
        bottom = following


def _raise_to_greatest_below(above: Rows, *values: Rows) -> None:
    """Make each value the greatest of its run's and of all runs below. above: the run that a run hangs on, or NONE."""
    up = above.copy()
    while len(under_way := np.flatnonzero(up != NONE)):
        for value in values:
            np.maximum.at(value, up[under_way], value[under_way])
        up[under_way] = up[up[under_way]]
