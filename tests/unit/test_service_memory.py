"""The reader with memory that others may map: what is read whole lies there, is found there, and is let go of."""

from __future__ import annotations

import asyncio
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import aclosing, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.clock import ManualClock
from kvstore.core import FetchItem
from kvstore.errors import DeviceError, UnknownLease
from kvstore.memory import BlockCache, Slot, why_not_mapped
from kvstore.service.map_calls import MapCalls
from kvstore.service.mapping import Row, row_of
from kvstore.service.pins import Pins
from kvstore.service.reader import BATCH_ITEMS
from kvstore.service.session import Sessions
from kvstore.service.tenancy import Tenancy
from kvstore.store import Place, Record, RecordKind
from kvstore.types import BlockKey, BootId, Checks, ItemId, ItemKind, Lineage
from kvstore.v1 import cache_pb2 as pb
from tests.support.reading import NAMESPACE, SIZE, SLICE_ENDS, Rig, item, key_of, payload_of, rig

pytestmark = pytest.mark.skipif(bool(why_not_mapped()), reason=why_not_mapped() or "it is mapped")

ROOMY = 64 << 20


def places_of(made: Rig) -> list[Place]:
    return [each.place for each in made.items if each is not None and each.place is not None]


def held(memory: BlockCache, made: Rig) -> list[bool]:
    """Whether each item is in memory; its bytes are right then."""
    found = []
    for number, place in enumerate(places_of(made)):
        slot = memory.find(made.domain, place)
        found.append(slot is not None)
        if slot is not None:
            assert slot.payload == payload_of(number)
            memory.unpin([slot])
    return found


def nothing_is_pinned(memory: BlockCache) -> bool:
    memory.check()
    return all(extent.pinned == 0 for shelf in memory._shelves.values() for extent in shelf.extents)


async def began(made: Rig) -> None:
    """A thread has begun to read."""
    await asyncio.get_running_loop().run_in_executor(None, made.threads.began.acquire)


async def test_what_was_read_once_comes_from_memory_and_is_right() -> None:
    memory = BlockCache(ROOMY)
    with rig(40, memory=memory) as made:
        for _ in range(3):
            reads = await made.all()
            assert [read.payload for read in reads] == [payload_of(number) for number in range(40)]
            assert made.reader.read_bytes_total == 40 * SIZE
            assert (made.reader.gate.held_bytes, made.forgotten) == (0, [])
            assert nothing_is_pinned(memory)
        assert (memory.hits_total, memory.misses_total) == (80, 40)
        # Large records are read to where they are to lie: no room is needed.
        assert made.rooms.lent == 0


async def test_what_is_in_memory_says_where_and_waits_for_nobody_at_the_gate() -> None:
    memory = BlockCache(ROOMY)
    with rig(9, memory=memory, gate_bytes=10 * SIZE) as made:
        await made.all()
        await made.reader.gate.enter(10 * SIZE)
        waiting = asyncio.ensure_future(made.reader.gate.enter(1))
        await _until(lambda: bool(made.reader.gate._waiting))
        async with aclosing(made.reader.read(made.items, made)) as batches:
            [rows] = [[read.slot.about for read in reads if read.slot is not None] async for reads in batches]
        assert len(rows) == 9
        for number, row in enumerate(rows):
            assert isinstance(row, Row)
            assert (row.length, row.crc32) == (SIZE, zlib.crc32(payload_of(number)))
        assert not waiting.done()
        made.reader.gate.leave(10 * SIZE)
        await waiting


async def test_small_payloads_are_copied_into_slots_of_their_own() -> None:
    memory = BlockCache(ROOMY)
    with rig(1, memory=memory) as made:
        payloads = [bytes([number]) * (100 + number) for number in range(5)]
        records = [
            Record(
                RecordKind.BLOCK,
                NAMESPACE,
                key_of(100 + number),
                BlockKey(NAMESPACE),
                32,
                Lineage.EXACT,
                payload,
                Checks(zlib.crc32(payload)),
            )
            for number, payload in enumerate(payloads)
        ]
        made.items = [
            FetchItem(ItemId(record.key, ItemKind.BLOCK), 32, Lineage.EXACT, record.checks, place=place)
            for record, place in zip(records, made.log.append(records), strict=True)
        ]
        for _ in range(2):
            assert [read.payload for read in await made.all()] == payloads
        assert made.reader.read_bytes_total == sum(map(len, payloads))
        assert made.rooms.lent == made.rooms.taken_back == 1
        assert nothing_is_pinned(memory)


