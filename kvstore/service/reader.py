"""Reading what a lease covers: from the log in batches in a few threads, from the pool as it lies there."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol

from kvstore.clock import Clock
from kvstore.core.base import FetchItem
from kvstore.errors import DeviceError, LimitExceeded
from kvstore.service.rates import ReadRate
from kvstore.service.rooms import Rooms
from kvstore.store.base import RecordKind, RecordLog, Wanted
from kvstore.types import BytesLike

log = logging.getLogger(__name__)

BATCH_BYTES = 2 << 20
"""One read's payloads, but for a single item that is larger. A fetch holds at most two batches."""

BATCH_ITEMS = 512
"""And of small items no more than these, so that listing them does not hold up the event loop."""

WAIT_SECONDS_MAX = 10.0


class ReadGate:
    """Bytes that all fetches together hold: first come, first served, and `busy` instead of a wait without end.

    What is larger than the whole gate passes when it is alone.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self.held_bytes = 0
        self.refused_total = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def enter(self, length: int) -> None:
        """LimitExceeded when there is no room within WAIT_SECONDS_MAX."""
        if not self._waiting and self._fits(length):
            self.held_bytes += length
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = (length, turn)
        self._waiting.append(place)
        entered = False
        try:
            await asyncio.wait({turn}, timeout=WAIT_SECONDS_MAX)
            entered = turn.done()
        finally:
            if not entered:
                self._give_up(place)
        if not entered:
            self.refused_total += 1
            raise LimitExceeded(
                "too many bytes are being fetched; try again later",
                field="fetch_bytes",
                value=self.held_bytes + length,
                allowed=f"{self._limit} bytes for all fetches together",
            )

    def leave(self, length: int) -> None:
        self.held_bytes -= length
        self._wake()

    def _give_up(self, place: tuple[int, asyncio.Future[None]]) -> None:
        if place[1].done():
            self.leave(place[0])
        else:
            self._waiting.remove(place)
            self._wake()

    def _fits(self, length: int) -> bool:
        return self.held_bytes == 0 or self.held_bytes + length <= self._limit

    def _wake(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            length, turn = self._waiting.popleft()
            self.held_bytes += length
            turn.set_result(None)


class Sources(Protocol):
    """What the reader asks about the list that it reads. Called in the event loop's thread."""

    async def settled(self) -> None:
        """Return when `again` tells of all moves that the log has made: at once, but while a segment is cleaned."""

    def again(self, number: int) -> FetchItem | None:
        """Item `number` of the list as it is now: cleaning may have moved it since. Raises UnknownLease."""

    def damaged(self, item: FetchItem) -> None:
        """It could not be read: forget it."""


@dataclass(frozen=True, slots=True)
class Read:
    """An item with its bytes; `payload` is None where there is nothing to read any more."""

    item: FetchItem | None
    payload: BytesLike | None


Part = tuple[int, int]
"""Bytes [begin, end) of each payload."""


@dataclass(frozen=True, slots=True)
class _Batch:
    first: int
    items: Sequence[FetchItem | None]
    disk_bytes: int


@dataclass(frozen=True, slots=True)
class _Loan:
    """A batch that was read, and what it holds until its bytes are used: `disk_bytes` of the gate, and a room."""

    reads: list[Read]
    disk_bytes: int
    room: memoryview | None


