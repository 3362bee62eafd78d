"""A limit on how many requests are in a process at once."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager

from kvstore.errors import LimitExceeded


class Room(AbstractContextManager[None]):
    """Counts the requests inside; LIMIT_EXCEEDED on entering past the limit. `what` names the process in that error."""

    def __init__(self, limit: int, *, what: str) -> None:
        self._limit = limit
        self._what = what
        self._lock = threading.Lock()
        self._inside = 0

    @property
    def inside(self) -> int:
        with self._lock:
            return self._inside

    def __enter__(self) -> None:
        with self._lock:
            if self._inside >= self._limit:
                raise LimitExceeded(
                    f"this {self._what} is busy",
                    field="requests_running",
                    value=self._inside,
                    allowed=f"at most {self._limit}",
                )
            self._inside += 1

    def __exit__(self, *args: object) -> None:
        with self._lock:
            self._inside -= 1
