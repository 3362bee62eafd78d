"""Which segment a batch goes to, and what the books say once it is durable."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from kvstore.errors import DeviceError, InvalidArgument, NoSpace
from kvstore.store.base import Place
from kvstore.store.catalog import SEALED, SegmentRow, key_of, segment_row
from kvstore.store.format import POLICY_KIND, SegmentHeader
from kvstore.store.segment import COVERED_KINDS, bytes_for
from kvstore.store.state import OpenedStore
from kvstore.store.writer import OpenSegment, Pending, create_segment


class Appender:
    """Owns the open segment. One thread at a time; `unused_bytes` and `may_create` from any."""

    def __init__(self, store: OpenedStore) -> None:
        self._store = store
        self._table = store.table
        self._disk = store.disk
        self._open: OpenSegment | None = None

    def append(
        self, items: Sequence[Pending], *, cleaning: bool = False, following: Sequence[int] = ()
    ) -> list[Place]:
        """Make a batch durable and enter it in the books. `cleaning`: it may use the space kept for copies, in a
        segment just large enough for it and for payloads `following` it.

        Raises InvalidArgument or NoSpace before anything is written; DeviceError, or NoSpace from the device itself,
        when writing fails: then none of it counts, and the segment takes no more.
        """
        target = self._target_for(items, cleaning=cleaning, following=following)
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
            self._abandon(target)
            raise
        self._table.count("syncs")
        with self._table.lock:
            return self._enter(target, items, offsets)

    def fitting(self, items: Sequence[Pending]) -> int:
        """How many of the items, from the first, the open segment still takes."""
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
        return self.free_bytes(cleaning=False) >= self._disk.segment_bytes

    def free_bytes(self, *, cleaning: bool) -> int:
        return self._disk.free_bytes(given_back=self.unused_bytes(), cleaning=cleaning)

    def holds_only_dead(self) -> bool:
        """Whether there is an open segment with records, and nothing in it lives."""
        target = self._open
        return target is not None and len(target.segment) > 0 and not target.segment.has_live()

    def seal(self) -> None:
        """Seal the open segment. A failure costs a scan at the next start, and no record."""
        target = self._open
        if target is None:
            return
        try:
            footer, file_bytes = target.seal()
        except (DeviceError, NoSpace):
            self._table.count("device_errors")
            self._abandon(target)
            return
        self._open = None
        segment = target.segment
        with self._table.lock:
            segment.advance(file_bytes, 0)
            segment.close(file_bytes)
        with suppress(DeviceError):  # all of it is durable
            target.close()
        self._store.write_rows(
            {
                key_of(b"S", segment.segment_id): segment_row(
                    SegmentRow(segment.identity.salt, file_bytes, SEALED)
                ),
                key_of(b"F", segment.segment_id): footer,
            }
        )

    def _target_for(
        self, items: Sequence[Pending], *, cleaning: bool, following: Sequence[int]
    ) -> OpenSegment:
        """The open segment, or a fresh one, with room for all of `items`."""
        if self._open is not None and self._open.has_room(items):
            return self._open
        lengths = [item.length for item in items]
        namespaces = len({item.namespace for item in items})
        if bytes_for(lengths, namespaces=namespaces) > self._disk.segment_bytes:
            raise InvalidArgument(
                "the batch does not fit into one segment with its headers; append it in parts",
                field="records",
                value=f"{len(items)} with {sum(lengths)} payload bytes",
                allowed=f"{self._disk.segment_bytes} bytes a segment",
            )
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
        return self._create(size)

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
        self._disk.creating_bytes = header.allocated
        try:
            segment, file = create_segment(self._store.device, header)
        except DeviceError:
            self._table.count("device_errors")
            raise
        finally:
            self._disk.creating_bytes = 0
        with self._table.lock:
            self._table.segments[segment.segment_id] = segment
        self._open = OpenSegment(segment, file)
        return self._open

    def _abandon(self, target: OpenSegment) -> None:
        """The segment takes no more writes; its synced records stay readable."""
        self._open = None
        with self._table.lock:
            target.segment.close(target.segment.allocated)
        with suppress(DeviceError):  # the segment has failed already, and its descriptor is gone either way
            target.close()

    def _enter(self, target: OpenSegment, items: Sequence[Pending], offsets: list[int]) -> list[Place]:
        """Enter durable records in the books, in order: a clear covers what came before it in its batch, too."""
        segment = target.segment
        places = []
        for item, offset in zip(items, offsets, strict=True):
            number = self._table.number_of(item.namespace)
            place = segment.add(
                offset=offset, length=item.length, kind=item.kind, namespace=number, sequence=item.sequence
            )
            places.append(place)
            if item.kind in COVERED_KINDS:
                self._enter_clear(item, number, place)
            elif item.kind == POLICY_KIND:
                self._enter_policy(item, place)
        segment.advance(target.end, sum(item.length for item in items))
        return places

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
