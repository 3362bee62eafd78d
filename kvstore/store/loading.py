"""What one segment file holds, from the cheapest source that can be trusted: catalogue row, footer, scan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.store.catalog import DEAD, SEALED, SegmentRow, decode_segment_row, key_of
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
    footer_extent,
    payload_gap,
    store_tag,
)
from kvstore.store.scan import Scan, scan_segment
from kvstore.store.segment import segment_name
from kvstore.types import Lineage, NamespaceDigest

Progress = Callable[[str, int, int], None]
"""Told of a start: phase, how much of it is done, and how much it is in all. Phases: "catalogue" and "segments" count
themselves; "records" counts bytes of one segment whose footer is lost."""


@dataclass(frozen=True, slots=True)
class LoadedSegment:
    """`known`: the catalogue had it. `unused`: a whole header and no record. `dead`: its removal had begun."""

    identity: SegmentIdentity
    file_bytes: int
    footer: Footer
    known: bool = False
    unused: bool = False
    dead: bool = False
    first_sequence: int = 0
    torn_bytes: int = 0
    damaged_records: int = 0


class _Context(NamedTuple):
    file: DeviceFile
    size: int
    identity: SegmentIdentity
    header: SegmentHeader | Verdict
    row: SegmentRow | None
    footer_row: bytes


def load_segment(
    device: Device, segment_id: int, *, uuid: bytes, rows: dict[bytes, bytes], progress: Progress
) -> LoadedSegment | None:
    """Read what the file of `segment_id` holds; None for a file of another store, which is left alone.

    A torn tail is cut off. A file that is not the segment its name says yields no records: its space comes back with
    the next reclaim. Raises DeviceError and then has removed nothing.
    """
    file = device.open(segment_name(segment_id))
    if file is None:
        return None
    try:
        size = file.size()
        header = decode_segment_header(read_fully(file, 0, SEGMENT_HEADER_BYTES))
        if isinstance(header, Verdict):
            # It may have been bent on its way.
            file.forget_cached(0, SEGMENT_HEADER_BYTES)
            header = decode_segment_header(read_fully(file, 0, SEGMENT_HEADER_BYTES))
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
        return _load(_Context(file, size, identity, header, row, footer_row), progress)
    finally:
        file.close()


def _load(at: _Context, progress: Progress) -> LoadedSegment:
    first = at.header.first_sequence if isinstance(at.header, SegmentHeader) else 0
    if at.row is not None and at.row.state == DEAD:
        return LoadedSegment(at.identity, at.size, EMPTY, dead=True, first_sequence=first)
    lost = int(isinstance(at.header, Verdict))
    if at.row is not None and at.row.state == SEALED and at.row.file_bytes == at.size:
        footer = read_footer(at.footer_row, identity=at.identity)
        if isinstance(footer, Footer):
            return _within(at, footer, known=True, first_sequence=first, damaged_records=lost)
    at.file.sync()
    footer = _footer_of(at.file, at.size, at.identity)
    if isinstance(footer, Footer):
        return _within(at, footer, known=False, first_sequence=first, damaged_records=lost)
    # Only what the device itself says counts: a process that died may have left bytes in memory whose sync failed,
    # and nothing may be built on those.
    scan = _scan(at, progress)
    # Nothing is cut off that a second look finds whole.
    if scan.damaged_records:
        scan = max(scan, _scan(at, progress), key=lambda each: (len(each.records), each.end))
    elif scan.torn_bytes and scan.footer is None:
        rest = _scan(at, progress, begin=scan.end)
        if rest.records:
            scan = Scan(
                scan.records + rest.records, rest.end, rest.torn_bytes, rest.damaged_records, rest.footer
            )
    if scan.footer is not None:
        return _within(at, scan.footer, known=False, first_sequence=first, damaged_records=lost)
    records = scan.records
    identity = at.identity
    if not identity.salt and records:
        identity = identity._replace(salt=records[0].salt)
        records = [record for record in records if record.salt == identity.salt]
    size = at.size
    if records and size > align(scan.end, PAGE):
        size = align(scan.end, PAGE)
        at.file.truncate(size)
    missing = int(at.row is not None)
    return LoadedSegment(
        identity,
        size,
        _footer_from(records, min(scan.end, size), identity),
        unused=not records and not lost and not missing,
        first_sequence=first,
        torn_bytes=scan.torn_bytes,
        damaged_records=scan.damaged_records + max(lost, missing),
    )


def _scan(at: _Context, progress: Progress, *, begin: int = SEGMENT_HEADER_BYTES) -> Scan:
    at.file.forget_cached(0, 0)
    return scan_segment(
        at.file, at.identity, at.size, progress=lambda done: progress("records", done, at.size), begin=begin
    )


def _within(
    at: _Context, footer: Footer, *, known: bool, first_sequence: int, damaged_records: int
) -> LoadedSegment:
    """A footer's segment, without entries that point outside of the file."""
    if footer.records_end > at.size:
        entries = len(footer.entries)
        footer = without_entries_behind(footer, at.size, identity=at.identity)
        damaged_records += entries - len(footer.entries)
    return LoadedSegment(
        at.identity,
        at.size,
        footer,
        known=known,
        first_sequence=first_sequence,
        damaged_records=damaged_records,
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
