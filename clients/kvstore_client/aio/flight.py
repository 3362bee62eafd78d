"""Flights, on an event loop."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from kvstore.v1 import cache_pb2 as pb
from kvstore_client.aio.link import AsyncConnection, AsyncLink


class AsyncFlight:
    """As kvstore_client.Flight."""

    def __init__(self, link: AsyncLink, connection: AsyncConnection, *, flight_id: int) -> None:
        self.id = flight_id
        self._link = link
        self._connection = connection
        self._ended = False

    def __repr__(self) -> str:
        return f"AsyncFlight(id={self.id}, ended={self._ended})"

    async def end(self) -> bool:
        """As Flight.end."""
        if self._ended:
            return False
        self._ended = True
        reply = await self._link.hint(self._connection, "EndFlight", pb.EndFlightRequest(flight_id=self.id))
        return reply is not None and bool(reply.was_open)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.end()
