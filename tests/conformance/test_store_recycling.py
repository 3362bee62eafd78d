"""Files that segments leave to one another, and what happens beside the appends, on a real directory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvstore.clock import ManualClock
from kvstore.errors import DeviceError, InvalidArgument
from kvstore.store import open_log
from kvstore.store.base import RecordKind, RecordLog, Recovery, Wanted
from kvstore.store.device import PosixDevice
from kvstore.store.segment import is_spare_name, segment_id_of, spare_id_of
from kvstore.testing.store_suite import MIB, fill, make_record, make_records, read_back

BUDGET = 12 * MIB


def opened(directory: Path, *, budget_bytes: int = BUDGET) -> tuple[RecordLog, Recovery]:
    return open_log(directory, budget_bytes=budget_bytes, segment_bytes=MIB, clock=ManualClock())


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_no_id_is_given_twice_while_a_file_bears_it(tmp_path: Path) -> None:
    """A segment and a spare of one id would want one name, and leftovers of the one would pass for the other's."""
    for life in range(6):
        log, recovery = opened(tmp_path)
        log.discard(found.place for found in recovery.records)
        log.reclaim()
        spare_ids = {number for number in map(spare_id_of, names(tmp_path)) if number is not None}
        places = [
            place for number in range(5) for place in log.append(make_records(40 * number, 40, size=20_000))
        ]
        assert not spare_ids & {place.segment_id for place in places}, life
        log.discard(places)
        log.reclaim()
        log.check_integrity()
        log.close()
    assert any(map(is_spare_name, names(tmp_path)))


def test_over_the_budget_files_go_instead_of_waiting(tmp_path: Path) -> None:
    log, _ = opened(tmp_path)
    written = fill(log)
    log.close()
    log, recovery = opened(tmp_path, budget_bytes=6 * MIB)
    assert log.space().allocated > 6 * MIB
    assert len(recovery.records) == len(written)
    oldest = min(place.segment_id for place in written)
    log.discard([place for place in written if place.segment_id == oldest])
    before = log.space().allocated
    log.reclaim()
    assert log.space().spare == 0
    assert log.space().allocated < before
    log.close()


@pytest.mark.parametrize("name", ["segment-00000000ffffffff.log", "segment-ffffffffffffffff.log"])
def test_a_foreign_file_with_an_impossible_id_changes_nothing(tmp_path: Path, name: str) -> None:
    log, _ = opened(tmp_path)
    log.close()
    (tmp_path / name).touch()
    assert segment_id_of(name) is None
    for first in (0, 3):
        log, recovery = opened(tmp_path)
        assert len(recovery.records) == first
        assert all(place.segment_id < 100 for place in log.append(make_records(first, 3)))
        log.close()
    assert (tmp_path / name).exists()


def with_spares(directory: Path) -> list[Path]:
    log, _ = opened(directory)
    log.discard(
        [place for number in range(5) for place in log.append(make_records(40 * number, 40, size=20_000))]
    )
    log.reclaim()
    assert log.space().spare > 0
    log.close()
    return [path for path in sorted(directory.iterdir()) if is_spare_name(path.name)]