async def test_a_part_of_what_is_in_memory_is_not_read_and_a_part_that_is_read_does_not_stay() -> None:
    memory = BlockCache(ROOMY)
    part = (SLICE_ENDS[0], SLICE_ENDS[2])
    with rig(3, memory=memory) as made:
        wanted = [payload_of(number)[slice(*part)] for number in range(3)]
        assert [read.payload for read in await made.all(part)] == wanted
        assert held(memory, made) == [False] * 3
        await made.all()
        before = made.reader.read_bytes_total
        assert [read.payload for read in await made.all(part)] == wanted
        assert made.reader.read_bytes_total == before
        assert nothing_is_pinned(memory)


async def test_without_room_in_memory_everything_comes_all_the_same() -> None:
    memory = BlockCache(2 << 20, extent_bytes=2 << 20)
    with rig(20, memory=memory) as made:
        # All of it is in use by another.
        assert [memory.begin("another", (9, 9, number), room_bytes=SIZE) for number in range(7)][-1] is None
        reads = await made.all()
        assert [read.payload for read in reads] == [payload_of(number) for number in range(20)]
        assert memory.refused_total > 0
        assert made.rooms.lent == made.rooms.taken_back > 0
        memory.check()


async def test_where_only_memory_is_wanted_what_has_no_room_there_is_not_read_and_not_held_for_damaged() -> (
    None
):
    memory = BlockCache(2 << 20, extent_bytes=2 << 20)
    with rig(20, memory=memory) as made:
        taken = [memory.begin("another", (9, 9, number), room_bytes=SIZE) for number in range(7)]
        calls = made.device.calls
        async with aclosing(made.reader.read(made.items, made, in_memory=True)) as batches:
            reads = [read async for each in batches for read in each]
        assert [(read.item, read.payload, read.slot) for read in reads] == [
            (item, None, None) for item in made.items
        ]
        assert (made.device.calls, made.reader.read_bytes_total, made.forgotten) == (calls, 0, [])
        assert made.reader.gate.held_bytes == 0
        # Where there is room for some of it, the rest is not read.
        extent = taken[0].extent if taken[0] is not None else None
        for slot in taken:
            if slot is not None:
                memory.abandon(slot)
        assert extent is not None
        async with aclosing(made.reader.read(made.items, made, in_memory=True)) as batches:
            shown = [(read.slot is None, read.payload is None) async for each in batches for read in each]
        assert set(shown) <= {(False, False), (True, True)}
        count = shown.count((False, False))
        assert made.reader.read_bytes_total == count * SIZE
        assert count > 0
        assert nothing_is_pinned(memory)


async def test_what_somebody_else_keeps_is_let_go_of_before_the_next_batch_is_asked_for() -> None:
    memory = BlockCache(ROOMY)
    with rig(3, memory=memory) as made:
        pins = Pins(memory)
        async with aclosing(made.reader.read(made.items, made, in_memory=True)) as batches:
            reads = await anext(batches)
            slots = [read.slot for read in reads if read.slot is not None]
            pins.keep(1, slots)
            for _ in range(2):
                reads.let_go()
                assert [slot.pins for slot in slots] == [1, 1, 1]
            assert [slot.payload for slot in slots] == [payload_of(number) for number in range(3)]
            pins.end(1)
            assert nothing_is_pinned(memory)
        assert nothing_is_pinned(memory)
        assert made.reader.gate.held_bytes == 0


async def test_what_another_read_while_this_waited_is_not_read_again() -> None:
    memory = BlockCache(ROOMY)
    with rig(3, memory=memory, gate_bytes=1) as made:
        await made.reader.gate.enter(1)
        task = asyncio.ensure_future(made.all())
        await _until(lambda: bool(made.reader.gate._waiting))
        for number, place in enumerate(places_of(made)):
            slot = memory.begin(made.domain, place, room_bytes=SIZE)
            assert slot is not None
            slot.pages[:SIZE] = payload_of(number)
            memory.finish(slot, begin=0, length=SIZE)
            memory.unpin([slot])
        made.reader.gate.leave(1)
        assert [read.payload for read in await task] == [payload_of(number) for number in range(3)]
        assert made.reader.read_bytes_total == 0
        assert nothing_is_pinned(memory)


