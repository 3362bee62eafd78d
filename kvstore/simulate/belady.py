"""Belady's policy, which knows the log: what is used again last goes first, and what is worth less is not stored."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.policy.leaves import LeafPolicy
from kvstore.simulate.log import RequestLog

NEVER = 2**31 - 1
"""The next use of what is not used again."""

Uses = NDArray[np.int64]


class BeladyPolicy(LeafPolicy):
    """Keys are next uses, as numbers of requests, negated. Its caller says what it stores and uses. It stands for the best
    that any policy could do, one block at a time; without `refuses` for the best of those that store everything."""

    name = "belady"

    def __init__(self, *, refuses: bool = True) -> None:
        super().__init__()
        self._refuses = refuses
        self._arriving: Sequence[int] = ()
        self._arrived = 0
        self._bars: Sequence[int] | None = None
        self._gone = 0

    def expect(self, uses: Uses) -> None:
        """The next insertions are of blocks with these next uses, in order; what must go for the one that comes after the
        free places are used up is decided with them."""
        self._arriving = uses.tolist()
        self._arrived = 0

    def refuse_below(self, uses: Uses | None) -> None:
        """From now on the n-th victim is one that is used again later than `uses[n]`, or there is none. None: any."""
        self._bars = uses.tolist() if self._refuses and uses is not None else None
        self._gone = 0

    def used(self, handles: NDArray[np.int32], uses: Uses) -> None:
        """These, a chain from its first block on, are used now, and then again at `uses`."""
        self._rank_chain(handles, 0, -uses)

    def on_remove(self, handle: int, tag: int = 0) -> None:
        super().on_remove(handle, tag)
        self._gone += 1

    def _place_of_new(self, handle: int, tag: int) -> tuple[int, int]:
        use = self._arriving[self._arrived]
        self._arrived += 1
        return 0, -use

    def _may_go(self, key: int) -> bool:
        return self._bars is None or (self._gone < len(self._bars) and -key > self._bars[self._gone])


class NextUses:
    """For each block of each request the number of the next request that asks for it, or NEVER. Four bytes an access."""

    def __init__(self, log: RequestLog) -> None:
        self._begins = np.zeros(len(log) + 1, np.int64)
        self._uses = np.empty(log.accesses, np.int32)
        upcoming = np.full(log.footprint, NEVER, np.int32)
        end = log.accesses
        self._begins[-1] = end
        for request in range(len(log) - 1, -1, -1):
            blocks = log.blocks(request)
            begin = end - len(blocks)
            self._uses[begin:end] = upcoming[blocks]
            upcoming[blocks] = request
            self._begins[request] = end = begin

    def of(self, request: int) -> Uses:
        return self._uses[self._begins[request] : self._begins[request + 1]].astype(np.int64)
