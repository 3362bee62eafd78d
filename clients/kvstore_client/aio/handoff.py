"""Handoffs, on an event loop."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from kvstore.types import Lineage
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.aio.link import AsyncConnection, AsyncLink
from kvstore_client.handoff_frames import HandoffContent, HandoffReader


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncHandoffTake:
    """As kvstore_client.HandoffTake."""

    payload: bytes
    position: int
    note: bytes
    lineage: Lineage
    take_id: int
    _link: AsyncLink = field(repr=False)
    _connection: AsyncConnection = field(repr=False)

    async def confirm(self) -> bool:
        """As HandoffTake.confirm."""
        request = pb.ConfirmHandoffRequest(take_id=self.take_id)
        reply = await self._link.hint(self._connection, "ConfirmHandoff", request)
        return reply is not None and bool(reply.was_out)


async def read_handoff(frames: AsyncGenerator[pb.HandoffFrame, None]) -> HandoffContent:
    """As kvstore_client.handoff.read_handoff."""
    reader = HandoffReader()
    async with aclosing(frames):
        async for frame in frames:
            reader.feed(frame)
    return reader.finish()