class Reader:
    """Reads lists of items. Any number of fetches at once; the executor's threads bound the reads under way."""

    def __init__(
        self,
        store: RecordLog,
        *,
        executor: Executor,
        gate: ReadGate,
        clock: Clock,
        rooms: Rooms | None = None,
    ) -> None:
        self._log = store
        self._executor = executor
        self._clock = clock
        self._rooms = rooms or Rooms()
        self.gate = gate
        self.rate = ReadRate()
        self.read_bytes_total = 0

    async def read(
        self, items: Iterable[FetchItem | None], sources: Sources, *, part: Part | None = None
    ) -> AsyncGenerator[Sequence[Read], None]:
        """The items in their order, in batches, one read ahead; `items` is asked for no more than that. `part`: these
        bytes of each payload instead of all. A batch's payloads are good until the next one is asked for: the memory is used
        again. Who stops early closes the iterator (`aclosing`)."""
        batches = _cut(items, part)
        ahead = self._start(batches, sources, part)
        try:
            while ahead is not None:
                loan = await ahead
                ahead = None
                try:
                    ahead = self._start(batches, sources, part)
                    yield loan.reads
                finally:
                    self._end(loan)
        finally:
            if ahead is not None:
                await self._drop(ahead)

    def _start(
        self, batches: Iterator[_Batch], sources: Sources, part: Part | None
    ) -> asyncio.Task[_Loan] | None:
        batch = next(batches, None)
        return (
            None
            if batch is None
            else asyncio.get_running_loop().create_task(self._read_batch(batch, sources, part))
        )

    def _end(self, loan: _Loan) -> None:
        self.gate.leave(loan.disk_bytes)
        if loan.room is not None:
            self._rooms.take_back(loan.room)

    async def _drop(self, ahead: asyncio.Task[_Loan]) -> None:
        """End a batch that nobody waits for, and what it holds."""
        ahead.cancel()
        try:
            await asyncio.wait({ahead})
        except asyncio.CancelledError:
            # Cancelled once more: what it holds goes back when it ends.
            ahead.add_done_callback(self._ended)
            raise
        self._ended(ahead)

    def _ended(self, ahead: asyncio.Task[_Loan]) -> None:
        # A batch that failed, as well as one that was cancelled, has left the gate by itself.
        if not ahead.cancelled() and ahead.exception() is None:
            self._end(ahead.result())

    async def _read_batch(self, batch: _Batch, sources: Sources, part: Part | None) -> _Loan:
        await self.gate.enter(batch.disk_bytes)
        done = False
        try:
            # Where this is cancelled the room is not taken back: a thread may still be reading into it.
            payloads, room = await self._payloads(batch.items, part)
            reads = []
            for offset, (item, payload) in enumerate(zip(batch.items, payloads, strict=True)):
                if item is not None and payload is None:
                    reads.append(await self._once_more(batch.first + offset, item, sources, part))
                else:
                    reads.append(Read(item, payload))
            self.read_bytes_total += batch.disk_bytes
            done = True
            return _Loan(reads, batch.disk_bytes, room)
        finally:
            if not done:
                self.gate.leave(batch.disk_bytes)

    async def _once_more(self, number: int, item: FetchItem, sources: Sources, part: Part | None) -> Read:
        """It was not at its place. Read it where it has moved to; what cannot be read where it stays is damaged."""
        while True:
            await sources.settled()
            now = sources.again(number)
            if now is None:
                return Read(item, None)
            if now.place == item.place:
                sources.damaged(now)
                return Read(now, None)
            payload = await self._payload(now, part)
            if payload is not None:
                return Read(now, payload)
            item = now

    async def _payloads(
        self, items: Sequence[FetchItem | None], part: Part | None
    ) -> tuple[list[BytesLike | None], memoryview | None]:
        """The payloads, and the room in which they lie."""
        wanted = [_wanted(item, part) for item in items if item is not None and item.place is not None]
        payloads: list[BytesLike | None] = []
        room = None
        if wanted:
            payloads, room = await asyncio.get_running_loop().run_in_executor(
                self._executor, self._read_in_room, wanted
            )
        found = iter(payloads)
        return [
            None if item is None else next(found) if item.place is not None else _in_memory(item, part)
            for item in items
        ], room

    async def _payload(self, item: FetchItem, part: Part | None) -> BytesLike | None:
        """In memory of its own."""
        if item.place is None:
            return _in_memory(item, part)
        [payload] = await asyncio.get_running_loop().run_in_executor(
            self._executor, self._read, [_wanted(item, part)], None
        )
        return payload

    def _read_in_room(self, wanted: Sequence[Wanted]) -> tuple[list[BytesLike | None], memoryview]:
        room = self._rooms.lend(self._log.room_for(wanted))
        return self._read(wanted, room), room

    def _read(self, wanted: Sequence[Wanted], room: memoryview | None) -> list[BytesLike | None]:
        """In a reader thread. What the device cannot read is None like what is damaged: a miss for whoever asked."""
        start = self._clock.monotonic()
        try:
            payloads = self._log.read(wanted, room)
        except DeviceError as error:
            log.warning("could not read %d items: %s", len(wanted), error)
            if len(wanted) == 1:
                return [None]
            return [payload for each in wanted for payload in self._read([each], None)]
        length = sum(memoryview(payload).nbytes for payload in payloads if payload is not None)
        if length:
            self.rate.note(length, self._clock.monotonic() - start)
        return payloads


def _wanted(item: FetchItem, part: Part | None) -> Wanted:
    assert item.place is not None
    begin, end = part or (0, None)
    return Wanted(item.place, item.item.key, RecordKind(item.item.kind), begin, end)


def _in_memory(item: FetchItem, part: Part | None) -> BytesLike | None:
    return item.payload if part is None or item.payload is None else memoryview(item.payload)[slice(*part)]


def _cut(items: Iterable[FetchItem | None], part: Part | None) -> Iterator[_Batch]:
    current: list[FetchItem | None] = []
    first = size = 0
    for number, item in enumerate(items):
        length = 0
        if item is not None and item.place is not None:
            length = item.place.length if part is None else part[1] - part[0]
        if current and (size + length > BATCH_BYTES or len(current) == BATCH_ITEMS):
            yield _Batch(first, current, size)
            current, first, size = [], number, 0
        current.append(item)
        size += length
    if current:
        yield _Batch(first, current, size)
