"""What must be durable before what, and what is checked on every read: one promise per test."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest

from kvstore.clock import ManualClock
from kvstore.errors import DeviceError
from kvstore.store.base import Place, Record, RecordLog, Wanted
from kvstore.store.catalog import DEAD, SEALED, LmdbCatalog, RamCatalog, decode_segment_row, key_of
from kvstore.store.format import TRAILER_BYTES, decode_segment_header, decode_trailer
from kvstore.store.log import SegmentLog
from kvstore.store.segment import is_spare_name, segment_id_of, segment_name
from kvstore.testing.sim_device import PowerCut, SimCatalog, SimDevice, SimFile
from kvstore.testing.store_suite import make_record
from tests.support.long import one_in
from tests.support.sim_store import BUDGET, Scenario, open_sim, within


class WatchedCatalog(SimCatalog):
    """Looks at the device whenever a segment is entered as sealed."""

    def __init__(self, device: SimDevice) -> None:
        super().__init__(device)
        self.watched = device
        self.sealed = 0

    def write(self, changes: Mapping[bytes, bytes | None], *, bytes_max: int) -> bool:
        for key, value in changes.items():
            row = decode_segment_row(value or b"") if key[:1] == b"S" else None
            if row is not None and row.state == SEALED and len(changes) == 2:
                inode = self.watched._held_names[segment_name(int.from_bytes(key[1:], "big"))]
                trailer = decode_trailer(bytes(inode.held[-TRAILER_BYTES:]))
                assert isinstance(trailer, tuple), "a segment is called sealed before its footer is durable"
                assert (trailer[1], len(inode.held)) == (row.salt, row.file_bytes)
                self.sealed += 1
        return super().write(changes, bytes_max=bytes_max)


class WatchedDevice(SimDevice):
    """Looks at the catalogue whenever a segment's file goes, and at the names whenever a spare is used."""

    catalog: SimCatalog
    gone = used = 0

    def rename(self, old: str, new: str) -> None:
        if is_spare_name(new):
            self._expect_dead(old)
        elif is_spare_name(old):
            header = decode_segment_header(bytes(self._names[old].held[:4096]))
            assert not isinstance(header, tuple) or segment_id_of(new) == header.segment_id, (
                "a name before its header"
            )
        super().rename(old, new)

    def unlink(self, name: str) -> None:
        if segment_id_of(name) is not None and name in self._names:
            self._expect_dead(name)
        super().unlink(name)

    def open(self, name: str, *, bulk: bool = False) -> SimFile | None:
        if bulk and is_spare_name(name):
            self.used += 1
            assert name in self._held_names, "a file is used again before it is durable that its segment went"
        return super().open(name, bulk=bulk)

    def _expect_dead(self, name: str) -> None:
        row = decode_segment_row(self.catalog.rows.get(key_of(b"S", segment_id_of(name) or 0), b"")[4:])
        unused = decode_segment_header(bytes(self._names[name].seen[:4096]))
        if row is None and isinstance(unused, tuple):
            # Prepared and never used: nothing can come back with it.
            assert bytes(self._names[name].seen[4096:4104]) != b"KVSRECD1" or self.older_life(name)
        else:
            assert row is not None, "a segment went that the catalogue does not know"
            assert row.state == DEAD, "a segment went before the catalogue said so"
        self.gone += 1

    def older_life(self, name: str) -> bool:
        """Whether the first record there is left over from another segment."""
        return int.from_bytes(self._names[name].seen[4096 + 64 : 4096 + 72], "little") != segment_id_of(name)


def watched(seed: int) -> tuple[WatchedDevice, WatchedCatalog]:
    device = WatchedDevice(seed)
    device.watch = within(BUDGET)
    device.catalog = catalog = WatchedCatalog(device)
    return device, catalog


def test_rows_follow_footers_and_files_follow_rows() -> None:
    gone = used = sealed = 0
    for seed in range(12):
        device, catalog = watched(seed)
        log, _ = open_sim(device, catalog)
        scenario = Scenario(seed)
        for _ in range(4):
            scenario.run(log, 40)
            scenario.append_sizes(log, [3000])
        log.close()
        gone, used, sealed = gone + device.gone, used + device.used, sealed + catalog.sealed
    assert min(gone, used, sealed) > 10, (gone, used, sealed)


