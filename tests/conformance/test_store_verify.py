"""Verify over a real directory: one changed byte anywhere that is checked is found and named; and what a rebuild keeps."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.clock import ManualClock
from kvstore.errors import DirectoryInUse, StoreDamaged
from kvstore.store import RecordLog, open_log
from kvstore.store.base import Damage, Place, Record
from kvstore.store.catalog import LmdbCatalog
from kvstore.store.format import LARGE_HEADER_BYTES, RECORD_HEADER_BYTES, SLICE_ENTRY_BYTES, payload_gap
from kvstore.store.rebuild import RebuiltCatalog
from kvstore.testing.store_suite import MIB, make_records, read_back

SLICES = 5


class Shelf:
    """A store on disk with small and large records."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.clock = ManualClock()
        large = [
            replace(record, slices=[i * 20_000 for i in range(1, SLICES + 1)])
            for record in make_records(0, 12, size=100_000)
        ]
        self.records = [*large, *make_records(100, 200, size=3328)]
        self.log = self.open()
        self.places = [place for each in self.records for place in self.log.append([each])]
        self.reopen()

    def open(self, catalog: RebuiltCatalog | None = None) -> RecordLog:
        log, _ = open_log(
            self.directory, budget_bytes=16 * MIB, segment_bytes=MIB, clock=self.clock, catalog=catalog
        )
        return log

    def reopen(self) -> None:
        self.log.close()
        self.log = self.open()

    def path(self, segment_id: int) -> Path:
        return self.directory / f"segment-{segment_id:016x}.log"

    def bend(self, segment_id: int, at: int, bit: int = 3) -> None:
        with self.path(segment_id).open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << bit]))

    def verify(self) -> list[Damage]:
        return [
            damage
            for segment_id in self.log.segment_ids()
            for damage in self.log.verify(segment_id, begin=0, bytes_max=1 << 30).damages
        ]


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    made = Shelf(tmp_path / "store")
    yield made
    made.log.close()


def checked_bytes(place: Place, record: Record) -> list[int]:
    """Where a record's bytes are covered by a checksum: its header, its table, its payload. The last slice has no entry."""
    begin = place.offset - payload_gap(place.length)
    table = SLICE_ENTRY_BYTES * max(0, len(record.slices) - 1)
    return [
        *range(begin, begin + RECORD_HEADER_BYTES + table),
        *range(place.offset, place.offset + place.length),
    ]


@pytest.mark.parametrize("seed", range(3))
def test_a_changed_bit_of_a_record_is_found_and_the_record_named(shelf: Shelf, seed: int) -> None:
    chance = random.Random(seed)
    for number in chance.sample(range(len(shelf.records)), 40):
        place, record = shelf.places[number], shelf.records[number]
        at, bit = chance.choice(checked_bytes(place, record)), chance.randrange(8)
        shelf.bend(place.segment_id, at, bit)
        [damage] = [each for each in shelf.verify() if each.what != "segment header"]
        assert damage.place == place, f"seed {seed}, byte {at}, bit {bit}"
        assert damage.key == record.key, f"seed {seed}, byte {at}, bit {bit}"
        shelf.bend(place.segment_id, at, bit)


@pytest.mark.parametrize("at", [0, RECORD_HEADER_BYTES - 1, RECORD_HEADER_BYTES, RECORD_HEADER_BYTES + 31])
def test_header_and_table_of_a_large_record_are_part_of_it(shelf: Shelf, at: int) -> None:
    place = shelf.places[3]
    shelf.bend(place.segment_id, place.offset - LARGE_HEADER_BYTES + at)
    assert [damage.place for damage in shelf.verify()] == [place]
    [answer] = read_back(shelf.log, [shelf.records[3]], [place])
    # A payload that is whole by itself may still be handed out; only its table of slices is gone.
    assert answer in (None, shelf.records[3].payload)


