"""The shared suite over both logs, and what is particular to files in a directory."""

from __future__ import annotations

import errno
import os
import random
import shutil
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvstore.clock import ManualClock
from kvstore.errors import DeviceError, DirectoryInUse, FormatTooNew, NoSpace, StoreDamaged
from kvstore.store import open_log
from kvstore.store.base import Place, RecordKind, RecordLog, Recovery, Wanted
from kvstore.store.catalog import LmdbCatalog
from kvstore.store.device import DeviceFile, PosixDevice, device_error
from kvstore.store.format import FORMAT_VERSION, crc32c
from kvstore.store.memory import MemoryDisk, open_memory
from kvstore.testing.store_suite import (
    MIB,
    StoreBench,
    StoreSuite,
    digest,
    fill,
    make_record,
    make_records,
    read_back,
)
from kvstore.types import BytesLike
from tests.support.long import seeds


class DirectoryBench:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.clock = ManualClock()

    def open(
        self, *, budget_bytes: int = 8 * MIB, segment_bytes: int | None = None
    ) -> tuple[RecordLog, Recovery]:
        return open_log(
            self.directory, budget_bytes=budget_bytes, segment_bytes=segment_bytes, clock=self.clock
        )

    def segment(self, segment_id: int) -> Path:
        return self.directory / f"segment-{segment_id:016x}.log"

    def segments(self) -> list[Path]:
        return sorted(self.directory.glob("segment-*.log"))

    def holds(self, payload: bytes) -> bool:
        return any(payload in path.read_bytes() for path in self.segments())

    def damage(self, place: Place) -> None:
        with self.segment(place.segment_id).open("r+b") as file:
            file.seek(place.offset + place.length // 2)
            byte = file.read(1)[0]
            file.seek(place.offset + place.length // 2)
            file.write(bytes([byte ^ 4]))


class MemoryBench:
    def __init__(self) -> None:
        self.disk = MemoryDisk()
        self.clock = ManualClock()

    def open(
        self, *, budget_bytes: int = 8 * MIB, segment_bytes: int | None = None
    ) -> tuple[RecordLog, Recovery]:
        return open_memory(
            self.disk, budget_bytes=budget_bytes, segment_bytes=segment_bytes, clock=self.clock
        )

    def holds(self, payload: bytes) -> bool:
        return any(
            kept.payload == payload
            for segment in self.disk.segments.values()
            for kept in segment.kept.values()
        )

    def damage(self, place: Place) -> None:
        kept = self.disk.at(place)
        assert kept is not None
        kept.payload = kept.payload[:-1] + bytes([kept.payload[-1] ^ 4])


class TestSegmentLog(StoreSuite):
    @pytest.fixture
    def bench(self, tmp_path: Path) -> StoreBench:
        return DirectoryBench(tmp_path / "store")


class TestMemoryLog(StoreSuite):
    @pytest.fixture
    def bench(self) -> StoreBench:
        return MemoryBench()


@pytest.fixture
def bench(tmp_path: Path) -> DirectoryBench:
    return DirectoryBench(tmp_path / "store")


MADE: dict[int, tuple[Path, dict[bytes, bytes]]] = {}


@pytest.fixture(scope="module", autouse=True)
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    for count in (100, 300, 600, 900):
        made = DirectoryBench(tmp_path_factory.mktemp("made") / "store")
        log, _ = made.open()
        payloads: dict[bytes, bytes] = {}
        for first in range(0, count, 50):
            records = make_records(first, 50)
            log.append(records)
            payloads.update((record.key, bytes(record.payload)) for record in records)
        log.put_policy(records[0].namespace, "periodic:8192")
        log.close()
        MADE[count] = made.directory, payloads
    yield
    MADE.clear()


def filled(bench: DirectoryBench, count: int = 900) -> dict[bytes, bytes]:
    """Three segments and more of records, from a closed log: payloads by key."""
    directory, payloads = MADE[count]
    shutil.copytree(directory, bench.directory)
    return dict(payloads)


def served(log: RecordLog, recovery: Recovery) -> dict[bytes, bytes]:
    """What the log hands out for everything that recovery named, misses left out."""
    answers = log.read([Wanted(found.place, found.key, found.kind) for found in recovery.records])
    return {
        found.key: data for found, data in zip(recovery.records, answers, strict=True) if data is not None
    }


def assert_serves(bench: DirectoryBench, payloads: dict[bytes, bytes], *, at_least: int) -> Recovery:
    """Open; everything handed out is right, and at least so many are; the log takes new records."""
    log, recovery = bench.open()
    got = served(log, recovery)
    assert all(payloads[key] == data for key, data in got.items())
    assert len(got) >= at_least, (len(got), at_least)
    new = make_records(50_000, 3)
    assert read_back(log, new, log.append(new)) == [record.payload for record in new]
    log.check_integrity()
    log.close()
    return recovery


def test_files_and_directory_are_private(bench: DirectoryBench) -> None:
    filled(bench)
    assert bench.directory.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in bench.directory.iterdir()} == {0o600}


@pytest.mark.parametrize("kind", [RecordKind.CLEAR, RecordKind.CLEAR_STATES])
def test_a_clear_is_carried_from_segment_to_segment_for_as_long_as_it_covers_anything(
    bench: DirectoryBench, kind: RecordKind
) -> None:
    log, _ = bench.open(segment_bytes=MIB)
    covered = make_record("covered", b"c" * 3328, kind=RecordKind.STATE)
    beside = make_record("beside", b"b" * 3328, namespace="other")
    log.append([covered, beside])
    for _ in range(2):
        log.close()
        log, recovery = bench.open(segment_bytes=MIB)
    first = {found.place.segment_id for found in recovery.records}
    place = log.append([make_record("clear", b"", kind=kind)])[0]
    carried = make_record("carried", b"d" * 3328, namespace="other")
    at = log.append([carried])[0]
    for _ in range(3):
        log.discard([place])  # which does not matter to a clear
        for _ in range(2):  # the second fills a segment of its own, and the clear's is sealed
            filling = make_record("filling", bytes(log.largest_append_bytes()), namespace="other")
            log.discard(log.append([filling]))
        assert at.segment_id not in first
        at = log.clean(at.segment_id)[at]
    log.close()
    log, recovery = bench.open(segment_bytes=MIB)
    keys = {found.key for found in recovery.records}
    assert {beside.key, carried.key} <= keys
    assert covered.key not in keys
    assert bench.holds(bytes(covered.payload))
    log.discard(found.place for found in recovery.records if found.key == beside.key)
    log.reclaim()
    assert not bench.holds(bytes(covered.payload))
    # Nothing is left that it covers, and it goes with its segment.
    log.discard(found.place for found in recovery.records)
    log.reclaim()
    assert log.space().segments == 0
    log.close()


def test_a_lost_catalogue_is_rebuilt(bench: DirectoryBench) -> None:
    payloads = filled(bench)
    (bench.directory / "catalog.mdb").unlink()
    recovery = assert_serves(bench, payloads, at_least=len(payloads))
    assert recovery.rebuilt
    assert list(recovery.policies.values()) == ["periodic:8192"]
    log, again = bench.open()
    assert not again.rebuilt
    log.close()


@pytest.mark.parametrize("seed", seeds(6, of=60))
def test_a_flipped_bit_in_the_catalogue_costs_nothing(bench: DirectoryBench, seed: int) -> None:
    payloads = filled(bench, 600)
    path = bench.directory / "catalog.mdb"
    data = bytearray(path.read_bytes())
    bit = random.Random(seed).randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)
    recovery = assert_serves(bench, payloads, at_least=len(payloads))
    assert list(recovery.policies.values()) == ["periodic:8192"]