def filled(log: RecordLog, scenario: Scenario) -> None:
    """Two full segments of records that nobody needs, and a third one that is open."""
    while log.space().segments < 3:
        scenario.append_sizes(log, [100_000])
    for place in list(scenario.places):
        scenario.forget(log, place)


def test_a_file_whose_removal_was_not_synced_is_not_used_again() -> None:
    """There is room for fresh ones, so that nothing forces the log to wait."""
    for seed in range(4):
        device, catalog = watched(seed)
        device.watch = None
        log, _ = open_sim(device, catalog, budget=3 * BUDGET)
        scenario = Scenario(seed)
        filled(log, scenario)
        device.sync_names = _failing(device)  # type: ignore[method-assign]
        with pytest.raises(DeviceError):
            log.reclaim()
        del device.sync_names  # type: ignore[method-assign]
        segments = log.space().segments
        while log.space().segments < segments + 3:
            scenario.append_sizes(log, [100_000])
        log.reclaim()
        log.check_integrity()
        log.close()


def _failing(device: SimDevice):  # type: ignore[no-untyped-def]
    def sync_names() -> None:
        device.step()
        raise DeviceError("injected EIO")

    return sync_names


def test_a_new_directory_survives_a_power_cut_at_any_moment() -> None:
    for seed in range(10):
        for call in range(1, 25):
            device = SimDevice(seed)
            device.cut_at(call)
            try:
                log, _ = open_sim(device, RamCatalog())
                log.append([make_record("first", b"f" * 3328)])
            except PowerCut:
                pass
            device.crash()
            log, _ = open_sim(device, RamCatalog())
            log.close()


def test_power_may_go_at_every_call_of_a_short_run() -> None:
    """In order where the seeded cuts are random: all calls in `make test-long`, under a few fates of what was not synced."""
    probe = SimDevice(0)
    log, _ = open_sim(probe, SimCatalog(probe))
    Scenario(5).run(log, 60)
    log.close()
    for call in range(1, probe.calls + 1, one_in(3)):
        device = SimDevice(call)
        catalog, scenario = SimCatalog(device), Scenario(5)
        device.cut_at(call)
        try:
            log, _ = open_sim(device, catalog)
            scenario.run(log, 60)
            log.close()
        except PowerCut:
            pass
        device.crash()
        log, recovery = open_sim(device, catalog)
        scenario.owed.check(log, recovery, f"power cut at call {call}")
        found = (recovery.damaged_records, recovery.damaged_segments, recovery.missing_segments)
        assert found == (0, 0, 0), f"power cut at call {call}: lost power is called damage"
        for life in range(2):
            damages = [log.verify(each, begin=0, bytes_max=BUDGET).damages for each in log.segment_ids()]
            assert not any(damages), f"power cut at call {call}, start {life}: {damages}"
            log.close()
            device.kill()
            log, _ = open_sim(device, catalog)
        log.close()


def test_a_segment_that_is_read_does_not_go() -> None:
    device, catalog = watched(1)
    log, _ = open_sim(device, catalog)
    assert isinstance(log, SegmentLog)
    filled(log, Scenario(1))
    first = min(log._table.segments)
    with log._table.reading(first) as segment:
        assert segment is not None
        log.reclaim()
        assert segment_name(first) in device.names()
    assert log.reclaim() > 0
    assert segment_name(first) not in device.names()
    log.close()


def opened(*records: Record) -> tuple[SimDevice, RecordLog, list[Place]]:
    device = SimDevice(1)
    log, _ = open_sim(device, SimCatalog(device))
    return device, log, log.append(list(records))


def test_a_record_under_another_key_or_of_another_kind_is_a_counted_miss() -> None:
    one, other = make_record("one", b"1" * 3328), make_record("other", b"2" * 3328)
    _, log, (place, _) = opened(one, other)
    assert log.read([Wanted(place, other.key, one.kind)]) == [None]
    assert log.read([Wanted(place, one.key, type(one.kind).STATE)]) == [None]
    assert log.read([Wanted(place, one.key, one.kind, 10, 20)]) == [one.payload[10:20]]
    assert log.read([Wanted(place, other.key, one.kind, 10, 20)]) == [None]
    assert log.counters()["damaged_records"] == 3
    log.close()


