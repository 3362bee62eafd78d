"""What the parts of an opened store share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvstore.clock import Clock
from kvstore.store.base import Place
from kvstore.store.catalog import Catalog
from kvstore.store.device import Device
from kvstore.store.identity import Randomness
from kvstore.store.reader import OpenFiles, Reader
from kvstore.store.space import DiskBudget
from kvstore.store.table import SegmentTable
from kvstore.types import NamespaceDigest


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
    next_segment_id: int = 1
    next_sequence: int = 1
    clears: dict[tuple[NamespaceDigest, int], tuple[int, Place]] = field(default_factory=dict)
    """Sequence and place, by namespace and kind, of each CLEAR and CLEAR_STATES that still covers something."""
    policies: dict[NamespaceDigest, tuple[int, str, Place | None]] = field(default_factory=dict)
    """Sequence, text and, when it is in the log, place of each namespace's policy."""
    stale_rows: dict[bytes, bytes | None] = field(default_factory=dict)
    """Catalogue rows of segments that are gone, to be removed with the next write."""

    def write_rows(self, changes: Mapping[bytes, bytes | None]) -> bool:
        """Change the catalogue, within the budget. It only makes a start faster, so that a failure is counted and
        changes nothing else."""
        self.disk.refresh()
        written = self.catalog.write({**self.stale_rows, **changes}, bytes_max=self.disk.catalog_bytes_max())
        if written:
            self.stale_rows = {}
        else:
            self.table.count("catalog_errors")
        self.disk.refresh()
        return written

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
