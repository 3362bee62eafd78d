"""Finding records in a segment that has no footer, however it was left.

A segment's file had earlier lives: behind the last record there may be records, and a footer, of other segments or under
another salt. They are nobody's, and neither damage nor torn bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvstore.store.columns import Footer, read_footer
from kvstore.store.device import DeviceFile, read_fully
from kvstore.store.format import (
    FOOTER_HEADER_BYTES,
    FOOTER_MAGIC,
    PAGE,
    RECORD_HEADER_BYTES,
    RECORD_MAGIC,
    SECTOR,
    SEGMENT_HEADER_BYTES,
    RecordHeader,
    SegmentIdentity,
    Verdict,
    align,
    decode_record_header,
    footer_extent,
    payload_gap,
    payload_holds,
    record_span,
)

_WINDOW_BYTES = 8 << 20
_COMMON_PREFIX = RECORD_MAGIC[:3]
assert FOOTER_MAGIC.startswith(_COMMON_PREFIX)


class Scan(NamedTuple):
    """`footer`: a whole footer was met, and says more than the scan does. `end`: behind the last whole record.
    `torn_bytes`: of what was begun under this segment's identity and never acknowledged."""

    records: list[RecordHeader]
    end: int
    torn_bytes: int
    damaged_records: int
    footer: Footer | None


class _Window:
    """Sequential reading in large pieces."""

    def __init__(self, file: DeviceFile, size: int, progress: Callable[[int], None]) -> None:
        self._file = file
        self.size = size
        self._progress = progress
        self._begin = 0
        self._data = b""

    def get(self, at: int, length: int) -> bytes:
        """At most `length` bytes from `at`."""
        begin, end = self._reach(at, length)
        return self._data[begin:end]

    def view(self, at: int, length: int) -> memoryview:
        """As `get`, without a copy."""
        begin, end = self._reach(at, length)
        return memoryview(self._data)[begin:end]

    def next_magic(self, at: int) -> int | None:
        """The next sector from `at` on that begins like a record or footer."""
        if self._data.startswith(_COMMON_PREFIX, at - self._begin):
            return at
        while at < self.size:
            begin, _ = self._reach(at, 1)
            # Looking for one byte is many times faster through what was never written.
            found = self._data.find(_COMMON_PREFIX[:1], begin)
            if found >= 0:
                found = self._data.find(_COMMON_PREFIX, found)
            while found >= 0:
                if (self._begin + found) % SECTOR == 0:
                    return self._begin + found
                found = self._data.find(_COMMON_PREFIX, found + 1)
            # A sector that the window cuts is looked at with the next one.
            at = max(at + SECTOR, (self._begin + len(self._data)) // SECTOR * SECTOR)
        return None

    def _reach(self, at: int, length: int) -> tuple[int, int]:
        """Where [at, at + length) lies in the data, cut where the file ends; read if need be."""
        begin = at - self._begin
        if begin >= 0 and begin + length <= len(self._data):
            return begin, begin + length
        length = max(0, min(length, self.size - at))
        if not self._begin <= at <= at + length <= self._begin + len(self._data):
            self._progress(at)
            self._begin = at
            self._data = read_fully(self._file, at, min(max(length, _WINDOW_BYTES), self.size - at))
        return at - self._begin, at - self._begin + length


def scan_segment(
    file: DeviceFile,
    identity: SegmentIdentity,
    size: int,
    *,
    progress: Callable[[int], None],
    begin: int = SEGMENT_HEADER_BYTES,
) -> Scan:
    """Every whole record of a file of `size` bytes, from `begin` on, where a record or nothing begins. progress: told now
    and then how many bytes were looked at.

    A hole with an acknowledged batch behind it is damage: a batch is written only when the one before it was synced.
    A hole in the last batch, or a record behind the last whole one, was never acknowledged: a torn tail.
    """
    window = _Window(file, size, progress)
    records: list[RecordHeader] = []
    holes: list[tuple[int, int]] = []
    begun: list[tuple[int, int]] = []
    at = end = begin
    while at + SECTOR <= size:
        header = decode_record_header(window.get(at, RECORD_HEADER_BYTES), identity=identity, offset=at)
        if isinstance(header, RecordHeader):
            span = record_span(header.length)
            if payload_holds(header, window.view(at + payload_gap(header.length), header.length)):
                if at > end and at > (behind := _behind_padding(window, end)):
                    holes.append((behind, at))
                records.append(header)
                end = at + span
            else:
                begun.append((at, min(at + span, size)))
            at += span
        elif (footer := _footer_at(window, identity, at)) is not None:
            return Scan(records, end, 0, 0, footer)
        else:
            at += SECTOR
        following = window.next_magic(at)
        if following is None:
            break
        at = following
    last_batch = max((record.batch for record in records), default=0)
    damaged = sum(last_batch > first for first, _ in holes)
    torn = sum(until - first for first, until in holes if last_batch <= first)
    torn += sum(until - first for first, until in begun if first >= end)
    return Scan(records, end, torn, damaged, None)


def _behind_padding(window: _Window, end: int) -> int:
    """Where the next batch, or the next large record, begins if a record ended at `end`."""
    page = align(end, PAGE)
    return end if window.get(end, page - end).strip(b"\0") else page


def _footer_at(window: _Window, identity: SegmentIdentity, at: int) -> Footer | None:
    extent = footer_extent(window.get(at, FOOTER_HEADER_BYTES))
    if isinstance(extent, Verdict) or not identity.salt:
        return None
    footer = read_footer(window.get(at, extent), identity=identity)
    return None if isinstance(footer, Verdict) else footer
