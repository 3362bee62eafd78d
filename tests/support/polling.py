"""Asking until something has come to be."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_for(read: Callable[[], bool], seconds: float = 10.0) -> None:
    """Ask again until it is so; the question itself takes a while, so this needs no pause."""
    end = time.monotonic() + seconds
    while not read():
        assert time.monotonic() < end, "it did not come to be"
