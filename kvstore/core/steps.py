"""Long work in steps: whoever runs it may do something else between two of them."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")

Steps = Generator[S, None, T]
"""Yields what each step did, and returns the whole work's result. What it works on is in order at each yield; it looks again at
what others may have changed meanwhile. Closing it early undoes what must not stay half done."""

ITEMS_AT_ONCE = 400
"""Blocks, states or items of a call in one step: some milliseconds."""

VISITS_AT_ONCE = 10_000
"""Of what is only looked at."""


def whole(steps: Steps[S, T]) -> T:
    """All of it at once."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


def collected(steps: Steps[list[S], T]) -> tuple[list[S], T]:
    """All of it at once: what the steps did, joined, and the result."""
    did: list[S] = []
    while True:
        try:
            did += next(steps)
        except StopIteration as end:
            return did, end.value
