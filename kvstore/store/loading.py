"""What one segment file holds, from the cheapest source that can be trusted: catalogue row, footer, scan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvstore.store.catalog import DEAD, SEALED, UNSEALED, SegmentRow, decode_segment_row, key_of
from kvstore.store.columns import EMPTY, Footer, read_footer, without_entries_behind
from kvstore.store.device import Device, DeviceFile, read_fully
from kvstore.store.format import (
    FOOTER_HEADER_BYTES,
    PAGE,
    SEGMENT_HEADER_BYTES,
    TRAILER_BYTES,
    Entry,
    RecordHeader,
    SegmentHeader,
    SegmentIdentity,
    Verdict,
    align,
    decode_segment_header,
    decode_trailer,
    encode_footer,
    footer_bytes,
    footer_extent,
    payload_gap,
    store_tag,
)
from kvstore.store.lanes import Lanes
from kvstore.store.scan import scan_segment
from kvstore.store.segment import FULL_SHARE, segment_name
from kvstore.types import Lineage, NamespaceDigest

Progress = Callable[[str, int, int], None]
"""Told of a start: phase, how much of it is done, and how much it is in all. Phases: "catalogue" and "segments" count
themselves; "records" counts bytes of one segment whose footer is lost."""


@dataclass(frozen=True, slots=True)
class LoadedSegment:
    """`known`: the catalogue had it. `unused`: a whole header and no record. `dead`: its removal had begun. `has_footer`:
    its file ends with it, or should. `damaged`: its header or footer is not whole, which need not cost a record."""

    identity: SegmentIdentity
    file_bytes: int
    footer: Footer
    known: bool = False
    unused: bool = False
    dead: bool = False
    first_sequence: int = 0
    torn_bytes: int = 0
    damaged_records: int = 0
    damaged: bool = False
    has_footer: bool = False


class _Context(NamedTuple):
    file: DeviceFile
    size: int
    identity: SegmentIdentity
    header: SegmentHeader | Verdict
    row: SegmentRow | None
    footer_row: bytes
    lanes: Lanes


def load_segment(
    device: Device,
    segment_id: int,
    *,
    uuid: bytes,
    rows: dict[bytes, bytes],
    lanes: Lanes,
    progress: Progress,
) -> LoadedSegment | None:
    """Read what the file of `segment_id` holds; None for a file of another store, which is left alone.

    A torn tail is cut off. A file that is not the segment its name says yields no records: its space comes back with
    the next reclaim. Raises DeviceError and then has removed nothing.
    """
    file = device.open(segment_name(segment_id), bulk=True)
    if file is None:
        return None
    try:
        size = file.size()
        header = read_header(
            file, expected=lambda found: found.uuid == uuid and found.segment_id == segment_id
        )
        if isinstance(header, SegmentHeader) and header.uuid != uuid:
            return None
        if isinstance(header, SegmentHeader) and header.segment_id != segment_id:
            # Written to the wrong place, perhaps: the records behind it say themselves whose they are.
            header = Verdict.CORRUPT
        row = decode_segment_row(rows.get(key_of(b"S", segment_id), b""))
        identity = SegmentIdentity(store_tag(uuid), segment_id, 0)
        salt = (
            header.salt
            if isinstance(header, SegmentHeader)
            else _salt_without_header(file, size, identity, row)
        )
        identity = identity._replace(salt=salt)
        if row is not None and row.salt != salt:
            row = None
        footer_row = rows.get(key_of(b"F", segment_id), b"")
        return _load(_Context(file, size, identity, header, row, footer_row, lanes), progress)
    finally:
        file.close()


def read_header(file: DeviceFile, *, expected: Callable[[SegmentHeader], bool]) -> SegmentHeader | Verdict:
    """A segment's header. Another one than is expected may be of its way, or of an earlier life: it is read again."""
    header = decode_segment_header(read_fully(file, 0, SEGMENT_HEADER_BYTES))
    if isinstance(header, Verdict) or not expected(header):
        file.forget_cached(0, SEGMENT_HEADER_BYTES)
        header = decode_segment_header(read_fully(file, 0, SEGMENT_HEADER_BYTES))
    return header


