"""The disk budget: what may still be created. allocated + other <= budget at every moment."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.errors import ConfigError
from kvstore.store.base import Space
from kvstore.store.catalog import LmdbCatalog
from kvstore.store.device import Device
from kvstore.store.format import (
    FOOTER_ENTRY_BYTES,
    PAGE,
    SEGMENT_BYTES_MAX,
    SEGMENT_HEADER_BYTES,
    align,
)
from kvstore.store.table import SegmentTable
from kvstore.units import size_text

SEGMENT_BYTES_MIN = 1 << 20
SEGMENT_BYTES_DEFAULT_MAX = 256 << 20
SEGMENTS_MIN = 4
"""The open one, one to copy into, one that is full, and the room of a fourth for the catalogue and rounding."""

# A record's payload may be as small as this for the promises in payload bytes to hold exactly.
_SMALL_PAYLOAD_BYTES = 3072
_WORST_RECORD_BYTES = 256 + 511 + FOOTER_ENTRY_BYTES
_ROUNDING_BYTES = 3 * PAGE
"""The batch's end, the footer's end, and the names of the batch's namespaces in the footer."""
_CATALOG_FLOOR_BYTES = 64 << 10

SPARES_MAX = 4
"""Files kept for further segments. What more there is goes back to the file system."""


def segment_bytes_for(budget_bytes: int, segment_bytes: int | None) -> int:
    """The size of new segments. Raises ConfigError when it or the budget is out of range."""
    if segment_bytes is None:
        sixteenth = budget_bytes // 16 // SEGMENT_BYTES_MIN * SEGMENT_BYTES_MIN
        segment_bytes = max(SEGMENT_BYTES_MIN, min(SEGMENT_BYTES_DEFAULT_MAX, sixteenth))
    if not SEGMENT_BYTES_MIN <= segment_bytes <= SEGMENT_BYTES_MAX or segment_bytes % PAGE:
        raise ConfigError(
            "the segment size is out of range",
            field="--segment",
            value=size_text(segment_bytes),
            allowed=f"multiples of {PAGE}B from {size_text(SEGMENT_BYTES_MIN)} to {size_text(SEGMENT_BYTES_MAX)}",
        )
    if budget_bytes < SEGMENTS_MIN * segment_bytes:
        raise ConfigError(
            f"the disk budget holds fewer than {SEGMENTS_MIN} segments of {size_text(segment_bytes)}",
            field="--disk",
            value=size_text(budget_bytes),
            allowed=f"{size_text(SEGMENTS_MIN * segment_bytes)} or more, or a smaller --segment",
        )
    return segment_bytes


def payload_room(free_bytes: int) -> int:
    """Payload bytes that surely fit into so many bytes of a segment, for payloads of 3,072 bytes on average or
    more, with their headers, padding and footer."""
    usable = free_bytes - _ROUNDING_BYTES
    return max(0, usable * _SMALL_PAYLOAD_BYTES // (_SMALL_PAYLOAD_BYTES + _WORST_RECORD_BYTES))


def largest_batch(segment_bytes: int) -> int:
    return payload_room(segment_bytes - SEGMENT_HEADER_BYTES)


def catalog_growth_bytes(segment_bytes: int) -> int:
    """What the catalogue may grow by while the next segment fills: its footer, twice, since a page is reused only
    some transactions after it was freed, and small rows."""
    return _CATALOG_FLOOR_BYTES + 2 * align(segment_bytes // 25, PAGE)


@dataclass(slots=True)
class SpaceBooks:
    """The arithmetic of the budget. No I/O."""

    table: SegmentTable
    budget_bytes: int
    segment_bytes: int
    other_bytes: int = 0
    creating_bytes: int = 0
    """Of a segment that is being created and not in the table yet."""
    spares: dict[str, int] = field(default_factory=dict)
    """Files between two lives, and their bytes. They are free for a new segment and for nothing else."""

    def spare_bytes(self) -> int:
        return sum(list(self.spares.values()))

    def free_bytes(self, *, given_back: int, cleaning: bool) -> int:
        """What new segments may take now, if `given_back` bytes are given back first. One segment's worth stays free
        unless the new one is for cleaning: copying forward must always be able to begin."""
        reserve = catalog_growth_bytes(self.segment_bytes) + (0 if cleaning else self.segment_bytes)
        return self.unused_bytes() + self.spare_bytes() + given_back - reserve

    def still_fits(self, size: int, *, cleaning: bool) -> bool:
        """Whether a segment that there was room for may still be created, now that the catalogue has grown into what
        was kept for its growth."""
        unused = self.unused_bytes() + self.spare_bytes()
        return unused - (0 if cleaning else self.segment_bytes) >= size

    def unused_bytes(self) -> int:
        """What of the budget lies in no file. Negative when a start found more than the budget."""
        return self.budget_bytes - self.table.allocated() - self.spare_bytes() - self.other_bytes


@dataclass(slots=True)
class DiskBudget(SpaceBooks):
    device: Device = field(kw_only=True)
    promised_bytes: int = 0
    """Of a segment that is about to be created: the catalogue does not grow into them."""
    left_alone: set[str] = field(default_factory=set)
    """Files with names of spares that are not ours, or cannot be told to be: nothing of ours may take such a name."""
    creating: frozenset[str] = frozenset()
    """Names that the file of a segment has while it is created: counted as that segment, or as the spare that it was."""
    _catalog_bytes: int = field(default=0)

    def refresh(self) -> None:
        """Measure everything below the directory that is not a segment of ours."""
        names = self.device.names()
        with self.table.lock:
            ours = {segment.name for segment in self.table.segments.values()}
            ours.update(self.spares, self.creating)
        other = sum(self.device.allocated(name) for name in names if name not in ours)
        self._catalog_bytes = self.device.allocated(LmdbCatalog.DATA_NAME)
        self.other_bytes = other

    def catalog_bytes_max(self) -> int:
        """How large the catalogue's file may be. It does not grow into the room kept for copying."""
        taken = self.table.allocated() + self.creating_bytes
        kept = max(self.promised_bytes + self.segment_bytes, self.spare_bytes())
        rest = self.other_bytes - self._catalog_bytes
        return self.budget_bytes - taken - rest - kept


def space_of(disk: SpaceBooks) -> Space:
    """As accounted. The caller holds the table's lock."""
    segments = disk.table.segments.values()
    spare = disk.spare_bytes()
    beside = disk.creating_bytes + spare
    return Space(
        budget=disk.budget_bytes,
        live=sum(segment.live for segment in segments),
        dead=sum(segment.dead for segment in segments),
        padded=sum(segment.padded for segment in segments),
        reserved=sum(segment.reserved for segment in segments) + beside,
        allocated=sum(segment.allocated for segment in segments) + beside,
        spare=spare,
        other=disk.other_bytes,
        segments=len(segments),
    )