@pytest.mark.parametrize("content", ["of another store", "of nobody", "empty", "a link to nothing"])
def test_a_spare_that_is_not_ours_is_left_alone_and_counts_as_other_bytes(
    tmp_path: Path, content: str
) -> None:
    [mine, *_] = with_spares(tmp_path / "store")
    foreign = tmp_path / "store" / "spare-0000000000000077.log"
    assert not foreign.exists()
    data = {
        "of another store": with_spares(tmp_path / "other")[0].read_bytes(),
        "of nobody": b"precious" * (MIB // 8),
        "empty": b"",
        "a link to nothing": b"",
    }[content]
    if content == "a link to nothing":
        foreign.symlink_to("nowhere")
    else:
        foreign.write_bytes(data)
    log, _ = opened(tmp_path / "store")
    spare, other = log.space().spare, log.space().other
    assert spare == MIB * len([each for each in (tmp_path / "store").glob("spare-*") if each != foreign])
    assert other >= len(data)
    assert mine.exists()
    # It stays, whatever becomes of the store's own: a segment of its id may not leave its file under that name.
    for life in range(8):
        records = make_records(1000 * life, 40, size=20_000)
        log.discard(log.append(records))
        log.reclaim()
    log.check_integrity()
    log.close()
    assert foreign.is_symlink() or foreign.read_bytes() == data


def test_a_foreign_spare_of_the_name_of_ours_is_not_written_over(tmp_path: Path) -> None:
    log, _ = opened(tmp_path)
    places = [
        place for number in range(5) for place in log.append(make_records(40 * number, 40, size=20_000))
    ]
    log.close()
    foreign = {tmp_path / f"spare-{place.segment_id:016x}.log" for place in places}
    for path in foreign:
        path.write_bytes(b"precious")
    log, recovery = opened(tmp_path)
    log.discard(found.place for found in recovery.records)
    log.reclaim()
    log.check_integrity()
    log.close()
    assert all(path.read_bytes() == b"precious" for path in foreign)


def test_a_spare_with_an_impossible_id_changes_nothing(tmp_path: Path) -> None:
    log, _ = opened(tmp_path)
    log.close()
    (tmp_path / "spare-ffffffffffffffff.log").write_bytes(b"precious")
    log, _ = opened(tmp_path)
    assert all(place.segment_id < 100 for place in log.append(make_records(0, 3)))
    log.close()
    assert (tmp_path / "spare-ffffffffffffffff.log").read_bytes() == b"precious"


def test_a_spare_whose_new_header_was_torn_is_used_again(tmp_path: Path) -> None:
    """Power may go while a spare gets the header of its next life: its first sector is ours all the same."""
    spares = with_spares(tmp_path)
    for path in spares:
        with path.open("r+b") as file:
            file.seek(512)
            file.write(b"\1" * 3584)
    log, _ = opened(tmp_path)
    assert log.space().spare == MIB * len(spares)
    written = make_records(0, 40, size=20_000)
    assert read_back(log, written, log.append(written)) == [record.payload for record in written]
    log.close()


@pytest.mark.parametrize("way", ["read", "verify", "clean"])
def test_what_a_damaged_clear_covers_stays_away(tmp_path: Path, way: str) -> None:
    log, _ = opened(tmp_path)
    kept = make_records(0, 60, namespace="kept")
    cleared = make_records(0, 60, namespace="cleared")
    log.append([record for pair in zip(kept, cleared, strict=True) for record in pair])
    log.close()
    log, _ = opened(tmp_path)
    [place] = log.append([make_record("clear", b"", kind=RecordKind.CLEAR, namespace="cleared")])
    more = make_records(100, 20, namespace="kept")
    log.append(more)
    log.close()
    log, _ = opened(tmp_path)
    with (tmp_path / f"segment-{place.segment_id:016x}.log").open("r+b") as file:
        file.seek(place.offset - 200)
        bent = file.read(1)[0] ^ 1
        file.seek(place.offset - 200)
        file.write(bytes([bent]))
    if way == "read":
        assert log.read([Wanted(place, kept[0].key, RecordKind.BLOCK)]) == [None]
    elif way == "verify":
        step = log.verify(place.segment_id, begin=0, bytes_max=MIB)
        assert [damage.place for damage in step.damages] == [place]
    else:
        log.clean(place.segment_id)
    log.reclaim()
    log.close()
    log, recovery = opened(tmp_path)
    assert {found.namespace for found in recovery.records} == {kept[0].namespace}
    assert len(recovery.records) == len(kept) + len(more)
    log.close()


class Passing(PosixDevice):
    """A directory whose listing fails while `fails` says so."""

    fails: Callable[[], bool] = staticmethod(lambda: False)

    def names(self) -> list[str]:
        if self.fails():
            raise DeviceError("cannot list: Too many open files")
        return super().names()


def test_a_listing_that_fails_for_a_moment_beside_the_appends_costs_nothing(tmp_path: Path) -> None:
    device = Passing(tmp_path)
    log, _ = open_log(
        tmp_path, budget_bytes=BUDGET, segment_bytes=MIB, clock=ManualClock(), device=device, lanes=None
    )
    main = threading.current_thread()
    for failing in (True, False):
        device.fails = lambda failing=failing: failing and threading.current_thread() is not main  # type: ignore[misc]
        written = {}
        for number in range(8):
            records = make_records(1000 * failing + 40 * number, 40, size=10_000)
            written.update(zip(log.append(records), records, strict=True))
        assert read_back(log, list(written.values()), list(written)) == [
            record.payload for record in written.values()
        ]
        log.discard(written)
        log.reclaim()
    log.check_integrity()
    log.close()


def test_a_closed_log_reads_nothing_and_waits_for_who_reads(tmp_path: Path) -> None:
    log, _ = opened(tmp_path)
    records = make_records(0, 200, size=3_000)
    places = log.append(records)
    wanted = [Wanted(place, record.key, record.kind) for place, record in zip(places, records, strict=True)]
    outcomes: list[str] = []
    begun = threading.Barrier(5)

    def reader() -> None:
        begun.wait()
        try:
            while True:
                assert log.read(wanted) == [record.payload for record in records]
        except InvalidArgument as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=reader) for _ in range(4)]
    for thread in threads:
        thread.start()
    begun.wait()
    log.close()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 4
    assert all("closed" in text for text in outcomes)
