"""Reading what a lease covers: from the log in batches in a few threads, from memory as it lies there."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import (
    AsyncGenerator,
    Callable,
    Collection,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Protocol, TypeVar

from kvstore.clock import Clock
from kvstore.core.base import FetchItem
from kvstore.errors import DeviceError, LimitExceeded
from kvstore.memory import BlockCache, Slot
from kvstore.pages import copy_memory
from kvstore.service.gate import ReadGate
from kvstore.service.mapping import row_of
from kvstore.service.rates import ReadRate
from kvstore.service.rooms import Rooms
from kvstore.store.base import Place, RecordKind, RecordLog, Wanted
from kvstore.store.device import OutOfDescriptors
from kvstore.store.format import LARGE_PAYLOAD_BYTES, payload_gap, record_span
from kvstore.types import BytesLike

log = logging.getLogger(__name__)

T = TypeVar("T")

BATCH_BYTES = 2 << 20
"""One read's payloads, but for a single item that is larger; what is in memory does not count. A fetch holds at most two
batches."""

MAPPED_BATCH_BYTES = 16 << 20
"""What is read to where it stays comes in larger ones: nothing is held for it but the slots where it stays, and each costs its way to
a thread and back."""

BATCH_MEMORY_BYTES = 16 << 20
"""What of a batch is in memory stays there until it is sent; a reader that takes nothing keeps no more of it than this."""

BATCH_ITEMS = 512
"""And of small items no more than these, so that listing them does not hold up the event loop."""


class Sources(Protocol):
    """What the reader asks about the list that it reads. Called in the event loop's thread. `domain`: whose bytes these
    are, so that they may lie in memory that others of it can map. `session`: for whom they are read, which has a share of the
    gate."""

    @property
    def domain(self) -> str: ...

    @property
    def session(self) -> str:
        """In whose name they are read."""

    async def settled(self) -> None:
        """Return when `again` tells of all moves that the log has made: at once, but while a segment is cleaned."""

    def again(self, number: int) -> FetchItem | None:
        """Item `number` of the list as it is now: cleaning may have moved it since. Raises UnknownLease."""

    def damaged(self, item: FetchItem) -> None:
        """It could not be read: forget it."""


@dataclass(frozen=True, slots=True)
class Read:
    """An item with its bytes; `payload` is None where there is nothing to read any more. `slot`: where it lies in memory
    that can be mapped, if it does; pinned while the batch is lent."""

    item: FetchItem | None
    payload: BytesLike | None
    slot: Slot | None = None


class Lent(list[Read]):
    """A batch of the caller's, until the next one is asked for. `let_go`: its slots need not stay pinned for it any more: something
    else keeps them, or nobody needs them. Calling it twice does nothing."""

    def __init__(self, reads: Iterable[Read], let_go: Callable[[], None]) -> None:
        super().__init__(reads)
        self.let_go = let_go


Part = tuple[int, int]
"""Bytes [begin, end) of each payload."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a list is read for. `in_memory`: only what has a slot is wanted."""

    sources: Sources
    part: Part | None
    in_memory: bool


