"""The order in which things are to be evicted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class EvictionPolicy(Protocol):
    """Ranks handles (small whole numbers >= 0 that the caller owns and may use again after `on_remove`).

    The caller keeps a tree: a handle's parent is inserted before it and removed after it. A policy ranks a handle before
    its parent, so that walking `victims` from the front meets children first, and a parent that has become childless
    meanwhile after them. Every method but `victims` and `start` is O(1), or O(log n), per handle.
    """

    follows_uses: bool
    """Whether `victims` come in the order of their last uses, all of them: what is found too young then ends a search."""

    def start(self, handles: Sequence[int] | NDArray[np.integer[Any]]) -> None:
        """The handles of a start, oldest first, children before parents, each once. Nothing is ranked yet."""

    def on_insert(self, handle: int, below: int = -1) -> None:
        """A new handle. With `below` >= 0 it ranks just before that handle (its parent), else last of all."""

    def on_touch(self, handles: Iterable[int], below: int = -1) -> None:
        """These were used: they rank in the order given (leaf first, root last), before `below` or last of all.

        `below` is the parent of the last handle, when that one has just been used already.
        """

    def on_touch_many(self, handles: NDArray[np.int32], below: int = -1) -> None:
        """As on_touch, for many, each once and none of them `below`."""

    def on_remove(self, handle: int) -> None: ...

    def victims(self, start: int = -1) -> Iterator[int]:
        """All handles, or all that have no child, first to go first; or those from `start` on, which was yielded before and is
        still ranked. The handle that was yielded last may be removed while iterating; nothing else may change."""

    def __len__(self) -> int: ...

    def memory_bytes(self) -> int: ...

    def check_integrity(self) -> None:
        """Raise AssertionError unless what it keeps agrees with itself."""
