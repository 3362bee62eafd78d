"""The handoff calls: a state at any position in, and out again under a ticket."""

from __future__ import annotations

import grpc.aio

from kvstore.errors import GeometryMismatch, InvalidArgument, LimitExceeded, UnknownTicket
from kvstore.pool.handoffs import TICKET_BYTES, Handoff, Take
from kvstore.profile.layout import open_rows_bytes, state_layout
from kvstore.service import encode
from kvstore.service.delivery import send
from kvstore.service.engine import Engine
from kvstore.service.frames import FRAME_BYTES, Incoming, Receiver
from kvstore.service.session import Session
from kvstore.service.status import Context
from kvstore.service.tenant_limits import namespace_of_caller
from kvstore.service.waiting import until_end
from kvstore.types import Checks, NamespaceDigest
from kvstore.v1 import cache_pb2 as pb

POSITION_MAX = 8_388_608
SECONDS_MAX = 24 * 3600.0


class HandoffCalls:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def put(self, session: Session, context: Context) -> pb.HandoffTicket:
        engine = self._engine
        engine.check_open()
        # For all frames together: a trickle of them must not hold its memory for ever.
        deadline = engine.time.monotonic() + engine.core.reservation_seconds
        frame = await self._next_frame(context, session, deadline)
        if frame is None or not frame.HasField("header"):
            raise InvalidArgument(
                "the first frame has the header", field="header", value="none", allowed="a HandoffHeader"
            )
        header = frame.header
        tenant = self._check(header)
        engine.tenants.begin(tenant, length=header.length)
        seconds = (
            encode.take_seconds(header.seconds, field="header.seconds", high=SECONDS_MAX)
            or engine.config.handoff_ttl
        )
        lineage = encode.take_lineage(header.lineage, field="header.lineage")
        with engine.tenants.moving(tenant, header.length), engine.staging.holding(header.length, session.id):
            receiver = Receiver()
            incoming = Incoming("the handoff", header.length, Checks(header.crc32))
            list(receiver.accept([incoming], frame.data))
            while (frame := await self._next_frame(context, session, deadline)) is not None:
                if frame.HasField("header"):
                    raise InvalidArgument(
                        "only the first frame has the header", field="header", value="another", allowed="none"
                    )
                list(receiver.accept([], frame.data))
            receiver.finish()
            handoff = Handoff(incoming.payload(), header.position, lineage, incoming.checks, header.note)
            ticket = engine.handoffs.put(
                NamespaceDigest(header.namespace),
                handoff,
                takes=header.takes or 1,
                seconds=seconds,
                now=engine.time.monotonic(),
            )
        return pb.HandoffTicket(ticket=ticket, seconds=seconds)

    def _check(self, header: pb.HandoffHeader) -> str:
        """Whose it is."""
        engine = self._engine
        info = namespace_of_caller(engine, encode.take_digest(header.namespace, field="header.namespace"))
        info.check_prefix()
        if not 1 <= header.position <= POSITION_MAX:
            raise InvalidArgument(
                "a state has a position",
                field="header.position",
                value=header.position,
                allowed=f"1 to {POSITION_MAX}",
            )
        wanted = state_layout(info.profile, header.position).total_bytes
        rows = open_rows_bytes(info.profile, header.position)
        if header.length not in (wanted, wanted + rows):
            raise GeometryMismatch(
                f"a state of namespace {info.name!r} at position {header.position} has another length",
                field="header.length",
                value=header.length,
                allowed=f"{wanted} bytes, or {wanted + rows} with the open block's rows",
            )
        if header.length > engine.config.handoff_bytes:
            raise LimitExceeded(
                "larger than all handoffs may be together",
                field="header.length",
                value=header.length,
                allowed=f"{engine.config.handoff_bytes} bytes",
            )
        return info.tenant

    async def _next_frame(
        self, context: Context, session: Session, deadline: float
    ) -> pb.HandoffFrame | None:
        frame = await until_end(
            context.read(),
            session=session,
            seconds=deadline - self._engine.time.monotonic(),
            late=lambda: InvalidArgument(
                "the handoff's bytes did not all come in time",
                field="data",
                value="too late",
                allowed=f"all of it within {self._engine.core.reservation_seconds:g} s",
            ),
        )
        return None if frame is grpc.aio.EOF else frame

    async def take(self, request: pb.TakeHandoffRequest, session: Session, context: Context) -> None:
        engine = self._engine
        info = namespace_of_caller(engine, encode.take_digest(request.namespace))
        namespace = info.digest
        engine.tenants.begin(info.tenant)
        if len(request.ticket) != TICKET_BYTES:
            raise InvalidArgument(
                f"a ticket of {len(request.ticket)} bytes",
                field="ticket",
                value=request.ticket,
                allowed=f"{TICKET_BYTES} bytes",
            )
        now = engine.time.monotonic()
        take = engine.handoffs.take(request.ticket, namespace, session.id, now)
        delivered = False
        try:
            length = memoryview(take.handoff.payload).nbytes
            engine.tenants.spend_bytes(info.tenant, length)
            with engine.tenants.moving(info.tenant, length):
                await self._send(take, namespace, session, context, deadline=now + engine.core.lease_seconds)
            delivered = True
        finally:
            if not delivered:
                engine.handoffs.give_back(take.take_id, engine.time.monotonic())
                engine.activity.note()

    async def _send(
        self, take: Take, namespace: bytes, session: Session, context: Context, *, deadline: float
    ) -> None:
        """All of it by `deadline`: a take lasts as long as decoding may, its bytes are not waited for as long."""
        engine = self._engine
        handoff = take.handoff
        payload = memoryview(handoff.payload)
        header = pb.HandoffHeader(
            namespace=namespace,
            position=handoff.position,
            length=len(payload),
            crc32=handoff.checks.crc32,
            take_id=take.take_id,
            lineage=encode.put_lineage(handoff.lineage),
            note=handoff.note,
        )
        for at in range(0, max(len(payload), 1), FRAME_BYTES):
            frame = pb.HandoffFrame(
                header=header if at == 0 else None, data=bytes(payload[at : at + FRAME_BYTES])
            )
            await until_end(
                send(context, frame),
                session=session,
                seconds=min(deadline, take.deadline) - engine.time.monotonic(),
                late=lambda: UnknownTicket(
                    "the handoff's bytes were not taken in time, and the take is given back",
                    field="ticket",
                    value=take.ticket,
                    allowed=f"all of it within {engine.core.lease_seconds:g} s",
                ),
            )

    def drop(self, request: pb.DropHandoffRequest) -> bool:
        namespace = namespace_of_caller(self._engine, encode.take_digest(request.namespace)).digest
        was_here = self._engine.handoffs.drop(request.ticket, namespace, self._engine.time.monotonic())
        self._engine.activity.note()
        return was_here

    def confirm(self, take_id: int, session: Session) -> bool:
        was_out = self._engine.handoffs.confirm(take_id, session.id, self._engine.time.monotonic())
        self._engine.activity.note()
        return was_out