@dataclass(slots=True, eq=False)
class _Batch:
    """`slots`: where the items lie in memory, pinned; None for what is to be read, or lies in the pool. `memory_bytes`: in
    slots when it was listed; `disk_bytes`: of the others, for which the gate is asked in the name of `session`, `limit_bytes`
    at most. `stale`: places that are nobody's any more since it was listed."""

    first: int
    limit_bytes: int
    items: list[FetchItem | None] = field(default_factory=list)
    slots: list[Slot | None] = field(default_factory=list)
    disk_bytes: int = 0
    memory_bytes: int = 0
    stale: list[frozenset[Place]] = field(default_factory=list)
    session: str = ""

    def is_full_with(self, disk_bytes: int, memory_bytes: int) -> bool:
        """Whether it would be too large with one more item of these."""
        return (
            self.disk_bytes + disk_bytes > self.limit_bytes
            or self.memory_bytes + memory_bytes > BATCH_MEMORY_BYTES
            or len(self.items) == BATCH_ITEMS
        )


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A batch on its way."""

    batch: _Batch
    task: asyncio.Task[_Loan]


@dataclass(frozen=True, slots=True)
class _Loan:
    """A batch that was read, and what it holds until its bytes are used: its share of the gate, its slots, and a room."""

    reads: list[Read]
    batch: _Batch
    room: memoryview | None


class Reader:
    """Reads lists of items. Any number of fetches at once; the executor's threads bound the reads under way.

    With `memory` what is read whole lies there afterwards, where it has room, and is not read again while it does. Its
    bytes were checked when they came in.
    """

    def __init__(
        self,
        store: RecordLog,
        *,
        executor: Executor,
        gate: ReadGate,
        clock: Clock,
        rooms: Rooms | None = None,
        memory: BlockCache | None = None,
    ) -> None:
        self._log = store
        self._executor = executor
        self._clock = clock
        self._rooms = rooms or Rooms()
        self.memory = memory
        self._copies = itertools.count()
        self._listed: set[_Batch] = set()
        """Listed, and their slots not begun: what leaves meanwhile is not to come into memory."""
        self.gate = gate
        self.rate = ReadRate()
        self.read_bytes_total = 0

    async def read(
        self,
        items: Iterable[FetchItem | None],
        sources: Sources,
        *,
        part: Part | None = None,
        in_memory: bool = False,
        limit_bytes: int | None = None,
    ) -> AsyncGenerator[Lent, None]:
        """The items in their order, in batches, one read ahead; `items` is asked for no more than that. `part`: these
        bytes of each payload instead of all. `in_memory`: what memory has no room for is not read, and has no payload.
        `limit_bytes`: of one batch from the disk, where it is not to be what is usual. A batch's payloads are good until the
        next one is asked for: the memory is used again. Who stops early closes the iterator (`aclosing`)."""
        asked = _Asked(sources, part, in_memory)
        limit = limit_bytes or (MAPPED_BATCH_BYTES if in_memory else BATCH_BYTES)
        batches = self._cut(items, sources, part, limit_bytes=limit)
        ahead = None
        try:
            ahead = self._start(batches, asked)
            while ahead is not None:
                loan = await ahead.task
                ahead = None
                try:
                    ahead = self._start(batches, asked)
                    yield Lent(loan.reads, partial(self._unpin, loan.batch))
                finally:
                    self._end(loan)
        finally:
            batches.close()
            if ahead is not None:
                await self._drop(ahead)

    def forget(self, places: Collection[Place]) -> None:
        """What lies at these places is nobody's any more, and must not be found in memory."""
        if self.memory is not None:
            self.memory.forget(places)
        self._note_stale(places)

    def moved(self, moves: Mapping[Place, Place]) -> None:
        """The same bytes lie at other places of the log now."""
        if self.memory is not None:
            self.memory.move(moves)
        self._note_stale(moves)

    def _note_stale(self, places: Collection[Place]) -> None:
        # All of a store can leave while hundreds of batches wait.
        if self._listed:
            gone = frozenset(places)
            for batch in self._listed:
                batch.stale.append(gone)

    async def copied(self, item: FetchItem, domain: str) -> Slot | None:
        """What lies in the pool, copied into a slot of its own, which goes when the caller unpins it. None without room."""
        memory, payload = self.memory, item.payload
        assert payload is not None
        length = memoryview(payload).nbytes
        # No place in the log: nobody else finds it.
        key = (-1, next(self._copies), length)
        slot = None if memory is None else memory.begin(domain, key, room_bytes=length)
        if memory is None or slot is None:
            return None
        memory.forget([key])
        await self._in_thread(lambda: _fill(slot, payload), [slot])
        memory.finish(slot, begin=0, length=length)
        slot.about = row_of(item, slot)
        return slot

    def show(self, item: FetchItem, slot: Slot) -> None:
        """A slot that was begun at the item's place, and filled, lies as if it had been read: others find it there. It stays
        pinned for the caller, as what `kept` gives."""
        self._finish(item, slot, came=True)

    async def kept(self, items: Sequence[FetchItem], domain: str, executor: Executor) -> list[Slot] | None:
        """What no log has yet: each payload copied into a slot by which others find it at its place, pinned for the caller, who
        forgets the place in the end. None without room for all of them."""
        memory = self.memory
        if memory is None:
            return None
        slots: list[Slot] = []
        for item in items:
            slot = self._begin(item, domain, None)
            if slot is None:
                for begun in slots:
                    memory.abandon(begun)
                return None
            slots.append(slot)
        await self._in_thread(lambda: _copy_all(items, slots), slots, executor)
        for item, slot in zip(items, slots, strict=True):
            self._finish(item, slot, came=True)
        return slots

    def _start(self, batches: Iterator[_Batch], asked: _Asked) -> _Ahead | None:
        batch = next(batches, None)
        if batch is None:
            return None
        task = asyncio.get_running_loop().create_task(self._read_batch(batch, asked))
        return _Ahead(batch, task)

    def _end(self, loan: _Loan) -> None:
        self._leave(loan.batch)
        self._unpin(loan.batch)
        if loan.room is not None:
            self._rooms.take_back(loan.room)

    async def _drop(self, ahead: _Ahead) -> None:
        """End a batch that nobody waits for, and what it holds."""
        ahead.task.cancel()
        try:
            await asyncio.wait({ahead.task})
        except asyncio.CancelledError:
            # Cancelled once more: what it holds goes back when it ends.
            ahead.task.add_done_callback(lambda _: self._ended(ahead))
            raise
        self._ended(ahead)

    def _ended(self, ahead: _Ahead) -> None:
        if not ahead.task.cancelled() and ahead.task.exception() is None:
            self._end(ahead.task.result())
        else:
            # One that failed, as well as one that was cancelled, has left the gate by itself; it may not have begun.
            self._unpin(ahead.batch)

    def _unpin(self, batch: _Batch) -> None:
        """It holds none of its slots any more. Doing it twice does nothing."""
        self._listed.discard(batch)
        if self.memory is not None:
            self.memory.unpin(slot for slot in batch.slots if slot is not None)
        batch.slots = []

    async def _enter(self, batch: _Batch) -> None:
        # What needs nothing of the gate waits for nobody there.
        if batch.disk_bytes:
            await self.gate.enter(batch.disk_bytes, batch.session)

    def _leave(self, batch: _Batch) -> None:
        if batch.disk_bytes:
            self.gate.leave(batch.disk_bytes, batch.session)

    async def _read_batch(self, batch: _Batch, asked: _Asked) -> _Loan:
        await self._enter(batch)
        done = False
        try:
            # Where this is cancelled the room is not taken back: a thread may still be reading into it.
            payloads, room, left_out = await self._payloads(batch, asked)
            reads = []
            rows = zip(batch.items, batch.slots, payloads, strict=True)
            for offset, (item, slot, payload) in enumerate(rows):
                if item is not None and payload is None and offset not in left_out:
                    reads.append(await self._once_more(batch.first + offset, item, asked))
                else:
                    reads.append(Read(item, payload, slot))
            done = True
            return _Loan(reads, batch, room)
        finally:
            if not done:
                self._leave(batch)
                self._unpin(batch)

    async def _once_more(self, number: int, item: FetchItem, asked: _Asked) -> Read:
        """It was not at its place. Read it where it has moved to; what cannot be read where it stays is damaged."""
        sources = asked.sources
        while True:
            await sources.settled()
            now = sources.again(number)
            if now is None:
                return Read(item, None)
            if now.place == item.place:
                sources.damaged(now)
                return Read(now, None)
            if asked.in_memory:
                return Read(now, None)
            payload = await self._payload(now, asked.part)
            if payload is not None:
                return Read(now, payload)
            item = now

    async def _payloads(
        self, batch: _Batch, asked: _Asked
    ) -> tuple[list[BytesLike | None], memoryview | None, Collection[int]]:
        """The payloads, the room in which those lie that have no slot, and the numbers of those that were not to be read
        since they have none. What was read into slots has them in the batch from then on."""
        domain, part = asked.sources.domain, asked.part
        self._listed.discard(batch)
        found: dict[int, BytesLike | None] = {}
        left_out: dict[int, FetchItem] = {}
        reading: list[tuple[int, FetchItem, Slot | None]] = []
        gone = _gone(batch)
        for number, (item, held) in enumerate(zip(batch.items, batch.slots, strict=True)):
            if held is not None or item is None or item.place is None:
                continue
            slot = None if item.place in gone else self._begin(item, domain, part)
            if slot is None and self._is_there_now(batch, number, item, asked):
                continue
            if slot is None and asked.in_memory:
                left_out[number] = item
            else:
                reading.append((number, item, slot))
        room = None
        if reading:
            wanted = [_wanted(item, part, slot) for _, item, slot in reading]
            slots = [slot for _, _, slot in reading]
            payloads, room = await self._in_thread(
                lambda: self._read_in_room(wanted, slots), [slot for slot in slots if slot is not None]
            )
            for (number, item, slot), payload in zip(reading, payloads, strict=True):
                if payload is not None:
                    self.read_bytes_total += memoryview(payload).nbytes
                if slot is not None and self._finish(item, slot, came=payload is not None):
                    batch.slots[number] = slot
                elif slot is not None or not self._is_there_now(batch, number, item, asked):
                    found[number] = payload
            left_out = {
                number: item
                for number, item in left_out.items()
                if not self._is_there_now(batch, number, item, asked)
            }
        return (
            [
                found[number] if number in found else _lying(item, slot, part)
                for number, (item, slot) in enumerate(zip(batch.items, batch.slots, strict=True))
            ],
            room,
            left_out,
        )

    def _begin(self, item: FetchItem, domain: str, part: Part | None) -> Slot | None:
        """Where a whole item is to be read to, if memory has room."""
        if self.memory is None or part is not None or item.place is None:
            return None
        return self.memory.begin(domain, item.place, room_bytes=_room_bytes(item.place.length))

    def _finish(self, item: FetchItem, slot: Slot, *, came: bool) -> bool:
        """No thread reads into the slot any more."""
        assert self.memory is not None
        assert item.place is not None
        if not came:
            self.memory.abandon(slot)
            return False
        length = item.place.length
        begin = payload_gap(length) if length >= LARGE_PAYLOAD_BYTES else 0
        self.memory.finish(slot, begin=begin, length=length)
        slot.about = row_of(item, slot)
        return True

    async def _in_thread(
        self, work: Callable[[], T], slots: Sequence[Slot], executor: Executor | None = None
    ) -> T:
        """The result of work that writes into slots. Where it fails, or nobody waits for it any more, they are abandoned:
        when it is over, and not before, since a thread that has begun cannot be stopped."""
        loop = asyncio.get_running_loop()

        def abandon() -> None:
            if self.memory is not None:
                for slot in slots:
                    self.memory.abandon(slot)

        try:
            job = (executor or self._executor).submit(work)
        except RuntimeError:
            abandon()
            raise
        try:
            return await asyncio.wrap_future(job)
        except BaseException:
            # Cancelled with this call unless it has begun; either way its end calls this, in whichever thread.
            if slots:
                job.add_done_callback(lambda _: loop.call_soon_threadsafe(abandon))
            raise

    async def _payload(self, item: FetchItem, part: Part | None) -> BytesLike | None:
        """In memory of its own."""
        if item.place is None:
            return _lying(item, None, part)
        [payload] = await asyncio.get_running_loop().run_in_executor(
            self._executor, self._read, [_wanted(item, part, None)], None
        )
        return payload

    def _read_in_room(
        self, wanted: Sequence[Wanted], slots: Sequence[Slot | None]
    ) -> tuple[list[BytesLike | None], memoryview | None]:
        """In a reader thread: the payloads, each in its slot if it has one, the others in the room."""
        for slot in slots:
            if slot is not None:
                slot.enlarge()
        # What is large and has a slot is read to where it stays.
        others = [each for each in wanted if each.room is None or each.place.length < LARGE_PAYLOAD_BYTES]
        needed = self._log.room_for(others) if others else 0
        room = self._rooms.lend(needed) if needed else None
        payloads = self._read(wanted, room)
        for slot, payload in zip(slots, payloads, strict=True):
            # Large ones were read to where they are to lie.
            if slot is not None and payload is not None and len(payload) < LARGE_PAYLOAD_BYTES:
                _fill(slot, payload)
        return payloads, room

    def _read(self, wanted: Sequence[Wanted], room: memoryview | None) -> list[BytesLike | None]:
        """In a reader thread. What the device cannot read is None like what is damaged: a miss for whoever asked. LimitExceeded
        where no file can be opened now, which is no reason to forget anything."""
        start = self._clock.monotonic()
        try:
            payloads = self._log.read(wanted, room)
        except OutOfDescriptors as error:
            raise LimitExceeded(
                f"too many files are open to read another one; try again later: {error}",
                field="RLIMIT_NOFILE",
                value="used up",
            ) from error
        except DeviceError as error:
            log.warning("could not read %d items: %s", len(wanted), error)
            if len(wanted) == 1:
                return [None]
            return [payload for each in wanted for payload in self._read([each], None)]
        length = sum(memoryview(payload).nbytes for payload in payloads if payload is not None)
        if length:
            self.rate.note(length, self._clock.monotonic() - start)
        return payloads

    def _cut(
        self, items: Iterable[FetchItem | None], sources: Sources, part: Part | None, *, limit_bytes: int
    ) -> Generator[_Batch, None, None]:
        """Batches, each with what of it is in memory, pinned for who takes it. From the disk up to `limit_bytes` each."""
        current = self._new(0, sources.session, limit_bytes)
        try:
            for number, item in enumerate(items):
                place = None if item is None else item.place
                slot = None if place is None else self._find(place, sources.domain)
                disk_bytes = memory_bytes = 0
                if place is not None and slot is None:
                    disk_bytes = place.length if part is None else part[1] - part[0]
                elif place is not None:
                    memory_bytes = place.length
                full = None
                if current.items and current.is_full_with(disk_bytes, memory_bytes):
                    full, current = current, self._new(number, sources.session, limit_bytes)
                current.items.append(item)
                current.slots.append(slot)
                current.disk_bytes += disk_bytes
                current.memory_bytes += memory_bytes
                if full is not None:
                    yield full
            if current.items:
                last, current = current, _Batch(0, limit_bytes)
                yield last
        finally:
            # What nobody took: the list ended with an error, or nobody wants more of it.
            self._unpin(current)

    def _new(self, first: int, session: str, limit_bytes: int) -> _Batch:
        batch = _Batch(first, limit_bytes, session=session)
        self._listed.add(batch)
        return batch

    def _find(self, place: Place, domain: str) -> Slot | None:
        return None if self.memory is None else self.memory.find(domain, place)

    def _is_there_now(self, batch: _Batch, number: int, item: FetchItem, asked: _Asked) -> bool:
        """Whether another fetch has read it to memory since it was listed; the batch has it pinned then."""
        if self.memory is None or asked.part is not None or item.place is None:
            return False
        slots = self.memory.find_all(asked.sources.domain, [item.place])
        if slots is None:
            return False
        self.memory.pin(slots)
        [batch.slots[number]] = slots
        return True


