"""Finding records in a segment that has no footer, however it was left.

A segment's file had earlier lives: behind the last record there may be records, and a footer, of other segments or under
another salt. They are nobody's, and neither damage nor torn bytes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from kvstore.store.buffers import aligned
from kvstore.store.columns import Footer, read_footer
from kvstore.store.device import DeviceFile
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
from kvstore.store.lanes import Lanes, Transfer

_WINDOW_BYTES = 8 << 20
_PIECE_BYTES = 1 << 20
_GAP_COSTS_BYTES = 1 << 20
"""Looking at one gap alone takes about as long as reading so much."""
_TAIL_BYTES = 32 << 20
"""More than is read at once, so that no single misread hides all of it."""
_PREFIX_MASK = 0xFFFFFF
_PREFIX = int.from_bytes(RECORD_MAGIC[:3], "little")
assert FOOTER_MAGIC[:3] == RECORD_MAGIC[:3]


class Scan(NamedTuple):
    """`footer`: a whole footer was met, and says more than the scan does. `end`: behind the last whole record.
    `torn_bytes`: of what was begun under this segment's identity and never acknowledged."""

    records: list[RecordHeader]
    end: int
    torn_bytes: int
    damaged_records: int
    footer: Footer | None


class _Window:
    """Sequential reading in large pieces, into memory that is used again."""

    def __init__(self, file: DeviceFile, size: int, *, lanes: Lanes, progress: Callable[[int], None]) -> None:
        self.end = size
        self._size = size
        self._ahead = True
        self._file = file
        self._lanes = lanes
        self._progress = progress
        self._room = aligned(_WINDOW_BYTES)
        self._begin = self._filled = 0
        self._magics: list[int] = []

    def begin_again(self, *, ahead: bool) -> None:
        """Read everything anew. ahead: more than is looked at, since the next look will be near."""
        self._filled = 0
        self._ahead = ahead

    def get(self, at: int, length: int) -> bytes:
        """At most `length` bytes from `at`."""
        return bytes(self.view(at, length))

    def view(self, at: int, length: int) -> memoryview:
        """As `get`, without a copy: good until the next call."""
        length = max(0, min(length, self.end - at))
        self._reach(at, length)
        begin = at - self._begin
        return self._room[begin : begin + length]

    def next_magic(self, at: int) -> int | None:
        """The next sector from `at` on that begins like a record or footer."""
        while at < self.end:
            self._reach(at, 1)
            number = bisect_left(self._magics, at)
            if number < len(self._magics):
                return self._magics[number] if self._magics[number] < self.end else None
            # A sector that the window cuts is looked at with the next one.
            at = max(at + SECTOR, (self._begin + self._filled) // SECTOR * SECTOR)
        return None

    def _reach(self, at: int, length: int) -> None:
        """Have [at, at + length), which ends in the file, in the room."""
        if self._begin <= at and at + length <= self._begin + self._filled:
            return
        self._progress(at)
        self._begin = at // PAGE * PAGE
        most = (self._size if self._ahead else self.end) - self._begin
        wanted = align(min(max(at + length - self._begin, _WINDOW_BYTES), most), PAGE)
        if wanted > len(self._room):
            self._room = aligned(wanted)
        self._filled = min(self._read(wanted), most)
        words = np.frombuffer(self._room[: self._filled // SECTOR * SECTOR], "<u4")[:: SECTOR // 4]
        found = np.flatnonzero(words & _PREFIX_MASK == _PREFIX) * SECTOR + self._begin
        self._magics = found.tolist()

    def _read(self, length: int) -> int:
        """Fill the room with so many bytes, whole pages, several transfers at a time; how many there were."""
        transfers = [
            Transfer(
                self._file, self._begin + at, self._room[at : min(at + _PIECE_BYTES, length)], is_write=False
            )
            for at in range(0, length, _PIECE_BYTES)
        ]
        for _ in self._lanes.move(transfers):
            pass
        return sum(transfer.done for transfer in transfers)


def scan_segment(
    file: DeviceFile,
    identity: SegmentIdentity,
    size: int,
    *,
    lanes: Lanes,
    progress: Callable[[int], None],
    ask_device: Callable[[], None] = lambda: None,
) -> Scan:
    """Every whole record of a file of `size` bytes. progress: told now and then how many bytes were looked at. ask_device:
    called before each of two looks; reads after it are not answered from memory.

    What lies between whole records is looked at twice: a read may have gone wrong on its way, and nothing is cut off for
    that. A hole with an acknowledged batch behind it is damage: a batch is written only when the one before it was
    synced. A hole in the last batch, or a record behind the last whole one, was never acknowledged: a torn tail.
    """
    ask_device()
    window = _Window(file, size, lanes=lanes, progress=progress)
    first = _look(window, identity, SEGMENT_HEADER_BYTES)
    if first.footer is not None:
        return Scan(first.records, first.end, 0, 0, first.footer)
    ask_device()
    gaps = sum(_end_of(before) < after.offset for before, after in pairwise(first.records))
    window.begin_again(ahead=gaps * _GAP_COSTS_BYTES > first.end)
    records: list[RecordHeader] = []
    holes: list[_Extent] = []
    at = SEGMENT_HEADER_BYTES
    for following in first.records:
        if following.offset > at:
            window.end = following.offset
            again = _look(window, identity, at, is_followed=True)
            records += again.records
            # Padding that came back as something else once is no hole.
            holes += [hole for hole in again.holes if any(_holds(each, hole) for each in first.holes)]
        records.append(following)
        at = _end_of(following)
    reach = _TAIL_BYTES
    while at < size:
        # Whatever was acknowledged begins right behind what was before it.
        window.end = min(size, at + reach)
        window.begin_again(ahead=False)
        again = _look(window, identity, at)
        records += again.records
        if again.footer is not None:
            return Scan(records, again.end, 0, 0, again.footer)
        if again.records:
            at = again.end
        elif again.begun and reach < size:
            # Perhaps it is only longer.
            reach = size
        else:
            break
    end = _end_of(records[-1]) if records else SEGMENT_HEADER_BYTES
    last_batch = max((record.batch for record in records), default=0)
    damaged = sum(last_batch > hole[0] for hole in holes)
    torn = sum(hole[1] - hole[0] for hole in holes if last_batch <= hole[0])
    torn += sum(each[1] - each[0] for each in first.begun if each[0] >= end)
    return Scan(records, end, torn, damaged, None)


_Extent = tuple[int, int]
"""Bytes [begin, end) of the file."""


class _Look(NamedTuple):
    """`end`: behind the last whole record. `holes`: what is no padding and has a record behind it. `begun`: headers, with
    the room for their payloads, which are not whole."""

    records: list[RecordHeader]
    end: int
    holes: list[_Extent]
    begun: list[_Extent]
    footer: Footer | None


def _look(window: _Window, identity: SegmentIdentity, begin: int, *, is_followed: bool = False) -> _Look:
    """From `begin` to the window's end. is_followed: there a record begins."""
    records: list[RecordHeader] = []
    holes: list[_Extent] = []
    begun: list[_Extent] = []
    at = end = begin
    while at + SECTOR <= window.end:
        header = decode_record_header(window.get(at, RECORD_HEADER_BYTES), identity=identity, offset=at)
        if isinstance(header, RecordHeader):
            span = record_span(header.length)
            if payload_holds(header, window.view(at + payload_gap(header.length), header.length)):
                holes += _hole(window, end, at)
                records.append(header)
                end = at + span
            else:
                begun.append((at, min(at + span, window.end)))
            at += span
        elif (footer := _footer_at(window, identity, at)) is not None:
            return _Look(records, end, holes, begun, footer)
        else:
            at += SECTOR
        following = window.next_magic(at)
        if following is None:
            break
        at = following
    if is_followed:
        holes += _hole(window, end, window.end)
    return _Look(records, end, holes, begun, None)


def _hole(window: _Window, end: int, at: int) -> list[_Extent]:
    """What lies between two records, where it is more than padding."""
    if at > end and at > (behind := _behind_padding(window, end)):
        return [(behind, at)]
    return []


def _end_of(record: RecordHeader) -> int:
    return record.offset + record_span(record.length)


def _holds(outer: _Extent, inner: _Extent) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


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
