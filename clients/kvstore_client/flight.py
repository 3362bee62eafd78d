"""Flights: what this client has said that it computes, so that others may wait for it instead of computing it too."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

from kvstore.v1 import cache_pb2 as pb
from kvstore_client.link import Connection, Link


class Flight:
    """Belongs to the session that it was announced in. Leaving the context ends it.

    Forgetting it is safe: it ends with the session or at its deadline. Until then others may wait for its blocks, so end
    it when they are stored with their states, or given up.
    """

    def __init__(self, link: Link, connection: Connection, *, flight_id: int) -> None:
        self.id = flight_id
        self._link = link
        self._connection = connection
        self._ended = False
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Flight(id={self.id}, ended={self._ended})"

    def end(self) -> bool:
        """Wake whoever waits. Whether this ended it: False where it had ended before, or the service has gone."""
        with self._lock:
            if self._ended:
                return False
            self._ended = True
        reply = self._link.hint(self._connection, "EndFlight", pb.EndFlightRequest(flight_id=self.id))
        return reply is not None and bool(reply.was_open)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
