"""A segment's books in RAM: where its records are, which of them live, and how its bytes add up. No I/O."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from enum import Enum
from typing import NamedTuple

from kvstore.store.base import Place, RecordKind
from kvstore.store.format import (
    NAMESPACES_PER_SEGMENT_MAX,
    PAGE,
    SEGMENT_HEADER_BYTES,
    SegmentIdentity,
    align,
    footer_bytes,
    record_alignment,
    record_span,
)

_NAME = re.compile(r"segment-([0-9a-f]{16})\.log\Z")
TEMPORARY_SUFFIX = ".tmp"

CACHED_KINDS = frozenset({int(RecordKind.BLOCK), int(RecordKind.STATE), int(RecordKind.ROWS)})
"""What callers store. A namespace's description and policy are no part of it."""

COVERED_KINDS = {
    int(RecordKind.CLEAR): CACHED_KINDS,
    int(RecordKind.CLEAR_STATES): frozenset({int(RecordKind.STATE), int(RecordKind.ROWS)}),
}
"""What each kind of clear covers, of those that were written before it in its namespace."""


def segment_name(segment_id: int) -> str:
    return f"segment-{segment_id:016x}.log"


def segment_id_of(name: str) -> int | None:
    match = _NAME.match(name)
    return int(match[1], 16) if match else None


class Layout(NamedTuple):
    """Where a batch goes: the offset of each record's header, and where the batch ends."""

    offsets: list[int]
    end: int


def plan_batch(end: int, lengths: Sequence[int]) -> Layout:
    """Records with payloads of `lengths` behind the byte `end`."""
    at = align(end, PAGE)
    offsets = []
    for length in lengths:
        at = align(at, record_alignment(length))
        offsets.append(at)
        at += record_span(length)
    return Layout(offsets, at)


def fits(layout: Layout, *, capacity: int, namespaces: int, records: int) -> bool:
    """Whether a segment of `capacity` bytes still has room for its footer after the batch."""
    return (
        namespaces <= NAMESPACES_PER_SEGMENT_MAX
        and align(layout.end, PAGE) + footer_bytes(namespaces, records) <= capacity
    )


def bytes_for(lengths: Sequence[int], *, namespaces: int) -> int:
    """The size of a segment that one batch of such payloads fills, footer and all."""
    layout = plan_batch(SEGMENT_HEADER_BYTES, lengths)
    return align(layout.end, PAGE) + footer_bytes(namespaces, len(lengths))


class State(Enum):
    OPEN = "open"
    CLOSED = "closed"
    """Takes no more writes: sealed, or suspect after a failed write, or found unsealed at start."""
    DYING = "dying"
    """Nothing lives in it and readers are refused; its file goes next."""