@pytest.mark.parametrize("keep", [0, 1, 4095, 4096, 8192, 12_288, -4096])
def test_a_truncated_catalogue_is_rebuilt(bench: DirectoryBench, keep: int) -> None:
    payloads = filled(bench)
    path = bench.directory / "catalog.mdb"
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    recovery = assert_serves(bench, payloads, at_least=len(payloads))
    assert recovery.rebuilt
    assert list(recovery.policies.values()) == ["periodic:8192"]


def test_a_catalogue_of_another_store_is_not_believed(bench: DirectoryBench, tmp_path: Path) -> None:
    payloads = filled(bench)
    other = DirectoryBench(tmp_path / "other")
    filled(other, 600)
    shutil.copy(other.directory / "catalog.mdb", bench.directory / "catalog.mdb")
    assert assert_serves(bench, payloads, at_least=len(payloads)).rebuilt


def test_an_emptied_segment_is_a_number_of_misses(bench: DirectoryBench) -> None:
    payloads = filled(bench)
    bench.segments()[1].write_bytes(b"")
    recovery = assert_serves(bench, payloads, at_least=len(payloads) - 300)
    assert recovery.damaged_records > 0


@pytest.mark.parametrize("cut", [1, 513, 4096, 300_000])
def test_a_truncated_segment_loses_only_what_was_cut_off(bench: DirectoryBench, cut: int) -> None:
    payloads = filled(bench)
    path = bench.segments()[1]
    os.truncate(path, path.stat().st_size - cut)
    assert_serves(bench, payloads, at_least=len(payloads) - cut // 3328 - 10)


def test_exchanged_segments_are_misses_and_never_wrong(bench: DirectoryBench) -> None:
    payloads = filled(bench)
    first, second = bench.segments()[:2]
    first.rename(bench.directory / "aside")
    second.rename(first)
    (bench.directory / "aside").rename(second)
    assert_serves(bench, payloads, at_least=len(payloads) - 600)


def test_a_removed_segment_is_misses_and_an_added_one_is_ignored(
    bench: DirectoryBench, tmp_path: Path
) -> None:
    payloads = filled(bench)
    other = DirectoryBench(tmp_path / "other")
    filled(other, 300)
    bench.segments()[0].unlink()
    shutil.copy(other.segments()[0], bench.segment(77))
    (bench.directory / "notes.txt").write_text("not ours")
    (bench.directory / "folder").mkdir()
    recovery = assert_serves(bench, payloads, at_least=len(payloads) - 300)
    assert {found.place.segment_id for found in recovery.records}.isdisjoint({1, 77})
    assert (bench.directory / "notes.txt").exists()
    assert bench.segment(77).exists()
    log, _ = bench.open()
    assert log.space().other > bench.segment(77).stat().st_size
    log.close()


def test_a_segment_removed_under_a_running_log_is_misses(bench: DirectoryBench) -> None:
    payloads = filled(bench)
    log, recovery = bench.open()
    bench.segments()[0].unlink()
    got = served(log, recovery)
    assert 0 < len(got) < len(payloads)
    assert log.counters()["damaged_records"] == len(payloads) - len(got)
    log.close()


def test_a_damaged_segment_header_costs_no_record(bench: DirectoryBench) -> None:
    payloads = filled(bench)
    (bench.directory / "catalog.mdb").unlink()
    for path in bench.segments()[:2]:
        with path.open("r+b") as file:
            file.write(bytes(64))
    assert_serves(bench, payloads, at_least=len(payloads))


def test_segments_without_header_and_footer_are_salvaged(bench: DirectoryBench) -> None:
    payloads = filled(bench)
    (bench.directory / "catalog.mdb").unlink()
    for path in bench.segments():
        with path.open("r+b") as file:
            file.write(bytes(64))
            file.seek(-32, os.SEEK_END)
            file.write(bytes(32))
    assert_serves(bench, payloads, at_least=len(payloads))


def test_temporary_files_are_gone_after_a_start(bench: DirectoryBench) -> None:
    payloads = filled(bench)
    (bench.directory / "segment-00000000000000aa.log.tmp").write_bytes(bytes(9000))
    (bench.directory / "identity.tmp").write_bytes(b"half")
    assert_serves(bench, payloads, at_least=len(payloads))
    assert not list(bench.directory.glob("*.tmp"))


def test_a_second_open_names_directory_and_process(bench: DirectoryBench) -> None:
    log, _ = bench.open()
    with pytest.raises(DirectoryInUse, match=rf"pid {os.getpid()}.*{bench.directory.name}"):
        bench.open()
    log.close()


@pytest.mark.parametrize("content", [b"", b"x" * 64, b"KVSTORE\n" + bytes(56)])
def test_an_unreadable_identity_is_refused_and_nothing_touched(bench: DirectoryBench, content: bytes) -> None:
    filled(bench, 300)
    (bench.directory / "identity").write_bytes(content)
    before = {path.name: (path.stat().st_mtime_ns, path.stat().st_size) for path in bench.directory.iterdir()}
    with pytest.raises(StoreDamaged, match="directory="):
        bench.open()
    after = {path.name: (path.stat().st_mtime_ns, path.stat().st_size) for path in bench.directory.iterdir()}
    assert after == before


def test_a_newer_format_is_refused_by_name(bench: DirectoryBench) -> None:
    filled(bench, 100)
    path = bench.directory / "identity"
    body = bytearray(path.read_bytes()[:60])
    struct.pack_into("<I", body, 8, FORMAT_VERSION + 1)
    path.write_bytes(body + struct.pack("<I", crc32c(bytes(body))))
    told = f"format_version={FORMAT_VERSION + 1}; allowed: at most {FORMAT_VERSION}"
    with pytest.raises(FormatTooNew, match=told):
        bench.open()


def test_a_format_before_the_first_release_is_refused_by_name(bench: DirectoryBench) -> None:
    filled(bench, 100)
    path = bench.directory / "identity"
    body = bytearray(path.read_bytes()[:60])
    struct.pack_into("<I", body, 8, FORMAT_VERSION - 1)
    path.write_bytes(body + struct.pack("<I", crc32c(bytes(body))))
    with pytest.raises(StoreDamaged, match=f"format_version={FORMAT_VERSION - 1}"):
        bench.open()
    assert bench.segments()


def test_a_directory_of_something_else_is_refused_and_nothing_touched(bench: DirectoryBench) -> None:
    bench.directory.mkdir()
    (bench.directory / "thesis.tex").write_text("years of work")
    with pytest.raises(StoreDamaged, match=r"thesis\.tex"):
        bench.open()
    assert [path.name for path in bench.directory.iterdir()] == ["thesis.tex"]


def test_a_file_in_place_of_the_directory_is_a_device_error(bench: DirectoryBench) -> None:
    bench.directory.write_text("a file")
    with pytest.raises(DeviceError, match="list"):
        bench.open()


def test_a_start_above_the_budget_frees_before_it_writes(bench: DirectoryBench) -> None:
    log, _ = bench.open(budget_bytes=12 * MIB, segment_bytes=MIB)
    written = fill(log)
    log.close()
    log, recovery = bench.open(budget_bytes=8 * MIB, segment_bytes=MIB)
    assert log.space().allocated > 8 * MIB * 1.2
    assert log.room_bytes() == 0
    with pytest.raises(NoSpace):
        log.append(make_records(9000, 10))
    assert len(served(log, recovery)) == len(written)
    log.discard([found.place for found in recovery.records][: len(written) * 3 // 4])
    log.reclaim()
    assert log.room_bytes() > 0
    new = make_records(9000, 10)
    assert read_back(log, new, log.append(new)) == [record.payload for record in new]
    log.check_integrity()
    assert log.space().allocated + log.space().other <= 8 * MIB
    log.close()


def test_a_reader_keeps_its_segment_until_it_is_done(bench: DirectoryBench) -> None:
    log, _ = bench.open()
    records = make_records(0, 4)
    places = log.append(records)
    log.close()
    device = _HeldReads(bench.directory)
    log, _ = open_log(bench.directory, budget_bytes=8 * MIB, clock=bench.clock, device=device)
    device.hold.set()
    answers: list[bytes | None] = []
    thread = threading.Thread(target=lambda: answers.extend(read_back(log, records, places)))
    thread.start()
    assert device.reached.wait(10)
    log.discard(places)
    assert log.reclaim() == 0
    assert bench.segment(places[0].segment_id).exists()
    device.go_on.set()
    thread.join(10)
    assert answers == [record.payload for record in records]
    assert log.reclaim() > 0
    assert not bench.segment(places[0].segment_id).exists()
    assert read_back(log, records, places) == [None] * 4
    log.close()


class _Measured(PosixDevice):
    """A directory that is measured, whole, after every call that can change it."""

    def __init__(self, directory: Path, budget_bytes: int) -> None:
        super().__init__(directory)
        self.budget_bytes = budget_bytes
        self.highest = 0

    def measure(self) -> None:
        total = sum(path.lstat().st_blocks * 512 for path in self.path.iterdir())
        self.highest = max(self.highest, total)
        assert total <= self.budget_bytes, (total, self.budget_bytes)

    def create(self, name: str, *, bulk: bool = False) -> DeviceFile:
        return _MeasuredFile(super().create(name, bulk=bulk), self)

    def open(self, name: str, *, bulk: bool = False) -> DeviceFile | None:
        file = super().open(name, bulk=bulk)
        return None if file is None else _MeasuredFile(file, self)

    def rename(self, old: str, new: str) -> None:
        super().rename(old, new)
        self.measure()

    def unlink(self, name: str) -> None:
        super().unlink(name)
        self.measure()

    def sync_names(self) -> None:
        super().sync_names()
        self.measure()


class _MeasuredFile:
    def __init__(self, file: DeviceFile, device: _Measured) -> None:
        self._file = file
        self._device = device
        self.pread, self.read_into, self.size, self.close = file.pread, file.read_into, file.size, file.close
        self.forget_cached = file.forget_cached

    def pwritev(self, offset: int, parts: Sequence[BytesLike]) -> int:
        written = self._file.pwritev(offset, parts)
        self._device.measure()
        return written

    def allocate(self, size: int) -> None:
        self._file.allocate(size)
        self._device.measure()

    def truncate(self, size: int) -> None:
        self._file.truncate(size)
        self._device.measure()

    def sync(self) -> None:
        self._file.sync()
        self._device.measure()


@pytest.mark.parametrize("size", [200, 3328, 70_000])
def test_the_directory_never_exceeds_the_budget_catalogue_and_all(bench: DirectoryBench, size: int) -> None:
    budget = 5 * MIB
    device = _Measured(bench.directory, budget)
    catalog = LmdbCatalog(bench.directory)
    log, _ = open_log(
        bench.directory,
        budget_bytes=budget,
        segment_bytes=MIB,
        clock=bench.clock,
        device=device,
        catalog=catalog,
    )
    chance = random.Random(size)
    living: list[Place] = []
    number = 0
    for step in range(30):
        while log.room_bytes() > 40 * size + 200_000 or step == 0:
            records = make_records(number, 40 if size < 10_000 else 4, size=size)
            number += len(records)
            try:
                living += log.append(records)
            except NoSpace:
                break
            if step == 0 and number > 400:
                break
        log.note_uses((place, bench.clock.wall()) for place in living)
        cheapest = log.cheapest_segment()
        if step % 3 and cheapest is not None:
            try:
                moved = log.clean(cheapest[0])
                living = [moved.get(place, place) for place in living]
            except NoSpace:
                log.reclaim()
        chance.shuffle(living)
        log.discard(living[: len(living) // 4])
        living = living[len(living) // 4 :]
        log.reclaim()
        device.measure()
        log.check_integrity()
    assert device.highest > budget // 2
    assert log.counters()["cleaned_bytes"] > 0
    log.close()
    device.measure()


class _HeldReads(PosixDevice):
    """A directory whose reads wait, once `hold` is set, until `go_on` is."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.hold, self.reached, self.go_on = threading.Event(), threading.Event(), threading.Event()

    def open(self, name: str, *, bulk: bool = False) -> DeviceFile | None:
        file = super().open(name, bulk=bulk)
        if file is not None and self.hold.is_set():
            read = file.read_into

            def held(offset: int, target: memoryview) -> int:
                self.reached.set()
                assert self.go_on.wait(10)
                return read(offset, target)

            file.read_into = held  # type: ignore[method-assign]
        return file


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS])
def test_a_device_without_space_says_which_limit(code: int) -> None:
    error = device_error(OSError(code, os.strerror(code)), action="write", path="file")
    assert isinstance(error, NoSpace)
    assert errno.errorcode[code] in str(error)


def test_other_device_failures_are_device_errors() -> None:
    error = device_error(OSError(errno.EIO, os.strerror(errno.EIO)), action="read", path="file")
    assert isinstance(error, DeviceError)
    assert "cannot read file" in str(error)


def test_reads_from_many_threads_while_one_writes(bench: DirectoryBench) -> None:
    log, _ = bench.open()
    records = make_records(0, 200)
    places = log.append(records)
    wrong: list[int] = []
    done = threading.Event()

    def read_on(seed: int) -> None:
        chance = random.Random(seed)
        while not done.is_set():
            chosen = chance.sample(range(200), 8)
            answers = read_back(
                log, [records[index] for index in chosen], [places[index] for index in chosen]
            )
            wrong.extend(
                index for index, data in zip(chosen, answers, strict=True) if data != records[index].payload
            )

    threads = [threading.Thread(target=read_on, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for first in range(1000, 1500, 50):
        batch = make_records(first, 50)
        log.discard(log.append(batch))
        log.reclaim()
    done.set()
    for thread in threads:
        thread.join(10)
    assert wrong == []
    log.check_integrity()
    log.close()


def test_many_segments_are_read_with_few_open_files(bench: DirectoryBench) -> None:
    log, _ = bench.open(budget_bytes=12 * MIB, segment_bytes=MIB)
    written = fill(log)
    log.close()
    log, recovery = bench.open(budget_bytes=12 * MIB, segment_bytes=MIB)
    log._store.files._max = 2  # type: ignore[attr-defined]
    assert len(served(log, recovery)) == len(written)
    assert len(log._store.files._files) <= 2  # type: ignore[attr-defined]
    log.close()


def test_a_namespace_description_is_kept_apart_from_a_block_of_the_same_key(bench: DirectoryBench) -> None:
    log, _ = bench.open()
    described = make_record("n", b"description", kind=RecordKind.NAMESPACE)
    block = make_record("namespace", b"block")
    assert block.key == described.key == digest("namespace")
    log.append([described, block])
    log.close()
    log, recovery = bench.open()
    assert served(log, recovery)[block.key] in (b"description", b"block")
    assert [found.kind for found in recovery.records] == [RecordKind.NAMESPACE, RecordKind.BLOCK]
    log.close()


@pytest.mark.parametrize("seed", range(4))
def test_near_the_budget_promised_room_is_there_and_cleaning_can_always_begin(
    bench: DirectoryBench, seed: int
) -> None:
    chance = random.Random(seed)
    budget = chance.choice([4, 5, 6, 9]) * MIB
    log, _ = bench.open(budget_bytes=budget, segment_bytes=MIB)
    living: list[Place] = []
    number = 0
    for _ in range(120):
        size = chance.choice([3072, 3328, 5000, 70_000])
        count = min(chance.randint(1, 64), log.room_bytes() // size)
        cheapest = log.cheapest_segment()
        if count:
            living += log.append(make_records(number, count, size=size))
            number += count
        elif cheapest is None or chance.random() < 0.6:
            chance.shuffle(living)
            log.discard(living[: len(living) // 5])
            living = living[len(living) // 5 :]
            log.reclaim()
        elif chance.random() < 0.3:
            log.note_uses((place, bench.clock.wall()) for place in living)
        else:
            moved = log.clean(cheapest[0])
            living = [moved.get(place, place) for place in living]
        space = log.space()
        assert space.allocated + space.other <= budget, f"seed {seed}"
        assert space.live == sum(place.length for place in living), f"seed {seed}"
    log.check_integrity()
    log.close()


def test_with_the_catalogue_everything_s_last_use_is_lost_and_counts_as_now(tmp_path: Path) -> None:
    """Nothing goes before its time because nobody knows any more when it was used."""
    clock = ManualClock(wall=1_800_000_000.0)
    log, _ = open_log(tmp_path, budget_bytes=8 * MIB, segment_bytes=MIB, clock=clock)
    records = make_records(0, 40)
    log.append(records)
    log.close()
    clock.advance(50.5 * 3600.0)
    (tmp_path / "catalog.mdb").unlink()
    lost_at = clock.wall()
    for is_first in (True, False):
        log, recovery = open_log(tmp_path, budget_bytes=8 * MIB, segment_bytes=MIB, clock=clock)
        assert recovery.rebuilt is is_first
        assert len(recovery.records) == len(records)
        assert all(lost_at <= found.last_use <= lost_at + 3600.0 for found in recovery.records)
        log.close()
        clock.advance(3600.0)
