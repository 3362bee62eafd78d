"""How many bytes are read from the disk at once, for all who read."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from kvstore.errors import LimitExceeded
from kvstore.service.shares import NOBODY, Shares

WAIT_SECONDS_MAX = 10.0


@dataclass(eq=False, frozen=True, slots=True)
class _Place:
    length: int
    session: str
    turn: asyncio.Future[None]


class ReadGate:
    """Bytes that all fetches together hold: first come, first served, and `busy` instead of a wait without end. A session that
    holds its share stands aside for others.

    What is larger than the whole gate passes when it is alone.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self.held_bytes = 0
        self.refused_total = 0
        self._waiting: deque[_Place] = deque()
        self._shares = Shares(limit_bytes)

    async def enter(self, length: int, session: str = NOBODY) -> None:
        """LimitExceeded when there is no room within WAIT_SECONDS_MAX."""
        # Those who wait for others of their own session only are no queue.
        is_first = not any(self._shares.allows(each.session, each.length) for each in self._waiting)
        if is_first and self._shares.allows(session, length) and self._fits(length):
            self._take(length, session)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = _Place(length, session, turn)
        self._waiting.append(place)
        entered = False
        try:
            await asyncio.wait({turn}, timeout=WAIT_SECONDS_MAX)
            entered = turn.done()
        finally:
            if not entered:
                self._give_up(place)
        if not entered:
            self.refused_total += 1
            raise LimitExceeded(
                "too many bytes are being fetched; try again later",
                field="fetch_bytes",
                value=self.held_bytes + length,
                allowed=f"{self._limit} bytes for all fetches together, {self._shares.share_bytes} for a session",
            )

    def leave(self, length: int, session: str = NOBODY) -> None:
        self.held_bytes -= length
        self._shares.give_back(session, length)
        self._wake()

    def _take(self, length: int, session: str) -> None:
        self.held_bytes += length
        self._shares.take(session, length)

    def _give_up(self, place: _Place) -> None:
        if place.turn.done():
            self.leave(place.length, place.session)
        else:
            self._waiting.remove(place)
            self._wake()

    def _fits(self, length: int) -> bool:
        return self.held_bytes == 0 or self.held_bytes + length <= self._limit

    def _wake(self) -> None:
        for place in list(self._waiting):
            if not self._shares.allows(place.session, place.length):
                continue
            if not self._fits(place.length):
                break
            self._waiting.remove(place)
            self._take(place.length, place.session)
            place.turn.set_result(None)
