"""Whether an order of our own does better than LRU would have done on the same requests."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

from kvstore.policy.ghosts import GHOST_BYTES

SHADOW_MAX = 1 << 15
"""Blocks of the sample that LRU would hold. Where it would hold more, half as many are in the sample."""

WARM_TURNS = 2
"""So many times what is held has left before an order is tried: what was learned of less is noise."""

LOSS_SHARE = 0.001
"""Of the blocks asked for: how far an order may fall behind."""

WINDOW_TURNS = 256
"""What was asked for this many times the held blocks ago counts by 1/e: a gain of long ago pays for no loss now."""


class LruGuard:
    """Remembers what LRU would hold, as marks (32 evenly spread bits of a key) of a sample. A chain is touched from its end on,
    so that of a chain that LRU holds a part of, that is its beginning: a block is a hit of LRU's if it is remembered, whatever
    else is in the sample."""

    def __init__(self) -> None:
        self._shadow: OrderedDict[int, None] = OrderedDict()
        self._chain: list[int] = []
        self._hits = 0
        self._ahead = 0.0
        self._asked = 0.0
        self._left = 0
        self._warm = False
        self.trusts = False
        """Whether the order may decide; else LRU is to."""
        self.mask = 0
        """Marks that have any of these bits are not in the sample."""

    def begin(self, marks: Sequence[int], held: int) -> None:
        """A request finds the blocks of these marks, of the sample, first one first; `held` are held. The one before it has
        brought all that it did."""
        self._judge(held)
        self._chain = list(marks)
        self._hits = len(marks)

    def bring(self, mark: int) -> None:
        """The request stores a block, of the sample, that was not found."""
        self._chain.append(mark)

    def leave(self) -> None:
        """A block has left."""
        self._left += 1

    def _judge(self, held: int) -> None:
        while held // (self.mask + 1) > SHADOW_MAX:
            self._thin()
        room = held // (self.mask + 1)
        shadow, chain = self._shadow, self._chain
        found = 0
        for mark in chain:
            if mark not in shadow:
                break
            found += 1
        for mark in reversed(chain):
            shadow.pop(mark, None)
            shadow[mark] = None
        while len(shadow) > room:
            shadow.popitem(last=False)
        if not self._warm:
            self._warm = self.trusts = held > 0 and self._left >= WARM_TURNS * held
            return
        if not chain or not room:
            return
        kept = math.exp(-len(chain) / (WINDOW_TURNS * room))
        self._ahead = kept * (self._ahead + self._hits - found)
        self._asked = kept * (self._asked + len(chain))
        self.trusts = self._ahead >= -LOSS_SHARE * self._asked

    def _thin(self) -> None:
        self.mask = 2 * self.mask + 1
        for mark in [mark for mark in self._shadow if mark & self.mask]:
            del self._shadow[mark]
        was = self._chain
        self._chain = [mark for mark in was if not mark & self.mask]
        self._hits = sum(not mark & self.mask for mark in was[: self._hits])

    def memory_bytes(self) -> int:
        return GHOST_BYTES * len(self._shadow) + 8 * len(self._chain)

    def check_integrity(self) -> None:
        assert len(self._shadow) <= SHADOW_MAX, "shadow"
        assert self._hits <= len(self._chain), "hits"
