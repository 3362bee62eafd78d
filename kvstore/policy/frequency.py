"""Policies by how often something is used: LFU with aging, GDSF."""

from __future__ import annotations

import math
from array import array

import numpy as np

from kvstore.policy.base import Handles
from kvstore.policy.leaves import FIRST, LeafPolicy


class LfuPolicy(LeafPolicy):
    """Least frequently used, where a use counts half as much after as many insertions as are held.

    The key is the logarithm of the sum over uses of 2**(time of use), so that aging changes no order and costs nothing."""

    name = "lfu"
    _STEPS = 1 << 24

    def __init__(self) -> None:
        super().__init__()
        self._time = 0.0

    def on_request(self, chain: Handles, now: float) -> None:
        keys = np.frombuffer(self._key, np.int64)[chain]
        scores = np.maximum(keys - FIRST, 0) / self._STEPS
        keys = FIRST + (np.logaddexp2(scores, self._time) * self._STEPS).astype(np.int64)
        self._rank_chain(chain, 0, keys)

    def _place_of_new(self, handle: int, tag: int) -> tuple[int, int]:
        self._time += 1.0 / self._count
        return 0, FIRST + math.floor(self._time * self._STEPS)


class GdsfPolicy(LeafPolicy):
    """Greedy dual, size, frequency: how often it was used since it came, plus how far the store had come at its last use, which
    is the worth of what was evicted last. Blocks have one size and one price, so that neither changes an order."""

    name = "gdsf"
    _WORTH_BITS = 30
    _LEAST = FIRST >> _WORTH_BITS

    def __init__(self) -> None:
        super().__init__()
        self._uses = array("I")
        self._inflation = self._LEAST

    def on_request(self, chain: Handles, now: float) -> None:
        uses = np.frombuffer(self._uses, np.uint32)
        uses[chain] += 1
        worth = self._inflation + uses[chain].astype(np.int64)
        last = self._tick(len(chain))
        turns = np.arange(last, last - len(chain), -1) & ((1 << self._WORTH_BITS) - 1)
        self._rank_chain(chain, 0, worth << self._WORTH_BITS | turns)

    def _place_of_new(self, handle: int, tag: int) -> tuple[int, int]:
        turn = self._tick() & ((1 << self._WORTH_BITS) - 1)
        return 0, self._inflation + 1 << self._WORTH_BITS | turn

    def _went(self, key: int) -> None:
        self._inflation = max(self._inflation, key >> self._WORTH_BITS)

    def _enter(self, handle: int, parent: int) -> None:
        super()._enter(handle, parent)
        self._uses[handle] = 1

    def _grow(self, handle: int) -> None:
        super()._grow(handle)
        self._uses.extend([1] * (len(self._here) - len(self._uses)))

    def memory_bytes(self) -> int:
        return super().memory_bytes() + 4 * len(self._uses)
