"""The order in which things are to be evicted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

NO_HANDLE = -1

Handles = NDArray[np.int32]


class EvictionPolicy(Protocol):
    """Ranks handles (small whole numbers >= 0 that the caller owns and may use again after `on_remove`).

    The caller keeps a tree: a handle's parent is inserted before it and removed after it. A policy ranks a handle before
    its parent, so that walking `victims` from the front meets children first, and a parent that has become childless
    meanwhile after them. Every method but `victims`, `start` and `on_request` is O(1), or O(log n), per handle.

    A use is told twice over: `on_request` once, by who reads, with all that is read; `on_touch` by whoever needs the chain to
    stay, writers too, as often as that is, but not again within a second.
    """

    name: ClassVar[str]

    remembers: bool
    """Whether it wants tags."""

    def start(
        self, handles: Sequence[int] | NDArray[np.integer[Any]], parents: NDArray[np.integer[Any]]
    ) -> None:
        """The handles of a start, oldest first, children before parents, each once, and each one's parent or -1. Nothing is
        ranked yet."""

    def on_request(self, chain: Handles, now: float) -> None:
        """A request begins, and reads these, first one first: a chain from its root on, or nothing. `now`: seconds of the clock
        by which last uses are told."""

    def on_insert(self, handle: int, below: int = NO_HANDLE, tag: int = 0) -> None:
        """A new handle; its parent is `below` (-1: none). `tag`: 64 bits of its key, by which what has left is known again."""

    def on_touch(self, handles: Iterable[int], below: int = NO_HANDLE) -> None:
        """These were used: where uses count they rank in the order given (leaf first, root last), before `below` or last of
        all. `below` is the parent of the last handle, when that one has just been used already."""

    def on_touch_many(self, handles: Handles, below: int = NO_HANDLE) -> None:
        """As on_touch, for many, each once and none of them `below`."""

    def on_remove(self, handle: int, tag: int = 0) -> None:
        """It has left, for whatever reason. `tag`: as it was inserted with, or would have been."""

    def victims(self, start: int = NO_HANDLE) -> Iterator[int]:
        """All handles, or all that have no child, first to go first; or, of the walk before, which ended at `start`, the rest
        with that one, which is still ranked. The handle that was yielded last may be removed while iterating; nothing else may change. What comes
        up is taken for looked at: a policy that gives second chances has then given them."""

    def __len__(self) -> int: ...

    def memory_bytes(self) -> int: ...

    def check_integrity(self) -> None:
        """Raise AssertionError unless what it keeps agrees with itself."""
