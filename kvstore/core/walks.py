"""Walks over all blocks of a namespace, by columns and in parts."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np
from numpy.typing import NDArray

from kvstore.core.index import LIVE, BlockIndex

PART_BLOCKS = 8192
_NUMBERS_END = 2**31 - 1


def tails_first(index: BlockIndex, space: int) -> Iterator[list[int]]:
    """All slots of a namespace, children before parents, some thousand at a time or all of one number. Each part is looked
    for when it is its turn: blocks may leave meanwhile, and none may come."""
    if not len(index):
        return
    counts = np.bincount(np.frombuffer(index.number, np.int32)[_living(index, space)])
    # From the last number down: as many numbers as have some thousand blocks together.
    last = len(counts)
    while last:
        first = last - 1
        found = int(counts[first])
        while first and found + counts[first - 1] <= PART_BLOCKS:
            first -= 1
            found += int(counts[first])
        if found:
            yield _slots(index, space, first, last)
        last = first


def oldest(index: BlockIndex, spaces: Collection[int], count: int) -> list[int]:
    """Up to `count` slots of these namespaces, those that were used longest ago first, and children before their parents: no block
    was used later than its parent."""
    if not len(index) or count < 1:
        return []
    live = np.frombuffer(index.flags, np.uint8) & np.uint8(LIVE) != 0
    slots = np.flatnonzero(live & np.isin(np.frombuffer(index.space, np.uint16), list(spaces)))
    used, numbers = np.frombuffer(index.used, np.uint32), np.frombuffer(index.number, np.int32)
    order = used[slots].astype(np.uint64) << np.uint64(32) | (_NUMBERS_END - numbers[slots]).astype(np.uint64)
    if count < len(slots):
        first = np.argpartition(order, count - 1)[:count]
        slots, order = slots[first], order[first]
    found: list[int] = slots[np.argsort(order, kind="stable")].tolist()
    return found


def _slots(index: BlockIndex, space: int, first: int, last: int) -> list[int]:
    """Those with numbers in [first, last), the highest first."""
    if not len(index):
        return []
    numbers = np.frombuffer(index.number, np.int32)
    slots = np.flatnonzero(_living(index, space) & (numbers >= first) & (numbers < last))
    found: list[int] = slots[np.argsort(-numbers[slots], kind="stable")].tolist()
    return found


def _living(index: BlockIndex, space: int) -> NDArray[np.bool_]:
    # The columns cannot grow while they are looked at like this, and nobody keeps what is made of them.
    live = np.frombuffer(index.flags, np.uint8) & np.uint8(LIVE) != 0
    return np.asarray(live & (np.frombuffer(index.space, np.uint16) == space))
