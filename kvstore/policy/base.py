"""The order in which things are to be evicted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol


class EvictionPolicy(Protocol):
    """Ranks handles (small whole numbers >= 0 that the caller owns and may use again after `on_remove`).

    The caller keeps a tree: a handle's parent is inserted before it. A policy ranks a handle before its parent, so that
    walking `victims` from the front meets children first. Every method but `victims` is O(1) per handle.
    """

    def on_insert(self, handle: int, below: int = -1) -> None:
        """A new handle. With `below` >= 0 it ranks just before that handle (its parent), else last of all."""

    def on_touch(self, handles: Iterable[int], below: int = -1) -> None:
        """These were used: they rank in the order given (leaf first, root last), before `below` or last of all.

        `below` is the parent of the last handle, when that one has just been used already.
        """

    def on_remove(self, handle: int) -> None: ...

    def victims(self, start: int = -1) -> Iterator[int]:
        """All handles, first to go first, or those from `start` on. The handle that was yielded last may be removed while iterating; nothing
        else may change."""

    def __len__(self) -> int: ...
