"""The log on a simulated directory: power goes at any moment, bits flip, calls fail."""

from __future__ import annotations

import random

import pytest

from kvstore.errors import DeviceError, KvstoreError, NoSpace
from kvstore.store.base import RecordKind, RecordLog, Wanted
from kvstore.store.catalog import DEAD, Catalog, RamCatalog, SegmentRow, key_of, segment_row
from kvstore.testing.sim_device import Inode, PowerCut, SimCatalog, SimDevice, SimFile
from kvstore.testing.store_suite import MIB, make_record
from tests.support.long import examples
from tests.support.sim_store import BUDGET, COVERED, Scenario, open_sim, segments_of, within, works_again


def survivors(device: SimDevice, catalog: Catalog, scenario: Scenario, note: str) -> None:
    """Open what is left, twice: all that is owed is there, and the log works on."""
    for attempt in ("first", "second"):
        log, recovery = open_sim(device, catalog)
        scenario.owed.check(log, recovery, f"{note}, {attempt} start")
        if not scenario.failed:
            found = (recovery.damaged_records, recovery.damaged_segments, recovery.missing_segments)
            assert found == (0, 0, 0), f"{note}: lost power is called damage"
        log.check_integrity()
        known = {record.key for record in scenario.owed.must.values()}
        if attempt == "second":
            log.discard(found.place for found in recovery.records if found.key not in known)
            log.reclaim()
            record = make_record("afterwards", b"afterwards")
            try:
                places = log.append([record])
            except NoSpace:
                assert log.room_bytes() < len(record.payload), note
            else:
                assert log.read([Wanted(places[0], record.key, record.kind)]) == [record.payload], note
        log.close()


def power_cut(seed: int, device: SimDevice, cut_within: int) -> None:
    """Run until power goes, start again, perhaps lose power during that, and check what is owed."""
    chance = random.Random(seed)
    catalog: Catalog = RamCatalog()
    scenario = Scenario(seed)
    note = f"seed {seed}"
    device.watch = within(BUDGET)
    device.cut_at(chance.randint(1, cut_within))
    try:
        log, recovery = open_sim(device, catalog)
        for _ in range(4):
            scenario.run(log, 20)
            if chance.random() < 0.3:
                log.close()
                log, recovery = open_sim(device, catalog)
                scenario.adopt(log, scenario.owed.check(log, recovery, note), recovery)
    except PowerCut:
        note += ", power cut"
    if chance.random() < 0.2:
        device.kill()
    else:
        device.crash()
    if chance.random() < 0.4:
        catalog = RamCatalog()
    if chance.random() < 0.4:
        device.cut_at(device.calls + chance.randint(1, 30))
        try:
            log, _ = open_sim(device, catalog)
            log.close()
        except PowerCut:
            note += ", another one during the start"
        device.crash()
    survivors(device, catalog, scenario, note)


def test_power_cuts_lose_nothing_acknowledged() -> None:
    first = random.SystemRandom().randrange(2**32)
    for seed in [*range(examples(80)), *range(first, first + examples(40))]:
        power_cut(seed, SimDevice(seed, short_writes=seed % 2 == 1), 260)


class _UnsyncedData(SimDevice):
    """A directory whose files say that they are synced, and are not."""

    def _file(self, inode: Inode, *, bulk: bool) -> SimFile:
        file = super()._file(inode, bulk=bulk)
        file.sync = lambda: None  # type: ignore[method-assign]
        return file


class _UnsyncedNames(SimDevice):
    def sync_names(self) -> None:
        self.step()


class _BlindWrites(SimDevice):
    """A directory that claims to have written all when it wrote a part."""

    def _file(self, inode: Inode, *, bulk: bool) -> SimFile:
        file = super()._file(inode, bulk=bulk)
        write = file.pwritev

        def blind(offset: int, parts: list[bytes]) -> int:
            write(offset, parts)
            return sum(memoryview(part).nbytes for part in parts)

        file.pwritev = blind  # type: ignore[method-assign, assignment]
        return file


