"""Blows that fall inside of an operation: this process's own system calls, counted and interrupted.

The functions of `os` are replaced in a child that is about to die, and nowhere else; what the store is made of does
not matter. Calls of compiled libraries are not counted: kills at random moments meet those.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

CHANGING = (
    "pwritev",
    "pwrite",
    "write",
    "fdatasync",
    "fsync",
    "rename",
    "replace",
    "unlink",
    "posix_fallocate",
    "ftruncate",
)
"""Calls that change what is on a disk, or say that it is there."""

SYNCS = ("fdatasync", "fsync")
_PAGE = 4096


def die_in_call(number: int, *, share: float) -> None:
    """The `number`-th changing call from now, counted from 1, is this process's last. share: how much of it is done,
    of a write in whole pages; of another call all from 0.5 on, and nothing below."""
    left = number

    def dying(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            nonlocal left
            left -= 1
            if left:
                return call(*arguments, **named)
            if name == "pwritev" and 0.0 < share < 1.0:
                descriptor, parts, *rest = arguments
                call(descriptor, first_bytes(parts, share), *rest, **named)
            elif share >= 0.5:
                call(*arguments, **named)
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError("unreachable")

        return counted

    for name in CHANGING:
        setattr(os, name, dying(name, getattr(os, name)))


def first_bytes(parts: Sequence[Any], share: float) -> list[memoryview]:
    """The beginning of a vector of buffers, cut where a page ends."""
    views = [memoryview(part).cast("B") for part in parts]
    left = int(sum(view.nbytes for view in views) * share) // _PAGE * _PAGE
    kept = []
    for view in views:
        kept.append(view[:left])
        left -= kept[-1].nbytes
        if not left:
            break
    return kept


def lose_syncs() -> None:
    """Every sync of this process does nothing and says that it did: a checker that has teeth must find out."""
    for name in SYNCS:
        setattr(os, name, lambda descriptor: None)
    write = os.pwritev

    def without_flags(descriptor: int, parts: Sequence[Any], offset: int, flags: int = 0) -> int:
        return write(descriptor, parts, offset)

    setattr(os, "pwritev", without_flags)  # noqa: B010 - to the type checker the name is a constant
