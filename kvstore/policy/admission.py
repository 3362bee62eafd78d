"""Which new blocks are worth a write: all of them, or those that somebody has asked for before."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from kvstore.policy.ghosts import GHOSTS_MAX, Ghosts


class Admission(StrEnum):
    ALWAYS = "always"
    SECOND_SIGHT = "second-sight"


class SecondSight:
    """Remembers what was asked for and not stored, the latest `most` tags. A block that comes again finds itself remembered, and
    is stored; what is never asked for again never costs a write (Kangaroo and other flash caches admit so)."""

    def __init__(self, most: int = GHOSTS_MAX) -> None:
        self._seen = Ghosts()
        self._most = most

    def admit(self, tags: Sequence[int]) -> int:
        """Of a chain of new blocks how many, from the first on, were asked for before; the others are remembered. A block whose
        parent is not stored can't be."""
        count = 0
        while count < len(tags) and self._seen.take(tags[count]):
            count += 1
        for tag in tags[count:]:
            self._seen.add(tag, self._most)
        return count

    def memory_bytes(self) -> int:
        return self._seen.memory_bytes()
