"""The Cache service: each call decoded, done, encoded."""

# ruff: noqa: N802 -- the methods have the names of the wire contract
from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from typing import Any

import grpc.aio

from kvstore.core import ReserveItem, ReserveOutcome
from kvstore.errors import InvalidArgument, PolicyTooLarge, UnknownReservation
from kvstore.prefix.identity import NamespaceIdentity
from kvstore.prefix.joined import JoinedKeys
from kvstore.service import encode
from kvstore.service.arena_calls import ArenaCalls
from kvstore.service.callers import current_caller
from kvstore.service.delivery import send_head
from kvstore.service.dock_calls import DockCalls
from kvstore.service.engine import NO_SESSION, Engine
from kvstore.service.fetch_calls import FetchCalls
from kvstore.service.frames import Incoming, Receiver
from kvstore.service.handoff_calls import HandoffCalls
from kvstore.service.lookup_calls import LookupCalls
from kvstore.service.map_calls import MapCalls
from kvstore.service.session import SESSION_METADATA, Session
from kvstore.service.session_calls import SessionCalls
from kvstore.service.status import Context, answering
from kvstore.service.tenant_limits import check_namespaces, check_tenant_of_caller, namespace_of_caller
from kvstore.service.turns import mapped
from kvstore.service.uploads import Upload
from kvstore.service.waiting import until_end
from kvstore.types import BlockKey, ItemKind, Lineage
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1 import cache_pb2_grpc

log = logging.getLogger(__name__)

TOLD_EVERY_SECONDS = 60.0
"""Refused namespaces are logged no more often than this."""