def test_a_bent_bit_of_a_payload_costs_the_parts_around_it_and_no_others() -> None:
    payload = random.Random(3).randbytes(200_000)
    record = replace(make_record("sliced", payload), slices=range(20_000, 200_000, 20_000))
    for bit in random.Random(4).sample(range(8 * len(payload)), 40):
        device, log, (place,) = opened(record)
        device.flip(segment_name(place.segment_id), 8 * place.offset + bit)
        bent = bit // 8 // 20_000
        for number in range(10):
            begin = number * 20_000
            answer = log.read([Wanted(place, record.key, record.kind, begin + 100, begin + 19_000)])
            right = payload[begin + 100 : begin + 19_000]
            assert answer == ([None] if number == bent else [right]), (bit, number)
        assert log.counters()["read_again_records"] == log.counters()["damaged_records"] == 1
        log.close()


def test_a_recycled_file_does_not_serve_its_earlier_life() -> None:
    """Records of an earlier life lie whole behind the new ones, under checksums that hold."""
    device, catalog = watched(2)
    log, _ = open_sim(device, catalog)
    scenario = Scenario(2)
    old: set[bytes] = set()
    for _ in range(4):
        filled_before = dict(scenario.places)
        filled(log, scenario)
        old.update(bytes(record.key) for record in filled_before.values())
        log.reclaim()
    assert device.used > 0
    new = make_record("new", b"n" * 3328)
    log.append([new])
    device.crash()
    log, recovery = open_sim(device, SimCatalog(device))
    served = log.read([Wanted(found.place, found.key, found.kind) for found in recovery.records])
    assert new.payload in served
    ids = {found.place.segment_id for found in recovery.records}
    assert ids <= {segment_id_of(name) for name in device.names()}
    assert recovery.damaged_records == 0
    log.close()


def test_a_use_that_was_noted_counts_after_a_restart() -> None:
    device, clock = SimDevice(1), ManualClock()
    catalog = SimCatalog(device)
    log, _ = open_sim(device, catalog, clock=clock)
    record = make_record("used", b"u" * 3328)
    places = log.append([record, make_record("unused", b"v" * 3328)])
    written = clock.wall()
    clock.advance(70 * 3600)
    used = clock.wall()
    log.note_uses([(places[0], used)])
    log.close()
    clock.advance(3600)
    log, recovery = open_sim(device, catalog, clock=clock)
    uses = {found.key: found.last_use for found in recovery.records}
    assert used <= uses[record.key] <= clock.wall()
    assert min(uses.values()) == written
    log.close()


def test_the_catalogue_does_not_grow_into_the_room_for_segments() -> None:
    """Whatever it may grow to, there is room for what is there and for a segment to copy into."""
    device, catalog = watched(1)
    log, _ = open_sim(device, catalog)
    assert isinstance(log, SegmentLog)
    scenario, disk = Scenario(1), log._disk
    for _ in range(30):
        scenario.attempt(scenario.append, log)
        scenario.attempt(scenario.policy, log)
        disk.refresh()
        beside = disk.other_bytes - device.allocated(LmdbCatalog.DATA_NAME)
        most = disk.catalog_bytes_max()
        assert disk.table.allocated() + beside + most + disk.segment_bytes <= BUDGET
        assert not catalog.write({b"large": bytes(most)}, bytes_max=most)
    log.close()


def test_a_header_that_landed_elsewhere_costs_no_record() -> None:
    """The new segment's file then begins with the header of its earlier life, and ends with that life's trailer."""
    device, catalog = watched(2)
    log, _ = open_sim(device, catalog)
    scenario = Scenario(2)
    filled(log, scenario)
    log.reclaim()
    assert log.space().spare > 0
    old = [name for name in device.names() if is_spare_name(name)]
    header = bytes(device._names[old[0]].seen[:4096])
    filled(log, scenario)
    record = make_record("new", b"n" * 3328)
    place = log.append([record])[0]
    device.crash()
    device.contents(segment_name(place.segment_id))[:4096] = header
    for fate in (catalog, SimCatalog(device)):
        log, recovery = open_sim(device, fate)
        found = {item.key: item for item in recovery.records}[record.key]
        assert log.read([Wanted(found.place, record.key, record.kind)]) == [record.payload]
        assert (recovery.damaged_records, recovery.damaged_segments) == (0, 1)
        log.close()
        device.kill()
