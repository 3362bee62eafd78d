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
from kvstore.store.base import RecordKind, RecordLog
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


@dataclass(frozen=True, slots=True)
class _Batch:
    first: int
    items: Sequence[FetchItem | None]
    disk_bytes: int


class Reader:
    """Reads lists of items. Any number of fetches at once; the executor's threads bound the reads under way."""

    def __init__(self, store: RecordLog, *, executor: Executor, gate: ReadGate, clock: Clock) -> None:
        self._log = store
        self._executor = executor
        self._clock = clock
        self.gate = gate
        self.rate = ReadRate()
        self.read_bytes_total = 0

    async def read(self, items: Iterable[FetchItem | None], sources: Sources) -> AsyncGenerator[Read, None]:
        """The items in their order, one batch read ahead; `items` is asked for no more than that. Who stops early
        closes the iterator (`aclosing`)."""
        batches = _cut(items)
        ahead = self._start(batches, sources)
        try:
            while ahead is not None:
                reads, held_bytes = await ahead
                ahead = None
                try:
                    ahead = self._start(batches, sources)
                    for read in reads:
                        yield read
                finally:
                    self.gate.leave(held_bytes)
        finally:
            if ahead is not None:
                await self._drop(ahead)

    def _start(
        self, batches: Iterator[_Batch], sources: Sources
    ) -> asyncio.Task[tuple[list[Read], int]] | None:
        batch = next(batches, None)
        return (
            None
            if batch is None
            else asyncio.get_running_loop().create_task(self._read_batch(batch, sources))
        )

    async def _drop(self, ahead: asyncio.Task[tuple[list[Read], int]]) -> None:
        """End a batch that nobody waits for, and what it holds."""
        ahead.cancel()
        await asyncio.wait({ahead})
        # A batch that failed, as well as one that was cancelled, has left the gate by itself.
        if not ahead.cancelled() and ahead.exception() is None:
            self.gate.leave(ahead.result()[1])

    async def _read_batch(self, batch: _Batch, sources: Sources) -> tuple[list[Read], int]:
        """(what was read, bytes with which to leave the gate)."""
        await self.gate.enter(batch.disk_bytes)
        done = False
        try:
            payloads = await self._payloads(batch.items)
            reads = []
            for offset, (item, payload) in enumerate(zip(batch.items, payloads, strict=True)):
                if item is not None and payload is None:
                    reads.append(await self._once_more(batch.first + offset, item, sources))
                else:
                    reads.append(Read(item, payload))
            self.read_bytes_total += batch.disk_bytes
            done = True
            return reads, batch.disk_bytes
        finally:
            if not done:
                self.gate.leave(batch.disk_bytes)

    async def _once_more(self, number: int, item: FetchItem, sources: Sources) -> Read:
        """It was not at its place. Read it where it has moved to; what cannot be read where it stays is damaged."""
        while True:
            await sources.settled()
            now = sources.again(number)
            if now is None:
                return Read(item, None)
            if now.place == item.place:
                sources.damaged(now)
                return Read(now, None)
            [payload] = await self._payloads([now])
            if payload is not None:
                return Read(now, payload)
            item = now

    async def _payloads(self, items: Sequence[FetchItem | None]) -> list[BytesLike | None]:
        wanted = [item for item in items if item is not None and item.place is not None]
        found = iter(
            await asyncio.get_running_loop().run_in_executor(self._executor, self._read, wanted)
            if wanted
            else ()
        )
        return [
            None if item is None else item.payload if item.place is None else next(found) for item in items
        ]

    def _read(self, wanted: list[FetchItem]) -> list[bytes | None]:
        """In a reader thread. What the device cannot read is None like what is damaged: a miss for whoever asked."""
        places = [
            (item.place, item.item.key, RecordKind(item.item.kind))
            for item in wanted
            if item.place is not None
        ]
        start = self._clock.monotonic()
        try:
            payloads = self._log.read(places)
        except DeviceError as error:
            log.warning("could not read %d items: %s", len(wanted), error)
            if len(wanted) == 1:
                return [None]
            return [payload for item in wanted for payload in self._read([item])]
        length = sum(len(payload) for payload in payloads if payload is not None)
        if length:
            self.rate.note(length, self._clock.monotonic() - start)
        return payloads


def _cut(items: Iterable[FetchItem | None]) -> Iterator[_Batch]:
    current: list[FetchItem | None] = []
    first = size = 0
    for number, item in enumerate(items):
        length = 0 if item is None or item.place is None else item.place.length
        if current and (size + length > BATCH_BYTES or len(current) == BATCH_ITEMS):
            yield _Batch(first, current, size)
            current, first, size = [], number, 0
        current.append(item)
        size += length
    if current:
        yield _Batch(first, current, size)
