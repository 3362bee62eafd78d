"""The tests that every RecordLog passes. Subclass `StoreSuite` and override the `bench` fixture."""

from __future__ import annotations

import hashlib
import random
import zlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import pytest
import xxhash

from kvstore.clock import ManualClock
from kvstore.errors import ConfigError, DirectoryInUse, InvalidArgument, NoSpace
from kvstore.store.base import Place, Record, RecordKind, RecordLog, Recovery, Wanted
from kvstore.store.buffers import aligned
from kvstore.store.format import payload_gap, record_span
from kvstore.types import BlockKey, BytesLike, Checks, Lineage, NamespaceDigest

MIB = 1 << 20


class StoreBench(Protocol):
    """One place to keep records, which outlives the logs that are opened over it."""

    clock: ManualClock

    def open(
        self, *, budget_bytes: int = 8 * MIB, segment_bytes: int | None = None
    ) -> tuple[RecordLog, Recovery]: ...

    def holds(self, payload: bytes) -> bool:
        """Whether the bytes are at rest somewhere, found without the log."""

    def damage(self, place: Place) -> None:
        """Flip one bit of the payload at rest."""


def digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def make_record(
    name: str,
    payload: BytesLike,
    *,
    kind: RecordKind = RecordKind.BLOCK,
    namespace: str = "namespace",
    lineage: Lineage = Lineage.EXACT,
    position: int = 128,
    with_xxh3: bool = True,
) -> Record:
    """A record whose key is made from `name`."""
    checks = Checks(zlib.crc32(payload), xxhash.xxh3_64_intdigest(payload) if with_xxh3 else 0, with_xxh3)
    space = NamespaceDigest(digest(namespace))
    key = BlockKey(space if kind is RecordKind.NAMESPACE else digest(name))
    return Record(kind, space, key, BlockKey(digest(name + "'s parent")), position, lineage, payload, checks)


def make_records(
    first: int, count: int, *, size: int = 3328, seed: int = 1, namespace: str = "namespace"
) -> list[Record]:
    """Records `first` and following, with bytes that depend on the seed and their number only."""
    return [
        make_record(
            f"{namespace} {number}",
            random.Random(f"{seed} {number}").randbytes(size),
            namespace=namespace,
            position=128 * (number + 1),
        )
        for number in range(first, first + count)
    ]


def read_back(log: RecordLog, records: Sequence[Record], places: Sequence[Place]) -> list[BytesLike | None]:
    return log.read(
        [Wanted(place, record.key, record.kind) for record, place in zip(records, places, strict=True)]
    )


def fill(
    log: RecordLog, *, batch: int = 32, size: int = 3328, namespace: str = "namespace"
) -> dict[Place, Record]:
    """Append until there is no room: what was written where."""
    written: dict[Place, Record] = {}
    while log.room_bytes() >= batch * size:
        records = make_records(len(written), batch, size=size, namespace=namespace)
        written.update(zip(log.append(records), records, strict=True))
    return written


