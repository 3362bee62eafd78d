"""The Cache service: each call decoded, done, encoded."""

# ruff: noqa: N802 -- the methods have the names of the wire contract
from __future__ import annotations

from contextlib import aclosing
from typing import Any

import grpc.aio

from kvstore.core import ReserveItem
from kvstore.errors import InvalidArgument, UnknownLease, UnknownReservation
from kvstore.prefix.identity import NamespaceIdentity
from kvstore.service import encode
from kvstore.service.engine import NO_SESSION, Engine, LeasedItems
from kvstore.service.frames import Cutter, Incoming, Receiver
from kvstore.service.handoff_calls import HandoffCalls
from kvstore.service.reader import Read
from kvstore.service.session import SESSION_METADATA, Session
from kvstore.service.status import Context, answering
from kvstore.service.uploads import Upload
from kvstore.service.waiting import until_end
from kvstore.types import BlockKey, Checks, ItemKind
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1 import cache_pb2_grpc


class CacheServicer(cache_pb2_grpc.CacheServicer):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._handoffs = HandoffCalls(engine)

    def check_ready(self) -> None:
        self._engine.check_ready()

    def _session(self, context: Context) -> Session:
        for key, value in context.invocation_metadata() or ():
            if key == SESSION_METADATA:
                return self._engine.sessions.get(value if isinstance(value, str) else "")
        return self._engine.sessions.get("")

    # ---- namespaces and lookup ----------------------------------------------------------------------------------

    @answering
    async def OpenNamespace(self, request: pb.OpenNamespaceRequest, context: Context) -> pb.Namespace:
        identity = NamespaceIdentity(
            encode.take_profile(request.profile),
            request.weights_revision,
            request.numerics,
            request.adapter,
            request.tenant_salt,
        )
        return encode.put_namespace(
            await self._engine.registry.open(request.name, identity, request.policy or None)
        )

    @answering
    async def Lookup(self, request: pb.LookupRequest, context: Context) -> pb.LookupReply:
        found = self._engine.lookup(
            encode.take_digest(request.namespace),
            encode.split_keys(request.keys, most=self._engine.config.keys),
            prompt_tokens=request.prompt_tokens,
            costs=encode.take_costs(request.costs),
            lease=request.lease,
            session=self._session(context).id if request.lease else NO_SESSION,
        )
        return pb.LookupReply(
            plan=encode.put_plan(found.plan),
            lease_id=found.lease_id or 0,
            lease_seconds=self._engine.core.lease_seconds if found.lease_id else 0.0,
            blocks_held=found.coverage.blocks,
        )

    @answering
    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseReply:
        return pb.ReleaseReply(was_held=self._engine.release(request.lease_id, self._session(context).id))

    # ---- fetch --------------------------------------------------------------------------------------------------

    @answering
    async def Fetch(self, request: pb.FetchRequest, context: Context) -> None:
        session = self._session(context)
        leased = LeasedItems(
            self._engine,
            self._engine.lease(request.lease_id, session.id),
            first_block=request.first_block,
            block_count=request.block_count,
            state=request.state,
        )
        cutter = Cutter[pb.ItemHeader]()
        with self._engine.activity.transfer():
            async with aclosing(self._engine.reader.read(leased.items(), leased)) as reads:
                number = 0
                async for read in reads:
                    header = _header(leased.place_of(number), read)
                    for headers, data in cutter.add(header, b"" if read.payload is None else read.payload):
                        await self._send(
                            context, session, request.lease_id, pb.ItemFrame(items=headers, data=data)
                        )
                    number += 1
                for headers, data in cutter.rest():
                    await self._send(
                        context, session, request.lease_id, pb.ItemFrame(items=headers, data=data)
                    )

    async def _send(self, context: Context, session: Session, lease_id: int, frame: pb.ItemFrame) -> None:
        """One frame under a lease that holds: a reader slower than its lease gets an error, and never other bytes."""
        lease = self._engine.lease(lease_id, session.id)
        await until_end(
            context.write(frame),
            session=session,
            seconds=lease.deadline - self._engine.time.monotonic(),
            late=lambda: UnknownLease(
                "the lease ended before its bytes were taken; look up again",
                field="lease_id",
                value=lease_id,
                allowed=f"fetching within {self._engine.core.lease_seconds:g} s",
            ),
        )

    # ---- writing ------------------------------------------------------------------------------------------------

    @answering
    async def Reserve(self, request: pb.ReserveRequest, context: Context) -> pb.ReserveReply:
        session = self._session(context)
        items = [_reserve_item(item, f"items[{index}]") for index, item in enumerate(request.items)]
        result = self._engine.reserve(session, encode.take_digest(request.namespace), items)
        return pb.ReserveReply(
            reservation_id=result.reservation_id or 0,
            outcomes=[pb.ReserveOutcome.Name(each.outcome) for each in result.outcomes],
            owner_age_seconds=[each.owner_age_seconds for each in result.outcomes],
            reservation_seconds=self._engine.core.reservation_seconds if result.reservation_id else 0.0,
        )

    @answering
    async def Write(self, requests: Any, context: Context) -> pb.WriteReply:
        session = self._session(context)
        with self._engine.activity.transfer():
            first = await self._next_frame(context, session, self._engine.core.reservation_seconds)
            if first is None or not first.reservation_id:
                raise InvalidArgument(
                    "the first frame names the reservation",
                    field="reservation_id",
                    value=0,
                    allowed="an open reservation",
                )
            upload = self._engine.uploads.get(first.reservation_id, session.id)
            arrived: dict[int, Incoming] = {}
            taken = 0
            try:
                receiver = Receiver()
                frame: pb.WriteFrame | None = first
                while frame is not None:
                    if frame.reservation_id not in (0, upload.reservation_id):
                        raise InvalidArgument(
                            "all frames of a call are for one reservation",
                            field="reservation_id",
                            value=frame.reservation_id,
                            allowed=f"{upload.reservation_id}, or 0",
                        )
                    announced = []
                    for item in frame.items:
                        if item.item in arrived:
                            raise InvalidArgument(
                                "the item is announced twice",
                                field="items.item",
                                value=item.item,
                                allowed="each item once",
                            )
                        incoming = self._engine.uploads.start(upload, item.item, item.length, _checks(item))
                        taken += incoming.length
                        arrived[item.item] = incoming
                        announced.append(incoming)
                    for incoming in receiver.accept(announced, frame.data):
                        incoming.check()
                    frame = await self._next_frame(
                        context, session, upload.deadline - self._engine.time.monotonic(), upload
                    )
                receiver.finish()
                self._engine.uploads.finish(upload, arrived)
                stored, taken = taken, 0
            finally:
                self._engine.uploads.drop(upload, taken)
        return pb.WriteReply(items=len(arrived), bytes=stored)

    async def _next_frame(
        self, context: Context, session: Session, seconds: float, upload: Upload | None = None
    ) -> pb.WriteFrame | None:
        """None at the stream's end."""
        frame = await until_end(
            context.read(),
            session=session,
            seconds=seconds,
            late=lambda: UnknownReservation(
                "the reservation ended before its bytes came",
                field="reservation_id",
                value=0 if upload is None else upload.reservation_id,
                allowed=f"writing within {self._engine.core.reservation_seconds:g} s",
            ),
        )
        return None if frame is grpc.aio.EOF else frame

    @answering
    async def Commit(self, request: pb.CommitRequest, context: Context) -> pb.CommitReply:
        session = self._session(context)
        with self._engine.activity.transfer():
            report = await self._engine.commit(request.reservation_id, session)
        return pb.CommitReply(items=len(report.visible), bytes=report.bytes)

    @answering
    async def Abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortReply:
        return pb.AbortReply(was_open=self._engine.abort(request.reservation_id, self._session(context)))

    # ---- handoffs -----------------------------------------------------------------------------------------------

    @answering
    async def PutHandoff(self, requests: Any, context: Context) -> pb.HandoffTicket:
        with self._engine.activity.transfer():
            return await self._handoffs.put(self._session(context), context)

    @answering
    async def TakeHandoff(self, request: pb.TakeHandoffRequest, context: Context) -> None:
        with self._engine.activity.transfer():
            await self._handoffs.take(request, self._session(context), context)

    @answering
    async def ConfirmHandoff(
        self, request: pb.ConfirmHandoffRequest, context: Context
    ) -> pb.ConfirmHandoffReply:
        return pb.ConfirmHandoffReply(was_out=self._handoffs.confirm(request.take_id, self._session(context)))


def _header(place: tuple[ItemKind, int], read: Read) -> pb.ItemHeader:
    kind, index = place
    if read.item is None or read.payload is None:
        return pb.ItemHeader(kind=pb.ItemKind.Name(kind), index=index, missing=True)
    checks = read.item.checks
    return pb.ItemHeader(
        kind=pb.ItemKind.Name(kind),
        index=index,
        length=memoryview(read.payload).nbytes,
        crc32=checks.crc32,
        xxh3_64=checks.xxh3_64,
        has_xxh3=checks.has_xxh3,
        lineage=encode.put_lineage(read.item.lineage),
    )


def _reserve_item(item: pb.ReserveItem, at: str) -> ReserveItem:
    return ReserveItem(
        BlockKey(item.key),
        encode.take_kind(item.kind, field=f"{at}.kind"),
        item.parent,
        item.position,
        item.length,
        to_pool=item.to_pool,
        to_ssd=item.to_ssd or item.kind == pb.ItemKind.BLOCK,
        lineage=encode.take_lineage(item.lineage, field=f"{at}.lineage"),
    )


def _checks(item: pb.WriteItem) -> Checks:
    return Checks(item.crc32, item.xxh3_64 if item.has_xxh3 else 0, item.has_xxh3)
