"""Parts of payloads from a log: the right bytes, in the caller's room, verified by the slices around them and no others."""

from __future__ import annotations

import itertools
import random

import pytest

from kvstore.clock import ManualClock
from kvstore.store import Place, RecordKind, RecordLog, Wanted, open_log
from kvstore.store.base import Record
from kvstore.store.buffers import aligned
from kvstore.store.format import payload_sums
from kvstore.testing.sim_device import SimDevice
from kvstore.types import BlockKey, Checks, Lineage, NamespaceDigest

SPACE = NamespaceDigest(b"n" * 32)
ENDS = (28_672, 33_000, 100_000, 200_000, 260_000)
LARGE, SMALL = 300_000, 20_000


def stored(log: RecordLog, length: int, ends: tuple[int, ...] = ENDS) -> tuple[Record, Place]:
    payload = random.Random(length).randbytes(length)
    key = BlockKey(length.to_bytes(32, "little"))
    record = Record(
        RecordKind.BLOCK, SPACE, key, BlockKey(SPACE), 128, Lineage.EXACT, payload, Checks(1), ends
    )
    return record, log.append([record])[0]


def opened() -> tuple[SimDevice, RecordLog]:
    device = SimDevice(5)
    log, _ = open_log("sim", budget_bytes=32 << 20, segment_bytes=4 << 20, clock=ManualClock(), device=device)
    return device, log


def asked(record: Record, place: Place, begin: int, end: int | None) -> Wanted:
    return Wanted(place, record.key, RecordKind.BLOCK, begin, end)


def test_any_part_of_any_record_is_its_bytes_with_and_without_a_room() -> None:
    _, log = opened()
    records = [stored(log, LARGE), stored(log, LARGE + 7, ()), stored(log, SMALL)]
    chance = random.Random(11)
    wanted, right = [], []
    for record, place in records:
        edges = [e for e in (0, *ENDS, place.length) if e <= place.length]
        parts = [(a, b) for a in edges for b in edges if a <= b]
        parts += [
            (min(a, b), max(a, b)) for a, b in [chance.choices(range(place.length), k=2) for _ in range(20)]
        ]
        for begin, end in parts:
            wanted.append(asked(record, place, begin, end))
            right.append(bytes(record.payload)[begin:end])
        wanted.append(asked(record, place, 5, None))
        right.append(bytes(record.payload)[5:])
    room = aligned(log.room_for(wanted))
    for found in (log.read(wanted), log.read(wanted, room)):
        assert [None if payload is None else bytes(payload) for payload in found] == right
    log.close()


@pytest.mark.parametrize("is_right", [True, False])
def test_sums_that_come_with_a_record_are_what_it_is_read_by(is_right: bool) -> None:
    _, log = opened()
    payload = random.Random(3).randbytes(LARGE)
    sums = payload_sums(payload if is_right else bytes(LARGE), ENDS)
    key = BlockKey(bytes(32))
    record = Record(
        RecordKind.BLOCK,
        SPACE,
        key,
        BlockKey(SPACE),
        128,
        Lineage.EXACT,
        payload,
        Checks(1),
        ENDS,
        sums=sums,
    )
    [place] = log.append([record])
    wanted = [asked(record, place, 0, None), asked(record, place, ENDS[1], ENDS[2])]
    right = [payload, payload[ENDS[1] : ENDS[2]]]
    assert log.read(wanted) == (right if is_right else [None, None])
    log.close()


def test_parts_cut_at_ends_of_slices_lie_in_a_room_not_much_larger_than_they_are() -> None:
    _, log = opened()
    record, place = stored(log, LARGE)
    wanted = [asked(record, place, begin, end) for begin, end in ((0, ENDS[0]), (ENDS[2], ENDS[3]))]
    room = aligned(log.room_for(wanted))
    assert len(room) <= ENDS[0] + ENDS[3] - ENDS[2] + 5 * 4096
    for payload in log.read(wanted, room):
        assert isinstance(payload, memoryview)
        assert payload.obj is room.obj
    log.close()


@pytest.mark.parametrize("at", [0, ENDS[1], LARGE - 1])
def test_damage_in_one_slice_is_a_miss_for_it_alone_counted_and_looked_at_twice(at: int) -> None:
    device, log = opened()
    record, place = stored(log, LARGE)
    [name] = [
        name
        for name in device.names()
        if name.startswith("segment-") and place.segment_id == int(name[8:24], 16)
    ]
    device.contents(name)[place.offset + at] ^= 1
    edges = (0, *ENDS, LARGE)
    for begin, end in itertools.pairwise(edges):
        [payload] = log.read([asked(record, place, begin, end)])
        if begin <= at < end:
            assert payload is None
        else:
            assert payload is not None
            assert bytes(payload) == bytes(record.payload)[begin:end]
    counters = log.counters()
    assert [counters[n] for n in ("read_again_records", "damaged_records", "quarantined_records")] == [
        1,
        1,
        1,
    ]
    log.close()


def test_a_part_of_a_record_whose_table_is_damaged_is_a_miss() -> None:
    device, log = opened()
    record, place = stored(log, LARGE)
    [name] = [
        name
        for name in device.names()
        if name.startswith("segment-") and place.segment_id == int(name[8:24], 16)
    ]
    device.contents(name)[place.offset - 736 + 256 + 3] ^= 1
    assert log.read([asked(record, place, ENDS[2], ENDS[3])]) == [None]
    log.close()


@pytest.mark.parametrize(("begin", "end"), [(-1, 5), (7, 5), (0, LARGE + 1), (LARGE + 1, None)])
def test_a_part_that_no_payload_has_is_not_read(begin: int, end: int | None) -> None:
    _, log = opened()
    record, place = stored(log, LARGE)
    assert log.read([asked(record, place, begin, end)]) == [None]
    log.close()