class StoreSuite:
    """What is promised to callers of a RecordLog, and nothing about how it is kept."""

    @pytest.fixture
    def bench(self) -> StoreBench:
        pytest.fail("override the fixture with the store under test")

    @pytest.mark.parametrize("size", [0, 1, 511, 3328, 4096, 65_535, 65_536, 449_824])
    def test_a_payload_of_any_size_comes_back_and_lies_at_rest_as_it_was(
        self, bench: StoreBench, size: int
    ) -> None:
        log, _ = bench.open()
        payload = random.Random(size).randbytes(size)
        records = [make_record("one", payload), make_record("two", b"two")]
        places = log.append(records)
        assert [place.length for place in places] == [size, 3]
        assert read_back(log, records, places) == [payload, b"two"]
        log.close()
        assert bench.holds(payload)

    def test_any_buffer_can_be_appended(self, bench: StoreBench) -> None:
        log, _ = bench.open()
        data = bytes(range(256)) * 13
        records = [
            make_record("a", data),
            make_record("b", bytearray(data)),
            make_record("c", memoryview(data)[7:]),
        ]
        assert read_back(log, records, log.append(records)) == [data, data, data[7:]]
        assert log.append([]) == []
        log.close()

    def test_everything_about_a_record_is_found_again_after_a_restart(self, bench: StoreBench) -> None:
        log, first = bench.open()
        assert (first.fresh, first.rebuilt, list(first.records), dict(first.policies)) == (
            True,
            False,
            [],
            {},
        )
        records = [
            make_record("describes", "Größe ✓".encode(), kind=RecordKind.NAMESPACE, position=0),
            make_record("block", b"b" * 3328, lineage=Lineage.BOUNDED, position=2**40),
            make_record("block", b"s" * 70_000, kind=RecordKind.STATE, with_xxh3=False),
        ]
        places = log.append(records)
        written = bench.clock.wall()
        bench.clock.advance(100)
        log.close()
        log, again = bench.open()
        assert (again.fresh, again.torn_bytes, again.damaged_records) == (False, 0, 0)
        assert [
            (
                found.kind,
                found.namespace,
                found.key,
                found.parent,
                found.position,
                found.lineage,
                found.checks,
            )
            for found in again.records
        ] == [
            (
                record.kind,
                record.namespace,
                record.key,
                record.parent,
                record.position,
                record.lineage,
                record.checks,
            )
            for record in records
        ]
        assert [found.place for found in again.records] == places
        assert [found.payload for found in again.records] == ["Größe ✓".encode(), b"", b""]
        assert all(abs(found.last_use - written) < 0.01 for found in again.records)
        sequences = [found.sequence for found in again.records]
        assert sequences == sorted(set(sequences))
        assert read_back(log, records, places) == [bytes(record.payload) for record in records]
        log.close()

    def test_the_newest_copy_of_a_key_is_the_one_found(self, bench: StoreBench) -> None:
        log, _ = bench.open()
        log.append([make_record("key", b"old"), make_record("key", b"state", kind=RecordKind.STATE)])
        log.append([make_record("key", b"newer", lineage=Lineage.BOUNDED)])
        log.append([make_record("key", b"elsewhere", namespace="other")])
        log.close()
        log, recovery = bench.open()
        answers = log.read([Wanted(found.place, found.key, found.kind) for found in recovery.records])
        assert answers == [b"state", b"newer", b"elsewhere"]
        log.close()

    def test_a_wrong_key_kind_or_place_is_a_miss(self, bench: StoreBench) -> None:
        log, _ = bench.open()
        records = make_records(0, 3)
        places = log.append(records)
        right = places[1]
        other = Place(right.segment_id + 9, right.offset, right.length)
        asked = [
            Wanted(right, records[0].key, RecordKind.BLOCK),
            Wanted(right, records[1].key, RecordKind.STATE),
            Wanted(other, records[1].key, RecordKind.BLOCK),
            Wanted(Place(right.segment_id, right.offset + 1, right.length), records[1].key, RecordKind.BLOCK),
            Wanted(Place(right.segment_id, right.offset, right.length - 1), records[1].key, RecordKind.BLOCK),
            Wanted(Place(right.segment_id, 2**40, right.length), records[1].key, RecordKind.BLOCK),
            Wanted(Place(right.segment_id, 0, 0), records[1].key, RecordKind.BLOCK),
        ]
        assert log.read(asked) == [None] * len(asked)
        assert log.read([Wanted(right, records[1].key, RecordKind.BLOCK)]) == [records[1].payload]
        assert log.counters()["damaged_records"] >= 2
        log.close()

    def test_a_damaged_record_is_a_counted_miss_and_its_neighbours_are_not(self, bench: StoreBench) -> None:
        log, _ = bench.open()
        records = make_records(0, 5)
        places = log.append(records)
        bench.damage(places[2])
        expected = [None if index == 2 else record.payload for index, record in enumerate(records)]
        assert read_back(log, records, places) == expected
        assert log.counters()["damaged_records"] == 1
        again = log.append([records[2]])
        assert read_back(log, [records[2]], again) == [records[2].payload]
        log.close()

    def test_reads_come_in_the_order_asked(self, bench: StoreBench) -> None:
        log, _ = bench.open()
        records = make_records(0, 40)
        places = log.append(records[:20]) + log.append(records[20:])
        order = list(range(40)) * 2
        random.Random(3).shuffle(order)
        answers = read_back(log, [records[index] for index in order], [places[index] for index in order])
        assert answers == [records[index].payload for index in order]
        assert log.read([]) == []
        log.close()

    @pytest.mark.parametrize("size", [65_536, 66_000, 449_824])
    def test_a_whole_large_payload_lies_in_the_room_that_it_brought_along(
        self, bench: StoreBench, size: int
    ) -> None:
        log, _ = bench.open()
        records = make_records(0, 5, size=size)
        places = [place for record in records for place in log.append([record])]
        # Zeros: what is checked must be what came.
        rooms = [aligned(record_span(size)) for _ in records]
        wanted = [
            Wanted(place, record.key, record.kind, room=room if number % 2 == 0 else None)
            for number, (record, place, room) in enumerate(zip(records, places, rooms, strict=True))
        ]
        assert log.room_for(wanted) == log.room_for(wanted[1::2])
        payloads = log.read(wanted, aligned(log.room_for(wanted)))
        assert payloads == [record.payload for record in records]
        gap = payload_gap(size)
        assert [bytes(room[gap : gap + size]) for room in rooms[::2]] == payloads[::2]
        assert not any(any(room) for room in rooms[1::2])
        # The one is good for as long as its room is, whatever is done with the others.
        mine = memoryview(payloads[0] or b"")
        rooms[0][gap] ^= 1
        assert mine[0] ^ 1 == memoryview(records[0].payload)[0]
        log.close()

    def test_a_room_of_its_own_is_for_whole_large_payloads_and_what_is_wrong_does_not_spoil_others(
        self, bench: StoreBench
    ) -> None:
        log, _ = bench.open()
        large, small = make_records(0, 3, size=70_000), make_records(10, 2)
        places = log.append([*large, *small])
        bench.damage(places[1])
        rooms = [aligned(record_span(70_000)) for _ in places]
        wanted = [
            Wanted(place, record.key, record.kind, room=room)
            for record, place, room in zip([*large, *small], places, rooms, strict=True)
        ]
        wanted[2] = wanted[2]._replace(begin=100, end=60_000)
        odd = Place(places[0].segment_id, places[0].offset + 512, 70_000)
        wanted.append(wanted[0]._replace(place=odd))
        payloads = log.read(wanted)
        assert payloads == [
            large[0].payload,
            None,
            memoryview(large[2].payload)[100:60_000],
            *(record.payload for record in small),
            None,
        ]
        assert not any(any(room) for room in rooms[2:])
        assert log.counters()["damaged_records"] == 1
        log.close()

    def test_a_clear_covers_what_was_written_before_it_and_nothing_else(self, bench: StoreBench) -> None:
        log, _ = bench.open()
        described = make_record("describes", b"description", kind=RecordKind.NAMESPACE)
        log.append([described, make_record("before", b"1"), make_record("gone", b"2", kind=RecordKind.STATE)])
        log.append([make_record("gone", b"2", kind=RecordKind.ROWS)])
        log.append([make_record("elsewhere", b"3", namespace="other")])
        log.put_policy(described.namespace, "full")
        log.append(
            [
                make_record("in the same batch", b"4"),
                make_record("clear", b"", kind=RecordKind.CLEAR),
                make_record("after", b"5"),
            ]
        )
        log.append([make_record("before", b"6"), make_record("before", b"7", kind=RecordKind.ROWS)])
        for _ in range(3):
            log.close()
            log, recovery = bench.open()
            assert {(found.key, found.kind) for found in recovery.records} == {
                (described.key, RecordKind.NAMESPACE),
                (digest("elsewhere"), RecordKind.BLOCK),
                (digest("after"), RecordKind.BLOCK),
                (digest("before"), RecordKind.BLOCK),
                (digest("before"), RecordKind.ROWS),
            }
            assert recovery.policies == {described.namespace: "full"}
            both = sorted(
                (found for found in recovery.records if found.key == digest("before")),
                key=lambda found: found.kind,
            )
            assert log.read([Wanted(found.place, found.key, found.kind) for found in both]) == [b"6", b"7"]
        log.close()

    def test_cleared_records_stay_gone_when_segments_are_cleaned_and_reclaimed(
        self, bench: StoreBench
    ) -> None:
        log, _ = bench.open()
        doomed = fill(log, namespace="doomed")
        log.discard(list(doomed)[: len(doomed) // 2])
        log.reclaim()
        kept = make_records(0, 8, namespace="kept")
        log.append([*kept, make_record("clear", b"", kind=RecordKind.CLEAR, namespace="doomed")])
        for _ in range(4):
            log.close()
            log, recovery = bench.open()
            assert {found.key for found in recovery.records} == {record.key for record in kept}
            if (cheapest := log.cheapest_segment()) is not None:
                log.clean(cheapest[0])
            log.reclaim()
            log.check_integrity()
        log.close()

    def test_a_clear_of_states_covers_states_and_rows_written_before_it_and_nothing_else(
        self, bench: StoreBench
    ) -> None:
        log, _ = bench.open()
        state, rows, clear = RecordKind.STATE, RecordKind.ROWS, RecordKind.CLEAR_STATES
        described = make_record("describes", b"description", kind=RecordKind.NAMESPACE)
        log.append([described, make_record("key", b"block"), make_record("key", b"1", kind=state)])
        log.append([make_record("key", b"2", kind=rows), make_record("gone", b"3", kind=state)])
        log.append([make_record("key", b"4", kind=state, namespace="other")])
        log.put_policy(described.namespace, "full")
        log.append(
            [
                make_record("same batch", b"5", kind=rows),
                make_record("clear", b"", kind=clear),
                make_record("after", b"6", kind=rows),
            ]
        )
        log.append([make_record("key", b"7", kind=state)])
        expected = {
            (described.namespace, described.key, RecordKind.NAMESPACE): b"description",
            (described.namespace, digest("key"), RecordKind.BLOCK): b"block",
            (digest("other"), digest("key"), state): b"4",
            (described.namespace, digest("after"), rows): b"6",
            (described.namespace, digest("key"), state): b"7",
        }
        for _ in range(3):
            log.close()
            log, recovery = bench.open()
            found = list(recovery.records)
            answers = log.read([Wanted(item.place, item.key, item.kind) for item in found])
            got = {
                (item.namespace, item.key, item.kind): data for item, data in zip(found, answers, strict=True)
            }
            assert got == expected
            assert recovery.policies == {described.namespace: "full"}
        log.append([make_record("clear", b"", kind=RecordKind.CLEAR)])
        log.append([make_record("clear", b"", kind=clear, namespace="other")])
        log.close()
        log, recovery = bench.open()
        assert [found.key for found in recovery.records] == [described.key]
        log.close()

    def test_cleared_states_stay_gone_beside_living_blocks_however_segments_are_cleaned(
        self, bench: StoreBench
    ) -> None:
        log, _ = bench.open(segment_bytes=MIB)
        blocks: dict[bytes, Record] = {}
        states: dict[bytes, Record] = {}
        for first in range(0, 500, 20):
            part = make_records(first, 20)
            part[1::4] = [replace(record, kind=RecordKind.STATE) for record in part[1::4]]
            part[3::4] = [replace(record, kind=RecordKind.ROWS) for record in part[3::4]]
            log.append(part)
            blocks.update((record.key, record) for record in part[::2])
            states.update((record.key, record) for record in part[1::2])
        before = log.space()
        log.append([make_record("clear", b"", kind=RecordKind.CLEAR_STATES)])
        assert log.space().live == sum(len(record.payload) for record in blocks.values())
        assert log.space().dead > before.dead
        after = replace(make_records(0, 2)[1], kind=RecordKind.STATE)
        log.append([after])
        for _ in range(8):
            log.close()
            log, recovery = bench.open(segment_bytes=MIB)
            assert {found.key for found in recovery.records if found.kind is RecordKind.BLOCK} == set(blocks)
            [found] = [found for found in recovery.records if found.kind is not RecordKind.BLOCK]
            assert log.read([Wanted(found.place, after.key, RecordKind.STATE)]) == [after.payload]
            if (cheapest := log.cheapest_segment()) is not None:
                log.clean(cheapest[0])
            log.reclaim()
            log.check_integrity()
        assert sum(bench.holds(bytes(record.payload)) for record in states.values()) < len(states)
        log.close()

    def test_policies_are_remembered_and_the_latest_wins(self, bench: StoreBench) -> None:
        log, _ = bench.open()
        one, two = NamespaceDigest(digest("one")), NamespaceDigest(digest("two"))
        for policy in ("zero", "periodic:2048", "periodic:2048"):
            log.put_policy(one, policy)
        log.put_policy(two, "endpoints")
        log.close()
        log, recovery = bench.open()
        assert recovery.policies == {one: "periodic:2048", two: "endpoints"}
        assert list(recovery.records) == []
        log.put_policy(one, "full")
        log.close()
        log, recovery = bench.open()
        assert recovery.policies == {one: "full", two: "endpoints"}
        log.close()

    def test_last_uses_survive_a_restart_to_the_hour(self, bench: StoreBench) -> None:
        log, _ = bench.open()
        records = make_records(0, 3)
        places = log.append(records)
        written = bench.clock.wall()
        bench.clock.advance(50 * 3600)
        used = bench.clock.wall() - 7200
        log.note_uses([(places[0], used), (Place(999, 4352, 5), used), (places[2], written - 10_000)])
        log.close()
        log, recovery = bench.open()
        last = [found.last_use for found in recovery.records]
        assert used <= last[0] <= used + 3600
        assert abs(last[1] - written) < 0.01
        assert abs(last[2] - written) < 0.01
        log.close()

    def test_a_full_log_refuses_before_it_writes_and_goes_on_after_a_reclaim(self, bench: StoreBench) -> None:
        log, _ = bench.open(budget_bytes=4 * MIB, segment_bytes=MIB)
        written = fill(log)
        assert len(written) > 200
        before = log.space()
        refused = False
        for number in range(10):
            try:
                log.append(make_records(10_000 + 40 * number, 40))
            except NoSpace:
                refused = True
                break
        assert refused
        assert log.space().allocated <= before.budget
        assert all(read_back(log, list(written.values()), list(written)))
        log.discard(written)
        log.discard(written)
        assert log.reclaim() > 0
        assert log.room_bytes() > 0
        more = make_records(90_000, 16)
        assert read_back(log, more, log.append(more)) == [record.payload for record in more]
        log.check_integrity()
        log.close()

    def test_room_bytes_is_a_promise(self, bench: StoreBench) -> None:
        chance = random.Random(5)
        log, _ = bench.open(budget_bytes=4 * MIB, segment_bytes=MIB)
        number = 0
        while (room := log.room_bytes()) >= 3072:
            size = chance.choice([3072, 3328, 3600, 65_536, 70_000, 449_824])
            count = max(1, room // size) if chance.random() < 0.5 else 1
            if size * count > room:
                size, count = room, 1
            assert len(log.append(make_records(number, count, size=size))) == count
            number += count
        assert number > 5
        log.close()

    def test_the_books_add_up_whatever_is_done(self, bench: StoreBench) -> None:
        seed = 11
        chance = random.Random(seed)
        log, _ = bench.open(budget_bytes=5 * MIB, segment_bytes=MIB)
        living: dict[Place, Record] = {}
        number = 0
        for _ in range(120):
            action = chance.choice(["append", "append", "append", "discard", "reclaim", "clean", "restart"])
            if action == "append" and log.room_bytes() >= 100_000:
                records = make_records(number, chance.randint(1, 20), size=chance.choice([100, 3328, 5000]))
                number += len(records)
                living.update(zip(log.append(records), records, strict=True))
            elif action == "discard":
                for place in chance.sample(list(living), len(living) // 3):
                    log.discard([place])
                    del living[place]
            elif action == "reclaim":
                log.reclaim()
            elif action == "clean" and (cheapest := log.cheapest_segment()) is not None:
                try:
                    moved = log.clean(cheapest[0])
                except NoSpace:
                    continue
                living = {moved.get(place, place): record for place, record in living.items()}
            elif action == "restart":
                log.close()
                log, recovery = bench.open(budget_bytes=5 * MIB, segment_bytes=MIB)
                keys = {record.key for record in living.values()}
                log.discard(found.place for found in recovery.records if found.key not in keys)
                living = {
                    found.place: record
                    for found in recovery.records
                    for record in living.values()
                    if record.key == found.key
                }
                assert len(living) == len(keys), f"seed {seed}"
            log.check_integrity()
            space = log.space()
            assert space.live == sum(place.length for place in living), f"seed {seed}, after {action}"
            assert space.allocated + space.other <= space.budget, f"seed {seed}, after {action}"
        assert all(read_back(log, list(living.values()), list(living))), f"seed {seed}"
        log.discard(living)
        log.close()
        log, recovery = bench.open(budget_bytes=5 * MIB, segment_bytes=MIB)
        log.discard(found.place for found in recovery.records)
        log.reclaim()
        space = log.space()
        assert (space.live, space.allocated - space.spare, space.segments) == (0, 0, 0)
        log.close()

    def test_cleaning_moves_what_lives_and_frees_the_segment(self, bench: StoreBench) -> None:
        log, _ = bench.open(budget_bytes=6 * MIB, segment_bytes=MIB)
        written = fill(log)
        cheapest = log.cheapest_segment()
        assert cheapest is not None
        segment_id = cheapest[0]
        inside = [place for place in written if place.segment_id == segment_id]
        log.discard(inside[::2])
        cheapest = log.cheapest_segment()
        assert cheapest is not None
        assert cheapest.segment_id == segment_id
        assert cheapest.live == sum(place.length for place in inside[1::2])
        assert cheapest.live < cheapest.allocated <= MIB
        bench.damage(inside[1])
        moved = log.clean(segment_id)
        assert set(moved) == set(inside[3::2])
        assert log.space().allocated + log.space().other <= log.space().budget
        records = [written[place] for place in moved]
        assert read_back(log, records, list(moved.values())) == [record.payload for record in records]
        assert log.read([Wanted(inside[3], written[inside[3]].key, RecordKind.BLOCK)]) == [None]
        with pytest.raises(InvalidArgument, match="segment_id"):
            log.clean(segment_id)
        log.check_integrity()
        log.close()
        log, recovery = bench.open(budget_bytes=6 * MIB, segment_bytes=MIB)
        found = {item.key: item.place for item in recovery.records}
        assert all(found[record.key] == place for record, place in zip(records, moved.values(), strict=True))
        log.close()

    def test_verifying_reads_all_that_lives_and_what_is_damaged_is_dead_from_then_on(
        self, bench: StoreBench
    ) -> None:
        log, _ = bench.open(budget_bytes=6 * MIB, segment_bytes=MIB)
        written = fill(log)
        places = list(written)
        gone, bent = places[:7], places[7::50]
        log.discard(gone)
        for place in bent:
            bench.damage(place)
        steps = []
        for segment_id in log.segment_ids():
            begin: int | None = 0
            while begin is not None:
                steps.append(log.verify(segment_id, begin=begin, bytes_max=100_000))
                begin = steps[-1].next
        assert sum(step.records for step in steps) == len(places) - len(gone)
        assert sum(step.bytes for step in steps) == sum(place.length for place in places[7:])
        damages = {damage.place: damage.key for step in steps for damage in step.damages}
        assert damages == {place: written[place].key for place in bent}
        assert log.space().live == sum(place.length for place in {*places[7:]} - {*bent})
        assert log.counters()["quarantined_records"] == len(bent)
        again = [log.verify(segment_id, begin=0, bytes_max=1 << 30) for segment_id in log.segment_ids()]
        assert not any(step.damages for step in again)
        assert log.verify(10**6, begin=0, bytes_max=1).records == 0
        log.check_integrity()
        log.close()

    def test_impossible_records_are_refused_by_field(self, bench: StoreBench) -> None:
        log, _ = bench.open(budget_bytes=4 * MIB, segment_bytes=MIB)
        good = make_record("good", b"good")
        with pytest.raises(InvalidArgument, match="key"):
            log.append(
                [
                    Record(
                        RecordKind.BLOCK,
                        good.namespace,
                        BlockKey(b"short"),
                        good.parent,
                        0,
                        Lineage.EXACT,
                        b"",
                        good.checks,
                    )
                ]
            )
        with pytest.raises(InvalidArgument, match="position"):
            log.append([make_record("good", b"", position=-1)])
        with pytest.raises(InvalidArgument, match="payload_bytes"):
            log.append([make_record("large", bytes(log.largest_append_bytes() + 1))])
        with pytest.raises(InvalidArgument, match="policy"):
            log.put_policy(good.namespace, "x" * 4097)
        assert log.counters()["appended_records"] == 0
        largest = make_record("large", bytes(log.largest_append_bytes()))
        assert read_back(log, [largest], log.append([largest])) == [largest.payload]
        log.close()
        log.close()
        with pytest.raises(InvalidArgument, match="closed"):
            log.append([good])

    def test_one_log_at_a_time(self, bench: StoreBench) -> None:
        log, _ = bench.open()
        with pytest.raises(DirectoryInUse):
            bench.open()
        records = make_records(0, 1)
        assert read_back(log, records, log.append(records)) == [records[0].payload]
        log.close()
        log, _ = bench.open()
        log.close()

    def test_a_budget_below_four_segments_is_refused(self, bench: StoreBench) -> None:
        with pytest.raises(ConfigError, match=r"4 segments.*--disk"):
            bench.open(budget_bytes=4 * MIB - 1, segment_bytes=MIB)
        with pytest.raises(ConfigError, match="--segment"):
            bench.open(budget_bytes=64 * MIB, segment_bytes=MIB + 1)

    def test_counters_tell_what_was_done(self, bench: StoreBench) -> None:
        log, _ = bench.open()
        records = make_records(0, 4)
        places = log.append(records)
        read_back(log, records, places)
        counters = log.counters()
        assert counters["appended_records"] == counters["read_records"] == 4
        assert counters["appended_bytes"] == 4 * 3328
        assert counters["syncs"] == 1
        assert counters["damaged_records"] == counters["device_errors"] == 0
        log.close()
