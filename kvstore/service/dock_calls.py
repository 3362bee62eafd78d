"""The dock calls: memory that a session lends, from which its items are taken and to which what it leases is written."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from kvstore.errors import InvalidArgument, LimitExceeded, MemoryUnavailable
from kvstore.memory import Dock
from kvstore.service.arena_calls import ItemsInMemory
from kvstore.service.delivery import send, under
from kvstore.service.engine import Engine, LeasedItems
from kvstore.service.reader import MAPPED_BATCH_BYTES, Read
from kvstore.service.session import Session
from kvstore.service.status import Context
from kvstore.service.tenant_limits import reading
from kvstore.types import BytesLike, Checks
from kvstore.v1 import cache_pb2 as pb

BLOCKS_PER_CALL = 1024
PART_BYTES = 4 << 20
"""Written in one go: whoever waits for them checks them while the next ones are written."""

Piece = tuple[int, BytesLike]
"""Where in the dock, and what."""


class DockCalls:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._items = ItemsInMemory(engine)

    def open(self, session: Session) -> pb.OpenDockReply:
        """A way for a descriptor. Its line is on its way when this returns."""
        docks = self._engine.docks
        refusal = MemoryUnavailable(
            "a dock's descriptor cannot be passed: not over this session, or the system has no room for it now",
            field="session",
            value=session.id,
            allowed="Map and WriteArena, or Fetch and Write, which move the same bytes",
        )
        if not session.takes_memory:
            raise refusal
        try:
            number, theirs = docks.begin(session.id)
        except OSError as error:
            raise refusal from error
        with theirs:
            if not session.give_way(number, theirs.fileno()):
                raise refusal
        return pb.OpenDockReply(dock=number)

    def take(self, request: pb.TakeDockRequest, session: Session) -> pb.TakeDockReply:
        self._engine.docks.take(session.id, request.dock, size=request.bytes, lock=request.lock)
        return pb.TakeDockReply()

    async def write(self, request: pb.WriteDockRequest, session: Session) -> pb.WriteReply:
        dock = self._dock(session)
        # Never in the event loop's thread: its pages may have to come from swap.
        reply = await self._items.write(request, session, dock, self._engine.docks, is_quick=False)
        self._engine.counts["dock_written_bytes_total"] += reply.bytes
        return reply

    async def fetch(self, request: pb.FetchDockRequest, session: Session, context: Context) -> None:
        engine = self._engine
        dock = self._dock(session)
        lease = engine.lease(request.lease_id, session.id)
        offsets = request.offset[:]
        _check_places(offsets, engine.core.namespace(lease.namespace).figures.block_bytes, dock.bytes)
        leased = LeasedItems(
            engine, lease, first_block=request.first_block, block_count=len(offsets), state=False
        )
        moved = reading(engine, lease, block_count=len(offsets), state=False)
        engine.docks.borrow(dock)
        try:
            with moved, under(engine, lease, session):
                async with aclosing(self._parts(leased, offsets)) as parts:
                    async for pieces, reply in parts:
                        # Never other bytes: what the lease covered may be another's once it has ended.
                        engine.lease(lease.lease_id, session.id)
                        await self._written(dock, pieces)
                        engine.counts["dock_fetched_bytes_total"] += sum(reply.length)
                        await send(context, reply)
        finally:
            engine.docks.give_back(dock)

    async def _parts(
        self, leased: LeasedItems, offsets: Sequence[int]
    ) -> AsyncGenerator[tuple[list[Piece], pb.FetchDockReply], None]:
        """What is to be written in one go, and what is to be said of it then. It is good until the next part is asked for."""
        places = iter(offsets)
        batches = self._engine.reader.read(leased.items(), leased, limit_bytes=MAPPED_BATCH_BYTES)
        async with aclosing(batches):
            async for reads in batches:
                pieces: list[Piece] = []
                reply, size = pb.FetchDockReply(), 0
                for read in reads:
                    place = next(places)
                    _tell(reply, read)
                    if read.item is not None and read.payload is not None:
                        pieces.append((place, read.payload))
                        size += memoryview(read.payload).nbytes
                    if size >= PART_BYTES:
                        yield pieces, reply
                        pieces, reply, size = [], pb.FetchDockReply(), 0
                if reply.length:
                    yield pieces, reply

    async def _written(self, dock: Dock, pieces: Sequence[Piece]) -> None:
        """In a thread. Nobody comes back from here while it still writes, though the call may be cancelled: what it writes is lent
        until then, and the caller takes its memory back after that."""
        stop = threading.Event()
        job = asyncio.wrap_future(self._engine.threads.submit(dock.write, pieces, stop.is_set))
        try:
            await asyncio.shield(job)
        except asyncio.CancelledError:
            stop.set()
            # A payload's time, whoever else cancels.
            while not job.done():
                try:
                    await asyncio.wait({job})
                except asyncio.CancelledError:
                    continue
            job.exception()
            raise

    def _dock(self, session: Session) -> Dock:
        dock = self._engine.docks.find(session.id)
        if dock is None:
            raise InvalidArgument(
                "the session has no dock",
                field="dock",
                value="none",
                allowed="an OpenDock and a TakeDock before",
            )
        return dock


def _tell(reply: pb.FetchDockReply, read: Read) -> None:
    if read.item is None or read.payload is None:
        length, checks = 0, Checks(0)
    else:
        length, checks = memoryview(read.payload).nbytes, read.item.checks
    reply.length.append(length)
    reply.crc32.append(checks.crc32)
    reply.xxh3_64.append(checks.xxh3_64)
    reply.has_xxh3.append(checks.has_xxh3)


def _check_places(offsets: Sequence[int], length: int, size: int) -> None:
    """InvalidArgument unless a payload of `length` bytes at each offset lies within `size` bytes."""
    if not offsets:
        raise InvalidArgument(
            "nothing is asked for", field="offset", value="none", allowed="one for each block"
        )
    if len(offsets) > BLOCKS_PER_CALL:
        raise LimitExceeded(
            "too many blocks in one call", field="offset", value=len(offsets), allowed=f"{BLOCKS_PER_CALL}"
        )
    if length > size or max(offsets) > size - length:
        raise InvalidArgument(
            "a block would not lie in the dock",
            field="offset",
            value=max(offsets),
            allowed=f"{length} bytes within {size}",
        )
