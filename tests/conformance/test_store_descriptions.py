"""A namespace's description is in the log and in the catalogue: damage to either one costs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.clock import ManualClock
from kvstore.store import RecordLog, Recovery, open_log
from kvstore.store.base import Place, RecordKind
from kvstore.store.rebuild import RebuiltCatalog
from kvstore.testing.store_suite import MIB, make_record, make_records, read_back
from kvstore.types import Checks

OLD = make_record("description", b'{"name":"chat","policy":"zero"}', kind=RecordKind.NAMESPACE)
NEW = make_record("description", b'{"name":"chat","policy":"full"}', kind=RecordKind.NAMESPACE)
BLOCKS = make_records(0, 20)


class Shelf:
    """A store on disk with one namespace, described twice, and its blocks."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log, _ = self.open()
        [self.old] = self.log.append([OLD])
        self.blocks = self.log.append(BLOCKS)
        [self.new] = self.log.append([NEW])

    def open(self) -> tuple[RecordLog, Recovery]:
        return open_log(self.directory, budget_bytes=16 * MIB, segment_bytes=MIB, clock=ManualClock())

    def reopen(self) -> Recovery:
        self.log.close()
        self.log, recovery = self.open()
        return recovery

    def path(self, place: Place) -> Path:
        return self.directory / f"segment-{place.segment_id:016x}.log"

    def bend(self, place: Place, *, before: int = 0) -> None:
        with self.path(place).open("r+b") as file:
            file.seek(place.offset - before)
            byte = file.read(1)[0]
            file.seek(place.offset - before)
            file.write(bytes([byte ^ 4]))

    def lose_catalogue(self) -> None:
        self.log.close()
        (self.directory / "catalog.mdb").unlink()

    def kill_catalogue(self) -> None:
        self.log.close()
        (self.directory / "catalog.mdb").write_bytes(b"no catalogue" * 999)


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    made = Shelf(tmp_path / "store")
    yield made
    made.log.close()


def described(recovery: Recovery) -> tuple[bytes, Place]:
    [found] = recovery.records.of_kind(RecordKind.NAMESPACE)
    assert (found.namespace, found.key) == (NEW.namespace, NEW.key)
    assert (found.parent, found.position) == (NEW.parent, NEW.position)
    assert (found.lineage, found.checks) == (NEW.lineage, NEW.checks)
    return found.payload, found.place


@pytest.mark.parametrize("before", [0, 200], ids=["payload", "header"])
def test_a_bent_description_is_told_from_the_catalogue_and_written_anew(shelf: Shelf, before: int) -> None:
    shelf.log.close()
    shelf.bend(shelf.new, before=before)
    recovery = shelf.reopen()
    payload, place = described(recovery)
    assert payload == NEW.payload
    assert place != shelf.new
    assert read_back(shelf.log, [NEW], [place]) == [NEW.payload]
    assert (recovery.damaged_records, recovery.rescued_descriptions) == (0, 1)
    # From here on the log says it again, whatever becomes of the catalogue.
    shelf.lose_catalogue()
    assert described(shelf.reopen()) == (NEW.payload, place)
    assert len(recovery.records.of_kind(RecordKind.BLOCK)) == len(BLOCKS)


def test_a_description_whose_segment_is_gone_is_told_from_the_catalogue(shelf: Shelf) -> None:
    shelf.log.close()
    shelf.path(shelf.new).unlink()
    payload, place = described(shelf.reopen())
    assert payload == NEW.payload
    assert read_back(shelf.log, [NEW], [place]) == [NEW.payload]


@pytest.mark.parametrize("lose", [Shelf.lose_catalogue, Shelf.kill_catalogue])
def test_a_lost_catalogue_is_told_the_description_again(shelf: Shelf, lose: object) -> None:
    assert callable(lose)
    lose(shelf)
    assert described(shelf.reopen()) == (NEW.payload, shelf.new)
    shelf.log.close()
    shelf.bend(shelf.new)
    assert described(shelf.reopen())[0] == NEW.payload


def test_with_both_bent_the_description_is_lost_and_counted(shelf: Shelf) -> None:
    shelf.log.discard([shelf.old])
    shelf.lose_catalogue()
    shelf.bend(shelf.new)
    recovery = shelf.reopen()
    assert recovery.records.of_kind(RecordKind.NAMESPACE) == []
    assert recovery.damaged_records == 1


def test_a_discarded_description_is_forgotten_by_the_catalogue_too(shelf: Shelf) -> None:
    shelf.log.discard([shelf.old, shelf.new, *shelf.blocks])
    shelf.log.append([make_record("x", b"other", kind=RecordKind.NAMESPACE, namespace="another")])
    shelf.log.close()
    shelf.bend(shelf.old)
    shelf.bend(shelf.new)
    found = shelf.reopen().records.of_kind(RecordKind.NAMESPACE)
    assert [each.payload for each in found] == [b"other"]