def _load(at: _Context, progress: Progress) -> LoadedSegment:
    first = at.header.first_sequence if isinstance(at.header, SegmentHeader) else 0
    if at.row is not None and at.row.state == DEAD:
        return LoadedSegment(at.identity, at.size, EMPTY, dead=True, first_sequence=first)
    is_bent = isinstance(at.header, Verdict)
    row = at.row if at.row is not None and at.row.state in (SEALED, UNSEALED) else None
    listed = read_footer(at.footer_row, identity=at.identity) if row is not None else Verdict.TORN
    if row is not None and row.file_bytes == at.size and isinstance(listed, Footer):
        has_footer = row.state == SEALED and _ends_with(listed, at.size)
        return _within(at, listed, known=True, first_sequence=first, damaged=is_bent, has_footer=has_footer)
    at.file.sync()
    footer = _footer_of(at.file, at.size, at.identity)
    if isinstance(footer, Verdict):
        _ask_the_device(at)
        footer = _footer_of(at.file, at.size, at.identity)
    if isinstance(footer, Footer):
        return _within(at, footer, known=False, first_sequence=first, damaged=is_bent, has_footer=True)
    # Only what the device itself says counts: a process that died may have left bytes in memory whose sync failed,
    # and nothing may be built on those.
    scan = scan_segment(
        at.file,
        at.identity,
        at.size,
        lanes=at.lanes,
        progress=lambda done: progress("records", done, at.size),
        ask_device=lambda: _ask_the_device(at),
    )
    # A crash may leave a footer whose file was never cut behind it; what the catalogue calls sealed was whole.
    was_sealed = row is not None and row.state == SEALED
    if scan.footer is not None:
        return _within(
            at,
            scan.footer,
            known=False,
            first_sequence=first,
            damaged=is_bent or was_sealed,
            has_footer=was_sealed,
        )
    records = scan.records
    identity = at.identity
    if not identity.salt and records:
        identity = identity._replace(salt=records[0].salt)
        records = [record for record in records if record.salt == identity.salt]
    size = at.size
    if records and size > align(scan.end, PAGE):
        size = align(scan.end, PAGE)
        at.file.truncate(size)
    damaged_records = scan.damaged_records
    if isinstance(listed, Footer):
        found = np.array([record.offset + payload_gap(record.length) for record in records], np.uint32)
        damaged_records = int(np.count_nonzero(~np.isin(listed.entries["offset"], found)))
    return LoadedSegment(
        identity,
        size,
        _footer_from(records, min(scan.end, size), identity),
        unused=not records and not is_bent and row is None,
        first_sequence=first,
        torn_bytes=scan.torn_bytes,
        damaged_records=damaged_records,
        damaged=is_bent or row is not None,
    )


def _ask_the_device(at: _Context) -> None:
    """Reads from here on are not answered from memory."""
    at.file.forget_cached(0, 0)


def _ends_with(footer: Footer, size: int) -> bool:
    """Whether a file of so many bytes, with this footer at its end, was cut behind it or full: others end with their last
    record, or were never cut."""
    room = footer_bytes(len(footer.namespaces), len(footer.entries))
    return 0 <= size - align(footer.records_end, PAGE) - room <= size // FULL_SHARE


def _within(
    at: _Context, footer: Footer, *, known: bool, first_sequence: int, damaged: bool, has_footer: bool
) -> LoadedSegment:
    """A footer's segment, without entries that point outside of the file."""
    damaged_records = 0
    if footer.records_end > at.size:
        entries = len(footer.entries)
        footer = without_entries_behind(footer, at.size, identity=at.identity)
        damaged_records = entries - len(footer.entries)
    return LoadedSegment(
        at.identity,
        at.size,
        footer,
        known=known,
        first_sequence=first_sequence,
        damaged_records=damaged_records,
        damaged=damaged,
        has_footer=has_footer,
    )


def _salt_without_header(
    file: DeviceFile, size: int, identity: SegmentIdentity, row: SegmentRow | None
) -> int:
    """The salt of a segment whose header is damaged; 0 when nothing says it. `identity` is all but the salt."""
    if row is not None:
        return row.salt
    trailer = decode_trailer(read_fully(file, max(0, size - TRAILER_BYTES), TRAILER_BYTES))
    if isinstance(trailer, Verdict):
        return 0
    # A whole trailer may be left from the file's earlier life; only a footer of this segment says whose it is.
    _, salt = trailer
    return salt if isinstance(_footer_of(file, size, identity._replace(salt=salt)), Footer) else 0


def _footer_of(file: DeviceFile, size: int, identity: SegmentIdentity) -> Footer | Verdict:
    trailer = decode_trailer(read_fully(file, max(0, size - TRAILER_BYTES), TRAILER_BYTES))
    if isinstance(trailer, Verdict):
        return trailer
    offset, salt = trailer
    if salt != identity.salt or not SEGMENT_HEADER_BYTES <= offset < size:
        return Verdict.CORRUPT
    extent = footer_extent(read_fully(file, offset, FOOTER_HEADER_BYTES))
    if isinstance(extent, Verdict):
        return extent
    if extent > size - offset:
        return Verdict.CORRUPT
    return read_footer(read_fully(file, offset, extent), identity=identity)


def _footer_from(records: list[RecordHeader], end: int, identity: SegmentIdentity) -> Footer:
    """The footer that a segment of these records would have been given."""
    numbers: dict[NamespaceDigest, int] = {}
    entries = []
    for record in records:
        number = numbers.setdefault(record.namespace, len(numbers))
        flags = int(record.checks.has_xxh3) | (2 if record.lineage is Lineage.BOUNDED else 0)
        entries.append(
            Entry(
                record.key,
                record.parent,
                record.sequence,
                record.checks.xxh3_64,
                record.created_ms,
                record.position,
                record.checks.crc32,
                record.offset + payload_gap(record.length),
                record.length,
                number,
                record.kind,
                flags,
            )
        )
    if not entries:
        return EMPTY._replace(records_end=end)
    data = encode_footer(
        identity, offset=align(end, PAGE), records_end=end, namespaces=list(numbers), entries=entries
    )
    footer = read_footer(data, identity=identity)
    assert isinstance(footer, Footer), "a scan finds records in order"
    return footer
