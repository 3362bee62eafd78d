"""The disk format, and nothing else: no I/O here. All integers are little-endian; all offsets are bytes.

A segment file is a header page, batches of records, and once sealed a footer page run that ends the file. Files are
written in whole pages of 4,096 bytes and used again under another segment id and salt: what lies behind the last record
of an unsealed segment may be zeros, or anything that an earlier life of the file left there.

Segment header, 4,096 bytes at offset 0
    offset size field
         0    8 magic "KVSSEGM1"
         8    2 format version
        16   16 store uuid
        32    8 segment id
        40    8 salt, random for each segment
        48    8 created, wall milliseconds
        56    8 bytes allocated for the file
        64    8 lowest sequence that a record newly written here can have
      4092    4 crc32c of bytes 0-4091

Record header, 256 bytes. Small records have their payload at +256. Large ones (64 KiB or more) have it at +736, behind
a table of slices, so that header, table and payload of a 449,824-byte block fill 110 pages to the last byte.
         0    8 magic "KVSRECD1"
         8    2 format version
        10    1 kind: 1 block, 2 state, 3 namespace, 4 clear, 5 a namespace's policy, 6 window rows, 7 clear of states
        11    1 flags: bit 0, the writer gave an xxh3
        12    1 lineage
        14    2 entries in the table of slices, at most 60
        16    4 payload length
        20    4 writer's crc32
        24    8 writer's xxh3-64
        32    8 xxh3-64 of the payload as it was written
        40    4 crc32c of the payload as it was written
        44    4 crc32c of the table's entries
        48    8 store tag: the first 8 bytes of the uuid
        56    8 salt of the segment
        64    8 segment id
        72    8 offset of this header in its file
        80    8 offset of the first header of its batch
        88    8 sequence
        96    8 position (tokens)
       104    8 created, wall milliseconds
       112   32 namespace
       144   32 key
       176   32 parent
       252    4 crc32c of bytes 0-251

Table of slices, at +256 of a large record: where a payload may be cut and verified in parts. 8 bytes an entry
         0    4 end of the slice in the payload; the next one begins there, and the last one ends with the payload
         4    4 crc32c of the payload up to that end
    The crc32c runs on from slice to slice: slice i is verified by continuing entry i-1's to entry i's, and the last
    slice by continuing to the payload's own. One pass makes all of them.

Footer, at a multiple of 4,096, padded with zeros so that the trailer ends the file at a multiple of 4,096
         0    8 magic "KVSFOOT1"
         8    2 format version
        16    8 store tag
        24    8 salt
        32    8 segment id
        40    8 offset of this footer
        48    8 where the records end
        56    4 namespaces
        60    4 records
        64    4 crc32c of what follows the header: namespaces (32 bytes each), entries (112 bytes each)
       124    4 crc32c of bytes 0-123
Footer entry
         0   32 key          32   32 parent       64   8 sequence     72   8 writer's xxh3-64
        80    8 created      88    8 position     96   4 writer's crc32
       100    4 payload offset   104   4 payload length   108   2 namespace (index in this footer)
       110    1 kind        111    1 flags: bit 0, the writer gave an xxh3; bit 1, lineage BOUNDED
Trailer, the last 32 bytes of a sealed file
         0    8 magic "KVSTAIL1"   8  8 footer offset   16  8 salt   28  4 crc32c of bytes 0-27

Identity file, 64 bytes: 0 8 magic "KVSTORE\\n"   8 4 format version   12 16 uuid   60 4 crc32c of bytes 0-59

Packing. Small records of a batch lie behind one another at multiples of 512, so that a 3,328-byte payload takes 3,584
bytes and many share a page run, one write and one sync; each keeps a header of its own, so that one can be read and
verified without the others. About every MiB of them begins at a multiple of 4,096, as large records and batches do: that
is where a write may begin, and no page that holds an acknowledged record is ever written again.

Bytes from a disk are claims. A length is used only after the header's checksum covered it, and a good checksum under
another salt, segment, offset or store is as bad as none.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from enum import Enum
from functools import lru_cache
from operator import itemgetter, lt
from typing import NamedTuple

import crc32c as _crc32c
import xxhash

from kvstore.errors import FormatTooNew, StoreDamaged
from kvstore.store.base import RecordKind
from kvstore.types import BlockKey, BytesLike, Checks, Lineage, NamespaceDigest

FORMAT_VERSION = 2
PAGE = 4096
SECTOR = 512
LARGE_PAYLOAD_BYTES = 64 * 1024
RECORD_HEADER_BYTES = 256
LARGE_HEADER_BYTES = 736
SLICE_ENTRY_BYTES = 8
SLICES_MAX = (LARGE_HEADER_BYTES - RECORD_HEADER_BYTES) // SLICE_ENTRY_BYTES + 1
"""61: the last slice needs no entry."""
SEGMENT_HEADER_BYTES = PAGE
FOOTER_HEADER_BYTES = 128
FOOTER_ENTRY_BYTES = 112
TRAILER_BYTES = 32
IDENTITY_BYTES = 64
PAYLOAD_BYTES_MAX = 2**31 - 1
SEGMENT_BYTES_MAX = 2**31
NAMESPACES_PER_SEGMENT_MAX = 2**16 - 1

POLICY_KIND = 5
"""A namespace's policy: key = namespace, payload = its text. The log's own; never handed out."""

KINDS = frozenset({*(int(kind) for kind in RecordKind), POLICY_KIND})
RECORD_MAGIC = b"KVSRECD1"
FOOTER_MAGIC = b"KVSFOOT1"
TRAILER_MAGIC = b"KVSTAIL1"

_SEGMENT_MAGIC = b"KVSSEGM1"
_IDENTITY_MAGIC = b"KVSTORE\n"
_CRC = struct.Struct("<I")
_SEGMENT = struct.Struct("<8sH6x16sQQQQQ")
_RECORD = struct.Struct("<8sHBBBxHIIQQIIQQQQQQQQ32s32s32s")
_SLICE = struct.Struct("<II")
_FOOTER = struct.Struct("<8sH6xQQQQQIII")
_ENTRY = struct.Struct("<32s32sQQQQIIIHBB")
_TRAILER = struct.Struct("<8sQQ")
_IDENTITY = struct.Struct("<8sI16s")
_END = itemgetter(0)
_ZEROS = memoryview(bytes(PAGE))

assert _RECORD.size == 208
assert _ENTRY.size == FOOTER_ENTRY_BYTES
assert _FOOTER.size == 68


class Verdict(Enum):
    """Why bytes are not a record."""

    TORN = "torn"
    """The bytes end, or nothing was written, before the record ends."""
    CORRUPT = "corrupt"
    """A checksum, magic, kind or identity is wrong."""


class SegmentIdentity(NamedTuple):
    """What every record of a segment repeats. Zero salt: any (used only to salvage a segment without a header)."""

    store_tag: int
    segment_id: int
    salt: int


class SegmentHeader(NamedTuple):
    uuid: bytes
    segment_id: int
    salt: int
    created_ms: int
    allocated: int
    first_sequence: int


class RecordHeader(NamedTuple):
    kind: int
    namespace: NamespaceDigest
    key: BlockKey
    parent: BlockKey
    position: int
    lineage: Lineage
    checks: Checks
    length: int
    crc32c: int
    xxh3_64: int
    salt: int
    offset: int
    batch: int
    sequence: int
    created_ms: int
    slices: int
    """Entries in the table of slices."""
    table_crc32c: int


class SliceEnd(NamedTuple):
    """Where a slice of a payload ends, and the crc32c of the payload up to there."""

    end: int
    crc32c: int


class Entry(NamedTuple):
    """A footer's line about one record. `offset` is the payload's; `namespace` an index into the footer's list."""

    key: bytes
    parent: bytes
    sequence: int
    xxh3_64: int
    created_ms: int
    position: int
    crc32: int
    offset: int
    length: int
    namespace: int
    kind: int
    flags: int

    @property
    def checks(self) -> Checks:
        return Checks(crc32=self.crc32, xxh3_64=self.xxh3_64, has_xxh3=bool(self.flags & 1))

    @property
    def lineage(self) -> Lineage:
        return Lineage.BOUNDED if self.flags & 2 else Lineage.EXACT


