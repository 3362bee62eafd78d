"""How many bytes are read from the disk at once, for all who read."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

from kvstore.errors import LimitExceeded

WAIT_SECONDS_MAX = 10.0
SHARES = 4
"""One owner holds a quarter at most, or one thing that is larger: who does not read what it asked for, in however many
calls, waits for itself and holds up nobody else."""


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    length: int
    owner: str
    turn: asyncio.Future[None]


class ReadGate:
    """Bytes that all fetches together hold: first come, first served among those within their share, and `busy` instead of a
    wait without end.

    What is larger than the whole gate passes when it is alone. An owner without a name has no share of its own.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._share = limit_bytes // SHARES
        self.held_bytes = 0
        self.refused_total = 0
        self._held_by: Counter[str] = Counter()
        self._waiting: list[_Place] = []

    async def enter(self, length: int, owner: str = "") -> None:
        """LimitExceeded when there is no room within WAIT_SECONDS_MAX."""
        place = _Place(length, owner, asyncio.get_running_loop().create_future())
        self._waiting.append(place)
        self._wake()
        if place.turn.done():
            return
        entered = False
        try:
            await asyncio.wait({place.turn}, timeout=WAIT_SECONDS_MAX)
            entered = place.turn.done()
        finally:
            if not entered:
                self._give_up(place)
        if not entered:
            self.refused_total += 1
            raise LimitExceeded(
                "too many bytes are being fetched; try again later",
                field="fetch_bytes",
                value=self.held_bytes + length,
                allowed=f"{self._limit} bytes for all fetches together, {self._share} for one session's",
            )

    def leave(self, length: int, owner: str = "") -> None:
        self.held_bytes -= length
        self._held_by[owner] -= length
        if not self._held_by[owner]:
            del self._held_by[owner]
        self._wake()

    def _give_up(self, place: _Place) -> None:
        if place.turn.done():
            self.leave(place.length, place.owner)
        else:
            self._waiting.remove(place)
            self._wake()

    def _is_within_share(self, place: _Place) -> bool:
        held = self._held_by[place.owner] if place.owner else 0
        return held == 0 or held + place.length <= self._share

    def _fits(self, length: int) -> bool:
        return self.held_bytes == 0 or self.held_bytes + length <= self._limit

    def _wake(self) -> None:
        waiting: list[_Place] = []
        for number, place in enumerate(self._waiting):
            if not self._is_within_share(place):
                waiting.append(place)
            elif self._fits(place.length):
                self.held_bytes += place.length
                self._held_by[place.owner] += place.length
                place.turn.set_result(None)
            else:
                waiting += self._waiting[number:]
                break
        self._waiting = waiting