async def test_what_leaves_is_noted_once_for_all_batches_that_wait() -> None:
    """A clear names all places of a store, while hundreds of fetches wait to read."""
    memory = BlockCache(ROOMY)
    with rig(3, memory=memory, gate_bytes=1) as made:
        await made.reader.gate.enter(1)
        tasks = [asyncio.ensure_future(made.all()) for _ in range(20)]
        await _until(lambda: len(made.reader.gate._waiting) == 20)
        made.reader.forget([*places_of(made)[1:2], *(Place(50, number, SIZE) for number in range(1000))])
        made.reader.moved({places_of(made)[2]: Place(99, 4096, SIZE)})
        noted = {id(stale) for batch in made.reader._listed for stale in batch.stale}
        assert len(made.reader._listed) == 20
        assert len(noted) == 2
        made.reader.gate.leave(1)
        for task in tasks:
            assert [read.payload for read in await task] == [payload_of(number) for number in range(3)]
        assert held(memory, made) == [True, False, False]


async def test_another_domain_does_not_find_it() -> None:
    memory = BlockCache(ROOMY)
    with rig(3, memory=memory) as made:
        await made.all()
        made.domain = "another"
        assert held(memory, made) == [False] * 3
        reads = await made.all()
        assert [read.payload for read in reads] == [payload_of(number) for number in range(3)]
        assert made.reader.read_bytes_total == 6 * SIZE


async def test_while_a_thread_may_read_into_a_slot_it_is_nobodys_though_the_fetch_was_cancelled() -> None:
    memory = BlockCache(ROOMY)
    with rig(3, memory=memory) as made:
        made.threads.may.clear()
        task = asyncio.ensure_future(made.all())
        await began(made)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        filling = list(memory._filling.values())
        assert len(filling) == 3
        for slot in filling:
            assert (slot.pins, slot.generation % 2) == (1, 1)
        assert made.reader.gate.held_bytes == 0
        made.threads.may.set()
        await _until(lambda: nothing_is_pinned(memory))
        assert held(memory, made) == [False] * 3
        assert all(slot.generation % 2 == 0 for slot in filling)
        assert [read.payload for read in await made.all()] == [payload_of(number) for number in range(3)]
        assert held(memory, made) == [True] * 3


async def test_a_read_that_was_cancelled_before_a_thread_took_it_holds_nothing() -> None:
    memory = BlockCache(ROOMY)
    with rig(40, memory=memory) as made:
        made.threads.may.clear()
        tasks = [asyncio.ensure_future(made.all()) for _ in range(4)]
        await began(made)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        made.threads.may.set()
        await _until(lambda: nothing_is_pinned(memory))
        assert made.reader.gate.held_bytes == 0


async def test_what_left_while_it_was_read_is_not_found_by_others() -> None:
    memory = BlockCache(ROOMY)
    with rig(3, memory=memory) as made:
        made.threads.may.clear()
        task = asyncio.ensure_future(made.all())
        await began(made)
        made.reader.forget([places_of(made)[1]])
        made.threads.may.set()
        assert [read.payload for read in await task] == [payload_of(number) for number in range(3)]
        assert held(memory, made) == [True, False, True]
        assert nothing_is_pinned(memory)


async def test_what_left_while_it_waited_to_be_read_is_not_found_by_others() -> None:
    memory = BlockCache(ROOMY)
    with rig(3, memory=memory, gate_bytes=1) as made:
        await made.reader.gate.enter(1)
        task = asyncio.ensure_future(made.all())
        await _until(lambda: bool(made.reader.gate._waiting))
        made.reader.forget([places_of(made)[1]])
        made.reader.moved({places_of(made)[2]: Place(99, 4096, SIZE)})
        made.reader.gate.leave(1)
        assert [read.payload for read in await task] == [payload_of(number) for number in range(3)]
        assert held(memory, made) == [True, False, False]
        assert not made.reader._listed


async def test_what_moved_is_found_at_its_new_place_also_when_it_moved_while_it_was_read() -> None:
    memory = BlockCache(ROOMY)
    with rig(3, memory=memory) as made:
        places = places_of(made)
        made.threads.may.clear()
        task = asyncio.ensure_future(made.all())
        await began(made)
        early, late = Place(98, 4096, SIZE), Place(99, 4096, SIZE)
        made.reader.moved({places[0]: early})
        made.threads.may.set()
        await task
        made.reader.moved({places[1]: late})
        made.items = [item(0, early), item(1, late), made.items[2]]
        before = made.reader.read_bytes_total
        assert [read.payload for read in await made.all()] == [payload_of(number) for number in range(3)]
        assert made.reader.read_bytes_total == before


