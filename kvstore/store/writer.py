"""Writing segments: create, append a batch, seal. The order of the steps is what a crash depends on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvstore.errors import DeviceError, KvstoreError, NoSpace
from kvstore.store.device import Device, DeviceFile, write_all
from kvstore.store.format import (
    PAGE,
    Entry,
    SegmentHeader,
    SegmentIdentity,
    align,
    encode_footer,
    encode_record,
    encode_segment_header,
    finish_footer,
    footer_bytes,
    payload_gap,
    record_span,
    store_tag,
    zeros,
)
from kvstore.store.segment import TEMPORARY_SUFFIX, Segment, State, fits, plan_batch
from kvstore.types import BlockKey, BytesLike, Checks, Lineage, NamespaceDigest


@dataclass(frozen=True, slots=True)
class Pending:
    """A record on its way into a segment. Copies made by cleaning keep their sequence and time of creation."""

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


def create_segment(device: Device, header: SegmentHeader) -> tuple[Segment, DeviceFile]:
    """A new empty segment that survives a power cut under its name, or nothing at all.

    Raises NoSpace or DeviceError. When even the removal of a failed attempt fails, its file stays under the temporary
    name, or empty under the final one; the next start removes it.
    """
    identity = SegmentIdentity(store_tag(header.uuid), header.segment_id, header.salt)
    segment = Segment(identity, allocated=header.allocated, state=State.OPEN)
    temporary = segment.name + TEMPORARY_SUFFIX
    file = device.create(temporary)
    try:
        file.allocate(header.allocated)
        write_all(file, 0, [encode_segment_header(header)])
        file.sync()
        device.rename(temporary, segment.name)
        device.sync_names()
    except KvstoreError:
        with suppress(KvstoreError):
            file.close()
        for name in (temporary, segment.name):
            with suppress(KvstoreError):
                device.unlink(name)
        raise
    return segment, file


class OpenSegment:
    """The one segment that takes writes. After the first failure it takes none."""

    def __init__(self, segment: Segment, file: DeviceFile) -> None:
        self.segment = segment
        self.end = segment.end
        self.failed = False
        self._file = file
        self._numbers: dict[NamespaceDigest, int] = {}
        self._entries: list[Entry] = []

    def has_room(self, items: Sequence[Pending]) -> bool:
        """Whether a batch of these still leaves room for the footer."""
        names = len(self._numbers.keys() | {item.namespace for item in items})
        return not self.failed and fits(
            plan_batch(self.end, [item.length for item in items]),
            capacity=self.segment.allocated,
            namespaces=names,
            records=len(self._entries) + len(items),
        )

    def append(self, items: Sequence[Pending]) -> list[int]:
        """Write a batch and make it durable; the payloads' offsets. Raises DeviceError or NoSpace, after which the
        segment has failed and none of the batch counts."""
        assert not self.failed
        layout = plan_batch(self.end, [item.length for item in items])
        begin = at = align(self.end, PAGE)
        parts: list[BytesLike] = []
        for item, offset in zip(items, layout.offsets, strict=True):
            if offset > at:
                parts.append(zeros(offset - at))
            parts.extend(
                encode_record(
                    identity=self.segment.identity,
                    offset=offset,
                    batch=begin,
                    sequence=item.sequence,
                    created_ms=item.created_ms,
                    kind=item.kind,
                    namespace=item.namespace,
                    key=item.key,
                    parent=item.parent,
                    position=item.position,
                    lineage=item.lineage,
                    checks=item.checks,
                    payload=item.payload,
                )
            )
            at = offset + record_span(item.length)
        try:
            written = write_all(self._file, begin, parts)
            assert written == layout.end - begin
            self._file.sync()
        except (DeviceError, NoSpace):
            # Never tried again: a second sync can succeed without the bytes that the first one lost.
            self.failed = True
            raise
        self.end = layout.end
        offsets = [
            offset + payload_gap(item.length) for item, offset in zip(items, layout.offsets, strict=True)
        ]
        self._entries.extend(map(self._entry, items, offsets))
        return offsets

    def seal(self) -> tuple[bytes, int]:
        """Write the footer, cut the file behind it, make both durable. (footer, file bytes). Raises as `append`."""
        assert not self.failed
        offset = align(self.end, PAGE)
        footer = encode_footer(
            self.segment.identity,
            offset=offset,
            records_end=self.end,
            namespaces=list(self._numbers),
            entries=self._entries,
        )
        whole = finish_footer(footer, offset=offset, salt=self.segment.identity.salt)
        try:
            write_all(self._file, offset, [whole])
            self._file.truncate(offset + len(whole))
        except (DeviceError, NoSpace):
            self.failed = True
            raise
        return footer, offset + len(whole)

    def unused_bytes(self) -> int:
        """What sealing it now would give back."""
        if self.failed:
            return 0
        return (
            self.segment.allocated
            - align(self.end, PAGE)
            - footer_bytes(len(self._numbers), len(self._entries))
        )

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
