"""One read of a start that comes back wrong once, whichever it is: nothing is lost, cut off or called damage for it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from kvstore.store.base import Place, Record, RecordKind, RecordLog, Wanted
from kvstore.store.catalog import Catalog, RamCatalog
from kvstore.store.format import PAGE
from kvstore.store.segment import segment_name
from kvstore.testing.sim_device import Inode, PowerCut, SimDevice, flipped
from kvstore.testing.store_suite import make_record
from tests.support.long import one_in
from tests.support.sim_store import open_sim

Bend = Callable[[Inode, int, bytes], bytes]
"""What a read brings instead: of a file, from an offset, the bytes that are right."""


class MisreadingDevice(SimDevice):
    """Keeps what each read of it brought, in `reads`; the one with the number `bent_at` brings `instead`."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.reads: list[tuple[Inode, int, bytes]] = []
        self.bent_at = -1
        self.instead = b""

    def stale_of(self, inode: Inode, offset: int, data: bytes) -> bytes:
        self.reads.append((inode, offset, data))
        return self.instead if len(self.reads) - 1 == self.bent_at else data


def zero_page(page: int) -> Bend:
    def bend(inode: Inode, offset: int, data: bytes) -> bytes:
        return with_page(data, page * PAGE - offset, bytes(PAGE))

    return bend


def stale_page(page: int) -> Bend:
    def bend(inode: Inode, offset: int, data: bytes) -> bytes:
        return with_page(data, page * PAGE - offset, bytes(inode.older.get(page, b"")))

    return bend


def flipped_in(page: int, chance: random.Random) -> Bend:
    def bend(inode: Inode, offset: int, data: bytes) -> bytes:
        begin = max(0, page * PAGE - offset)
        end = min(len(data), page * PAGE - offset + PAGE)
        return flipped(data, chance.randrange(8 * begin, 8 * end)) if begin < end else data

    return bend


def with_page(data: bytes, at: int, page: bytes) -> bytes:
    """Bytes of which a page at `at`, as far as it lies in them, is another."""
    begin, end = max(0, at), min(len(data), at + len(page))
    return data[:begin] + page[begin - at : end - at] + data[end:] if begin < end else data


class Crashed:
    """A directory after a crash: sealed segments, spares, and an open one over an earlier life, written batch by batch."""

    def __init__(self, seed: int, *, torn: bool) -> None:
        self.chance = random.Random(seed)
        self.device = MisreadingDevice(seed)
        self.catalog: Catalog = RamCatalog()
        self.kept: dict[bytes, Record] = {}
        self.places: list[Place] = []
        log, _ = open_sim(self.device, self.catalog)
        first = [log.append([self.record(f"old {number}", 90_000)])[0] for number in range(25)]
        log.discard(first)
        log.reclaim()
        # The file of an earlier life is what the next segment writes over.
        assert log.space().spare > 0
        self.kept.clear()
        self.append(log, [90_000] * 8)
        self.append(log, [90_000] * 4)
        for sizes in ([90, 3328, 200], [3328] * 4, [70_000, 100], [150, 90, 90, 3328], [90]):
            self.append(log, sizes)
        if torn:
            self.device.cut_at(self.device.calls + 2)
            with pytest.raises(PowerCut):
                log.append([self.record(f"torn {number}", 3328, keep=False) for number in range(5)])
        self.device.crash()
        self.open_id = self.places[-1].segment_id
        self.saved = {
            name: (bytes(inode.seen), dict(inode.older), inode.bulk)
            for name, inode in self.device._names.items()
        }
        self.rows = dict(self.catalog.rows)

    def append(self, log: RecordLog, sizes: list[int]) -> None:
        number = len(self.kept)
        records = [self.record(f"key {number + i}", size) for i, size in enumerate(sizes)]
        self.places += log.append(records)

    def record(self, name: str, size: int, *, keep: bool = True) -> Record:
        record = make_record(name, self.chance.randbytes(size), kind=RecordKind.BLOCK)
        if keep:
            self.kept[record.key] = record
        return record

    def restored(self, *, with_catalog: bool) -> tuple[MisreadingDevice, RamCatalog]:
        device, catalog = MisreadingDevice(1), RamCatalog()
        for name, (data, older, bulk) in self.saved.items():
            device.replace(name, data)
            device._names[name].older, device._names[name].bulk = dict(older), bulk
        if with_catalog:
            catalog.load()
            catalog.rows = dict(self.rows)
        return device, catalog

    def pages(self) -> list[int]:
        """Of the open segment's file: those with its records, and some behind them."""
        return list(range(self.places[-1].offset // PAGE + 4))

    def bends(self) -> Iterator[tuple[str, Bend]]:
        last = len(self.saved[segment_name(self.open_id)][0]) // PAGE - 1
        for page in [*self.pages(), last]:
            yield f"page {page} is zeros", zero_page(page)
            yield f"page {page} is stale", stale_page(page)
            yield f"a bit of page {page} is flipped", flipped_in(page, self.chance)


def sealed_rows(catalog: RamCatalog) -> dict[bytes, bytes]:
    """What the catalogue says of each segment, its footer aside."""
    return {key: row for key, row in catalog.rows.items() if key[:1] == b"S"}


@pytest.mark.parametrize(("torn", "with_catalog"), [(False, True), (True, False)])
def test_one_misread_at_any_read_of_a_start_loses_nothing(torn: bool, with_catalog: bool) -> None:
    crashed = Crashed(5, torn=torn)
    device, catalog = crashed.restored(with_catalog=with_catalog)
    log, clean = open_sim(device, catalog)
    reads, sealed = list(device.reads), sealed_rows(catalog)
    log.close()
    assert (clean.damaged_records, clean.damaged_segments, clean.missing_segments) == (0, 0, 0)
    assert {found.key for found in clean.records} >= crashed.kept.keys()
    tried = 0
    for number, (inode, offset, right) in enumerate(reads):
        if number % one_in(3):
            continue
        answers = {bend(inode, offset, right): what for what, bend in crashed.bends()}
        answers.pop(right, None)
        for answer, what in answers.items():
            note = f"read {number} of {len(reads)}: {what}"
            tried += 1
            device, catalog = crashed.restored(with_catalog=with_catalog)
            device.bent_at, device.instead = number, answer
            log, recovery = open_sim(device, catalog)
            found = {item.key: item for item in recovery.records}
            assert found.keys() == {item.key for item in clean.records}, note
            assert (recovery.damaged_records, recovery.damaged_segments) == (0, 0), note
            assert recovery.missing_segments == 0, note
            assert sealed_rows(catalog) == sealed, note
            wanted = [Wanted(found[key].place, found[key].key, RecordKind.BLOCK) for key in crashed.kept]
            assert log.read(wanted) == [record.payload for record in crashed.kept.values()], note
            # Nor was anything cut off that only the next start would miss.
            device.kill()
            log, again = open_sim(device, RamCatalog())
            assert {item.key for item in again.records} >= crashed.kept.keys(), note
            log.close()
    assert tried > 60
