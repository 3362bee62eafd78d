"""What the parts of an opened store share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from kvstore.clock import Clock
from kvstore.errors import DeviceError, NoSpace
from kvstore.store.base import Place
from kvstore.store.buffers import BufferPool
from kvstore.store.catalog import Catalog, Description
from kvstore.store.device import Device
from kvstore.store.format import PAGE, align
from kvstore.store.identity import Randomness
from kvstore.store.lanes import Lanes
from kvstore.store.reader import OpenFiles, Reader
from kvstore.store.space import DiskBudget
from kvstore.store.table import SegmentTable
from kvstore.types import BlockKey, NamespaceDigest

_FULL_BYTES = 1 << 20
"""With less than this left, a catalogue that cannot be written has most likely found the file system full."""


@dataclass(slots=True)
class OpenedStore:
    """A locked directory and all that was found in it. One thread at a time changes it; the table has its own lock."""

    device: Device
    catalog: Catalog
    clock: Clock
    randomness: Randomness
    uuid: bytes
    table: SegmentTable
    files: OpenFiles
    reader: Reader
    disk: DiskBudget
    lanes: Lanes
    buffers: BufferPool
    """For gathering what is written, a piece at a time."""
    next_segment_id: int = 1
    next_sequence: int = 1
    clears: dict[tuple[NamespaceDigest, int], tuple[int, Place]] = field(default_factory=dict)
    """Sequence and place, by namespace and kind, of each CLEAR and CLEAR_STATES that still covers something."""
    policies: dict[NamespaceDigest, tuple[int, str, Place | None]] = field(default_factory=dict)
    """Sequence, text and, when it is in the log, place of each namespace's policy."""
    descriptions: dict[tuple[NamespaceDigest, BlockKey], Description] = field(default_factory=dict)
    """The newest NAMESPACE record of each namespace and key."""
    erasing: bytes = b""
    """What is being erased, as the caller calls it; while it is, files that are given up are overwritten first."""
    stale_rows: dict[bytes, bytes | None] = field(default_factory=dict)
    """Catalogue rows of segments that are gone, to be removed with the next write."""
    make_way: Callable[[], bool] = lambda: False
    """Give the file system something back, since it is full; whether there was anything."""
    rows_turn: threading.Lock = field(default_factory=threading.Lock)
    """Held while the catalogue is written: segments are sealed beside other work."""

    def write_rows(self, changes: Mapping[bytes, bytes | None]) -> bool:
        """Change the catalogue, within the budget. It only makes a start faster, so that a failure is counted and
        changes nothing else."""
        with self.rows_turn:
            try:
                written = self._write_rows({**self.stale_rows, **changes})
            except (DeviceError, NoSpace):
                # The directory could not be measured.
                written = False
            if written:
                self.stale_rows = {}
                self.table.count("written_bytes", catalog_bytes_of(changes))
            else:
                self.table.count("catalog_errors")
            return written

    def _write_rows(self, changes: Mapping[bytes, bytes | None]) -> bool:
        self.disk.refresh()
        written = self.catalog.write(changes, bytes_max=self.disk.catalog_bytes_max())
        if not written and self._is_full() and self.make_way():
            self.disk.refresh()
            written = self.catalog.write(changes, bytes_max=self.disk.catalog_bytes_max())
        self.disk.refresh()
        return written

    def forget_rows(self, keys: Iterable[bytes]) -> None:
        """Rows of what is gone, to be removed with the next write."""
        with self.rows_turn:
            self.stale_rows.update(dict.fromkeys(keys))

    def _is_full(self) -> bool:
        try:
            return self.device.free_bytes() < _FULL_BYTES
        except DeviceError:
            return False

    def now_ms(self) -> int:
        return max(0, int(self.clock.wall() * 1000))

    def take_sequences(self, count: int) -> int:
        """The first of `count` sequences that nothing else gets."""
        first = self.next_sequence
        self.next_sequence += count
        return first

    def take_segment_id(self) -> int:
        segment_id = self.next_segment_id
        self.next_segment_id += 1
        return segment_id

    def random_salt(self) -> int:
        # Zero means "any" in the format.
        return int.from_bytes(self.randomness(8), "little") or 1


def catalog_bytes_of(changes: Mapping[bytes, bytes | None]) -> int:
    """About what one transaction of the catalogue writes: its values, the pages of a tree two levels deep that lead to
    them, and the page that makes them count."""
    values = sum(len(key) + len(value or b"") for key, value in changes.items())
    return align(values, PAGE) + 4 * PAGE
