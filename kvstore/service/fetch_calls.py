"""The Fetch call: what a lease protects, as one stream of frames, whole or sliced."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from kvstore.core import Lease
from kvstore.errors import UnknownLease
from kvstore.service import encode
from kvstore.service.engine import Engine, LeasedItems
from kvstore.service.frames import Cutter
from kvstore.service.reader import Read
from kvstore.service.session import Session
from kvstore.service.slicing import Part, cuts_of, room_for, sliced
from kvstore.service.status import Context
from kvstore.service.waiting import until_end
from kvstore.types import ItemKind
from kvstore.v1 import cache_pb2 as pb


class FetchCalls:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def fetch(self, request: pb.FetchRequest, session: Session, context: Context) -> None:
        lease = self._engine.lease(request.lease_id, session.id)
        parts = self._sliced(lease, request) if request.slices > 1 else self._whole(lease, request)
        cutter = Cutter[pb.ItemHeader]()
        part_now = 0
        async with aclosing(parts):
            async for header, payload in parts:
                if header.slice != part_now:
                    # A slice is not to wait for bytes of the next one.
                    part_now = header.slice
                    for headers, data in cutter.rest():
                        await self._send(context, session, lease, headers, data)
                for headers, data in cutter.add(header, payload):
                    await self._send(context, session, lease, headers, data)
            for headers, data in cutter.rest():
                await self._send(context, session, lease, headers, data)

    async def _whole(self, lease: Lease, request: pb.FetchRequest) -> AsyncGenerator[Part, None]:
        leased = LeasedItems(
            self._engine,
            lease,
            first_block=request.first_block,
            block_count=request.block_count,
            state=request.state,
        )
        async with aclosing(self._parts(leased)) as parts:
            async for part in parts:
                yield part

    async def _sliced(self, lease: Lease, request: pb.FetchRequest) -> AsyncGenerator[Part, None]:
        engine = self._engine
        profile = engine.core.namespace(lease.namespace).profile
        cuts = cuts_of(profile, slices=request.slices, block_count=request.block_count)
        blocks = LeasedItems(
            engine,
            lease,
            first_block=request.first_block,
            block_count=request.block_count,
            state=False,
        )
        state = LeasedItems(engine, lease, first_block=0, block_count=0, state=request.state)
        with room_for(engine.staging, request.block_count * profile.block_bytes):
            async with aclosing(self._parts(state)) as parts:
                async for part in parts:
                    yield part
            async with (
                aclosing(engine.reader.read(blocks.items(), blocks)) as reads,
                aclosing(sliced(reads, cuts, first_block=request.first_block)) as parts,
            ):
                async for part in parts:
                    yield part

    async def _parts(self, leased: LeasedItems) -> AsyncGenerator[Part, None]:
        number = 0
        async with aclosing(self._engine.reader.read(leased.items(), leased)) as reads:
            async for read in reads:
                yield _header(leased.place_of(number), read), b"" if read.payload is None else read.payload
                number += 1

    async def _send(
        self, context: Context, session: Session, lease: Lease, headers: list[pb.ItemHeader], data: bytes
    ) -> None:
        """One frame under a lease that holds: a reader slower than its lease gets an error, and never other bytes."""
        engine = self._engine
        held = engine.lease(lease.lease_id, session.id)
        await until_end(
            context.write(pb.ItemFrame(items=headers, data=data)),
            session=session,
            seconds=held.deadline - engine.time.monotonic(),
            late=lambda: UnknownLease(
                "the lease ended before its bytes were taken; look up again",
                field="lease_id",
                value=lease.lease_id,
                allowed=f"fetching within {engine.core.lease_seconds:g} s",
            ),
        )


def _header(place: tuple[ItemKind, int], read: Read) -> pb.ItemHeader:
    kind, index = place
    if read.item is None or read.payload is None:
        return pb.ItemHeader(kind=encode.put_kind(kind), index=index, missing=True)
    checks = read.item.checks
    return pb.ItemHeader(
        kind=encode.put_kind(kind),
        index=index,
        length=memoryview(read.payload).nbytes,
        crc32=checks.crc32,
        xxh3_64=checks.xxh3_64,
        has_xxh3=checks.has_xxh3,
        lineage=encode.put_lineage(read.item.lineage),
    )