@pytest.mark.parametrize(
    ("broken", "short_writes"),
    [
        (_UnsyncedData, False),
        (_UnsyncedNames, False),
        (_BlindWrites, True),
    ],
)
def test_the_checks_have_teeth(broken: type[SimDevice], short_writes: bool) -> None:
    """On a directory that breaks a promise, the same runs must find records lost."""
    noticed = 0
    for seed in range(30):
        try:
            power_cut(seed, broken(seed, short_writes=short_writes), 260)
        except (AssertionError, KvstoreError):
            noticed += 1
    assert noticed >= 3


def test_after_a_failed_sync_no_second_one_is_believed() -> None:
    """The bytes whose sync failed are in memory, readable, and on no disk: the next start must not build on them."""
    for seed in range(20):
        device, catalog = SimDevice(seed), RamCatalog()
        log, _ = open_sim(device, catalog)
        safe = make_record("safe", b"safe" * 900)
        log.append([safe])
        lost = make_record("lost", random.Random(seed).randbytes(40_000))
        device.fail_at(device.calls + 2, DeviceError("injected EIO"))  # the write succeeds, its sync does not
        with pytest.raises(DeviceError):
            log.append([lost])
        device.kill()
        log, recovery = open_sim(device, catalog)
        found = {item.key for item in recovery.records}
        child = make_record("child", b"child" * 700)
        log.append([child])
        device.crash()
        log, again = open_sim(device, catalog)
        answers = log.read([Wanted(item.place, item.key, item.kind) for item in again.records])
        payloads = {item.key: data for item, data in zip(again.records, answers, strict=True)}
        assert (payloads[safe.key], payloads[child.key]) == (safe.payload, child.payload), f"seed {seed}"
        assert (payloads.get(lost.key) == lost.payload) == (lost.key in found), (
            f"seed {seed}: found after a restart, and gone after a power cut"
        )
        log.close()


def test_the_next_append_after_a_failed_one_goes_to_a_fresh_segment() -> None:
    device = SimDevice(1)
    log, _ = open_sim(device, RamCatalog())
    first = make_record("first", b"1" * 3328)
    place = log.append([first])[0]
    device.fail_at(device.calls + 2, DeviceError("injected EIO"))
    with pytest.raises(DeviceError):
        log.append([make_record("second", b"2" * 3328)])
    again = make_record("second", b"2" * 3328)
    other = log.append([again])[0]
    assert other.segment_id != place.segment_id
    assert log.read([Wanted(place, first.key, first.kind), Wanted(other, again.key, again.kind)]) == [
        first.payload,
        again.payload,
    ]
    assert log.counters()["device_errors"] == 1
    log.check_integrity()
    log.close()


def test_a_misread_is_looked_at_once_more() -> None:
    device = SimDevice(1)
    log, _ = open_sim(device, RamCatalog())
    record = make_record("fills its page", b"r" * (4096 - 256))
    wanted = [Wanted(log.append([record])[0], record.key, record.kind)]
    device.misread(1)
    assert log.read(wanted) == [record.payload]
    assert log.counters()["damaged_records"] == 0
    device.misread(2)
    assert log.read(wanted) == [None]
    counters = log.counters()
    assert (counters["read_again_records"], counters["damaged_records"], counters["quarantined_records"]) == (
        2,
        1,
        1,
    )
    # What could not be read twice is not copied forward either; who asks all the same is told what is there now.
    assert log.read(wanted) == [record.payload]
    assert log.counters()["quarantined_records"] == 1
    log.close()


def test_a_failing_read_is_an_error_and_not_a_miss() -> None:
    device = SimDevice(1)
    log, _ = open_sim(device, RamCatalog())
    record = make_record("record", b"r" * 3328)
    wanted = [Wanted(log.append([record])[0], record.key, record.kind)]
    assert log.read(wanted) == [record.payload]
    device.fail_at(device.calls + 1, DeviceError("injected EIO"))
    with pytest.raises(DeviceError):
        log.read(wanted)
    assert log.read(wanted) == [record.payload]
    log.close()