def test_a_damaged_footer_and_a_damaged_segment_header_are_named_and_cost_no_record(shelf: Shelf) -> None:
    ids = shelf.log.segment_ids()
    size = shelf.path(ids[0]).stat().st_size
    shelf.bend(ids[0], size - 32)
    shelf.bend(ids[1], shelf.path(ids[1]).stat().st_size - 20)
    shelf.bend(ids[1], 100)
    assert [(each.place.segment_id, each.what) for each in shelf.verify()] == [
        (ids[0], "footer"),
        (ids[1], "footer"),
        (ids[1], "segment header"),
    ]
    assert read_back(shelf.log, shelf.records, shelf.places) == [each.payload for each in shelf.records]
    shelf.reopen()
    assert read_back(shelf.log, shelf.records, shelf.places) == [each.payload for each in shelf.records]


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("back", [1, 9, 24, 32])
def test_a_bent_trailer_is_damage_of_the_footer_wherever_it_is_bent(
    shelf: Shelf, back: int, again: bool
) -> None:
    for segment_id in shelf.log.segment_ids():
        size = shelf.path(segment_id).stat().st_size
        shelf.bend(segment_id, size - back)
        if again:
            shelf.reopen()
        assert [(each.place.segment_id, each.what) for each in shelf.verify()] == [(segment_id, "footer")]
        shelf.bend(segment_id, size - back)
    assert shelf.verify() == []


def test_a_segment_that_was_never_sealed_has_no_footer_to_be_damaged(shelf: Shelf) -> None:
    """Neither the open one, nor one that a start found after a crash, nor the same one starts later."""
    record = make_records(5000, 1, size=3328)[0]
    [place] = shelf.log.append([record])
    assert shelf.verify() == []
    crashed = shelf.directory.with_name("crashed")
    shutil.copytree(shelf.directory, crashed)
    for _ in range(3):
        log, recovery = open_log(crashed, budget_bytes=16 * MIB, segment_bytes=MIB, clock=shelf.clock)
        assert (recovery.damaged_records, recovery.damaged_segments, recovery.missing_segments) == (0, 0, 0)
        assert place.segment_id in log.segment_ids()
        for segment_id in log.segment_ids():
            assert log.verify(segment_id, begin=0, bytes_max=1 << 30).damages == []
        log.close()


def test_a_segment_that_was_sealed_a_moment_ago_has_a_footer_too(shelf: Shelf) -> None:
    known = set(shelf.log.segment_ids())
    for number in range(4):
        shelf.log.append(make_records(5000 + 40 * number, 40, size=10_000))
    shelf.log.check_integrity()  # what is sealed beside the appends is sealed now
    sealed = sorted(set(shelf.log.segment_ids()) - known)[0]
    assert shelf.verify() == []
    shelf.bend(sealed, shelf.path(sealed).stat().st_size - 32)
    assert [(each.place.segment_id, each.what) for each in shelf.verify()] == [(sealed, "footer")]


def test_a_footer_whose_file_was_never_cut_behind_it_is_no_damage(shelf: Shelf) -> None:
    """Power may go between the two."""
    last = shelf.log.segment_ids()[-1]
    shelf.log.close()
    size = shelf.path(last).stat().st_size
    assert size < MIB
    os.truncate(shelf.path(last), MIB)
    (shelf.directory / "catalog.mdb").unlink()
    for _ in range(3):
        shelf.log, recovery = open_log(
            shelf.directory, budget_bytes=16 * MIB, segment_bytes=MIB, clock=shelf.clock
        )
        assert (recovery.damaged_records, recovery.damaged_segments) == (0, 0)
        assert shelf.verify() == []
        shelf.log.close()


def test_a_sealed_segment_whose_file_is_gone_is_counted_once(shelf: Shelf) -> None:
    ids = shelf.log.segment_ids()
    shelf.log.close()
    for segment_id in ids[:2]:
        shelf.path(segment_id).unlink()
    for missing in (2, 0):
        shelf.log, recovery = open_log(
            shelf.directory, budget_bytes=16 * MIB, segment_bytes=MIB, clock=shelf.clock
        )
        assert recovery.missing_segments == shelf.log.counters()["missing_segments"] == missing
        assert recovery.damaged_records == recovery.damaged_segments == 0
        shelf.log.close()


def test_a_segment_that_was_given_up_is_not_missing(shelf: Shelf) -> None:
    first = shelf.log.segment_ids()[0]
    shelf.log.discard([place for place in shelf.places if place.segment_id == first])
    shelf.log.reclaim()
    assert not shelf.path(first).exists()
    # The row that calls it dead is still there: it goes with the next write.
    crashed = shelf.directory.with_name("crashed")
    shutil.copytree(shelf.directory, crashed)
    log, recovery = open_log(crashed, budget_bytes=16 * MIB, segment_bytes=MIB, clock=shelf.clock)
    assert recovery.missing_segments == 0
    log.close()