class CacheServicer(cache_pb2_grpc.CacheServicer):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.check_ready = engine.check_ready
        self._handoffs = HandoffCalls(engine)
        self._lookups = LookupCalls(engine)
        self._fetches = FetchCalls(engine)
        self._maps = MapCalls(engine)
        self._arenas = ArenaCalls(engine)
        self._docks = DockCalls(engine)
        self._sessions = SessionCalls(engine)
        self._refused_told = -math.inf

    def _session(self, context: Context) -> Session:
        for key, value in context.invocation_metadata() or ():
            if key == SESSION_METADATA:
                return self._engine.sessions.get(value if isinstance(value, str) else "", current_caller())
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
        check_tenant_of_caller(self._engine, identity.tenant_salt)
        self._engine.tenants.begin(identity.tenant_salt)
        check_namespaces(self._engine, identity)
        try:
            info = await self._engine.registry.open(request.name, identity, request.policy or None)
        except PolicyTooLarge as error:
            self._tell_refused(request.name, error)
            raise
        return encode.put_namespace(info, self._engine.core)

    def _tell_refused(self, name: str, error: PolicyTooLarge) -> None:
        """Whoever started the service chose the policy, or the disk, and is not who asks."""
        now = self._engine.time.monotonic()
        if now >= self._refused_told + TOLD_EVERY_SECONDS:
            self._refused_told = now
            log.warning("refused to open namespace %r: %s", name, error)

    @answering
    async def Lookup(self, request: pb.LookupRequest, context: Context) -> pb.LookupReply:
        engine, monotonic = self._engine, self._engine.time.monotonic
        begin = monotonic()
        reply = await self._lookups.look(request, self._session(context) if request.lease else None, context)
        engine.lookup_seconds += monotonic() - begin - reply.waited_seconds
        return reply

    @answering
    async def EndFlight(self, request: pb.EndFlightRequest, context: Context) -> pb.EndFlightReply:
        return pb.EndFlightReply(
            was_open=self._engine.flights.end(request.flight_id, self._session(context).id)
        )

    @answering
    async def Contains(self, request: pb.ContainsRequest, context: Context) -> pb.ContainsReply:
        engine = self._engine
        session = self._session(context).id if request.lease else NO_SESSION
        info = namespace_of_caller(engine, encode.take_digest(request.namespace))
        digest = info.digest
        engine.tenants.begin(info.tenant)
        keys = JoinedKeys(request.keys)
        found = engine.contains(digest, keys, session=session, use=request.use, lease=request.lease)
        return pb.ContainsReply(
            held=found.held,
            lease_id=found.lease_id or 0,
            lease_seconds=engine.core.lease_seconds if found.lease_id else 0.0,
        )

    @answering
    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseReply:
        return pb.ReleaseReply(was_held=self._engine.release(request.lease_id, self._session(context).id))

    # ---- fetch --------------------------------------------------------------------------------------------------

    @answering
    async def Fetch(self, request: pb.FetchRequest, context: Context) -> None:
        with self._engine.activity.transfer():
            await self._fetches.fetch(request, self._session(context), context)

    @answering
    async def Map(self, request: pb.MapRequest, context: Context) -> None:
        with self._engine.activity.transfer():
            await self._maps.map(request, self._session(context), context)

    # ---- writing ------------------------------------------------------------------------------------------------

    @answering
    async def Reserve(self, request: pb.ReserveRequest, context: Context) -> pb.ReserveReply:
        session = self._session(context)
        items = await mapped(_reserve_item, request.items)
        result = await self._engine.reserve(session, encode.take_digest(request.namespace), items)
        if (number := result.reservation_id) is not None:
            await send_head(context, undo=lambda: self._engine.abort(number, session))
        return pb.ReserveReply(
            reservation_id=result.reservation_id or 0,
            outcomes=[_OUTCOMES[each.outcome] for each in result.outcomes],
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
            left: Iterable[Incoming] = arrived.values()
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
                        incoming = self._engine.uploads.start(
                            upload, item.item, item.length, encode.take_checks(item)
                        )
                        arrived[item.item] = incoming
                        announced.append(incoming)
                    for incoming in receiver.accept(announced, frame.data):
                        incoming.check()
                    frame = await self._next_frame(
                        context, session, upload.deadline - self._engine.time.monotonic(), upload
                    )
                receiver.finish()
                self._engine.uploads.finish(upload, arrived)
                left = ()
            finally:
                self._engine.uploads.drop(upload, left)
        return pb.WriteReply(items=len(arrived), bytes=sum(each.length for each in arrived.values()))

    @answering
    async def OpenArena(self, request: pb.OpenArenaRequest, context: Context) -> pb.OpenArenaReply:
        return self._arenas.open(request, self._session(context))

    @answering
    async def WriteArena(self, request: pb.WriteArenaRequest, context: Context) -> pb.WriteReply:
        with self._engine.activity.transfer():
            return await self._arenas.write(request, self._session(context))

    @answering
    async def OpenDock(self, request: pb.OpenDockRequest, context: Context) -> pb.OpenDockReply:
        return self._docks.open(self._session(context))

    @answering
    async def TakeDock(self, request: pb.TakeDockRequest, context: Context) -> pb.TakeDockReply:
        return self._docks.take(request, self._session(context))

    @answering
    async def WriteDock(self, request: pb.WriteDockRequest, context: Context) -> pb.WriteReply:
        with self._engine.activity.transfer():
            return await self._docks.write(request, self._session(context))

    @answering
    async def FetchDock(self, request: pb.FetchDockRequest, context: Context) -> None:
        with self._engine.activity.transfer():
            await self._docks.fetch(request, self._session(context), context)

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
            report = await self._engine.commit(
                request.reservation_id, session, encode.take_durability(request.durability)
            )
        return pb.CommitReply(
            items=len(report.visible),
            bytes=report.bytes,
            left_out=report.left_out,
            durability=encode.put_durability(report.durability),
        )

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

    @answering
    async def DropHandoff(self, request: pb.DropHandoffRequest, context: Context) -> pb.DropHandoffReply:
        self._session(context)
        return pb.DropHandoffReply(was_here=self._handoffs.drop(request))

    # ---- sessions: last, since the name is the type's above ---------------------------------------------------------

    @answering
    async def Session(self, requests: Any, context: Context) -> None:
        await self._sessions.hold(context)


# Hundreds in a call: what is looked up is not to cost a name for an error that is not raised.
_KINDS = {int(kind): kind for kind in ItemKind}
_LINEAGES = {int(lineage): lineage for lineage in Lineage}
_ON_SSD = frozenset((pb.ItemKind.BLOCK, pb.ItemKind.WINDOW_ROWS))
_OUTCOMES = {outcome: pb.ReserveOutcome.Name(outcome) for outcome in ReserveOutcome}


def _reserve_item(index: int, item: pb.ReserveItem) -> ReserveItem:
    kind = item.kind
    return ReserveItem(
        BlockKey(item.key),
        _KINDS.get(kind) or encode.take_kind(kind, field=f"items[{index}].kind"),
        item.parent,
        item.position,
        item.length,
        to_pool=item.to_pool,
        to_ssd=item.to_ssd or kind in _ON_SSD,
        lineage=_LINEAGES.get(item.lineage)
        or encode.take_lineage(item.lineage, field=f"items[{index}].lineage"),
    )
