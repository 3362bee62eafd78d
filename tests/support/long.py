"""Proof by volume, kept out of `make test`: what it adds to the shorter version beside it is more of the same."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest


def long(*values: object) -> Any:
    """A parameter of a test that only `make test-long` runs."""
    return pytest.param(*values, marks=pytest.mark.long)


def seeds(count: int, *, of: int) -> Iterable[Any]:
    """The first `count` of them in `make test`, all in `make test-long`."""
    return [*range(count), *map(long, range(count, of))]


TIMES = int(os.environ.get("KVSTORE_EXAMPLES", "1"))
"""How many times more than in `make test` is to be done."""


def examples(count: int) -> int:
    """How many examples Hypothesis makes, or seeds a loop has: `count` in `make test`."""
    return count * TIMES


def one_in(count: int) -> int:
    """The step of a loop over all calls, or all places: `count` in `make test`, so that one in so many is tried; every one
    where so many times more is asked for."""
    return max(count // TIMES, 1)
