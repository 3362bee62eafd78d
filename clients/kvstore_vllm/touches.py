"""Keys that requests use, to be told to the service: not each time, since a use counts to the second. Pure."""

from __future__ import annotations

from collections.abc import Iterable


class Touches:
    """`every_seconds`: a key is told at most that often; `most`: how many wait to be told, and how many are remembered."""

    def __init__(self, *, every_seconds: float, most: int) -> None:
        self._every = every_seconds
        self._most = most
        self._told: dict[bytes, float] = {}
        self._waiting: dict[bytes, None] = {}

    def used(self, keys: Iterable[bytes], now: float) -> None:
        for key in keys:
            told = self._told.get(key)
            if (told is None or now - told >= self._every) and len(self._waiting) < self._most:
                self._waiting[key] = None

    def take(self, now: float, *, most: int) -> list[bytes]:
        """Up to `most` keys that are to be told now, in the order of their uses."""
        taken = list(self._waiting)[:most]
        for key in taken:
            del self._waiting[key]
            # The order of the table is that in which they were told.
            self._told.pop(key, None)
            self._told[key] = now
        while len(self._told) > self._most:
            del self._told[next(iter(self._told))]
        return taken