@pytest.mark.parametrize("lose_index", [False, True])
def test_a_damaged_header_or_trailer_is_no_lost_record(shelf: Shelf, lose_index: bool) -> None:
    ids = shelf.log.segment_ids()
    shelf.log.close()
    shelf.bend(ids[0], 100)
    if lose_index:
        (shelf.directory / "catalog.mdb").unlink()
    shelf.log, recovery = open_log(
        shelf.directory, budget_bytes=16 * MIB, segment_bytes=MIB, clock=shelf.clock
    )
    assert (recovery.damaged_records, recovery.damaged_segments) == (0, 1)
    assert recovery.rebuilt == lose_index
    assert read_back(shelf.log, shelf.records, shelf.places) == [each.payload for each in shelf.records]


def test_of_a_segment_that_was_cut_off_each_record_is_counted(shelf: Shelf) -> None:
    first = shelf.log.segment_ids()[0]
    inside = [place for place in shelf.places if place.segment_id == first]
    shelf.log.close()
    kept = 3
    os.truncate(shelf.path(first), inside[kept].offset + 10)
    shelf.log, recovery = open_log(
        shelf.directory, budget_bytes=16 * MIB, segment_bytes=MIB, clock=shelf.clock
    )
    assert (recovery.damaged_records, recovery.damaged_segments) == (len(inside) - kept, 1)
    assert shelf.verify() == []


def test_a_removed_segment_is_that_many_damaged_records(shelf: Shelf) -> None:
    first = shelf.log.segment_ids()[0]
    shelf.log.close()
    shelf.log = shelf.open()
    shelf.path(first).unlink()
    inside = [place for place in shelf.places if place.segment_id == first]
    assert {damage.place for damage in shelf.verify()} == set(inside)


def test_a_rebuilt_catalogue_serves_everything_and_leaves_nothing_aside(shelf: Shelf) -> None:
    shelf.log.close()
    catalog = RebuiltCatalog(shelf.directory)
    shelf.log = shelf.open(catalog)
    assert (shelf.directory / LmdbCatalog.ASIDE_NAME).exists()
    catalog.keep()
    assert not (shelf.directory / LmdbCatalog.ASIDE_NAME).exists()
    assert read_back(shelf.log, shelf.records, shelf.places) == [each.payload for each in shelf.records]
    shelf.reopen()
    assert read_back(shelf.log, shelf.records, shelf.places) == [each.payload for each in shelf.records]


def test_a_rebuild_that_failed_puts_the_old_catalogue_back(shelf: Shelf) -> None:
    shelf.log.close()
    index = (shelf.directory / "catalog.mdb").read_bytes()
    catalog = RebuiltCatalog(shelf.directory)
    catalog.load()
    assert (shelf.directory / "catalog.mdb").read_bytes() != index
    catalog.close()
    assert (shelf.directory / "catalog.mdb").read_bytes() == index
    (shelf.directory / "identity").rename(shelf.directory / "kept")
    with pytest.raises(StoreDamaged):
        shelf.open(RebuiltCatalog(shelf.directory))
    (shelf.directory / "kept").rename(shelf.directory / "identity")
    assert (shelf.directory / "catalog.mdb").read_bytes() == index
    shelf.log = shelf.open()


def test_a_rebuild_that_was_killed_is_undone_by_the_next_start(shelf: Shelf) -> None:
    shelf.log.close()
    (shelf.directory / "catalog.mdb").rename(shelf.directory / LmdbCatalog.ASIDE_NAME)
    (shelf.directory / "catalog.mdb").write_bytes(b"half of a new one")
    shelf.log, recovery = open_log(
        shelf.directory, budget_bytes=16 * MIB, segment_bytes=MIB, clock=shelf.clock
    )
    assert not recovery.rebuilt
    assert not (shelf.directory / LmdbCatalog.ASIDE_NAME).exists()
    assert read_back(shelf.log, shelf.records, shelf.places) == [each.payload for each in shelf.records]


def test_a_rebuild_that_is_refused_touches_nothing_of_who_holds_the_directory(shelf: Shelf) -> None:
    index = (shelf.directory / "catalog.mdb").stat()
    with pytest.raises(DirectoryInUse):
        shelf.open(RebuiltCatalog(shelf.directory))
    assert (shelf.directory / "catalog.mdb").stat().st_ino == index.st_ino
