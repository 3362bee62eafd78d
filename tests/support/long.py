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


def examples(count: int) -> int:
    """How many examples Hypothesis makes: `count` times KVSTORE_EXAMPLES, which is 1 where it is not set."""
    return count * int(os.environ.get("KVSTORE_EXAMPLES", "1"))
