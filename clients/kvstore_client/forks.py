"""gRPC's objects in a forked child. Nothing of gRPC may run there: neither its threads nor what its locks guard have come along,
and an object that is collected needs both."""

from __future__ import annotations

import os
import weakref
from typing import TypeVar

T = TypeVar("T")

_living: weakref.WeakSet[object] = weakref.WeakSet()
_copies: list[object] = []
"""Of the parent's objects, in a child: never collected."""


def kept_in_children(made: T) -> T:
    """`made`; a forked child keeps its copy to its end, whoever lets go of it there. Any thread."""
    _living.add(made)
    return made


def _keep() -> None:
    _copies.extend(_living)


os.register_at_fork(after_in_child=_keep)