async def test_what_another_reads_at_the_same_time_is_mapped_where_that_one_put_it() -> None:
    memory = BlockCache(ROOMY)
    with rig(3, memory=memory) as made:
        theirs = memory.begin(made.domain, places_of(made)[1], room_bytes=SIZE)
        assert theirs is not None
        made.threads.may.clear()

        async def slots() -> list[Slot | None]:
            async with aclosing(made.reader.read(made.items, made)) as batches:
                return [read.slot async for reads in batches for read in reads]

        task = asyncio.ensure_future(slots())
        await began(made)
        theirs.pages[:SIZE] = payload_of(1)
        memory.finish(theirs, begin=0, length=SIZE)
        made.threads.may.set()
        mine = await task
        assert mine[1] is theirs
        assert None not in mine
        memory.unpin([theirs])
        assert held(memory, made) == [True] * 3
        assert nothing_is_pinned(memory)


async def test_damage_leaves_nothing_in_memory() -> None:
    memory = BlockCache(ROOMY)
    with rig(3, memory=memory) as made:
        [name] = [name for name in made.device.names() if name.startswith("segment-")]
        made.device.contents(name)[places_of(made)[1].offset + 9] ^= 4
        reads = await made.all()
        assert [read.payload is None for read in reads] == [False, True, False]
        assert held(memory, made) == [True, False, True]
        assert nothing_is_pinned(memory)


async def test_a_device_that_fails_leaves_nothing_in_memory() -> None:
    memory = BlockCache(ROOMY)
    with rig(2, memory=memory) as made:
        made.device.fail_at(made.device.calls + 1, DeviceError("no"))
        made.device.fail_at(made.device.calls + 2, DeviceError("no"))
        reads = await made.all()
        assert sorted(read.payload is None for read in reads) == [False, True]
        assert sorted(held(memory, made)) == [False, True]
        assert nothing_is_pinned(memory)


async def test_stopping_early_and_a_lease_that_ends_meanwhile_leave_nothing_pinned() -> None:
    memory = BlockCache(ROOMY)
    with rig(40, memory=memory) as made:
        for _ in range(2):  # from the disk, and from memory
            async with aclosing(made.reader.read(made.items, made)) as batches:
                async for _ in batches:
                    break
            assert nothing_is_pinned(memory)
            await made.all()

        def items() -> Iterator[FetchItem | None]:
            yield from made.items[:30]
            raise UnknownLease("the lease ended")

        async def read() -> None:
            async with aclosing(made.reader.read(items(), made)) as batches:
                async for _ in batches:
                    pass

        with pytest.raises(UnknownLease):
            await read()
        assert nothing_is_pinned(memory)
        assert not made.reader._listed


async def test_a_state_of_the_pool_is_copied_for_who_asks_and_found_by_nobody() -> None:
    memory = BlockCache(ROOMY)
    with rig(1, memory=memory) as made:
        pooled = item(7, None, payload_of(7))._replace(item=ItemId(key_of(7), ItemKind.STATE))
        slot = await made.reader.copied(pooled, "tenant")
        assert slot is not None
        assert slot.payload == payload_of(7)
        assert slot.generation % 2 == 0
        assert len(memory) == 0
        generation = slot.generation
        memory.unpin([slot])
        assert slot.generation != generation
        assert nothing_is_pinned(memory)


async def test_a_copy_that_nobody_waits_for_any_more_holds_nothing() -> None:
    memory = BlockCache(ROOMY)
    with rig(1, memory=memory) as made:
        made.threads.may.clear()
        task = asyncio.ensure_future(made.reader.copied(item(7, None, payload_of(7)), "tenant"))
        await began(made)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not nothing_is_pinned(memory)
        made.threads.may.set()
        await _until(lambda: nothing_is_pinned(memory))


# ---- pins -----------------------------------------------------------------------------------------------------------


def filled(memory: BlockCache, count: int) -> list[Slot]:
    slots = []
    for number in range(count):
        slot = memory.begin("", (1, number, 100), room_bytes=100)
        assert slot is not None
        memory.finish(slot, begin=0, length=100)
        memory.unpin([slot])
        slots.append(slot)
    return slots


