"""What all threads of a log share: its segments, who reads them, and counts. No I/O."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.store.base import Place
from kvstore.store.segment import Segment, State
from kvstore.types import NamespaceDigest

COUNTERS = (
    "appended_records",
    "appended_bytes",
    "syncs",
    "written_bytes",
    "read_records",
    "read_again_records",
    "damaged_records",
    "quarantined_records",
    "missing_segments",
    "device_errors",
    "reclaimed_segments",
    "recycled_segments",
    "cleaned_bytes",
    "catalog_errors",
    "overwritten_bytes",
)


class SegmentTable:
    """Segments by id, with namespace numbers for their columns. `lock` guards everything below it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.segments: dict[int, Segment] = {}
        self._numbers: dict[NamespaceDigest, int] = {}
        self._counts: Counter[str] = Counter()

    @contextmanager
    def reading(self, segment_id: int) -> Iterator[Segment | None]:
        """Keep a segment's file for the length of the block; None when it is gone or going."""
        with self.lock:
            segment = self.segments.get(segment_id)
            if segment is not None and segment.state is State.DYING:
                segment = None
            if segment is not None:
                segment.readers += 1
        try:
            yield segment
        finally:
            if segment is not None:
                with self.lock:
                    segment.readers -= 1

    def kill(self, place: Place) -> None:
        """Count a record as dead. The caller holds `lock`."""
        segment = self.segments.get(place.segment_id)
        index = segment.find(place) if segment is not None else None
        if segment is not None and index is not None:
            segment.kill(index)

    def number_of(self, namespace: NamespaceDigest) -> int:
        return self._numbers.setdefault(namespace, len(self._numbers))

    def namespaces(self) -> list[NamespaceDigest]:
        """All that have a number, by number."""
        return list(self._numbers)

    def allocated(self) -> int:
        with self.lock:
            return sum(segment.allocated for segment in self.segments.values())

    def count(self, name: str, amount: int = 1) -> None:
        with self.lock:
            self._counts[name] += amount

    def count_locked(self, name: str) -> None:
        """Count one. The caller holds `lock`."""
        self._counts[name] += 1

    def counts(self) -> dict[str, int]:
        # Without the lock, which others hold for milliseconds: each count is right by itself.
        return {name: self._counts[name] for name in COUNTERS}
