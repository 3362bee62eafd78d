"""A record log in RAM, for tests and simulations: the same promises, kept in the simplest way."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvstore.clock import Clock
from kvstore.errors import DirectoryInUse, InvalidArgument, NoSpace
from kvstore.store.base import (
    Cheapest,
    Damage,
    Found,
    Place,
    Record,
    RecordKind,
    Recovery,
    Space,
    Verified,
    Wanted,
)
from kvstore.store.format import LARGE_PAYLOAD_BYTES, payload_gap
from kvstore.store.incoming import pending_policy, refuse_impossible
from kvstore.store.records import Records
from kvstore.store.space import largest_batch, segment_bytes_for
from kvstore.store.table import COUNTERS
from kvstore.types import BlockKey, BytesLike, NamespaceDigest

_COVERED = {
    RecordKind.CLEAR: (RecordKind.BLOCK, RecordKind.STATE, RecordKind.ROWS),
    RecordKind.CLEAR_STATES: (RecordKind.STATE, RecordKind.ROWS),
}


@dataclass(slots=True)
class Kept:
    """A record at rest. Tests damage `payload`; `intact` says what it was."""

    record: Record
    payload: bytes
    intact: bytes
    sequence: int
    created: float
    last_use: float
    live: bool = True
    cleared: bool = False


@dataclass(slots=True)
class _Segment:
    capacity: int
    sealed: bool = False
    kept: dict[int, Kept] = field(default_factory=dict)

    def used(self) -> int:
        return sum(_size(kept) for kept in self.kept.values())

    def allocated(self) -> int:
        return self.used() if self.sealed else self.capacity

    def live(self) -> int:
        return sum(len(kept.intact) for kept in self.kept.values() if kept.live)


class MemoryDisk:
    """What outlives a log: the part of a directory."""

    def __init__(self) -> None:
        self.erasing = b""
        self.segments: dict[int, _Segment] = {}
        self.policies: dict[NamespaceDigest, str] = {}
        self.begun = False
        self.held = False
        self.next_segment_id = 1
        self.next_sequence = 1

    def at(self, place: Place) -> Kept | None:
        segment = self.segments.get(place.segment_id)
        kept = segment.kept.get(place.offset) if segment is not None else None
        return kept if kept is not None and len(kept.intact) == place.length else None


def open_memory(
    disk: MemoryDisk, *, budget_bytes: int, segment_bytes: int | None = None, clock: Clock
) -> tuple[MemoryLog, Recovery]:
    """Open a log over what `disk` holds. Raises ConfigError, and DirectoryInUse while another log has it."""
    size = segment_bytes_for(budget_bytes, segment_bytes)
    if disk.held:
        raise DirectoryInUse("another log holds this memory disk", field="disk", value=hex(id(disk)))
    disk.held = True
    fresh, disk.begun = not disk.begun, True
    for segment in disk.segments.values():
        segment.sealed = True
    newest: dict[tuple[NamespaceDigest, BlockKey, RecordKind], tuple[Place, Kept]] = {}
    for segment_id, segment in sorted(disk.segments.items()):
        for offset, kept in segment.kept.items():
            kept.live = False
            if kept.cleared or kept.record.kind in _COVERED:
                continue
            identity = (kept.record.namespace, kept.record.key, kept.record.kind)
            if identity not in newest or newest[identity][1].sequence <= kept.sequence:
                newest[identity] = (Place(segment_id, offset, len(kept.intact)), kept)
    found = []
    for place, kept in sorted(newest.values(), key=lambda item: item[1].sequence):
        kept.live = True
        record = kept.record
        found.append(
            Found(
                record.kind,
                record.namespace,
                record.key,
                record.parent,
                record.position,
                record.lineage,
                record.checks,
                place,
                kept.sequence,
                kept.last_use,
                kept.intact if record.kind is RecordKind.NAMESPACE else b"",
            )
        )
    log = MemoryLog(disk, budget_bytes=budget_bytes, segment_bytes=size, clock=clock)
    return log, Recovery(Records.of(found), dict(disk.policies), fresh, False, 0, 0)


class MemoryLog:
    """A RecordLog over a MemoryDisk. One lock for everything."""

    def __init__(self, disk: MemoryDisk, *, budget_bytes: int, segment_bytes: int, clock: Clock) -> None:
        self._disk = disk
        self._budget = budget_bytes
        self._segment_bytes = segment_bytes
        self._clock = clock
        self._lock = threading.RLock()
        self._open: int | None = None
        self._counts: Counter[str] = Counter()
        self._closed = False

    def append(self, records: Sequence[Record]) -> list[Place]:
        with self._lock:
            self._refuse_closed()
            refuse_impossible(records, payload_bytes_max=self.largest_append_bytes())
            if not records:
                return []
            now = self._clock.wall()
            first = self._disk.next_sequence
            kept = [
                Kept(record, bytes(record.payload), bytes(record.payload), first + index, now, now)
                for index, record in enumerate(records)
            ]
            clears = all(record.kind in _COVERED for record in records)
            places = self._place(kept, spare=0 if clears else self._segment_bytes)
            self._disk.next_sequence += len(kept)
            self._counts["appended_records"] += len(kept)
            self._counts["appended_bytes"] += sum(len(item.intact) for item in kept)
            self._counts["syncs"] += 1
            return places

    def read(self, wanted: Sequence[Wanted], room: memoryview | None = None) -> list[BytesLike | None]:
        with self._lock:
            answers: list[BytesLike | None] = []
            for place, key, kind, begin, end, own in wanted:
                kept = self._disk.at(place)
                if kept is None:
                    answers.append(None)
                elif kept.payload != kept.intact or kept.record.key != key or kept.record.kind != kind:
                    self._counts["damaged_records"] += 1
                    answers.append(None)
                else:
                    self._counts["read_records"] += 1
                    is_whole = (begin, place.length if end is None else end) == (0, place.length)
                    if own is not None and is_whole and place.length >= LARGE_PAYLOAD_BYTES:
                        gap = payload_gap(place.length)
                        target = own[gap : gap + place.length]
                        target[:] = kept.payload
                        answers.append(target)
                    else:
                        answers.append(kept.payload[begin:end])
            return answers

    def room_for(self, wanted: Sequence[Wanted]) -> int:
        """None: what it hands out lies in its own memory."""
        return 0

    def room_bytes(self) -> int:
        with self._lock:
            if self._creatable(spare=self._segment_bytes):
                return self.largest_append_bytes()
            open_segment = self._open_segment()
            rest = 0 if open_segment is None else open_segment.capacity - open_segment.used()
            return min(rest, self.largest_append_bytes())

    def largest_append_bytes(self) -> int:
        return largest_batch(self._segment_bytes)

    def discard(self, places: Iterable[Place]) -> None:
        with self._lock:
            for place in places:
                kept = self._disk.at(place)
                if kept is not None:
                    kept.live = False

    def reclaim(self) -> int:
        with self._lock:
            self._refuse_closed()
            open_segment = self._open_segment()
            if (
                open_segment is not None
                and open_segment.kept
                and not _lives(open_segment)
                and not self._creatable(spare=self._segment_bytes)
            ):
                self._seal()
            gone = [
                number
                for number, segment in self._disk.segments.items()
                if segment.sealed and not _lives(segment)
            ]
            freed = sum(self._disk.segments.pop(number).allocated() for number in gone)
            self._counts["reclaimed_segments"] += len(gone)
            return freed

    def cheapest_segment(self) -> Cheapest | None:
        with self._lock:
            sealed = [
                Cheapest(number, segment.live(), segment.allocated())
                for number, segment in self._disk.segments.items()
                if segment.sealed and _lives(segment)
            ]
            return min(sealed, key=lambda each: (each.live_share, each.segment_id), default=None)

    def segment_ids(self) -> list[int]:
        with self._lock:
            return sorted(number for number, segment in self._disk.segments.items() if _lives(segment))

    def verify(self, segment_id: int, *, begin: int, bytes_max: int) -> Verified:
        """All of the segment in one step."""
        with self._lock:
            segment = self._disk.segments.get(segment_id)
            living = [] if segment is None else [pair for pair in segment.kept.items() if pair[1].live]
            damages = [
                Damage(Place(segment_id, offset, len(kept.intact)), kept.record.key, "record")
                for offset, kept in living
                if kept.payload != kept.intact
            ]
            self._counts["damaged_records"] += len(damages)
            self._counts["quarantined_records"] += len(damages)
            self.discard(damage.place for damage in damages)
            return Verified(len(living), sum(len(kept.intact) for _, kept in living), damages, None)

    def clean(self, segment_id: int) -> dict[Place, Place]:
        with self._lock:
            self._refuse_closed()
            source = self._disk.segments.get(segment_id)
            if source is None or not source.sealed:
                raise InvalidArgument(
                    "only a sealed segment can be cleaned",
                    field="segment_id",
                    value=segment_id,
                    allowed="what cheapest_segment names",
                )
            living = [(offset, kept) for offset, kept in source.kept.items() if kept.live]
            whole = [(offset, kept) for offset, kept in living if kept.payload == kept.intact]
            copies = [
                Kept(kept.record, kept.payload, kept.intact, kept.sequence, kept.created, kept.last_use)
                for _, kept in whole
            ]
            places = self._place(copies, spare=0) if copies else []
            for _, kept in living:
                kept.live = False
            self._counts["damaged_records"] += len(living) - len(whole)
            self._counts["cleaned_bytes"] += sum(len(kept.intact) for kept in copies)
            self.reclaim()
            return {
                Place(segment_id, offset, len(kept.intact)): place
                for (offset, kept), place in zip(whole, places, strict=True)
            }

    def put_policy(self, namespace: NamespaceDigest, policy: str) -> None:
        with self._lock:
            self._refuse_closed()
            pending_policy(namespace, policy, sequence=0, created_ms=0)  # for its refusals
            self._disk.policies[namespace] = policy

    def note_uses(self, uses: Iterable[tuple[Place, float]]) -> None:
        with self._lock:
            for place, when in uses:
                kept = self._disk.at(place)
                if kept is not None:
                    kept.last_use = max(kept.last_use, when)

    @property
    def erasing(self) -> bytes:
        return self._disk.erasing

    def begin_erasing(self, note: bytes) -> None:
        with self._lock:
            self._refuse_closed()
            self._disk.erasing = note

    def expect_clears(self, namespaces: Collection[NamespaceDigest]) -> None:
        """Memory is read by its owner alone: what a clear has covered is nobody's."""

    def to_erase(self) -> list[int]:
        return []

    def blank_gap(self, segment_id: int) -> bool:
        return True

    def end_erasing(self) -> None:
        with self._lock:
            self._disk.erasing = b""

    def space(self) -> Space:
        with self._lock:
            segments = self._disk.segments.values()
            live = sum(segment.live() for segment in segments)
            used = sum(segment.used() for segment in segments)
            payload = sum(len(kept.intact) for segment in segments for kept in segment.kept.values())
            allocated = sum(segment.allocated() for segment in segments)
            return Space(
                self._budget,
                live,
                payload - live,
                used - payload,
                allocated - used,
                allocated,
                0,
                len(self._disk.segments),
            )

    def counters(self) -> Mapping[str, int]:
        with self._lock:
            return {name: self._counts[name] for name in COUNTERS}

    def check_integrity(self) -> None:
        space = self.space()
        assert space.live + space.dead + space.padded + space.reserved == space.allocated, space
        assert min(space.live, space.dead, space.padded, space.reserved) >= 0, space

    @property
    def buffered_because(self) -> str:
        return "it is memory"

    def close(self) -> None:
        with self._lock:
            if not self._closed:
                self._closed = True
                self._seal()
                self._disk.held = False

    def _open_segment(self) -> _Segment | None:
        return None if self._open is None else self._disk.segments[self._open]

    def _creatable(self, *, spare: int) -> bool:
        open_segment = self._open_segment()
        back = 0 if open_segment is None else open_segment.capacity - open_segment.used()
        return self.space().allocated - back + self._segment_bytes + spare <= self._budget

    def _place(self, items: list[Kept], *, spare: int) -> list[Place]:
        need = sum(_size(item) for item in items)
        segment = self._open_segment()
        if segment is None or segment.used() + need > segment.capacity:
            if not self._creatable(spare=spare):
                raise NoSpace(
                    f"the budget of {self._budget} bytes has no room for another segment; reclaim first"
                )
            self._seal()
            self._open = self._disk.next_segment_id
            self._disk.next_segment_id += 1
            segment = self._disk.segments[self._open] = _Segment(max(self._segment_bytes, need))
        assert self._open is not None
        places = []
        for item in items:
            if item.record.kind in _COVERED:
                self._cover(item)
            offset = segment.used()
            segment.kept[offset] = item
            places.append(Place(self._open, offset, len(item.intact)))
        return places

    def _cover(self, clear: Kept) -> None:
        """A clear works at once, and then nothing depends on it."""
        clear.live = False
        kinds = _COVERED[clear.record.kind]
        for segment in self._disk.segments.values():
            for kept in segment.kept.values():
                if kept.record.namespace == clear.record.namespace and kept.record.kind in kinds:
                    kept.cleared = True
                    kept.live = False

    def _seal(self) -> None:
        segment = self._open_segment()
        if segment is not None:
            segment.sealed = True
        self._open = None

    def _refuse_closed(self) -> None:
        if self._closed:
            raise InvalidArgument("the log is closed", field="disk", value=hex(id(self._disk)))


def _size(kept: Kept) -> int:
    """An empty payload takes a byte, so that offsets differ."""
    return max(1, len(kept.intact))


def _lives(segment: _Segment) -> bool:
    return any(kept.live for kept in segment.kept.values())
