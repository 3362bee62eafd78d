"""Overwriting what was given up: the files of segments that went, and what earlier lives left in others.

Zeros are written over the bytes themselves, in place: a file that is only removed, or has holes, leaves them on the device until
another takes the room.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from typing import NamedTuple

from kvstore.errors import KvstoreError
from kvstore.store.buffers import aligned
from kvstore.store.device import Device, DeviceFile, read_fully, read_pages, write_all, write_pages
from kvstore.store.format import (
    PAGE,
    SEGMENT_HEADER_BYTES,
    TRAILER_BYTES,
    Verdict,
    align,
    decode_trailer,
)
from kvstore.store.segment import CACHED_KINDS, TEMPORARY_SUFFIX, Segment, State, spare_id_of
from kvstore.store.state import OpenedStore
from kvstore.types import NamespaceDigest

NOTE_NAME = "erasing.json"
NOTE_BYTES_MAX = 64 << 10
_STEP_BYTES = 1 << 20
AT_ONCE_BYTES = 16 << 20
"""Of a file that is given up while there is room without it: what waits for the log has a turn in between."""


def read_note(device: Device) -> bytes:
    """What was being erased when the directory was last in use; empty for nothing. Raises DeviceError."""
    if NOTE_NAME not in device.names():
        return b""
    file = device.open(NOTE_NAME)
    if file is None:
        return b""
    try:
        return read_fully(file, 0, NOTE_BYTES_MAX)
    finally:
        file.close()


def write_note(device: Device, note: bytes) -> None:
    """Durable on return. Raises DeviceError or NoSpace."""
    temporary = NOTE_NAME + TEMPORARY_SUFFIX
    device.unlink(temporary)
    file = device.create(temporary)
    try:
        write_all(file, 0, [note])
        file.sync()
        device.rename(temporary, NOTE_NAME)
        device.sync_names()
    finally:
        file.close()


def drop_note(device: Device) -> None:
    device.unlink(NOTE_NAME)
    device.sync_names()


class Blanked(NamedTuple):
    """`written` bytes of a file were overwritten; up to `end` it is zeros, and that is all of it where it is `whole`."""

    written: int
    end: int
    whole: bool


def blank_file(
    device: Device, name: str, *, begin: int = SEGMENT_HEADER_BYTES, most: int | None = None
) -> Blanked:
    """Overwrite a segment's file, or a spare's, but for its header, from `begin` on, durably; `most` bytes of it, or all. Raises
    DeviceError or NoSpace."""
    file = device.open(name, bulk=True)
    if file is None:
        return Blanked(0, begin, whole=True)
    try:
        size = align(file.size(), PAGE)
        end = size if most is None else min(size, begin + most)
        return Blanked(blank(file, begin, end), end, whole=end == size)
    finally:
        file.close()


def blank(file: DeviceFile, begin: int, end: int) -> int:
    """Overwrite whole pages of a bulk file, as far as they are not zeros already, durably; the bytes."""
    page = aligned(_STEP_BYTES)
    found = aligned(_STEP_BYTES)
    written = 0
    for at in range(begin, end, _STEP_BYTES):
        size = min(_STEP_BYTES, end - at)
        here = found[:size]
        # Beyond the file's end nothing is read, and nothing is there.
        length = align(read_pages(file, at, here), PAGE)
        if length and bytes(here[:length]).count(0) < length:
            write_pages(file, at, [page[:length]])
            written += length
    if written:
        file.sync()
    return written


def gap_of(file: DeviceFile, segment: Segment) -> tuple[int, int] | None:
    """The pages of a closed segment between its last record and its footer, which an earlier life of the file may have left; None
    where that cannot be told."""
    size = file.size()
    begin = align(segment.records_end(), PAGE)
    if not segment.has_footer:
        return min(begin, size), align(size, PAGE)
    trailer = decode_trailer(read_fully(file, max(0, size - TRAILER_BYTES), TRAILER_BYTES))
    if isinstance(trailer, Verdict) or trailer[1] != segment.identity.salt or trailer[0] < begin:
        return None
    return begin, trailer[0]


class Eraser:
    """Of one opened store. Its calls take turns with everything that changes the log."""

    def __init__(self, store: OpenedStore) -> None:
        self._store = store
        self._before: dict[NamespaceDigest, int] = {}
        self._spares: dict[str, int] = {}
        """Those of before, with the byte up to which each is overwritten. They are nobody's to use meanwhile."""

    @property
    def note(self) -> bytes:
        """What is being erased; empty for nothing."""
        return self._store.erasing

    def begin(self, note: bytes) -> None:
        write_note(self._store.device, note)
        self._store.erasing = note

    def take_spares(self) -> None:
        """The caller has seen to it that none is made ready meanwhile."""
        disk = self._store.disk
        self._spares.update(dict.fromkeys(disk.spares, SEGMENT_HEADER_BYTES))
        disk.spares.clear()
        disk.refresh()

    def blank_spare(self) -> None:
        """Some of one; it can be used again when all of it is done. Raises DeviceError or NoSpace."""
        disk = self._store.disk
        for name, begin in list(self._spares.items())[:1]:
            done = blank_file(self._store.device, name, begin=begin, most=AT_ONCE_BYTES)
            self._count(done.written)
            self._spares[name] = done.end
            if done.whole:
                del self._spares[name]
                disk.spares[name] = disk.segment_bytes
                disk.refresh()

    def blank_some(self, segment: Segment) -> bool:
        """Some of the file of a segment that goes; whether that was all that is left of it. Raises DeviceError or NoSpace."""
        begin = segment.blanked or SEGMENT_HEADER_BYTES
        done = blank_file(self._store.device, segment.name, begin=begin, most=AT_ONCE_BYTES)
        self._count(done.written)
        segment.blanked = done.end
        return done.whole

    @property
    def spare_ids(self) -> list[int]:
        """Of the spares that are not done; each has the id of the segment that it was."""
        return [number for number in map(spare_id_of, self._spares) if number is not None]

    def blank_gap(self, segment_id: int) -> bool:
        """What an earlier life left in a segment that takes no more writes; False where that cannot be told apart, so that the
        segment has to go."""
        with self._store.table.lock:
            segment = self._store.table.segments.get(segment_id)
            if segment is None or segment.state is not State.CLOSED:
                return True
        file = self._store.device.open(segment.name, bulk=True)
        if file is None:
            return True
        try:
            gap = gap_of(file, segment)
            if gap is None:
                return False
            self._count(blank(file, *gap))
        finally:
            file.close()
        return True

    def expect(self, namespaces: Collection[NamespaceDigest]) -> None:
        """What the next CLEAR of each of these covers is to go."""
        self._before.update(dict.fromkeys(namespaces, 0))

    def cleared(self, namespace: NamespaceDigest, sequence: int) -> None:
        """A CLEAR was written."""
        if namespace in self._before:
            self._before[namespace] = sequence

    def holders(self) -> list[Segment]:
        """The segments whose files may hold such a record."""
        with self._store.table.lock:
            numbers = {
                self._store.table.number_of(namespace): before for namespace, before in self._before.items()
            }
            return [
                segment
                for segment in self._store.table.segments.values()
                if segment.state is State.DYING
                or any(
                    segment.may_hold(number, CACHED_KINDS, before=before)
                    for number, before in numbers.items()
                )
            ]

    def end(self) -> None:
        drop_note(self._store.device)
        self._store.erasing = b""
        self._before.clear()
        self._spares.clear()

    def _count(self, written: int) -> None:
        self._store.table.count("overwritten_bytes", written)
        self._store.table.count("written_bytes", written)


def blank_given_up(store: OpenedStore, name: str, *, begin: int = 0) -> None:
    """While something is erased, a file is overwritten before it is let go or used again; from `begin` on, where what lies before
    that was. Raises DeviceError or NoSpace."""
    if store.erasing:
        written = blank_file(store.device, name, begin=begin or SEGMENT_HEADER_BYTES).written
        store.table.count("overwritten_bytes", written)
        store.table.count("written_bytes", written)


def blank_forgotten(store: OpenedStore, name: str) -> None:
    """The same at a start, where a file that cannot be overwritten is let go all the same."""
    with suppress(KvstoreError):
        blank_given_up(store, name)
