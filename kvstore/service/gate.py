"""How many bytes are read from the disk at once, for all who read."""

from __future__ import annotations

import asyncio
from collections import deque

from kvstore.errors import LimitExceeded

WAIT_SECONDS_MAX = 10.0


class ReadGate:
    """Bytes that all fetches together hold: first come, first served, and `busy` instead of a wait without end.

    What is larger than the whole gate passes when it is alone.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self.held_bytes = 0
        self.refused_total = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def enter(self, length: int) -> None:
        """LimitExceeded when there is no room within WAIT_SECONDS_MAX."""
        if not self._waiting and self._fits(length):
            self.held_bytes += length
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = (length, turn)
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
                allowed=f"{self._limit} bytes for all fetches together",
            )

    def leave(self, length: int) -> None:
        self.held_bytes -= length
        self._wake()

    def _give_up(self, place: tuple[int, asyncio.Future[None]]) -> None:
        if place[1].done():
            self.leave(place[0])
        else:
            self._waiting.remove(place)
            self._wake()

    def _fits(self, length: int) -> bool:
        return self.held_bytes == 0 or self.held_bytes + length <= self._limit

    def _wake(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            length, turn = self._waiting.popleft()
            self.held_bytes += length
            turn.set_result(None)
