"""Reading records back: neighbours in one read, every byte checked, one second look before a record is given up."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.errors import DeviceError
from kvstore.store.base import Place, RecordKind
from kvstore.store.device import Device, DeviceFile, read_fully
from kvstore.store.format import (
    LARGE_PAYLOAD_BYTES,
    PAGE,
    RecordHeader,
    Verdict,
    decode_record,
    payload_gap,
)
from kvstore.store.segment import Segment
from kvstore.store.table import SegmentTable
from kvstore.types import BlockKey

_RUN_BYTES_MAX = 1 << 20
_OPEN_FILES_MAX = 256


@dataclass(slots=True)
class _Open:
    file: DeviceFile
    users: int = 0


class OpenFiles:
    """Segment files kept open for reading, at most `files_max` of them idle."""

    def __init__(self, device: Device, *, files_max: int = _OPEN_FILES_MAX) -> None:
        self._device = device
        self._max = files_max
        self._lock = threading.Lock()
        self._files: OrderedDict[str, _Open] = OrderedDict()

    @contextmanager
    def use(self, name: str) -> Iterator[DeviceFile | None]:
        """The file for the length of the block; None when there is no such file."""
        with self._lock:
            kept = self._files.get(name)
            if kept is None:
                opened = self._device.open(name)
                if opened is not None:
                    kept = self._files[name] = _Open(opened)
            else:
                self._files.move_to_end(name)
            if kept is not None:
                kept.users += 1
        try:
            yield None if kept is None else kept.file
        finally:
            if kept is not None:
                with self._lock:
                    kept.users -= 1
                    self._shrink(self._max)

    def drop(self, name: str) -> None:
        """Close a file that nobody uses."""
        with self._lock:
            kept = self._files.pop(name, None)
            if kept is not None:
                assert kept.users == 0, name
                kept.file.close()

    def close(self) -> None:
        with self._lock:
            self._shrink(0)

    def _shrink(self, files_max: int) -> None:
        for name in [name for name, kept in self._files.items() if kept.users == 0]:
            if len(self._files) <= files_max:
                return
            self._files.pop(name).file.close()


class _Item(NamedTuple):
    place: Place
    number: int

    @property
    def begin(self) -> int:
        return self.place.offset - payload_gap(self.place.length)

    @property
    def end(self) -> int:
        return self.place.offset + self.place.length


class Reader:
    """Reads from any thread. Damage is counted and answered with None; a failing device raises DeviceError."""

    def __init__(self, table: SegmentTable, files: OpenFiles, store_tag: int) -> None:
        self._table = table
        self._files = files
        self._tag = store_tag

    def read(self, wanted: Sequence[tuple[Place, BlockKey, RecordKind]]) -> list[bytes | None]:
        found = self.records([place for place, _, _ in wanted])
        payloads: list[bytes | None] = []
        misplaced = 0
        for (_, key, kind), record in zip(wanted, found, strict=True):
            if record is None:
                payloads.append(None)
            elif record[0].key != key or record[0].kind != kind:
                misplaced += 1
                payloads.append(None)
            else:
                payloads.append(record[1])
        if misplaced:
            self._table.count("damaged_records", misplaced)
        self._table.count("read_records", sum(payload is not None for payload in payloads))
        return payloads

    def records(self, places: Sequence[Place]) -> list[tuple[RecordHeader, bytes] | None]:
        """Checked records in the order asked; None for what is damaged or gone."""
        answers: list[tuple[RecordHeader, bytes] | None] = [None] * len(places)
        by_segment: dict[int, list[_Item]] = {}
        for number, place in enumerate(places):
            by_segment.setdefault(place.segment_id, []).append(_Item(place, number))
        for segment_id, items in by_segment.items():
            with self._table.reading(segment_id) as segment:
                if segment is None:
                    continue
                try:
                    self._read_segment(segment, items, answers)
                except DeviceError:
                    self._table.count("device_errors")
                    raise
        return answers

    def _read_segment(
        self, segment: Segment, items: list[_Item], answers: list[tuple[RecordHeader, bytes] | None]
    ) -> None:
        with self._files.use(segment.name) as file:
            damaged = 0
            for run in _runs(items, segment.allocated):
                answered = 0
                if file is not None:
                    begin = run[0].begin
                    data = read_fully(file, begin, run[-1].end - begin)
                    for item in run:
                        answers[item.number] = self._check(segment, file, item, data, begin)
                        answered += answers[item.number] is not None
                damaged += len(run) - answered
            damaged += sum(not _plausible(item, segment.allocated) for item in items)
        if damaged:
            self._table.count("damaged_records", damaged)

    def _check(
        self, segment: Segment, file: DeviceFile, item: _Item, data: bytes, begin: int
    ) -> tuple[RecordHeader, bytes] | None:
        at = item.begin
        record = self._decode(segment, item, data[at - begin : item.end - begin])
        if record is None:
            file.forget_cached(at // PAGE * PAGE, item.end - at + PAGE)
            record = self._decode(segment, item, read_fully(file, at, item.end - at))
        return record

    def _decode(self, segment: Segment, item: _Item, data: bytes) -> tuple[RecordHeader, bytes] | None:
        record = decode_record(data, identity=segment.identity, offset=item.begin)
        if isinstance(record, Verdict) or record[0].length != item.place.length:
            return None
        return record


def _plausible(item: _Item, allocated: int) -> bool:
    return item.begin >= PAGE and item.place.length >= 0 and item.end <= allocated


def _runs(items: list[_Item], allocated: int) -> Iterator[list[_Item]]:
    """Neighbours to be read together: small records with little between them. Impossible places are left out."""
    run: list[_Item] = []
    for item in sorted((item for item in items if _plausible(item, allocated)), key=lambda item: item.begin):
        if run:
            near = item.begin - run[-1].end <= PAGE and item.begin >= run[-1].begin
            small = item.place.length < LARGE_PAYLOAD_BYTES and item.end - run[0].begin <= _RUN_BYTES_MAX
            if not (near and small and run[-1].end <= item.end):
                yield run
                run = []
        run.append(item)
    if run:
        yield run
