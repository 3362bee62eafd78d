"""The Map call: where in shared memory lies what a lease protects."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence, Set
from contextlib import aclosing

from kvstore.core import FetchItem, Lease
from kvstore.errors import MemoryUnavailable
from kvstore.memory import Extent, Slot
from kvstore.service.delivery import send, under
from kvstore.service.engine import Engine, LeasedItems
from kvstore.service.mapping import Row, absent, reply_of
from kvstore.service.pins import Pins
from kvstore.service.reader import BATCH_ITEMS, Read
from kvstore.service.session import Session
from kvstore.service.status import Context
from kvstore.service.tenant_limits import reading
from kvstore.types import ItemKind
from kvstore.v1 import cache_pb2 as pb


class MapCalls:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def map(self, request: pb.MapRequest, session: Session, context: Context) -> None:
        engine = self._engine
        if engine.pins is None or not session.takes_memory:
            raise MemoryUnavailable(
                "this service has no memory that this session may map",
                field="memory",
                value="none" if engine.pins is None else "none over a Session call",
                allowed="Fetch, which brings the same bytes",
            )
        lease = engine.lease(request.lease_id, session.id)
        leased = LeasedItems(
            engine,
            lease,
            first_block=request.first_block,
            block_count=request.block_count,
            state=request.state,
        )
        replies = _Mapping(engine, engine.pins, lease, session, leased.domain).replies(request)
        moved = reading(engine, lease, block_count=request.block_count, state=request.state)
        with moved, under(engine, lease, session):
            async with aclosing(replies):
                async for reply in replies:
                    engine.lease(lease.lease_id, session.id)
                    await send(context, reply)
                    engine.counts["mapped_items_total"] += len(reply.extent) - list(reply.extent).count(0)


class _Mapping:
    """One call. What it names stays for the lease, which it looks up again whenever something else may have run."""

    def __init__(self, engine: Engine, pins: Pins, lease: Lease, session: Session, domain: str) -> None:
        assert engine.reader.memory is not None
        self._engine = engine
        self._memory = engine.reader.memory
        self._pins = pins
        self._lease = lease
        self._session = session
        self._domain = domain

    async def replies(self, request: pb.MapRequest) -> AsyncGenerator[pb.MapReply, None]:
        """A reply for each batch. Batches of blocks that are all in memory take no steps for each item but in columns; from
        the first one on that is not, everything goes the way of a fetch."""
        first, end = request.first_block, request.first_block + request.block_count
        while first < end and (reply := self._in_memory(first, min(BATCH_ITEMS, end - first))) is not None:
            yield reply
            first = min(first + BATCH_ITEMS, end)
        rest = LeasedItems(
            self._engine, self._lease, first_block=first, block_count=end - first, state=request.state
        )
        number = 0
        # What has no room comes by Fetch, and is read from the disk for that, once.
        async with aclosing(self._engine.reader.read(rest.items(), rest, in_memory=True)) as batches:
            async for reads in batches:
                reply = await self._read(rest, number, reads)
                # The lease keeps them. Who ends it as soon as it has this answer is not to find their memory taken still.
                reads.let_go()
                yield reply
                number += len(reads)

    def _in_memory(self, first: int, count: int) -> pb.MapReply | None:
        """None unless all of these blocks are in memory."""
        lease = self._held()
        places = self._engine.core.fetch_places(lease, first_block=first, block_count=count)
        slots = self._memory.find_all(self._domain, places) if len(places) == count else None
        if slots is None:
            return None
        extents = {slot.extent for slot in slots}
        given = self._given(extents)
        index = range(first, first + count)
        if len(given) == len(extents):
            self._pins.keep(lease.lease_id, slots)
            return reply_of([_row(slot) for slot in slots], index)
        self._pins.keep(lease.lease_id, [slot for slot in slots if slot.extent in given])
        return reply_of([_shown(slot, ItemKind.BLOCK, given) for slot in slots], index)

    async def _read(self, leased: LeasedItems, number: int, reads: Sequence[Read]) -> pb.MapReply:
        """Of a batch of the reader's, while it is lent."""
        slots: list[Slot | None] = []
        for read in reads:
            slot = read.slot
            if slot is None and read.item is not None and read.item.payload is not None:
                slot = await self._pooled(read.item)
            slots.append(slot)
        lease = self._held()
        given = self._given({slot.extent for slot in slots if slot is not None})
        self._pins.keep(
            lease.lease_id,
            [read.slot for read in reads if read.slot is not None and read.slot.extent in given],
        )
        rows: list[Row] = []
        index: list[int] = []
        for offset, slot in enumerate(slots):
            kind, at = leased.place_of(number + offset)
            rows.append(_shown(slot, kind, given))
            index.append(at)
        return reply_of(rows, index)

    async def _pooled(self, item: FetchItem) -> Slot | None:
        """The lease's copy of the state that it covers; kept for it."""
        kept = self._pins.state(self._lease.lease_id)
        if kept is not None:
            return kept
        slot = await self._engine.reader.copied(item, self._domain)
        if slot is None:
            return None
        try:
            lease = self._held()
        except BaseException:
            self._pins.give_back(slot)
            raise
        return self._pins.keep_state(lease.lease_id, slot)

    def _held(self) -> Lease:
        return self._engine.lease(self._lease.lease_id, self._session.id)

    def _given(self, extents: Set[Extent]) -> Set[Extent]:
        """Those of them that the session has, as it may be told of them now. What lies in others comes by Fetch."""
        for extent in extents - self._session.extents:
            assert extent.domain == self._domain, "a session is given its own domain's memory only"
            if self._session.give(extent):
                self._memory.give(extent)
        return extents & self._session.extents


def _shown(slot: Slot | None, kind: ItemKind, given: Set[Extent]) -> Row:
    return absent(kind) if slot is None or slot.extent not in given else _row(slot)


def _row(slot: Slot) -> Row:
    assert isinstance(slot.about, Row)
    return slot.about