def test_every_call_of_a_start_may_fail_and_nothing_is_erased() -> None:
    seed = 5
    device, catalog, scenario = SimDevice(seed), RamCatalog(), Scenario(seed)
    log, _ = open_sim(device, catalog)
    scenario.run(log, 60)
    device.crash()
    before = device.calls
    log, _ = open_sim(device, RamCatalog())
    log.close()
    calls = device.calls - before
    met = 0
    for call in range(1, calls + 1):
        device.fail_at(device.calls + call, DeviceError("injected EIO"))
        try:
            log, _ = open_sim(device, RamCatalog())
            log.close()
        except DeviceError:
            met += 1
        device.kill()
    assert met > calls // 2
    survivors(device, RamCatalog(), scenario, f"seed {seed}")


def reclaimable(device: SimDevice, catalog: Catalog) -> RecordLog:
    """A log with a sealed segment of records that nobody needs."""
    log, _ = open_sim(device, catalog)
    log.append([make_record("unneeded", b"u" * 3328)])
    log.close()
    log, recovery = open_sim(device, catalog)
    log.discard(found.place for found in recovery.records)
    return log


@pytest.mark.parametrize("with_catalog", [True, False])
def test_what_was_reclaimed_stays_away_after_a_power_cut(with_catalog: bool) -> None:
    for seed in range(8):
        device, catalog = SimDevice(seed), RamCatalog()
        assert reclaimable(device, catalog).reclaim() > 0
        device.crash()
        log, recovery = open_sim(device, catalog if with_catalog else RamCatalog())
        assert list(recovery.records) == [], f"seed {seed}"
        log.close()


def test_a_removal_that_lost_power_half_way_is_finished_by_the_next_start() -> None:
    for seed in range(8):
        device, catalog = SimDevice(seed), RamCatalog()
        log = reclaimable(device, catalog)
        device.cut_at(device.calls + 2)
        with pytest.raises(PowerCut):
            log.reclaim()
        device.crash()
        log, recovery = open_sim(device, catalog)
        assert (list(recovery.records), segments_of(device)) == ([], []), f"seed {seed}"
        log.close()


def test_a_catalogue_row_about_another_segment_of_the_same_number_removes_nothing() -> None:
    device, catalog = SimDevice(1), RamCatalog()
    log, _ = open_sim(device, catalog)
    record = make_record("needed", b"n" * 3328)
    place = log.append([record])[0]
    log.close()
    row = segment_row(SegmentRow(salt=12345, file_bytes=MIB, state=DEAD))
    assert catalog.write({key_of(b"S", place.segment_id): row}, bytes_max=MIB)
    log, recovery = open_sim(device, catalog)
    assert log.read([Wanted(found.place, found.key, found.kind) for found in recovery.records]) == [
        record.payload
    ]
    log.close()


@pytest.mark.parametrize("clear", COVERED)
def test_a_clear_outlives_what_a_failed_append_may_have_left_behind(clear: RecordKind) -> None:
    for seed in range(8):
        device = SimDevice(seed)
        log, _ = open_sim(device, RamCatalog())
        log.append([make_record("keeps the segment", b"k" * 100, namespace="other")])
        device.fail_at(device.calls + 2, DeviceError("injected EIO"))
        left_behind = make_record("left behind", b"l" * 100, kind=RecordKind.STATE)
        with pytest.raises(DeviceError):
            log.append([left_behind])
        log.append([make_record("clear", b"", kind=clear)])
        while log.room_bytes() > 400_000:  # seals the segment of the CLEAR
            log.discard(log.append([make_record("filling", bytes(400_000), namespace="other")]))
        log.reclaim()
        for _ in range(3):
            log.close()
            device.crash()
            log, recovery = open_sim(device, RamCatalog())
            assert left_behind.key not in {found.key for found in recovery.records}, f"seed {seed}"
            log.reclaim()
        log.close()