@lru_cache(maxsize=64)
def _room_bytes(length: int) -> int:
    """Of the slot in which a payload is to lie; a large one lies there as its record does."""
    return record_span(length) if length >= LARGE_PAYLOAD_BYTES else length


def _gone(batch: _Batch) -> set[Place]:
    """Of its places, those that are nobody's any more."""
    if not batch.stale:
        return set()
    places = {item.place for item in batch.items if item is not None and item.place is not None}
    return {place for stale in batch.stale for place in places & stale}


def _fill(slot: Slot, payload: BytesLike) -> None:
    slot.pages[: memoryview(payload).nbytes] = payload


def _copy_all(items: Sequence[FetchItem], slots: Sequence[Slot]) -> None:
    """Each payload to where it would lie if it had been read."""
    for item, slot in zip(items, slots, strict=True):
        assert item.payload is not None
        length = memoryview(item.payload).nbytes
        begin = payload_gap(length) if length >= LARGE_PAYLOAD_BYTES else 0
        slot.enlarge()
        copy_memory(memoryview(item.payload), slot.pages[begin : begin + length])


def _wanted(item: FetchItem, part: Part | None, slot: Slot | None) -> Wanted:
    assert item.place is not None
    begin, end = part or (0, None)
    room = None if slot is None else slot.pages
    return Wanted(item.place, item.item.key, RecordKind(item.item.kind), begin, end, room)


def _lying(item: FetchItem | None, slot: Slot | None, part: Part | None) -> BytesLike | None:
    """What is in memory already: in a slot, or in the pool."""
    payload = slot.payload if slot is not None else None if item is None else item.payload
    return payload if part is None or payload is None else memoryview(payload)[slice(*part)]
