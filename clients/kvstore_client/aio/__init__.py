"""The client for programs on an event loop: the same calls, to be awaited. grpcio and protobuf are all that it needs."""

from kvstore_client.aio.client import AsyncCacheClient, AsyncContained, AsyncLookup
from kvstore_client.aio.flight import AsyncFlight
from kvstore_client.aio.handoff import AsyncHandoffTake
from kvstore_client.aio.lease import AsyncLease
from kvstore_client.aio.reservation import AsyncReservation

__all__ = [
    "AsyncCacheClient",
    "AsyncContained",
    "AsyncFlight",
    "AsyncHandoffTake",
    "AsyncLease",
    "AsyncLookup",
    "AsyncReservation",
]
