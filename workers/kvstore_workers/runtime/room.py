"""A limit on how many requests are in a process at once, and the door that is shut before it ends."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager

from kvstore.errors import Draining, LimitExceeded


class Room(AbstractContextManager[None]):
    """Counts the requests inside; LIMIT_EXCEEDED on entering past the limit, DRAINING once it drains. `what` names the
    process in those errors."""

    def __init__(self, limit: int, *, what: str) -> None:
        self._limit = limit
        self._what = what
        self._changed = threading.Condition()
        self._inside = 0
        self._draining = False

    @property
    def inside(self) -> int:
        with self._changed:
            return self._inside

    @property
    def draining(self) -> bool:
        with self._changed:
            return self._draining

    def drain(self) -> None:
        """Let nobody in any more; those inside stay."""
        with self._changed:
            self._draining = True

    def wait_until_empty(self, *, seconds: float) -> bool:
        """Return when nobody is inside, or after `seconds`; whether it is empty."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._inside, timeout=seconds)

    def __enter__(self) -> None:
        with self._changed:
            if self._draining:
                raise Draining(
                    f"this {self._what} is shutting down",
                    field=self._what,
                    value="draining",
                    allowed=f"another {self._what}",
                )
            if self._inside >= self._limit:
                raise LimitExceeded(
                    f"this {self._what} is busy",
                    field="requests_running",
                    value=self._inside,
                    allowed=f"at most {self._limit}",
                )
            self._inside += 1

    def __exit__(self, *args: object) -> None:
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()
