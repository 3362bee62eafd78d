"""The segment log: appends in synced batches, checked reads, space given back by whole segments."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress

from kvstore.errors import DeviceError, InvalidArgument, KvstoreError, NoSpace
from kvstore.store.appender import Appender
from kvstore.store.ballast import Ballast, ballast_bytes_for
from kvstore.store.base import Cheapest, Place, Record, RecordKind, Space, Verified, Wanted
from kvstore.store.catalog import (
    DEAD,
    SegmentRow,
    description_key,
    description_row,
    key_of,
    policy_row,
    segment_row,
)
from kvstore.store.choice import cheapest_of, may_go
from kvstore.store.cleaning import Cleaner, uses_rows
from kvstore.store.erasing import Eraser
from kvstore.store.incoming import pending_description, pending_policy, pending_records
from kvstore.store.records import NOWHERE, Records
from kvstore.store.segment import CACHED_KINDS, COVERED_KINDS, Segment, State
from kvstore.store.space import largest_batch, payload_room, space_of
from kvstore.store.spares import retire_file
from kvstore.store.state import OpenedStore
from kvstore.store.verify import verify_segment
from kvstore.store.writer import Pending
from kvstore.types import BytesLike, NamespaceDigest

_HOUR = 3600
_HOURS_MAX = 2**32 - 1
_RENEWED_AT_ONCE = 64
"""Descriptions in one append: the smallest segments hold so many."""


class SegmentLog:
    """A RecordLog over segment files in one directory.

    Appends, cleaning, reclaiming, policies and uses take turns; reads, discards and questions run beside them.
    """

    def __init__(self, store: OpenedStore) -> None:
        self._store = store
        self._table = store.table
        self._disk = store.disk
        self._appender = Appender(store)
        self._cleaner = Cleaner(store, self._appender)
        self._ballast = Ballast(store, size_bytes=ballast_bytes_for(store.disk.budget_bytes))
        store.make_way = self._ballast.release
        self._eraser = Eraser(store)
        self._turn = threading.Lock()
        self._closed = False

    def __repr__(self) -> str:
        return f"SegmentLog({self._store.device.where!r}, {self.space()})"

    def append(self, records: Sequence[Record]) -> list[Place]:
        # Not in its turn: another append may be at work meanwhile.
        items = pending_records(records, payload_bytes_max=self.largest_append_bytes())
        with self._turn:
            self._refuse_closed()
            if not items:
                return []
            first, now = self._store.take_sequences(len(items)), self._store.now_ms()
            for number, item in enumerate(items):
                item.sequence, item.created_ms = first + number, now
            # A clear is what makes space; it may use the space that is kept for copies.
            only_clears = all(item.kind in COVERED_KINDS for item in items)
            places = self._append_in_parts(items, cleaning=only_clears)
            self._table.count("appended_records", len(items))
            self._table.count("appended_bytes", sum(item.length for item in items))
            self._note_descriptions(items)
            for item in items:
                if item.kind == RecordKind.CLEAR:
                    self._eraser.cleared(item.namespace, item.sequence)
            return places

    def _append_in_parts(self, items: list[Pending], *, cleaning: bool) -> list[Place]:
        """What the open segment still takes goes there, so that segments are filled to their end; the rest goes to the
        next one. Only the log's own records stay together with what they are about, and where the next segment needs the
        room that the open one would give back, the batch does."""
        count = self._appender.fitting(items) if self._appender.may_create_beside() else 0
        if not 0 < count < len(items) or any(item.kind not in CACHED_KINDS for item in items):
            return self._appender.append(items, cleaning=cleaning)
        first = self._appender.append(items[:count])
        try:
            return first + self._appender.append(items[count:])
        except KvstoreError:
            # None of it counts: whoever asked for it was told so.
            self.discard(first)
            raise

    def renew_descriptions(self, records: Records) -> None:
        """Write anew what of these the catalogue alone has, and tell `records` where it lies. A failure is counted and costs
        nothing: the catalogue keeps it until the next start."""
        rows = [
            row for row in records.rows_of(RecordKind.NAMESPACE).tolist() if records.place(row) == NOWHERE
        ]
        if not rows:
            return
        with self._turn, suppress(DeviceError, NoSpace, InvalidArgument):
            now = self._store.now_ms()
            for first in range(0, len(rows), _RENEWED_AT_ONCE):
                part = rows[first : first + _RENEWED_AT_ONCE]
                items = [
                    pending_description(self._store.descriptions[each.namespace, each.key], created_ms=now)
                    for each in map(records.__getitem__, part)
                ]
                for row, place in zip(part, self._appender.append(items), strict=True):
                    records.move(row, place)

    def _note_descriptions(self, items: Iterable[Pending]) -> None:
        described = [
            self._store.descriptions[item.namespace, item.key]
            for item in items
            if item.kind == RecordKind.NAMESPACE
        ]
        if described:
            self._store.write_rows({description_key(each): description_row(each) for each in described})

    def put_policy(self, namespace: NamespaceDigest, policy: str) -> None:
        with self._turn:
            self._refuse_closed()
            known = self._store.policies.get(namespace)
            if known is not None and known[1] == policy:
                return
            item = pending_policy(
                namespace, policy, sequence=self._store.take_sequences(1), created_ms=self._store.now_ms()
            )
            self._appender.append([item])
            self._store.write_rows({b"P" + namespace: policy_row(item.sequence, policy)})

    def read(self, wanted: Sequence[Wanted], room: memoryview | None = None) -> list[BytesLike | None]:
        return self._store.reader.read(wanted, room)

    def room_for(self, wanted: Sequence[Wanted]) -> int:
        return self._store.reader.room_for(wanted)

    def room_bytes(self) -> int:
        if self._appender.may_create():
            return self.largest_append_bytes()
        return min(payload_room(self._appender.unused_bytes()), self.largest_append_bytes())

    def largest_append_bytes(self) -> int:
        return largest_batch(self._disk.segment_bytes)

    def discard(self, places: Iterable[Place]) -> None:
        described: list[Place] = []
        with self._table.lock:
            for place in places:
                segment = self._table.segments.get(place.segment_id)
                index = segment.find(place) if segment is not None else None
                # A clear lives as long as it covers something, whatever the caller thinks of it.
                if segment is not None and index is not None and segment.kind(index) not in COVERED_KINDS:
                    segment.kill(index)
                    if segment.kind(index) == RecordKind.NAMESPACE:
                        described.append(place)
        if described:
            self._forget_descriptions(described)

    def _forget_descriptions(self, places: Sequence[Place]) -> None:
        """Where these are the newest of their namespaces, the catalogue forgets them too."""
        with self._table.lock:
            known = self._store.descriptions
            gone = [each for each in known.values() if each.place in places]
            for each in gone:
                del known[each.namespace, each.key]
        if gone:
            self._store.forget_rows(map(description_key, gone))

    def reclaim(self) -> int:
        with self._turn:
            self._refuse_closed()
            if self._appender.holds_only_dead() and not self._appender.may_create():
                # Space is short, and this segment is the only one that can give some.
                self._appender.seal()
            freed = self._reclaim()
            if self._ballast.is_wanted():
                self._appender.settle()
                self._ballast.restore()
            return freed

    def cheapest_segment(self) -> Cheapest | None:
        with self._table.lock:
            return cheapest_of(self._table.segments.values())

    def segment_ids(self) -> list[int]:
        with self._table.lock:
            return sorted(each.segment_id for each in self._table.segments.values() if each.has_live())

    def verify(self, segment_id: int, *, begin: int, bytes_max: int) -> Verified:
        return verify_segment(self._store, segment_id, begin=begin, bytes_max=bytes_max)

    def clean(self, segment_id: int) -> dict[Place, Place]:
        with self._turn:
            self._refuse_closed()
            with self._table.lock:
                self._drop_spent_clears()
                source = self._table.segments.get(segment_id)
            if source is None or source.state is not State.CLOSED:
                raise InvalidArgument(
                    "only a sealed segment can be cleaned",
                    field="segment_id",
                    value=segment_id,
                    allowed="what cheapest_segment names",
                )
            moved = self._cleaner.clean(source)
            # A failed removal is counted and goes on with the next reclaim; the caller must learn where its records are.
            with suppress(DeviceError, NoSpace):
                self._reclaim()
            return moved

    def note_uses(self, uses: Iterable[tuple[Place, float]]) -> None:
        with self._turn:
            self._refuse_closed()
            touched = set()
            with self._table.lock:
                for place, when in uses:
                    segment = self._table.segments.get(place.segment_id)
                    index = segment.find(place) if segment is not None else None
                    if segment is not None and index is not None:
                        segment.note_use(index, max(0, min(math.ceil(when / _HOUR), _HOURS_MAX)))
                        touched.add(place.segment_id)
            rows: dict[bytes, bytes | None] = {}
            for segment_id in sorted(touched):
                rows.update(uses_rows(self._store, segment_id))
            if rows:
                self._store.write_rows(rows)

    @property
    def erasing(self) -> bytes:
        return self._eraser.note

    def begin_erasing(self, note: bytes) -> None:
        with self._turn:
            self._refuse_closed()
            self._eraser.begin(note)
            self._appender.finish_blank()
            self._reclaim()
            self._eraser.take_spares()

    def expect_clears(self, namespaces: Collection[NamespaceDigest]) -> None:
        with self._turn:
            self._eraser.expect(namespaces)

    def to_erase(self) -> list[int]:
        with self._turn:
            self._refuse_closed()
            if any(segment.state is State.OPEN for segment in self._eraser.holders()):
                self._appender.finish_blank()
            self._appender.settle()
            # What fails is tried again the next time.
            with suppress(DeviceError, NoSpace):
                self._eraser.blank_spare()
                self._reclaim()
            return [segment.segment_id for segment in self._eraser.holders()] + self._eraser.spare_ids

    def blank_gap(self, segment_id: int) -> bool:
        with self._turn:
            self._refuse_closed()
            return self._eraser.blank_gap(segment_id)

    def end_erasing(self) -> None:
        with self._turn:
            self._eraser.end()

    def space(self) -> Space:
        with self._table.lock:
            return space_of(self._disk)

    def counters(self) -> Mapping[str, int]:
        return self._table.counts()

    def check_integrity(self) -> None:
        with self._turn:
            self._appender.settle()
            self._disk.refresh()
            with self._table.lock:
                for segment in self._table.segments.values():
                    segment.check()
                segments = list(self._table.segments.values())
                # A removal that failed half-way counts until it has been made durable, whatever is left of the file.
                going = sum(segment.allocated for segment in segments if segment.state is State.DYING)
                names = [segment.name for segment in segments if segment.state is not State.DYING]
            names.extend(self._disk.spares)
            space = self.space()
            assert space.live + space.dead + space.padded + space.reserved == space.allocated, space
            measured = going + sum(self._store.device.allocated(name) for name in names)
            # The file system's own blocks for a file's extents come on top, a page or so for each.
            slack = space.allocated // 100 + 8192 * len(names)
            assert abs(measured - space.allocated) <= slack, (measured, space)

    @property
    def buffered_because(self) -> str:
        return self._store.device.buffered_because

    def close(self) -> None:
        with self._turn:
            if self._closed:
                return
            self._closed = True
            # Whatever fails of it, the rest is given back; the last one entered is the first to run.
            with ExitStack() as last:
                last.callback(self._store.device.close)
                last.callback(self._store.lanes.close)
                last.callback(self._store.catalog.close)
                last.callback(self._store.files.close)
                last.callback(self._appender.finish)
                last.callback(self._store.reader.close)

    def _reclaim(self) -> int:
        total = 0
        while True:
            with self._table.lock:
                self._drop_spent_clears()
                victims = [segment for segment in self._table.segments.values() if may_go(segment)]
                for segment in victims:
                    segment.state = State.DYING
            if not victims:
                return total
            # Without this row a crash between the removals and their sync would bring segments back.
            self._store.write_rows(rows_of_dead(victims))
            try:
                victims = self._blanked(victims)
                if not victims:
                    return total
                spares: list[str] = []
                for segment in victims:
                    self._store.files.drop(segment.name)
                    name = retire_file(self._store, segment, kept=len(self._disk.spares) + len(spares))
                    if name is not None:
                        spares.append(name)
                self._store.device.sync_names()
            except (DeviceError, NoSpace):
                self._table.count("device_errors")
                raise
            with self._table.lock:
                for segment in victims:
                    del self._table.segments[segment.segment_id]
                self._disk.spares.update(dict.fromkeys(spares, self._disk.segment_bytes))
            total += sum(segment.allocated for segment in victims)
            self._table.count("reclaimed_segments", len(victims))
            self._store.forget_rows(key_of(b"S", segment.segment_id) for segment in victims)
            self._disk.refresh()

    def _blanked(self, victims: list[Segment]) -> list[Segment]:
        """Those that may go now. While something is erased a file is overwritten first, some of it at a time where others have room to
        write meanwhile."""
        if not self._store.erasing or not self._appender.may_create():
            return victims
        ready = []
        for segment in victims:
            self._store.files.drop(segment.name)
            if self._eraser.blank_some(segment):
                ready.append(segment)
        return ready

    def _drop_spent_clears(self) -> None:
        """A clear is needed while another segment holds a record that it covers."""
        for (namespace, kind), (sequence, place) in list(self._store.clears.items()):
            number = self._table.number_of(namespace)
            covers = any(
                segment.may_hold(number, COVERED_KINDS[kind], before=sequence)
                for segment_id, segment in self._table.segments.items()
                if segment_id != place.segment_id
            )
            if not covers:
                self._table.kill(place)
                del self._store.clears[namespace, kind]

    def _refuse_closed(self) -> None:
        if self._closed:
            raise InvalidArgument("the log is closed", field="directory", value=self._store.device.where)


def rows_of_dead(segments: Sequence[Segment]) -> dict[bytes, bytes | None]:
    """The catalogue's rows about segments that go."""
    rows: dict[bytes, bytes | None] = {}
    for segment in segments:
        row = SegmentRow(segment.identity.salt, segment.allocated, DEAD)
        rows[key_of(b"S", segment.segment_id)] = segment_row(row)
        rows[key_of(b"F", segment.segment_id)] = None
        rows[key_of(b"U", segment.segment_id)] = None
    return rows
