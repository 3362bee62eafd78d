"""A reader over a real log on a simulated device, with rooms that are spoilt when they are given back."""

from __future__ import annotations

import hashlib
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from kvstore.clock import ManualClock
from kvstore.core import FetchItem
from kvstore.errors import UnknownLease
from kvstore.memory import BlockCache
from kvstore.service.gate import ReadGate
from kvstore.service.reader import Read, Reader
from kvstore.service.rooms import Rooms
from kvstore.store import Place, Record, RecordKind, RecordLog, open_log
from kvstore.testing.sim_device import SimDevice
from kvstore.types import BlockKey, Checks, ItemId, ItemKind, Lineage, NamespaceDigest

SIZE = 300_000
SLICE_ENDS = (100_000, 150_000, 250_000)
NAMESPACE = NamespaceDigest(b"n" * 32)


def key_of(number: int) -> BlockKey:
    return BlockKey(hashlib.sha256(b"%d" % number).digest())


def payload_of(number: int) -> bytes:
    return hashlib.shake_256(key_of(number)).digest(SIZE)


def item(number: int, place: Place | None, payload: bytes | None = None) -> FetchItem:
    return FetchItem(
        ItemId(key_of(number), ItemKind.BLOCK),
        32,
        Lineage.EXACT,
        Checks(zlib.crc32(payload_of(number))),
        place=place,
        payload=payload,
    )


class PoisonedRooms(Rooms):
    """Whoever looks at a room after it was given back sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.lent = self.taken_back = 0

    def lend(self, length: int) -> memoryview:
        self.lent += 1
        return super().lend(length)

    def take_back(self, room: memoryview) -> None:
        self.taken_back += 1
        room[:] = b"\xee" * len(room)
        super().take_back(room)


class HeldThreads(ThreadPoolExecutor):
    """Two threads; while `may` is not set, work that they have begun waits before its first step."""

    def __init__(self) -> None:
        super().__init__(2)
        self.may = threading.Event()
        self.may.set()
        self.began = threading.Semaphore(0)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(self._held, fn, *args, **kwargs)

    def _held(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.began.release()
        assert self.may.wait(30.0)
        return fn(*args, **kwargs)


@dataclass
class Rig:
    device: SimDevice
    log: RecordLog
    reader: Reader
    items: list[FetchItem | None]
    now: dict[int, FetchItem | None] = field(default_factory=dict)
    rooms: PoisonedRooms = field(default_factory=PoisonedRooms)
    forgotten: list[FetchItem] = field(default_factory=list)
    lease_ended: bool = False
    domain: str = "tenant"
    session: str = ""
    threads: HeldThreads = field(default_factory=HeldThreads)
    settle: Callable[[], None] = lambda: None

    async def settled(self) -> None:
        self.settle()

    def again(self, number: int) -> FetchItem | None:
        if self.lease_ended:
            raise UnknownLease("the lease ended")
        return self.now.get(number, self.items[number])

    def damaged(self, item: FetchItem) -> None:
        self.forgotten.append(item)

    async def all(self, part: tuple[int, int] | None = None) -> list[Read]:
        """Copies of what comes, each made while its batch is good."""
        async with aclosing(self.reader.read(self.items, self, part=part)) as batches:
            return [
                Read(read.item, None if read.payload is None else bytes(read.payload))
                async for reads in batches
                for read in reads
            ]


@contextmanager
def rig(count: int, *, gate_bytes: int = 64 << 20, memory: BlockCache | None = None) -> Iterator[Rig]:
    device = SimDevice(3)
    log, _ = open_log("sim", budget_bytes=64 << 20, segment_bytes=4 << 20, clock=ManualClock(), device=device)
    places: list[Place] = []
    for number in range(count):
        record = Record(
            RecordKind.BLOCK,
            NAMESPACE,
            key_of(number),
            BlockKey(NAMESPACE),
            32,
            Lineage.EXACT,
            payload_of(number),
            Checks(zlib.crc32(payload_of(number))),
            SLICE_ENDS,
        )
        places += log.append([record])
    with HeldThreads() as threads:
        rooms = PoisonedRooms()
        reader = Reader(
            log,
            executor=threads,
            gate=ReadGate(gate_bytes),
            clock=ManualClock(),
            rooms=rooms,
            memory=memory,
        )
        yield Rig(
            device,
            log,
            reader,
            [item(number, place) for number, place in enumerate(places)],
            rooms=rooms,
            threads=threads,
        )
    log.close()
