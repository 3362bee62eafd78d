"""A segment's books in RAM: where its records are, which of them live, and how its bytes add up. No I/O."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from enum import Enum
from itertools import pairwise, repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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
_SPARE = re.compile(r"spare-([0-9a-f]{16})\.log\Z")
TEMPORARY_SUFFIX = ".tmp"

SEGMENT_IDS_END = 2**31
"""Ids of ours stay far below, and the index keeps them in 32 bits: a file that claims more is another's."""

CACHED_KINDS = frozenset({int(RecordKind.BLOCK), int(RecordKind.STATE), int(RecordKind.ROWS)})
"""What callers store. A namespace's description and policy are no part of it."""

KINDS_END = 8
"""Above every kind of record."""

COVERED_KINDS = {
    int(RecordKind.CLEAR): CACHED_KINDS,
    int(RecordKind.CLEAR_STATES): frozenset({int(RecordKind.STATE), int(RecordKind.ROWS)}),
}
"""What each kind of clear covers, of those that were written before it in its namespace."""


def segment_name(segment_id: int) -> str:
    return f"segment-{segment_id:016x}.log"


def segment_id_of(name: str) -> int | None:
    match = _NAME.match(name)
    number = int(match[1], 16) if match else SEGMENT_IDS_END
    return number if number < SEGMENT_IDS_END else None


PIECE_BYTES = 1 << 20

FULL_SHARE = 64
"""A segment with less than this part of it unused is full."""


def spare_name(segment_id: int) -> str:
    """What a file is called between two lives: after the segment that it was."""
    return f"spare-{segment_id:016x}.log"


def is_spare_name(name: str) -> bool:
    return _SPARE.match(name) is not None


def spare_id_of(name: str) -> int | None:
    """The id of the segment that it was; None for an impossible one."""
    match = _SPARE.match(name)
    number = int(match[1], 16) if match else SEGMENT_IDS_END
    return number if number < SEGMENT_IDS_END else None


class Layout(NamedTuple):
    """Where a batch goes: the offset of each record's header, where the batch ends, and the first record of each piece.
    A piece has pages of its own, so that pieces can be written side by side; it is at most PIECE_BYTES, or one record."""

    offsets: list[int]
    end: int
    pieces: list[int]


def plan_batch(end: int, lengths: Sequence[int]) -> Layout:
    """Records with payloads of `lengths` behind the byte `end`."""
    at = piece = align(end, PAGE)
    offsets: list[int] = []
    pieces: list[int] = []
    # Blocks of a batch have few lengths.
    spans = {length: (record_alignment(length) - 1, record_span(length)) for length in set(lengths)}
    for number, length in enumerate(lengths):
        mask, span = spans[length]
        at = at + mask & ~mask
        if not pieces or at + span - piece > PIECE_BYTES:
            at = piece = align(at, PAGE)
            pieces.append(number)
        offsets.append(at)
        at += span
    return Layout(offsets, at, pieces)


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
    SEALING = "sealing"
    """Takes no more writes, and its row in the catalogue is being written."""
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
        "blanked",
        "dead",
        "end",
        "has_footer",
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
        self.blanked = 0
        """Of one that goes: up to this byte its file was overwritten with zeros, but for its header."""
        self.has_footer = False
        """Whether its file ends with a whole footer, or did before something happened to it."""
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
        [place] = self.add_all([offset], [length], [kind], [namespace], [sequence])
        return place

    def add_all(
        self,
        offsets: Sequence[int],
        lengths: Sequence[int],
        kinds: Sequence[int],
        namespaces: Sequence[int],
        sequences: Sequence[int],
    ) -> list[Place]:
        """As `add`, for records in the order of their offsets."""
        before = self._offsets[-1] if self._offsets else 0
        assert all(a < b for a, b in pairwise([before, *offsets])), "records are added in offset order"
        self._offsets.extend(offsets)
        self._lengths.extend(lengths)
        self._hours.frombytes(bytes(self._hours.itemsize * len(offsets)))
        self._namespaces.extend(namespaces)
        self._kinds += bytes(kinds)
        self._live += b"\1" * len(offsets)
        for kind, namespace, sequence in zip(kinds, namespaces, sequences, strict=True):
            self.note_written(kind, namespace, sequence)
        self.live += sum(lengths)
        return list(map(Place, repeat(self.segment_id), offsets, lengths))

    def fill(
        self,
        entries: NDArray[np.void],
        numbers: NDArray[np.uint32],
        hours: NDArray[np.uint32],
        alive: NDArray[np.bool_],
    ) -> None:
        """All records of an empty segment at once: a footer's entries, in its order, the number of each of the footer's
        namespaces, and for each entry the hour of its last use (0: unknown) and whether it lives."""
        assert not self._offsets, "a segment is filled once"
        lengths, spaces, kinds = entries["length"], entries["namespace"], entries["kind"]
        for column, values in (
            (self._offsets, entries["offset"]),
            (self._lengths, lengths),
            (self._hours, hours),
            (self._namespaces, numbers[spaces]),
        ):
            column.frombytes(values.astype(np.uint32).tobytes())
        self._kinds += kinds.tobytes()
        self._live += alive.astype(np.uint8).tobytes()
        total = int(lengths.sum(dtype=np.uint64))
        self.live = int(lengths[alive].sum(dtype=np.uint64))
        self.dead = total - self.live
        unseen = 2**64 - 1
        lowest = np.full(len(numbers) * KINDS_END, unseen, np.uint64)
        np.minimum.at(lowest, spaces.astype(np.int64) * KINDS_END + kinds, entries["sequence"])
        for group in np.flatnonzero(lowest != unseen).tolist():
            space, kind = divmod(group, KINDS_END)
            self.note_written(kind, int(numbers[space]), int(lowest[group]))

    def note_written(self, kind: int, namespace: int, sequence: int) -> None:
        """The file may hold such a record, in the books or not."""
        if kind in CACHED_KINDS:
            known = self._lowest.get((namespace, kind))
            if known is None or sequence < known:
                self._lowest[namespace, kind] = sequence

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

    def close(self, allocated: int, state: State = State.CLOSED) -> None:
        """No more writes. What was reserved is padding now, or given back as far as `allocated` is lower."""
        self.state = state
        given_back = min(self.allocated - allocated, self.reserved)
        assert given_back >= 0 or self.reserved == 0
        self.padded += self.reserved - given_back
        self.reserved = 0
        self.allocated -= given_back

    def records_end(self) -> int:
        """Where the last record in the books ends."""
        return self._offsets[-1] + self._lengths[-1] if self._offsets else SEGMENT_HEADER_BYTES

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