def test_discarding_an_older_description_keeps_the_newest(shelf: Shelf) -> None:
    shelf.log.discard([shelf.old])
    shelf.log.append([make_record("x", b"other", kind=RecordKind.NAMESPACE, namespace="another")])
    shelf.log.close()
    shelf.bend(shelf.new)
    payloads = {each.payload for each in shelf.reopen().records.of_kind(RecordKind.NAMESPACE)}
    assert payloads == {NEW.payload, b"other"}


@pytest.mark.parametrize("discarded", [False, True])
def test_an_older_description_in_the_log_does_not_replace_the_newest(shelf: Shelf, discarded: bool) -> None:
    if discarded:
        shelf.log.discard([shelf.old])
    shelf.reopen()
    # In a segment of its own, so that nothing else goes with it.
    newest = replace(NEW, payload=b"newest", checks=Checks(1))
    [place] = shelf.log.append([newest])
    assert place.segment_id != shelf.new.segment_id
    shelf.log.discard([shelf.new])
    shelf.log.close()
    shelf.path(place).unlink()
    for _ in range(2):
        recovery = shelf.reopen()
        [found] = recovery.records.of_kind(RecordKind.NAMESPACE)
        assert found.payload == b"newest"
    # What is written after it is newer than what was rescued.
    last = replace(NEW, payload=b"last", checks=Checks(2))
    [again] = shelf.log.append([last])
    shelf.log.discard([found.place])
    [found] = shelf.reopen().records.of_kind(RecordKind.NAMESPACE)
    assert (found.payload, found.place) == (b"last", again)


def test_what_is_written_after_a_rescue_is_newer(shelf: Shelf) -> None:
    shelf.reopen()
    [place] = shelf.log.append([replace(NEW, payload=b"newest", checks=Checks(1))])
    shelf.log.close()
    shelf.path(place).unlink()
    [rescued] = shelf.reopen().records.of_kind(RecordKind.NAMESPACE)
    [last] = shelf.log.append([replace(NEW, payload=b"last", checks=Checks(2))])
    shelf.log.discard([rescued.place])
    [found] = shelf.reopen().records.of_kind(RecordKind.NAMESPACE)
    assert (found.payload, found.place) == (b"last", last)


def test_thousands_of_descriptions_are_written_anew_in_small_segments(tmp_path: Path) -> None:
    shelf = Shelf(tmp_path / "store")
    many = [
        make_record("x", b"%d" % number * 100, kind=RecordKind.NAMESPACE, namespace=f"space {number}")
        for number in range(2000)
    ]
    for first in range(0, len(many), 100):
        shelf.log.append(many[first : first + 100])
    shelf.log.close()
    for path in shelf.directory.glob("segment-*.log"):
        path.unlink()
    recovery = shelf.reopen()
    found = recovery.records.of_kind(RecordKind.NAMESPACE)
    assert recovery.rescued_descriptions == len(found) == 2001
    payloads = {each.namespace: each.payload for each in many}
    for each in found:
        if each.namespace in payloads:
            assert each.payload == payloads[each.namespace]
    shelf.log.check_integrity()
    assert shelf.reopen().rescued_descriptions == 0
    shelf.log.close()


def test_a_rebuilt_index_keeps_a_description_that_the_log_has_lost(shelf: Shelf) -> None:
    shelf.log.close()
    shelf.bend(shelf.new)
    catalog = RebuiltCatalog(shelf.directory)
    shelf.log, recovery = open_log(
        shelf.directory, budget_bytes=16 * MIB, segment_bytes=MIB, clock=ManualClock(), catalog=catalog
    )
    assert described(recovery)[0] == NEW.payload
    catalog.keep()
    place = described(shelf.reopen())[1]
    shelf.log.close()
    shelf.bend(place)
    assert described(shelf.reopen())[0] == NEW.payload


def test_discarding_while_segments_are_cleaned_forgets_the_description(shelf: Shelf) -> None:
    shelf.log.discard(shelf.blocks)
    shelf.reopen()
    moved = shelf.log.clean(shelf.new.segment_id)[shelf.new]
    shelf.log.discard([moved])
    shelf.log.append(make_records(100, 1))
    shelf.log.close()
    for path in shelf.directory.glob("segment-*.log"):
        path.unlink()
    assert shelf.reopen().records.of_kind(RecordKind.NAMESPACE) == []


def test_a_description_that_was_moved_is_still_rescued(shelf: Shelf) -> None:
    shelf.log.discard(shelf.blocks)
    shelf.reopen()
    moves = shelf.log.clean(shelf.new.segment_id)
    moved = moves[shelf.new]
    shelf.log.close()
    shelf.bend(moved)
    payload, place = described(shelf.reopen())
    assert payload == NEW.payload
    assert place not in (shelf.new, moved)