class Segment:
    """One segment. live + dead + padded + reserved == allocated at every step."""

    __slots__ = (
        "_hours",
        "_kinds",
        "_lengths",
        "_live",
        "_lowest",
        "_namespaces",
        "_offsets",
        "allocated",
        "dead",
        "end",
        "identity",
        "live",
        "name",
        "padded",
        "readers",
        "reserved",
        "state",
    )

    def __init__(self, identity: SegmentIdentity, *, allocated: int, state: State) -> None:
        self.identity = identity
        self.name = segment_name(identity.segment_id)
        self.state = state
        self.allocated = allocated
        self.end = min(SEGMENT_HEADER_BYTES, allocated)
        self.live = self.dead = 0
        self.padded = self.end
        self.reserved = allocated - self.end
        self.readers = 0
        self._lowest: dict[tuple[int, int], int] = {}
        """Lowest sequence by namespace number and kind, of dead records too: a clear must outlive what it covers."""
        # Columns, in offset order: 18 bytes a record instead of some hundreds as objects.
        self._offsets = array("I")
        self._lengths = array("I")
        self._hours = array("I")
        self._namespaces = array("I")
        self._kinds = bytearray()
        self._live = bytearray()

    @property
    def segment_id(self) -> int:
        return self.identity.segment_id

    def __len__(self) -> int:
        return len(self._offsets)

    def add(self, *, offset: int, length: int, kind: int, namespace: int, sequence: int) -> Place:
        """A record whose payload is at `offset`. Its bytes are live; the caller accounts the padding."""
        assert not self._offsets or offset > self._offsets[-1], "records are added in offset order"
        self._offsets.append(offset)
        self._lengths.append(length)
        self._hours.append(0)
        self._namespaces.append(namespace)
        self._kinds.append(kind)
        self._live.append(1)
        self.note_written(kind, namespace, sequence)
        self.live += length
        return Place(self.segment_id, offset, length)

    def note_written(self, kind: int, namespace: int, sequence: int) -> None:
        """The file may hold such a record, in the books or not."""
        if kind in CACHED_KINDS:
            known = self._lowest.get((namespace, kind), sequence)
            self._lowest[namespace, kind] = min(sequence, known)

    def may_hold(self, namespace: int, kinds: Collection[int], *, before: int) -> bool:
        """Whether the file may hold such a record of a lower sequence than `before`, in the books or not."""
        return any(self._lowest.get((namespace, kind), before) < before for kind in kinds)

    def advance(self, end: int, payload_bytes: int) -> None:
        """Bytes up to `end` are written; `payload_bytes` of them belong to records that were added."""
        taken = end - self.end
        assert payload_bytes <= taken <= self.reserved
        self.end = end
        self.reserved -= taken
        self.padded += taken - payload_bytes

    def close(self, allocated: int) -> None:
        """No more writes. What was reserved is padding now, or given back as far as `allocated` is lower."""
        self.state = State.CLOSED
        given_back = min(self.allocated - allocated, self.reserved)
        assert given_back >= 0 or self.reserved == 0
        self.padded += self.reserved - given_back
        self.reserved = 0
        self.allocated -= given_back

    def find(self, place: Place) -> int | None:
        """The number of the record at a place, if there is one."""
        index = bisect_left(self._offsets, place.offset)
        if (
            index < len(self._offsets)
            and self._offsets[index] == place.offset
            and self._lengths[index] == place.length
        ):
            return index
        return None

    def place(self, index: int) -> Place:
        return Place(self.segment_id, self._offsets[index], self._lengths[index])

    def kind(self, index: int) -> int:
        return self._kinds[index]

    def is_live(self, index: int) -> bool:
        return bool(self._live[index])

    def kill(self, index: int) -> None:
        """The record is not needed any more. Idempotent."""
        if self._live[index]:
            self._live[index] = 0
            self.live -= self._lengths[index]
            self.dead += self._lengths[index]

    def kill_kinds(self, namespace: int, kinds: Collection[int]) -> None:
        """Kill the records of such kinds of a namespace number."""
        if not any((namespace, kind) in self._lowest for kind in kinds):
            return
        for index, number in enumerate(self._namespaces):
            if number == namespace and self._kinds[index] in kinds:
                self.kill(index)

    def live_indexes(self) -> list[int]:
        return [index for index, alive in enumerate(self._live) if alive]

    def has_live(self) -> bool:
        return 1 in self._live

    def used(self, index: int) -> int:
        """The hour of the last use, counted from the epoch; 0 when none is known."""
        return self._hours[index]

    def note_use(self, index: int, hour: int) -> None:
        self._hours[index] = max(hour, self._hours[index])

    def uses(self) -> Iterator[tuple[int, int]]:
        """(payload offset, hour) of the records with a known use."""
        return ((offset, hour) for offset, hour in zip(self._offsets, self._hours, strict=True) if hour)

    def check(self) -> None:
        """Raise AssertionError unless the books add up."""
        live = sum(length for length, alive in zip(self._lengths, self._live, strict=True) if alive)
        assert live == self.live, (self.name, live, self.live)
        assert sum(self._lengths) == self.live + self.dead, self.name
        assert min(self.live, self.dead, self.padded, self.reserved, self.readers) >= 0, self.name
        total = self.live + self.dead + self.padded + self.reserved
        assert total == self.allocated, (self.name, total, self.allocated)
