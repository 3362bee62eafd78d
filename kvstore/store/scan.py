"""Finding records in a segment that has no footer, however it was left."""

from __future__ import annotations

from typing import NamedTuple

from kvstore.store.device import DeviceFile, read_fully
from kvstore.store.format import (
    FOOTER_HEADER_BYTES,
    FOOTER_MAGIC,
    PAGE,
    RECORD_MAGIC,
    SECTOR,
    SEGMENT_HEADER_BYTES,
    Footer,
    RecordHeader,
    SegmentIdentity,
    Verdict,
    align,
    decode_footer,
    decode_record,
    decode_record_header,
    footer_extent,
    payload_gap,
    record_span,
)

_WINDOW_BYTES = 4 << 20
_COMMON_PREFIX = RECORD_MAGIC[:3]
assert FOOTER_MAGIC.startswith(_COMMON_PREFIX)


class Scan(NamedTuple):
    """`footer`: a whole footer was met, and says more than the scan does. `end`: behind the last whole record."""

    records: list[RecordHeader]
    end: int
    torn_bytes: int
    damaged_records: int
    footer: Footer | None


class _Window:
    """Sequential reading in large pieces."""

    def __init__(self, file: DeviceFile, size: int) -> None:
        self._file = file
        self.size = size
        self._begin = 0
        self._data = b""

    def get(self, at: int, length: int) -> bytes:
        """At most `length` bytes from `at`."""
        length = max(0, min(length, self.size - at))
        if not self._begin <= at <= at + length <= self._begin + len(self._data):
            self._begin = at
            self._data = read_fully(self._file, at, min(max(length, _WINDOW_BYTES), self.size - at))
        return self._data[at - self._begin : at - self._begin + length]

    def next_magic(self, at: int) -> int | None:
        """The next sector from `at` on that begins like a record or footer."""
        while at < self.size:
            piece = self.get(at, _WINDOW_BYTES)
            found = piece.find(_COMMON_PREFIX)
            while found >= 0:
                if (at + found) % SECTOR == 0:
                    return at + found
                found = piece.find(_COMMON_PREFIX, found + 1)
            at += max(SECTOR, len(piece) // SECTOR * SECTOR)
        return None

    def last_nonzero(self, at: int) -> int:
        """The end of the last byte from `at` on that is not zero; `at` when all are."""
        last = at
        while at < self.size:
            piece = self.get(at, _WINDOW_BYTES)
            if not piece:
                break
            if stripped := piece.rstrip(b"\0"):
                last = at + len(stripped)
            at += len(piece)
        return last


def scan_segment(file: DeviceFile, identity: SegmentIdentity, size: int) -> Scan:
    """Every whole record of a file of `size` bytes.

    A hole with an acknowledged batch behind it is damage: a batch is written only when the one before it was synced.
    A hole in the last batch, or bytes behind the last record, were never acknowledged: a torn tail.
    """
    window = _Window(file, size)
    records: list[RecordHeader] = []
    holes: list[tuple[int, int]] = []
    at = end = SEGMENT_HEADER_BYTES
    while at + SECTOR <= size:
        header = decode_record_header(window.get(at, SECTOR), identity=identity, offset=at)
        if isinstance(header, RecordHeader):
            span = record_span(header.length)
            record = decode_record(
                window.get(at, payload_gap(header.length) + header.length), identity=identity, offset=at
            )
            if not isinstance(record, Verdict):
                begin = _behind_padding(window, end)
                if at > begin:
                    holes.append((begin, at))
                records.append(header)
                end = at + span
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
    damaged = sum(last_batch > begin for begin, _ in holes)
    torn = sum(until - begin for begin, until in holes if last_batch <= begin)
    torn += max(0, window.last_nonzero(min(end, size)) - end)
    return Scan(records, end, torn, damaged, None)


def _behind_padding(window: _Window, end: int) -> int:
    """Where the next batch, or the next large record, begins if a record ended at `end`."""
    page = align(end, PAGE)
    return end if window.get(end, page - end).strip(b"\0") else page


def _footer_at(window: _Window, identity: SegmentIdentity, at: int) -> Footer | None:
    extent = footer_extent(window.get(at, FOOTER_HEADER_BYTES))
    if isinstance(extent, Verdict) or not identity.salt:
        return None
    footer = decode_footer(window.get(at, extent), identity=identity)
    return None if isinstance(footer, Verdict) else footer
