"""Writing segments: create, append a batch, seal. The order of the steps is what a crash depends on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import pairwise

from kvstore.errors import DeviceError, KvstoreError, NoSpace
from kvstore.store.base import Slot
from kvstore.store.buffers import BufferPool, aligned
from kvstore.store.device import Device, DeviceFile, write_pages
from kvstore.store.erasing import blank
from kvstore.store.format import (
    PAGE,
    SEGMENT_HEADER_BYTES,
    Entry,
    PayloadSums,
    SegmentHeader,
    SegmentIdentity,
    align,
    encode_footer,
    encode_record_head,
    encode_segment_header,
    finish_footer,
    footer_bytes,
    payload_gap,
    payload_sums,
    record_span,
    store_tag,
    zeros,
)
from kvstore.store.lanes import Lanes, Transfer
from kvstore.store.segment import FULL_SHARE, TEMPORARY_SUFFIX, Layout, Segment, State, fits, plan_batch
from kvstore.types import BlockKey, BytesLike, Checks, Lineage, NamespaceDigest


@dataclass(slots=True)
class Pending:
    """A record on its way into a segment; nobody changes it. Copies made by cleaning keep their sequence and time of
    creation."""

    kind: int
    namespace: NamespaceDigest
    key: BlockKey
    parent: BlockKey
    position: int
    lineage: Lineage
    checks: Checks
    payload: BytesLike
    length: int
    sequence: int
    created_ms: int
    slices: Sequence[int] = ()
    slot: Slot | None = None
    sums: PayloadSums | None = None
    """Worked out when it is written, where they are not known before."""


def gather(parts: Iterable[BytesLike], take: Callable[[], memoryview]) -> Iterator[tuple[memoryview, int]]:
    """Copy parts one behind the other into buffers that `take` gives; yields each when it is full, and the last one, with
    how much of it is filled."""
    target: memoryview | None = None
    filled = 0
    for part in parts:
        rest = memoryview(part).cast("B")
        while rest:
            if target is None:
                target, filled = take(), 0
            count = min(len(rest), len(target) - filled)
            target[filled : filled + count] = rest[:count]
            filled, rest = filled + count, rest[count:]
            if filled == len(target):
                yield target, filled
                target = None
    if target is not None:
        yield target, filled


@dataclass(frozen=True, slots=True)
class _Piece:
    """Records with pages of their own."""

    items: Sequence[Pending]
    offsets: Sequence[int]

    @property
    def length(self) -> int:
        return align(self.offsets[-1] + record_span(self.items[-1].length), PAGE) - self.offsets[0]


def _lay_out(piece: _Piece, heads: Sequence[bytes], buffer: memoryview) -> None:
    """The records of a piece as they lie in its pages. What lies between them is what an earlier piece left in the buffer,
    unless it is cleared."""
    at, begin = 0, piece.offsets[0]
    for item, offset, head in zip(piece.items, piece.offsets, heads, strict=True):
        start = offset - begin
        if start > at:
            buffer[at:start] = bytes(start - at)
        at = start + len(head)
        buffer[start:at] = head
        buffer[at : at + item.length] = memoryview(item.payload).cast("B")
        at += item.length
    buffer[at : piece.length] = bytes(piece.length - at)


def create_segment(
    device: Device, header: SegmentHeader, *, spare: str | None = None
) -> tuple[Segment, DeviceFile]:
    """A new empty segment that survives a power cut under its name, or nothing at all. `spare`: a file to use again.

    Raises NoSpace or DeviceError. When even the removal of a failed attempt fails, its file stays under the temporary
    name, or empty under the final one; the next start removes it.
    """
    identity = SegmentIdentity(store_tag(header.uuid), header.segment_id, header.salt)
    segment = Segment(identity, allocated=header.allocated, state=State.OPEN)
    before = spare or segment.name + TEMPORARY_SUFFIX
    file = device.open(before, bulk=True) if spare else device.create(before, bulk=True)
    if file is None:
        raise DeviceError(f"the file {before} went away; the next segment gets one of its own")
    try:
        size = file.size()
        if size > header.allocated:
            file.truncate(header.allocated)
        elif size < header.allocated:
            file.allocate(header.allocated)
        page = aligned(SEGMENT_HEADER_BYTES)
        page[:] = encode_segment_header(header)
        write_pages(file, 0, [page])
        file.sync()
        device.rename(before, segment.name)
        device.sync_names()
    except KvstoreError:
        with suppress(KvstoreError):
            file.close()
        for name in (before, segment.name):
            with suppress(KvstoreError):
                device.unlink(name)
        raise
    return segment, file


class OpenSegment:
    """The one segment that takes writes. After the first failure it takes none."""

    def __init__(self, segment: Segment, file: DeviceFile, *, lanes: Lanes, buffers: BufferPool) -> None:
        self.segment = segment
        self.end = segment.end
        self.failed = False
        self._file = file
        self._lanes = lanes
        self._buffers = buffers
        self._numbers: dict[NamespaceDigest, int] = {}
        self._entries: list[Entry] = []
        self._planned: tuple[tuple[int, list[int]], Layout] | None = None

    def has_room(self, items: Sequence[Pending]) -> bool:
        """Whether a batch of these still leaves room for the footer."""
        names = len(self._numbers.keys() | {item.namespace for item in items})
        return not self.failed and fits(
            self._plan(items),
            capacity=self.segment.allocated,
            namespaces=names,
            records=len(self._entries) + len(items),
        )

    def append(self, items: Sequence[Pending]) -> list[int]:
        """Write a batch and make it durable; the payloads' offsets. Raises DeviceError or NoSpace, after which the
        segment has failed and none of the batch counts."""
        assert not self.failed
        layout = self._plan(items)
        begin = align(self.end, PAGE)
        pieces = [
            _Piece(items[first:last], layout.offsets[first:last])
            for first, last in pairwise([*layout.pieces, len(items)])
        ]
        entries: list[Entry] = []
        try:
            with closing(self._lanes.move(self._transfers(pieces, begin, entries))) as moved:
                for transfer in moved:
                    if isinstance(transfer.tag, memoryview):
                        self._buffers.give_back(transfer.tag)
            self._file.sync()
        except (DeviceError, NoSpace):
            # Never tried again: a second sync can succeed without the bytes that the first one lost.
            self.failed = True
            raise
        self.end = layout.end
        self._entries += entries
        return [entry.offset for entry in entries]

    def _plan(self, items: Sequence[Pending]) -> Layout:
        """Asked for several times for one batch, and worked out once."""
        question = (self.end, [item.length for item in items])
        if self._planned is None or self._planned[0] != question:
            self._planned = question, plan_batch(*question)
        return self._planned[1]

    def _transfers(self, pieces: Sequence[_Piece], batch: int, entries: list[Entry]) -> Iterator[Transfer]:
        """Whole pages, in order. What lies in a slot needs no copy. Footer entries are made on the way, while the device is
        at work."""
        for piece in pieces:
            if all(item.slot is not None for item in piece.items):
                for item, offset in zip(piece.items, piece.offsets, strict=True):
                    assert item.slot is not None
                    pages = item.slot.finish(self._head(item, offset, batch))
                    yield Transfer(self._file, offset, pages, is_write=True)
                    entries.append(self._entry(item, offset + payload_gap(item.length)))
                continue
            heads = [
                self._head(item, offset, batch)
                for item, offset in zip(piece.items, piece.offsets, strict=True)
            ]
            if piece.length > self._buffers.buffer_bytes:
                yield from self._in_parts(piece.items[0], piece.offsets[0], heads[0])
            else:
                buffer = self._buffers.take()
                _lay_out(piece, heads, buffer)
                view = buffer[: piece.length]
                yield Transfer(self._file, piece.offsets[0], view, is_write=True, tag=buffer)
            entries += [
                self._entry(item, offset + payload_gap(item.length))
                for item, offset in zip(piece.items, piece.offsets, strict=True)
            ]

    def _in_parts(self, item: Pending, offset: int, head: bytes) -> Iterator[Transfer]:
        """One record that is larger than a buffer."""
        parts = [head, item.payload, zeros(align(len(head) + item.length, PAGE) - len(head) - item.length)]
        for buffer, length in gather(parts, self._buffers.take):
            yield Transfer(self._file, offset, buffer[:length], is_write=True, tag=buffer)
            offset += length

    def _head(self, item: Pending, offset: int, batch: int) -> bytes:
        return encode_record_head(
            identity=self.segment.identity,
            offset=offset,
            batch=batch,
            sequence=item.sequence,
            created_ms=item.created_ms,
            kind=item.kind,
            namespace=item.namespace,
            key=item.key,
            parent=item.parent,
            position=item.position,
            lineage=item.lineage,
            checks=item.checks,
            sums=item.sums or payload_sums(item.payload, item.slices),
        )

    def blank_tail(self) -> int:
        """Overwrite what is not written in this life of the file; the bytes. Raises DeviceError or NoSpace."""
        return blank(self._file, align(self.end, PAGE), self.segment.allocated)

    def is_full(self) -> bool:
        """Whether so little is unused that it is not worth giving back: then the file keeps its size, and can be used
        again as it is."""
        return self.unused_bytes() <= self.segment.allocated // FULL_SHARE

    def seal(self) -> tuple[bytes, int]:
        """Write the footer at the end of the file, which is cut behind it unless it is full; make both durable. (footer,
        file bytes). Raises as `append`."""
        assert not self.failed
        room = footer_bytes(len(self._numbers), len(self._entries))
        offset = self.segment.allocated - room if self.is_full() else align(self.end, PAGE)
        footer = encode_footer(
            self.segment.identity,
            offset=offset,
            records_end=self.end,
            namespaces=list(self._numbers),
            entries=self._entries,
        )
        pages = aligned(room)[:room]
        pages[:] = finish_footer(footer, offset=offset, salt=self.segment.identity.salt)
        try:
            write_pages(self._file, offset, [pages])
            if offset + room < self.segment.allocated:
                self._file.truncate(offset + room)
            else:
                self._file.sync()
        except (DeviceError, NoSpace):
            self.failed = True
            raise
        return footer, offset + room

    def unused_bytes(self) -> int:
        """What sealing it now would give back."""
        if self.failed:
            return 0
        return (
            self.segment.allocated
            - align(self.end, PAGE)
            - footer_bytes(len(self._numbers), len(self._entries))
        )

    def file_bytes(self) -> int:
        """What the file has by now. Raises DeviceError."""
        return self._file.size()

    def close(self) -> None:
        self._file.close()

    def _entry(self, item: Pending, offset: int) -> Entry:
        number = self._numbers.setdefault(item.namespace, len(self._numbers))
        flags = int(item.checks.has_xxh3) | (2 if item.lineage is Lineage.BOUNDED else 0)
        return Entry(
            item.key,
            item.parent,
            item.sequence,
            item.checks.xxh3_64,
            item.created_ms,
            item.position,
            item.checks.crc32,
            offset,
            item.length,
            number,
            item.kind,
            flags,
        )
