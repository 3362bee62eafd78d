"""The writer's side, on an event loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from kvstore.types import BytesLike, Durability
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.aio.link import AsyncConnection, AsyncLink
from kvstore_client.reservation import Claim, commit_request, committed
from kvstore_client.values import Committed, ReserveItem
from kvstore_client.write_messages import size_of, write_frames, write_seconds


class AsyncReservation(Claim):
    """As kvstore_client.Reservation."""

    def __init__(
        self,
        link: AsyncLink,
        connection: AsyncConnection,
        items: Sequence[ReserveItem],
        reply: pb.ReserveReply,
    ) -> None:
        super().__init__(connection, items, reply)
        self._link = link
        self._connection = connection

    async def write(self, payloads: Mapping[int, BytesLike]) -> None:
        """As Reservation.write. Checksums are made on the loop, one item at a time."""
        for index, payload in payloads.items():
            self._check_payload(index, payload)
        if not payloads:
            return
        self._check_open()
        items = sorted(payloads.items(), key=lambda pair: pair[0])
        await self._link.call(
            self._connection,
            "Write",
            write_frames(self.id, items),
            timeout=write_seconds(self._link.deadlines, size_of(items)),
        )

    async def commit(self, durability: Durability = Durability.DURABLE) -> Committed:
        """As Reservation.commit."""
        if self.id == 0:
            return Committed(0, 0)
        self._check_open()
        reply = await self._link.call(
            self._connection,
            "Commit",
            commit_request(self.id, durability),
            timeout=self._link.deadlines.commit,
        )
        self._ended = True
        return committed(reply)

    async def abort(self) -> bool:
        """As Reservation.abort."""
        if self._ended:
            return False
        self._ended = True
        reply = await self._link.hint(self._connection, "Abort", pb.AbortRequest(reservation_id=self.id))
        return reply is not None and bool(reply.was_open)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.abort()
