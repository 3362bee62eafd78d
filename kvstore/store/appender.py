"""Which segment a batch goes to, and what the books say once it is durable."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from kvstore.errors import DeviceError, InvalidArgument, NoSpace
from kvstore.store.base import Place, RecordKind
from kvstore.store.catalog import SEALED, Description, SegmentRow, key_of, segment_row
from kvstore.store.device import NOT_FOR_WANT_OF_ROOM
from kvstore.store.format import PAGE, POLICY_KIND, SegmentHeader, align
from kvstore.store.lanes import Later
from kvstore.store.segment import (
    CACHED_KINDS,
    COVERED_KINDS,
    TEMPORARY_SUFFIX,
    Segment,
    State,
    bytes_for,
    segment_name,
)
from kvstore.store.spares import retire_file
from kvstore.store.state import OpenedStore
from kvstore.store.writer import OpenSegment, Pending, create_segment


class Appender:
    """Owns the open segment. One thread at a time; `unused_bytes` and `may_create` from any."""

    def __init__(self, store: OpenedStore) -> None:
        self._store = store
        self._table = store.table
        self._disk = store.disk
        self._open: OpenSegment | None = None
        self._next: OpenSegment | None = None
        self._preparing: Later | None = None
        self._sealing: list[Later] = []

    def append(
        self, items: Sequence[Pending], *, cleaning: bool = False, following: Sequence[int] = ()
    ) -> list[Place]:
        """Make a batch durable and enter it in the books. `cleaning`: it may use the space kept for copies, in a
        segment just large enough for it and for payloads `following` it.

        Raises InvalidArgument or NoSpace before anything is written; DeviceError, or NoSpace from the device itself,
        when writing fails: then none of it counts, and the segment takes no more.
        """
        target = self._target_for(items, cleaning=cleaning, following=following)
        begin = align(target.end, PAGE)
        try:
            offsets = target.append(items)
        except (DeviceError, NoSpace):
            self._table.count("device_errors")
            with self._table.lock:
                # They do not count as written, and yet a later start may find them: a clear must outlive them.
                for item in items:
                    target.segment.note_written(
                        item.kind, self._table.number_of(item.namespace), item.sequence
                    )
            self._open = None
            self._abandon(target)
            raise
        self._table.count("syncs")
        self._table.count("written_bytes", align(target.end, PAGE) - begin)
        with self._table.lock:
            places = self._enter(target, items, offsets)
        if target.end > target.segment.allocated // 2:
            self._begin_preparing()
        return places

    def fitting(self, items: Sequence[Pending]) -> int:
        """How many of the items, from the first, the open segment still takes."""
        if self._open is not None and self._open.has_room(items):
            return len(items)
        low, high = 0, len(items) if self._open is not None else 0
        while self._open is not None and low < high:
            middle = (low + high + 1) // 2
            if self._open.has_room(items[:middle]):
                low = middle
            else:
                high = middle - 1
        return low

    def unused_bytes(self) -> int:
        target = self._open
        return 0 if target is None else target.unused_bytes()

    def may_create(self) -> bool:
        """Whether a whole segment may be created now; the open one is sealed before."""
        return self._next is not None or self.free_bytes(cleaning=False) >= self._disk.segment_bytes

    def may_create_beside(self) -> bool:
        """Whether a whole segment may be created now and the open one keeps all of its room."""
        room = self._disk.free_bytes(given_back=0, cleaning=False)
        return self._next is not None or room >= self._disk.segment_bytes

    def free_bytes(self, *, cleaning: bool) -> int:
        return self._disk.free_bytes(given_back=self.unused_bytes(), cleaning=cleaning)

    def settle(self) -> None:
        """Return when no segment is being prepared or sealed: what is free stays free until the next append."""
        self._end_preparing()
        while self._sealing:
            self._sealing.pop().wait()

    def holds_only_dead(self) -> bool:
        """Whether there is an open segment with records, and nothing in it lives."""
        target = self._open
        return target is not None and len(target.segment) > 0 and not target.segment.has_live()

    def seal(self) -> None:
        """Seal the open segment. A failure costs a scan at the next start, and no record."""
        target, self._open = self._open, None
        if target is not None:
            self._seal(target)

    def finish(self) -> None:
        """Seal the open segment, and return when nothing is under way any more. Idempotent."""
        self._end_preparing()
        self.seal()
        while self._sealing:
            self._sealing.pop().wait()
        unused, self._next = self._next, None
        if unused is None:
            return
        try:
            unused.close()
            name = retire_file(self._store, unused.segment, kept=len(self._disk.spares))
            self._store.device.sync_names()
        except (DeviceError, NoSpace):
            # The next start finds a segment without records, and removes it.
            self._table.count("device_errors")
            return
        with self._table.lock:
            del self._table.segments[unused.segment.segment_id]
            if name is not None:
                self._disk.spares[name] = self._disk.segment_bytes

    def finish_blank(self) -> None:
        """As `finish`, and what an earlier life of the open segment's file left behind its records is overwritten. Raises
        DeviceError or NoSpace."""
        if self._open is not None:
            written = self._open.blank_tail()
            self._table.count("overwritten_bytes", written)
            self._table.count("written_bytes", written)
        self.finish()

    def _seal(self, target: OpenSegment) -> None:
        try:
            footer, file_bytes = target.seal()
        except (DeviceError, NoSpace):
            self._table.count("device_errors")
            self._abandon(target)
            return
        segment = target.segment
        self._table.count("written_bytes", file_bytes - align(target.end, PAGE))
        with self._table.lock:
            segment.advance(file_bytes, 0)
            segment.close(file_bytes, State.SEALING)
            segment.has_footer = True
        with suppress(DeviceError):  # all of it is durable
            target.close()
        try:
            self._store.write_rows(
                {
                    key_of(b"S", segment.segment_id): segment_row(
                        SegmentRow(segment.identity.salt, file_bytes, SEALED)
                    ),
                    key_of(b"F", segment.segment_id): footer,
                }
            )
        finally:
            # Not before: it must not be told dead and then sealed.
            with self._table.lock:
                segment.state = State.CLOSED

    def _seal_beside(self, target: OpenSegment) -> None:
        """A full one gives nothing back, so that nobody has to wait for its footer."""
        over = [each for each in self._sealing if each.done()]
        self._sealing = [each for each in self._sealing if not each.done()]
        for each in over:
            each.wait()
        self._sealing.append(self._store.lanes.later(lambda: self._seal(target)))

    def _begin_preparing(self) -> None:
        if self._next is not None or (self._preparing is not None and not self._preparing.done()):
            return
        if self._disk.free_bytes(given_back=0, cleaning=False) >= self._disk.segment_bytes:
            self._end_preparing()
            self._preparing = self._store.lanes.later(self._prepare)

    def _prepare(self) -> None:
        """Beside the appends: have the next segment ready before it is needed, where it costs nobody any room."""
        # A failure costs nothing: it is tried again when the segment is needed, and told then.
        with suppress(DeviceError, NoSpace):
            self._disk.refresh()
            if self._disk.free_bytes(given_back=0, cleaning=False) >= self._disk.segment_bytes:
                self._next = self._create(self._disk.segment_bytes)

    def _end_preparing(self) -> None:
        preparing, self._preparing = self._preparing, None
        if preparing is not None:
            preparing.wait()

    def _target_for(
        self, items: Sequence[Pending], *, cleaning: bool, following: Sequence[int]
    ) -> OpenSegment:
        """The open segment, or a fresh one, with room for all of `items`."""
        if self._open is not None and self._open.has_room(items):
            return self._open
        self._end_preparing()
        lengths = [item.length for item in items]
        namespaces = len({item.namespace for item in items})
        if bytes_for(lengths, namespaces=namespaces) > self._disk.segment_bytes:
            raise InvalidArgument(
                "the batch does not fit into one segment with its headers; append it in parts",
                field="records",
                value=f"{len(items)} with {sum(lengths)} payload bytes",
                allowed=f"{self._disk.segment_bytes} bytes a segment",
            )
        if self._next is not None:
            if self._open is not None and self._open.is_full():
                self._seal_beside(self._open)
            elif self._open is not None:
                self._seal(self._open)
            self._open, self._next = self._next, None
            return self._open
        exact = min(
            self._disk.segment_bytes,
            bytes_for([*lengths, *following], namespaces=namespaces + len(following)),
        )
        self._disk.refresh()
        size = self._size_of_next(exact, cleaning=cleaning)
        if size is None:
            raise NoSpace(
                f"the disk budget of {self._disk.budget_bytes} bytes has no room for another segment of "
                f"{self._disk.segment_bytes} bytes ({self._table.allocated()} in segments, {self._disk.other_bytes} "
                "otherwise); discard and reclaim first, or raise the budget"
            )
        self._disk.promised_bytes = size
        try:
            self.seal()
        finally:
            self._disk.promised_bytes = 0
        if not self._disk.still_fits(size, cleaning=cleaning):
            raise NoSpace(
                "the open segment could not be sealed, and its unused space is not free; reclaim first"
            )
        # A file system that others have filled may have no room for a whole one where copies need a few pages.
        self._open = self._create_as_room_is(sorted({size, exact if cleaning else size}, reverse=True))
        return self._open

    def _create_as_room_is(self, sizes: Sequence[int]) -> OpenSegment:
        """Of the first of these sizes that the file system has room for."""
        for size in sizes[:-1]:
            try:
                return self._create(size)
            except NoSpace as error:
                if error.value in NOT_FOR_WANT_OF_ROOM:
                    raise
        try:
            return self._create(sizes[-1])
        except NoSpace as error:
            if error.value in NOT_FOR_WANT_OF_ROOM or not self._store.make_way():
                raise
            return self._create(sizes[-1])

    def _size_of_next(self, exact: int, *, cleaning: bool) -> int | None:
        """A whole segment where there is room for one. Copies that need the kept room take no more than they fill:
        then cleaning leaves at least as much free as there was, and can go on."""
        if self.may_create():
            return self._disk.segment_bytes
        return exact if cleaning and self.free_bytes(cleaning=True) >= exact else None

    def _create(self, size: int) -> OpenSegment:
        header = SegmentHeader(
            self._store.uuid,
            self._store.take_segment_id(),
            self._store.random_salt(),
            self._store.now_ms(),
            size,
            self._store.next_sequence,
        )
        final = segment_name(header.segment_id)
        with self._table.lock:
            spare = next(iter(self._disk.spares), None)
            self._disk.creating_bytes = 0 if spare else header.allocated
            self._disk.creating = frozenset({final, final + TEMPORARY_SUFFIX})
        made: Segment | None = None
        try:
            made, file = create_segment(self._store.device, header, spare=spare)
        except DeviceError:
            self._table.count("device_errors")
            raise
        finally:
            with self._table.lock:
                # Of a spare that failed nothing is left, or the next measuring finds it.
                if spare:
                    del self._disk.spares[spare]
                if made is not None:
                    self._table.segments[made.segment_id] = made
                self._disk.creating_bytes = 0
                self._disk.creating = frozenset()
        self._table.count("written_bytes", PAGE)
        return OpenSegment(made, file, lanes=self._store.lanes, buffers=self._store.buffers)

    def _abandon(self, target: OpenSegment) -> None:
        """The segment takes no more writes; its synced records stay readable."""
        # Sealing may have failed behind the cut.
        file_bytes = target.segment.allocated
        with suppress(DeviceError):
            file_bytes = min(file_bytes, align(target.file_bytes(), PAGE))
        with self._table.lock:
            target.segment.close(file_bytes)
        with suppress(DeviceError):  # the segment has failed already, and its descriptor is gone either way
            target.close()

    def _enter(self, target: OpenSegment, items: Sequence[Pending], offsets: list[int]) -> list[Place]:
        """Enter durable records in the books, in order: a clear covers what came before it in its batch, too."""
        segment = target.segment
        known = {
            namespace: self._table.number_of(namespace) for namespace in {item.namespace for item in items}
        }
        numbers = [known[item.namespace] for item in items]
        kinds = [item.kind for item in items]
        if CACHED_KINDS.issuperset(kinds):
            lengths = [item.length for item in items]
            places = segment.add_all(offsets, lengths, kinds, numbers, [item.sequence for item in items])
        else:
            places = []
            for item, offset, number in zip(items, offsets, numbers, strict=True):
                place = segment.add(
                    offset=offset,
                    length=item.length,
                    kind=item.kind,
                    namespace=number,
                    sequence=item.sequence,
                )
                places.append(place)
                if item.kind in COVERED_KINDS:
                    self._enter_clear(item, number, place)
                elif item.kind == POLICY_KIND:
                    self._enter_policy(item, place)
                elif item.kind == RecordKind.NAMESPACE:
                    self._enter_description(item, place)
        segment.advance(target.end, sum(item.length for item in items))
        return places

    def _enter_description(self, item: Pending, place: Place) -> None:
        known = self._store.descriptions.get((item.namespace, item.key))
        if known is not None and known.place is not None and known.sequence == item.sequence:
            # A copy: where the log has it is said when all copies are there.
            return
        self._store.descriptions[item.namespace, item.key] = Description(
            item.namespace,
            item.key,
            item.sequence,
            item.parent,
            item.position,
            item.lineage,
            item.checks,
            bytes(item.payload),
            place,
        )

    def _enter_policy(self, item: Pending, place: Place) -> None:
        known = self._store.policies.get(item.namespace)
        if known is not None and known[2] is not None:
            self._table.kill(known[2])
        self._store.policies[item.namespace] = (item.sequence, bytes(item.payload).decode(), place)

    def _enter_clear(self, item: Pending, number: int, place: Place) -> None:
        known = self._store.clears.get((item.namespace, item.kind))
        self._store.clears[item.namespace, item.kind] = (item.sequence, place)
        if known is not None:
            self._table.kill(known[1])
        if known is None or known[0] != item.sequence:
            # Not for a copy: what it covers is dead already, and newer records are not covered.
            for segment in self._table.segments.values():
                segment.kill_kinds(number, COVERED_KINDS[item.kind])
