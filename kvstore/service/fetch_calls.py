"""The Fetch call: what a lease protects, as one stream of frames, whole or sliced."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from kvstore.core import Lease
from kvstore.errors import InvalidArgument
from kvstore.service import encode
from kvstore.service.delivery import Part, framed, send_frames, under
from kvstore.service.engine import Engine, LeasedItems
from kvstore.service.reader import Read
from kvstore.service.session import Session
from kvstore.service.slicing import cuts_of, sliced
from kvstore.service.status import Context
from kvstore.service.tenant_limits import reading
from kvstore.types import ItemKind
from kvstore.v1 import cache_pb2 as pb


class FetchCalls:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def fetch(self, request: pb.FetchRequest, session: Session, context: Context) -> None:
        _check_offset(request)
        lease = self._engine.lease(request.lease_id, session.id)
        batches = self._sliced(lease, request) if request.slices > 1 else self._whole(lease, request)
        moved = reading(self._engine, lease, block_count=request.block_count, state=request.state)
        with moved, under(self._engine, lease, session):
            async with aclosing(batches), aclosing(framed(batches)) as frames:
                # Never other bytes: what the lease covered may be another's once it has ended.
                await send_frames(
                    context, frames, may_send=lambda: self._engine.lease(lease.lease_id, session.id)
                )

    async def _whole(self, lease: Lease, request: pb.FetchRequest) -> AsyncGenerator[list[Part], None]:
        leased = LeasedItems(
            self._engine,
            lease,
            first_block=request.first_block,
            block_count=request.block_count,
            state=request.state,
        )
        offset = request.offset
        async with aclosing(self._batches(leased)) as batches:
            async for parts in batches:
                yield [after(parts[0], offset), *parts[1:]] if offset else parts
                offset = 0

    async def _sliced(self, lease: Lease, request: pb.FetchRequest) -> AsyncGenerator[list[Part], None]:
        engine = self._engine
        profile = engine.core.namespace(lease.namespace).profile
        cuts = cuts_of(profile, slices=request.slices, block_count=request.block_count)
        first = request.first_block
        blocks = LeasedItems(engine, lease, first_block=first, block_count=request.block_count, state=False)
        state = LeasedItems(engine, lease, first_block=0, block_count=0, state=request.state)
        async with (
            aclosing(self._batches(state)) as whole,
            aclosing(sliced(engine.reader, blocks.items(), blocks, cuts, first_block=first)) as slices,
        ):
            for batches in (whole, slices):
                async for parts in batches:
                    yield parts

    async def _batches(self, leased: LeasedItems) -> AsyncGenerator[list[Part], None]:
        number = 0
        async with aclosing(self._engine.reader.read(leased.items(), leased)) as batches:
            async for reads in batches:
                places = [leased.place_of(number + offset) for offset in range(len(reads))]
                number += len(reads)
                yield [_part(place, read) for place, read in zip(places, reads, strict=True)]


def _check_offset(request: pb.FetchRequest) -> None:
    if not request.offset:
        return
    if request.slices > 1:
        allowed = "0 with slices, whose checksums are each slice's own"
    elif not request.block_count and not request.state:
        allowed = "0 where nothing is asked for"
    else:
        return
    raise InvalidArgument("no item to go on in", field="offset", value=request.offset, allowed=allowed)


def after(part: Part, offset: int) -> Part:
    """The part without its first `offset` bytes, which the caller has; its header is the whole item's. InvalidArgument past
    its end."""
    header, payload = part
    if header.missing:
        return part
    if offset > header.length:
        raise InvalidArgument(
            "past the end of the first item", field="offset", value=offset, allowed=f"0 to {header.length}"
        )
    header.offset = offset
    return header, memoryview(payload)[offset:]


def _part(place: tuple[ItemKind, int], read: Read) -> Part:
    kind, index = place
    if read.item is None or read.payload is None:
        return pb.ItemHeader(kind=encode.put_kind(kind), index=index, missing=True), b""
    checks = read.item.checks
    header = pb.ItemHeader(
        kind=encode.put_kind(kind),
        index=index,
        length=memoryview(read.payload).nbytes,
        crc32=checks.crc32,
        xxh3_64=checks.xxh3_64,
        has_xxh3=checks.has_xxh3,
        lineage=encode.put_lineage(read.item.lineage),
    )
    return header, read.payload
