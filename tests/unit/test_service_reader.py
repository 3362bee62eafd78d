"""The reader over a real log on a simulated device: moved, damaged and unreadable items; nothing is held afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import aclosing

import pytest

from kvstore.core import FetchItem
from kvstore.errors import DeviceError, LimitExceeded, UnknownLease
from kvstore.service.reader import BATCH_BYTES, Read
from kvstore.service.rooms import KEPT_ROOMS, ROOM_BYTES, Rooms
from kvstore.store import Place
from kvstore.store.device import OutOfDescriptors
from tests.support.reading import SIZE, item, payload_of, rig


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
            async with aclosing(made.reader.read(items(), made)) as batches:
                async for reads in batches:
                    seen += len(reads)
                    assert listed <= seen + BATCH_BYTES // SIZE + 1

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


async def test_where_no_file_can_be_opened_now_nothing_is_forgotten() -> None:
    with rig(3) as made:
        await made.all()
        made.device.fail_at(made.device.calls + 1, OutOfDescriptors("no"))
        with pytest.raises(LimitExceeded, match="RLIMIT_NOFILE"):
            await made.all()
        assert (made.forgotten, made.reader.gate.held_bytes) == ([], 0)
        assert all(right(await made.all()))


async def test_an_item_gone_meanwhile_is_a_miss_and_not_damage() -> None:
    with rig(2) as made:
        made.items[1] = item(1, Place(99, 4096, SIZE))
        made.now[1] = None
        assert right(await made.all()) == [True, False]
        assert made.forgotten == []


async def test_stopping_early_or_failing_holds_nothing() -> None:
    with rig(40) as made:
        async with aclosing(made.reader.read(made.items, made)) as batches:
            async for _ in batches:
                break
        assert made.reader.gate.held_bytes == 0
        made.items[39] = item(39, Place(99, 4096, SIZE))
        made.lease_ended = True
        with pytest.raises(UnknownLease):
            await made.all()
        assert made.reader.gate.held_bytes == 0


async def test_a_part_is_those_bytes_of_every_item_wherever_it_lies() -> None:
    with rig(12) as made:
        made.items[2] = item(2, None, payload_of(2))
        moved = made.items[4]
        assert moved is not None
        made.now[4] = moved
        made.items[4] = item(4, Place(99, 4096, SIZE))
        for begin, end in ((0, 100_000), (100_000, 150_000), (150_000, SIZE), (120_000, 120_007), (0, SIZE)):
            reads = await made.all((begin, end))
            assert [read.payload for read in reads] == [payload_of(n)[begin:end] for n in range(12)]
        assert (made.reader.gate.held_bytes, made.forgotten) == (0, [])


async def test_rooms_come_back_when_the_next_batch_is_asked_for_and_are_used_again() -> None:
    with rig(60) as made:
        assert all(right(await made.all()))
        assert all(right(await made.all()))
        rooms = made.rooms
        assert rooms.lent == rooms.taken_back >= 2 * (60 * SIZE // BATCH_BYTES)
        # Two at once: the batch in hand and the one that is read ahead.
        assert 1 <= len(rooms._idle) <= 2


def test_rooms_that_are_kept_are_few_and_of_one_size() -> None:
    rooms = Rooms()
    lent = [rooms.lend(1) for _ in range(KEPT_ROOMS + 3)]
    for room in [*lent, rooms.lend(ROOM_BYTES + 1)]:
        rooms.take_back(room)
    assert {len(room) for room in rooms._idle} == {ROOM_BYTES}
    assert len(rooms._idle) == KEPT_ROOMS


async def test_a_read_that_is_given_up_while_it_runs_keeps_its_room_for_itself() -> None:
    with rig(40) as made:
        async with aclosing(made.reader.read(made.items, made)) as batches:
            await anext(batches)
        assert made.rooms.lent - made.rooms.taken_back in (0, 1)
        assert all(right(await made.all()))