def test_no_flipped_bit_anywhere_is_served() -> None:
    seed = 7
    for flip in range(150):
        note = f"seed {seed}, flip {flip}"
        chance = random.Random(flip)
        device, catalog = SimDevice(seed), RamCatalog()
        log, _ = open_sim(device, catalog)
        records = [
            make_record(f"key {number}", chance.randbytes(chance.choice([90, 3328, 70_000])))
            for number in range(12)
        ]
        log.append(records[:6])
        log.append(records[6:])
        if flip % 2:
            log.close()
            device.kill()
        else:
            device.crash()
        data = device.contents(segments_of(device)[0])
        used = len(bytes(data).rstrip(b"\0"))
        for _ in range(1 + flip % 3):
            bit = chance.randrange(8 * used)
            data[bit // 8] ^= 1 << bit % 8
        log, recovery = open_sim(device, catalog if flip % 4 else RamCatalog())
        payloads = {record.key: record.payload for record in records}
        answers = log.read([Wanted(found.place, found.key, found.kind) for found in recovery.records])
        right = 0
        for found, data_read in zip(recovery.records, answers, strict=True):
            assert data_read in (None, payloads[found.key]), note
            right += data_read is not None
        assert right >= len(records) - 1 - flip % 3, note
        log.close()


def test_damage_in_the_middle_is_counted_and_what_lies_behind_it_is_kept() -> None:
    device = SimDevice(1)
    log, _ = open_sim(device, RamCatalog())
    records = [make_record(f"key {number}", bytes([number]) * 3328) for number in range(9)]
    places = [log.append([record])[0] for record in records]
    device.crash()
    data = device.contents(segments_of(device)[0])
    data[places[4].offset + 5] ^= 1
    data[places[6].offset - 200] ^= 1
    log, recovery = open_sim(device, RamCatalog())
    assert [found.key for found in recovery.records] == [
        records[index].key for index in (0, 1, 2, 3, 5, 7, 8)
    ]
    assert recovery.damaged_records == 2
    assert recovery.torn_bytes == 0
    log.close()


def test_a_torn_tail_is_cut_and_is_not_called_damage() -> None:
    for seed in range(40):
        device = SimDevice(seed)
        log, _ = open_sim(device, RamCatalog())
        safe = [make_record(f"safe {number}", bytes([number]) * 3328) for number in range(4)]
        log.append(safe)
        device.cut_at(device.calls + 2)
        with pytest.raises(PowerCut):
            log.append(
                [
                    make_record(f"torn {number}", random.Random(number).randbytes(20_000))
                    for number in range(5)
                ]
            )
        device.crash()
        log, recovery = open_sim(device, RamCatalog())
        assert [found.key for found in recovery.records][:4] == [record.key for record in safe], (
            f"seed {seed}"
        )
        assert recovery.damaged_records == 0, f"seed {seed}"
        log.close()


def test_a_sealed_segment_is_not_scanned_again() -> None:
    device, catalog = SimDevice(1), RamCatalog()
    log, _ = open_sim(device, catalog)
    for number in range(12):
        log.append([make_record(f"key {number}", bytes(300_000))])
    log.close()
    before = device.calls
    log, recovery = open_sim(device, catalog)
    assert len(recovery.records) == 12
    # The identity twice, the lock, and for each segment: open, read its header.
    assert device.calls - before <= 2 * len(segments_of(device)) + 8
    log.close()


@pytest.mark.parametrize("fault", ["read-only", "filled by others"])
def test_a_disk_that_takes_no_writes_serves_reads_and_writing_comes_back_by_itself(fault: str) -> None:
    device = SimDevice(3)
    device.watch = within(BUDGET)
    log, _ = open_sim(device, SimCatalog(device))
    scenario = Scenario(3)
    scenario.run(log, 40)
    for _ in range(3):
        if fault == "read-only":
            device.read_only = True
        else:
            device.capacity = device.total_allocated()
        refused = 0
        for _ in range(12):
            try:
                scenario.append_sizes(log, [100_000])
            except NoSpace:
                refused += 1
            scenario.check_places(log, scenario.places.items(), fault)
        assert refused > 0
        device.read_only, device.capacity = False, None
        works_again(log, scenario)
        scenario.check_places(log, scenario.places.items(), fault)
    log.close()