class FooterHead(NamedTuple):
    """Counts of namespaces and of entries, and where the records end."""

    namespaces: int
    entries: int
    records_end: int


class Footer(NamedTuple):
    """What a segment holds, in the order in which it was written."""

    namespaces: list[NamespaceDigest]
    entries: list[Entry]
    records_end: int


def crc32c(data: BytesLike, before: int = 0) -> int:
    """The checksum of `data`, continued from that of what lies before it."""
    return int(_crc32c.crc32c(data, before))


def align(value: int, step: int) -> int:
    return -(-value // step) * step


def payload_gap(length: int) -> int:
    """Bytes from the beginning of a record to its payload."""
    return LARGE_HEADER_BYTES if length >= LARGE_PAYLOAD_BYTES else RECORD_HEADER_BYTES


def record_alignment(length: int) -> int:
    return PAGE if length >= LARGE_PAYLOAD_BYTES else SECTOR


def record_span(length: int) -> int:
    """Bytes that a record takes, its padding included."""
    return align(payload_gap(length) + length, record_alignment(length))


def footer_bytes(namespaces: int, entries: int) -> int:
    """Bytes of a padded footer with its trailer."""
    body = FOOTER_HEADER_BYTES + 32 * namespaces + FOOTER_ENTRY_BYTES * entries
    return align(body + TRAILER_BYTES, PAGE)


def zeros(count: int) -> memoryview:
    """At most a page of zero bytes."""
    assert 0 <= count <= PAGE
    return _ZEROS[:count]


def encode_identity(uuid: bytes) -> bytes:
    assert len(uuid) == 16
    body = _IDENTITY.pack(_IDENTITY_MAGIC, FORMAT_VERSION, uuid).ljust(IDENTITY_BYTES - 4, b"\0")
    return body + _CRC.pack(crc32c(body))


def decode_identity(data: bytes, *, directory: str) -> bytes:
    """The store's uuid. Raises StoreDamaged or FormatTooNew; both name the directory."""
    if len(data) != IDENTITY_BYTES or data[:8] != _IDENTITY_MAGIC or not _sealed_by_crc(data):
        raise StoreDamaged(
            "the identity file is not one of ours or is damaged; nothing was touched: restore it from a copy, "
            "or move the directory away and start with an empty one",
            field="directory",
            value=directory,
        )
    _, version, uuid = _IDENTITY.unpack_from(data)
    if version < FORMAT_VERSION:
        raise StoreDamaged(
            f"the store in {directory} has disk format {version}, which no release wrote; nothing was touched: "
            "start with an empty directory",
            field="format_version",
            value=version,
            allowed=f"{FORMAT_VERSION}",
        )
    if version > FORMAT_VERSION:
        raise FormatTooNew(
            f"the store in {directory} has a newer disk format than this program reads; nothing was touched: start it with the "
            "release that wrote it, or a later one",
            field="format_version",
            value=version,
            allowed=f"at most {FORMAT_VERSION}",
        )
    return bytes(uuid)


def store_tag(uuid: bytes) -> int:
    return int.from_bytes(uuid[:8], "little")


def encode_segment_header(header: SegmentHeader) -> bytes:
    body = _SEGMENT.pack(_SEGMENT_MAGIC, FORMAT_VERSION, *header).ljust(SEGMENT_HEADER_BYTES - 4, b"\0")
    return body + _CRC.pack(crc32c(body))


def decode_segment_header(data: bytes) -> SegmentHeader | Verdict:
    if len(data) < SEGMENT_HEADER_BYTES:
        return Verdict.TORN
    if data[:8] != _SEGMENT_MAGIC or not _sealed_by_crc(data[:SEGMENT_HEADER_BYTES]):
        return Verdict.CORRUPT
    _, version, *fields = _SEGMENT.unpack_from(data)
    return SegmentHeader(*fields) if version == FORMAT_VERSION else Verdict.CORRUPT


def begins_segment_of(data: bytes, uuid: bytes) -> bool:
    """Whether a file begins as a segment of this store, whole or not: a header that was never written to its end still has
    its first sector from one life or the other."""
    if len(data) < _SEGMENT.size or data[:8] != _SEGMENT_MAGIC:
        return False
    return bool(_SEGMENT.unpack_from(data)[2] == uuid)


def slice_ends(ends: Sequence[int], length: int) -> Sequence[int]:
    """The ends that a table of slices of a payload of `length` bytes keeps: ascending, without the payload's own. A slice of
    less than a page is verified with the one after it, since pages are what is read; and where there are more ends than
    entries they are evenly thinned out."""
    return () if length < LARGE_PAYLOAD_BYTES else _slice_ends(tuple(ends), length)


@lru_cache(maxsize=256)
def _slice_ends(ends: tuple[int, ...], length: int) -> tuple[int, ...]:
    inner: list[int] = []
    for end in sorted(ends):
        if (inner[-1] if inner else 0) + PAGE <= end < length:
            inner.append(end)
    most = SLICES_MAX - 1
    return tuple(inner if len(inner) <= most else [inner[i * len(inner) // most] for i in range(most)])


class PayloadSums(NamedTuple):
    """What a record's head says about its payload. `table`: the entries of its table of slices."""

    length: int
    crc32c: int
    xxh3_64: int
    table: bytes


def payload_sums(payload: BytesLike, slices: Sequence[int] = ()) -> PayloadSums:
    """Checksums of a payload. `slices`: ends of slices, thinned out if need be."""
    view = memoryview(payload)
    length = view.nbytes
    # First: it brings the bytes near so much faster than crc32c that both together take less than crc32c alone.
    xxh3 = xxhash.xxh3_64_intdigest(payload)
    crc = begin = 0
    entries: list[int] = []
    for end in slice_ends(slices, length):
        crc = _crc32c.crc32c(view[begin:end], crc)
        entries += end, crc
        begin = end
    crc = _crc32c.crc32c(view[begin:], crc)
    return PayloadSums(length, crc, xxh3, struct.pack(f"<{len(entries)}I", *entries))


def encode_record_head(
    *,
    identity: SegmentIdentity,
    offset: int,
    batch: int,
    sequence: int,
    created_ms: int,
    kind: int,
    namespace: NamespaceDigest,
    key: BlockKey,
    parent: BlockKey,
    position: int,
    lineage: Lineage,
    checks: Checks,
    sums: PayloadSums,
) -> bytes:
    """What lies before the payload: `payload_gap(length)` bytes."""
    body = _RECORD.pack(
        RECORD_MAGIC,
        FORMAT_VERSION,
        kind,
        int(checks.has_xxh3),
        lineage,
        len(sums.table) // SLICE_ENTRY_BYTES,
        sums.length,
        checks.crc32,
        checks.xxh3_64,
        sums.xxh3_64,
        sums.crc32c,
        crc32c(sums.table),
        identity.store_tag,
        identity.salt,
        identity.segment_id,
        offset,
        batch,
        sequence,
        position,
        created_ms,
        namespace,
        key,
        parent,
    ).ljust(RECORD_HEADER_BYTES - 4, b"\0")
    return (body + _CRC.pack(crc32c(body)) + sums.table).ljust(payload_gap(sums.length), b"\0")


def decode_record_header(data: bytes, *, identity: SegmentIdentity, offset: int) -> RecordHeader | Verdict:
    """The header at the beginning of `data`, which was read at `offset` of the segment's file."""
    if len(data) < RECORD_HEADER_BYTES:
        return Verdict.TORN
    data = data[:RECORD_HEADER_BYTES]
    if data[:8] != RECORD_MAGIC:
        return Verdict.CORRUPT if data.strip(b"\0") else Verdict.TORN
    if not _sealed_by_crc(data):
        return Verdict.CORRUPT
    (
        _,
        version,
        kind,
        flags,
        lineage,
        slices,
        length,
        crc32,
        writer_xxh3,
        xxh3,
        crc,
        table_crc,
        tag,
        salt,
        segment_id,
        own_offset,
        batch,
        sequence,
        position,
        created_ms,
        namespace,
        key,
        parent,
    ) = _RECORD.unpack_from(data)
    if version != FORMAT_VERSION or kind not in KINDS or lineage not in (1, 2) or flags > 1:
        return Verdict.CORRUPT
    if slices >= (SLICES_MAX if length >= LARGE_PAYLOAD_BYTES else 1):
        return Verdict.CORRUPT
    if (tag, segment_id, own_offset) != (identity.store_tag, identity.segment_id, offset):
        return Verdict.CORRUPT
    if identity.salt and salt != identity.salt:
        return Verdict.CORRUPT
    return RecordHeader(
        kind,
        namespace,
        key,
        parent,
        position,
        Lineage(lineage),
        Checks(crc32, writer_xxh3, bool(flags)),
        length,
        crc,
        xxh3,
        salt,
        own_offset,
        batch,
        sequence,
        created_ms,
        slices,
        table_crc,
    )


def decode_slices(data: BytesLike, header: RecordHeader) -> list[SliceEnd] | Verdict:
    """All slices of a record's payload, the last one ending with it. `data` begins with the record."""
    table = memoryview(data)[RECORD_HEADER_BYTES : RECORD_HEADER_BYTES + SLICE_ENTRY_BYTES * header.slices]
    if len(table) < SLICE_ENTRY_BYTES * header.slices:
        return Verdict.TORN
    if crc32c(table) != header.table_crc32c:
        return Verdict.CORRUPT
    found = [*map(SliceEnd._make, _SLICE.iter_unpack(table)), SliceEnd(header.length, header.crc32c)]
    ends = [end for end, _ in found]
    if not all(map(lt, [0, *ends], ends)) and header.length:
        return Verdict.CORRUPT
    return found


def payload_holds(header: RecordHeader, payload: BytesLike) -> bool:
    """Whether a whole payload has both checksums that it was written with."""
    return payload_is_right(header, payload) and crc32c(payload) == header.crc32c


def payload_is_right(header: RecordHeader, payload: BytesLike) -> bool:
    """Whether a whole payload has the stronger of them, for who reads it; who looks after what is stored asks `payload_holds`."""
    return memoryview(payload).nbytes == header.length and xxhash.xxh3_64_intdigest(payload) == header.xxh3_64


def covering_slices(slices: Sequence[SliceEnd], begin: int, end: int) -> tuple[int, int]:
    """Bytes [first, last) of a payload: the whole slices around [begin, end)."""
    before = bisect_right(slices, begin, key=_END)
    after = bisect_left(slices, end, key=_END)
    return slices[before - 1].end if before else 0, slices[after].end if end else 0


def slices_hold(slices: Sequence[SliceEnd], begin: int, data: BytesLike) -> bool:
    """Whether `data`, whole slices from byte `begin` of a payload on, are what was written."""
    view = memoryview(data)
    before, after = _crc32c_until(slices, begin), _crc32c_until(slices, begin + view.nbytes)
    return before is not None and after is not None and crc32c(view, before) == after


def _crc32c_until(slices: Sequence[SliceEnd], end: int) -> int | None:
    """Of the payload up to `end`; None where no slice ends there."""
    if end == 0:
        return 0
    at = bisect_left(slices, end, key=_END)
    return slices[at].crc32c if at < len(slices) and slices[at].end == end else None


def decode_record(
    data: bytes, *, identity: SegmentIdentity, offset: int
) -> tuple[RecordHeader, bytes] | Verdict:
    """A whole record at the beginning of `data`. Its payload is bytes that both checksums covered."""
    header = decode_record_header(data, identity=identity, offset=offset)
    if isinstance(header, Verdict):
        return header
    begin = payload_gap(header.length)
    payload = data[begin : begin + header.length]
    if len(payload) < header.length:
        return Verdict.TORN
    if not payload_holds(header, payload):
        return Verdict.CORRUPT
    return header, payload


def encode_footer(
    identity: SegmentIdentity,
    *,
    offset: int,
    records_end: int,
    namespaces: Sequence[NamespaceDigest],
    entries: Sequence[Entry],
) -> bytes:
    """The footer without padding and trailer: what the catalogue keeps a copy of."""
    body = b"".join(namespaces) + b"".join(_ENTRY.pack(*entry) for entry in entries)
    head = _FOOTER.pack(
        FOOTER_MAGIC,
        FORMAT_VERSION,
        *identity_fields(identity),
        offset,
        records_end,
        len(namespaces),
        len(entries),
        crc32c(body),
    ).ljust(FOOTER_HEADER_BYTES - 4, b"\0")
    return head + _CRC.pack(crc32c(head)) + body


def identity_fields(identity: SegmentIdentity) -> tuple[int, int, int]:
    """In the order of the footer's table."""
    return identity.store_tag, identity.salt, identity.segment_id


def finish_footer(footer: bytes, *, offset: int, salt: int) -> bytes:
    """A footer padded and with its trailer, as it ends the file."""
    size = align(len(footer) + TRAILER_BYTES, PAGE)
    tail = _TRAILER.pack(TRAILER_MAGIC, offset, salt).ljust(TRAILER_BYTES - 4, b"\0")
    return footer.ljust(size - TRAILER_BYTES, b"\0") + tail + _CRC.pack(crc32c(tail))


def decode_trailer(data: bytes) -> tuple[int, int] | Verdict:
    """(footer offset, salt) from the last 32 bytes of a file."""
    if len(data) < TRAILER_BYTES:
        return Verdict.TORN
    if data[:8] != TRAILER_MAGIC or not _sealed_by_crc(data):
        return Verdict.CORRUPT
    _, offset, salt = _TRAILER.unpack_from(data)
    return offset, salt


def footer_extent(head: bytes) -> int | Verdict:
    """Bytes of a footer without its padding, from its first 128."""
    if len(head) < FOOTER_HEADER_BYTES:
        return Verdict.TORN
    if head[:8] != FOOTER_MAGIC or not _sealed_by_crc(head[:FOOTER_HEADER_BYTES]):
        return Verdict.CORRUPT
    names, count = _FOOTER.unpack_from(head)[7:9]
    return int(FOOTER_HEADER_BYTES + 32 * names + FOOTER_ENTRY_BYTES * count)


def footer_head(data: BytesLike, *, identity: SegmentIdentity) -> FooterHead | Verdict:
    """What a footer says of itself, once its checksums and identity hold; padding may follow it."""
    extent = footer_extent(bytes(data[:FOOTER_HEADER_BYTES]))
    if isinstance(extent, Verdict):
        return extent
    _, version, tag, salt, segment_id, offset, records_end, names, count, crc = _FOOTER.unpack_from(data)
    if version != FORMAT_VERSION or (tag, segment_id) != (identity.store_tag, identity.segment_id):
        return Verdict.CORRUPT
    if salt != identity.salt or not SEGMENT_HEADER_BYTES <= records_end <= offset:
        return Verdict.CORRUPT
    if len(data) < extent:
        return Verdict.TORN
    if crc32c(memoryview(data)[FOOTER_HEADER_BYTES:extent]) != crc:
        return Verdict.CORRUPT
    return FooterHead(names, count, records_end)


def decode_footer(data: bytes, *, identity: SegmentIdentity) -> Footer | Verdict:
    """A footer, which may be followed by padding. Every entry lies between the segment's header and the footer."""
    head = footer_head(data, identity=identity)
    if isinstance(head, Verdict):
        return head
    body = FOOTER_HEADER_BYTES + 32 * head.namespaces
    end = body + FOOTER_ENTRY_BYTES * head.entries
    namespaces = [NamespaceDigest(data[at : at + 32]) for at in range(FOOTER_HEADER_BYTES, body, 32)]
    entries = [Entry._make(fields) for fields in _ENTRY.iter_unpack(data[body:end])]
    return Footer(namespaces, entries, head.records_end)


def _sealed_by_crc(data: bytes) -> bool:
    """The last four bytes are the crc32c of the rest."""
    return bool(_CRC.unpack_from(data, len(data) - 4)[0] == crc32c(data[:-4]))
