"""How a request is given up by the one who asked for it."""

from __future__ import annotations

import threading


class Stopped(Exception):
    """The request was given up: nobody waits for its result."""


class Stop:
    """A flag that another thread may set; the work looks at it between its steps."""

    def __init__(self) -> None:
        self._flag = threading.Event()

    def set(self) -> None:
        self._flag.set()

    @property
    def is_set(self) -> bool:
        return self._flag.is_set()

    def check(self) -> None:
        """Raise Stopped if the flag is set."""
        if self._flag.is_set():
            raise Stopped
