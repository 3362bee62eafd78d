"""The reader over a real log on a simulated device: moved, damaged and unreadable items; nothing is held afterwards."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field

import pytest

from kvstore.clock import ManualClock
from kvstore.core import FetchItem
from kvstore.errors import DeviceError, UnknownLease
from kvstore.service.reader import BATCH_BYTES, Read, Reader, ReadGate
from kvstore.store import Place, Record, RecordKind, RecordLog, open_log
from kvstore.testing.sim_device import SimDevice
from kvstore.types import BlockKey, Checks, ItemId, ItemKind, Lineage, NamespaceDigest

SIZE = 300_000
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


@dataclass
class Rig:
    device: SimDevice
    log: RecordLog
    reader: Reader
    items: list[FetchItem | None]
    now: dict[int, FetchItem | None] = field(default_factory=dict)
    forgotten: list[FetchItem] = field(default_factory=list)
    lease_ended: bool = False
    settle: Callable[[], None] = lambda: None

    async def settled(self) -> None:
        self.settle()

    def again(self, number: int) -> FetchItem | None:
        if self.lease_ended:
            raise UnknownLease("the lease ended")
        return self.now.get(number, self.items[number])

    def damaged(self, item: FetchItem) -> None:
        self.forgotten.append(item)

    async def all(self) -> list[Read]:
        async with aclosing(self.reader.read(self.items, self)) as reads:
            return [read async for read in reads]


@contextmanager
def rig(count: int, *, gate_bytes: int = 64 << 20) -> Iterator[Rig]:
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
        )
        places += log.append([record])
    with ThreadPoolExecutor(2) as threads:
        reader = Reader(log, executor=threads, gate=ReadGate(gate_bytes), clock=ManualClock())
        yield Rig(device, log, reader, [item(number, place) for number, place in enumerate(places)])
    log.close()


def right(reads: Sequence[Read]) -> list[bool]:
    return [read.payload == payload_of(number) for number, read in enumerate(reads)]


async def test_items_come_in_their_order_over_many_batches_and_nothing_is_held_after() -> None:
    with rig(40) as made:
        assert 40 * SIZE > 2 * BATCH_BYTES
        made.items[5] = None
        made.items[6] = item(6, None, payload_of(6))
        reads = await made.all()
        assert [number for number, is_right in enumerate(right(reads)) if not is_right] == [5]
        assert (made.reader.gate.held_bytes, made.forgotten) == (0, [])


async def test_items_are_listed_only_as_they_are_read_and_a_lease_that_ends_meanwhile_holds_nothing() -> None:
    with rig(40) as made:
        listed = 0

        def items() -> Iterator[FetchItem | None]:
            nonlocal listed
            for listed, each in enumerate(made.items, 1):
                if listed == 30:
                    raise UnknownLease("the lease ended")
                yield each

        async def read() -> None:
            seen = 0
            async with aclosing(made.reader.read(items(), made)) as reads:
                async for _ in reads:
                    assert listed <= seen + 2 * (BATCH_BYTES // SIZE + 1) + 1
                    seen += 1

        with pytest.raises(UnknownLease):
            await read()
        assert made.reader.gate.held_bytes == 0


async def test_a_narrow_gate_only_makes_it_slower() -> None:
    with rig(40, gate_bytes=1) as made:
        assert all(right(await made.all()))
        assert made.reader.gate.held_bytes == 0


async def test_an_item_that_moved_is_read_where_it_is_now() -> None:
    with rig(4) as made:
        first = made.items[0]
        assert first is not None
        place = first.place
        assert place is not None
        made.items[0] = item(0, Place(place.segment_id + 77, place.offset, place.length))
        made.now[0] = item(0, place)
        assert all(right(await made.all()))
        assert made.forgotten == []


async def test_an_item_whose_move_is_not_known_yet_is_read_at_its_new_place_and_not_forgotten() -> None:
    with rig(3) as made:
        second = made.items[1]
        assert second is not None
        made.items[1] = made.now[1] = item(1, Place(99, 4096, SIZE))

        def settle() -> None:
            made.now[1] = second

        made.settle = settle
        assert all(right(await made.all()))
        assert made.forgotten == []


async def test_an_item_that_moves_again_while_it_is_read_is_followed() -> None:
    with rig(2) as made:
        first = made.items[0]
        assert first is not None
        places = iter([item(0, Place(98, 4096, SIZE)), item(0, Place(99, 4096, SIZE)), first])
        made.items[0] = item(0, Place(97, 4096, SIZE))
        made.settle = lambda: made.now.update({0: next(places)})
        assert all(right(await made.all()))
        assert made.forgotten == []


async def test_a_damaged_item_is_a_miss_and_forgotten_and_the_others_follow() -> None:
    with rig(4) as made:
        damaged = made.items[2]
        assert damaged is not None
        assert damaged.place is not None
        [name] = [name for name in made.device.names() if name.startswith("segment-")]
        made.device.contents(name)[damaged.place.offset + 9] ^= 4
        assert right(await made.all()) == [True, True, False, True]
        assert made.forgotten == [damaged]


async def test_what_the_device_cannot_read_is_a_miss_for_that_item_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with rig(3) as made:
        await made.all()
        # The reads of the whole batch and then of its first item alone fail.
        made.device.fail_at(made.device.calls + 1, DeviceError("no"))
        made.device.fail_at(made.device.calls + 2, DeviceError("no"))
        assert right(await made.all()) == [False, True, True]
        assert made.forgotten == [made.items[0]]
        assert "could not read 1 items" in caplog.text


async def test_an_item_gone_meanwhile_is_a_miss_and_not_damage() -> None:
    with rig(2) as made:
        made.items[1] = item(1, Place(99, 4096, SIZE))
        made.now[1] = None
        assert right(await made.all()) == [True, False]
        assert made.forgotten == []


async def test_stopping_early_or_failing_holds_nothing() -> None:
    with rig(40) as made:
        async with aclosing(made.reader.read(made.items, made)) as reads:
            async for _ in reads:
                break
        assert made.reader.gate.held_bytes == 0
        made.items[39] = item(39, Place(99, 4096, SIZE))
        made.lease_ended = True
        with pytest.raises(UnknownLease):
            await made.all()
        assert made.reader.gate.held_bytes == 0