def test_a_lease_pins_a_slot_once_however_often_it_asks_and_lets_go_of_it_once() -> None:
    memory = BlockCache(1 << 20)
    pins, slots = Pins(memory), filled(memory, 5)
    pins.keep(1, slots[:3])
    pins.keep(1, [*slots[1:4], slots[1]])
    pins.keep(2, slots[3:])
    assert [slot.pins for slot in slots] == [1, 1, 1, 2, 1]
    assert (pins.slots, len(pins)) == (6, 2)
    pins.end(1)
    pins.end(1)
    pins.end(77)
    assert [slot.pins for slot in slots] == [0, 0, 0, 1, 1]
    pins.end(2)
    assert (pins.slots, len(pins)) == (0, 0)
    assert nothing_is_pinned(memory)


def test_of_what_a_lease_let_go_of_the_tail_goes_first() -> None:
    memory = BlockCache(256 << 10, extent_bytes=256 << 10)
    pins, slots = Pins(memory), filled(memory, 20)
    pins.keep(1, slots)
    pins.end(1)
    for number in range(memory.allocated_bytes // 4096):
        if memory.evicted_total == 3:
            break
        slot = memory.begin("", (2, number, 100), room_bytes=100)
        assert slot is not None
    assert [memory.find("", (1, number, 100)) is None for number in range(20)] == [False] * 17 + [True] * 3


def test_of_two_copies_of_a_leases_state_the_first_one_stays() -> None:
    memory = BlockCache(1 << 20)
    pins = Pins(memory)
    copies = []
    for number in range(2):
        slot = memory.begin("", (-1, number, 100), room_bytes=100)
        assert slot is not None
        memory.forget([(-1, number, 100)])
        memory.finish(slot, begin=0, length=100)
        copies.append(pins.keep_state(1, slot))
    assert copies[0] is copies[1] is pins.state(1)
    assert pins.slots == 1
    pins.end(1)
    assert pins.state(1) is None
    assert nothing_is_pinned(memory)


# ---- what is counted ------------------------------------------------------------------------------------------------


@dataclass
class Caller:
    """Takes so many messages, and is gone then."""

    takes: int

    async def write(self, message: pb.MapReply) -> None:
        if self.takes == 0:
            raise ConnectionError("gone")
        self.takes -= 1


@pytest.mark.parametrize("takes", [0, 1, 3])
async def test_items_are_counted_as_shown_when_their_message_has_been_taken(takes: int) -> None:
    memory = BlockCache(16 << 20)
    slots, blocks = filled(memory, 3 * BATCH_ITEMS), 3 * BATCH_ITEMS
    for slot in slots:
        slot.about = row_of(item(1, Place(1, slot.index, 100)), slot)
    lease = SimpleNamespace(
        lease_id=1, namespace=b"", blocks=blocks, states=(), state_at=0, deadline=60.0, session=""
    )
    figures = SimpleNamespace(block_bytes=100, state_bytes=0)
    space = SimpleNamespace(identity=SimpleNamespace(tenant_salt=""), tenant="", figures=figures)
    core = SimpleNamespace(
        namespace=lambda digest: space,
        check_fetch=lambda lease, **asked: None,
        fetch_places=lambda lease, first_block, block_count: [
            (1, number, 100) for number in range(first_block, first_block + block_count)
        ],
        fetch_list=lambda lease, **asked: [],
    )
    with rig(0, memory=memory) as made:
        engine: Any = SimpleNamespace(
            reader=made.reader,
            core=core,
            pins=Pins(memory),
            counts=Counter(),
            tenants=Tenancy(lambda: 0.0, Counter()),
            time=ManualClock(),
            lease=lambda lease_id, session: lease,
        )
        sessions = Sessions(boot=BootId(bytes(16)), limit=1, on_end=lambda session: None)
        session = sessions.begin(1, lambda: None, lambda line, descriptor: True)
        caller: Any = Caller(takes)
        request = pb.MapRequest(lease_id=1, block_count=blocks)
        ends = pytest.raises(ConnectionError) if takes < 3 else nullcontext()
        with ends:
            await MapCalls(engine).map(request, session, caller)
        assert engine.counts["mapped_items_total"] == takes * BATCH_ITEMS


async def _until(is_so: object) -> None:
    """The loop's turn, again and again, until it is so."""
    assert callable(is_so)
    async with asyncio.timeout(10):
        while not is_so():
            await asyncio.sleep(0)
