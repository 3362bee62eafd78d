"""A segment log that keeps no payload: placement, books, space and cleaning as in the log that serves, and what a device would
have been written."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from kvstore.errors import InvalidArgument, NoSpace
from kvstore.store.ballast import ballast_bytes_for
from kvstore.store.base import Cheapest, Place, RecordKind, Space
from kvstore.store.catalog import SEALED, SegmentRow, key_of, segment_row, uses_row
from kvstore.store.choice import cheapest_of, copy_groups, may_go
from kvstore.store.format import (
    FOOTER_ENTRY_BYTES,
    FOOTER_HEADER_BYTES,
    PAGE,
    SegmentIdentity,
    align,
    footer_bytes,
    payload_gap,
)
from kvstore.store.log import rows_of_dead
from kvstore.store.segment import FULL_SHARE, Segment, State, bytes_for, fits, plan_batch
from kvstore.store.space import SPARES_MAX, SpaceBooks, largest_batch, payload_room, space_of
from kvstore.store.state import catalog_bytes_of
from kvstore.store.table import SegmentTable

_NAMESPACES = 1
_KIND = int(RecordKind.BLOCK)


class WeightlessLog:
    """Counts what SegmentLog writes, of one namespace, by lengths alone. What that one does beside its appends is done at once."""

    def __init__(self, *, budget_bytes: int, segment_bytes: int) -> None:
        self._table = SegmentTable()
        self._disk = SpaceBooks(
            self._table, budget_bytes, segment_bytes, other_bytes=ballast_bytes_for(budget_bytes)
        )
        self._open: Segment | None = None
        self._next: Segment | None = None
        self._ids = itertools.count(1)
        self.written_bytes = 0
        """All that went to the device: headers, padding, footers, copies and about what the catalogue takes."""
        self.cleaned_bytes = 0
        self.appended_bytes = 0
        self.cleaned_segments = 0

    def append(self, lengths: Sequence[int]) -> list[Place]:
        """See SegmentLog.append. Raises InvalidArgument or NoSpace before anything is written."""
        count = self._fitting(lengths) if self._may_create_beside() else 0
        if not 0 < count < len(lengths):
            places = self._write(lengths)
        else:
            places = self._write(lengths[:count])
            try:
                places += self._write(lengths[count:])
            except NoSpace:
                self.discard(places)
                raise
        self.appended_bytes += sum(lengths)
        return places

    # ---- what making room asks: see RecordLog -------------------------------------------------------------------

    def discard(self, places: Iterable[Place]) -> None:
        for place in places:
            self._table.kill(place)

    def reclaim(self) -> int:
        target = self._open
        if target is not None and len(target) and not target.has_live() and not self._may_create():
            self._seal(target)
        victims = [segment for segment in self._table.segments.values() if may_go(segment)]
        if not victims:
            return 0
        self.written_bytes += catalog_bytes_of(rows_of_dead(victims))
        for segment in victims:
            del self._table.segments[segment.segment_id]
            is_whole = segment.allocated == self._disk.segment_bytes
            if is_whole and len(self._disk.spares) < SPARES_MAX and self._disk.unused_bytes() >= 0:
                self._disk.spares[segment.name] = segment.allocated
        return sum(segment.allocated for segment in victims)

    def room_bytes(self) -> int:
        if self._may_create():
            return self.largest_append_bytes()
        return min(payload_room(self._unused()), self.largest_append_bytes())

    def largest_append_bytes(self) -> int:
        return largest_batch(self._disk.segment_bytes)

    def space(self) -> Space:
        return space_of(self._disk)

    def cheapest_segment(self) -> Cheapest | None:
        return cheapest_of(self._table.segments.values())

    def clean(self, segment_id: int) -> dict[Place, Place]:
        source = self._table.segments.get(segment_id)
        if source is None or source.state is not State.CLOSED:
            raise InvalidArgument(
                "only a sealed segment can be cleaned",
                field="segment_id",
                value=segment_id,
                allowed="what cheapest_segment names",
            )
        indexes = source.live_indexes()
        lengths = [source.place(index).length for index in indexes]
        if bytes_for(lengths, namespaces=_NAMESPACES) > self._free(cleaning=True):
            raise NoSpace("copying forward does not fit into the disk budget; reclaim first")
        moved: dict[Place, Place] = {}
        begin = 0
        for group in copy_groups(indexes, lengths):
            begin += len(group)
            olds = [source.place(index) for index in group]
            for part, following in self._parts(olds, lengths[begin:]):
                sizes = [old.length for old in part]
                moved.update(zip(part, self._write(sizes, cleaning=True, following=following), strict=True))
                self.cleaned_bytes += sum(sizes)
        for index in indexes:
            source.kill(index)
        self.cleaned_segments += 1
        for number in sorted({place.segment_id for place in moved.values()}):
            segment = self._table.segments[number]
            # As if each had a use by then.
            pairs = [(segment.place(index).offset, 1) for index in range(len(segment))]
            self.written_bytes += catalog_bytes_of({key_of(b"U", number): uses_row(0, pairs)})
        self.reclaim()
        return moved

    def check_integrity(self) -> None:
        """Raise AssertionError unless the books add up, within the budget."""
        for segment in self._table.segments.values():
            segment.check()
        space = self.space()
        assert space.live + space.dead + space.padded + space.reserved == space.allocated, space
        assert space.allocated + space.other <= space.budget, space

    # ---- placement: see Appender --------------------------------------------------------------------------------

    def _parts(self, olds: list[Place], after: list[int]) -> Iterator[tuple[list[Place], list[int]]]:
        """What no longer fits the open segment goes to the next one."""
        begin = 0
        while begin < len(olds):
            lengths = [old.length for old in olds[begin:]]
            count = self._fitting(lengths) or len(lengths)
            yield olds[begin : begin + count], lengths[count:] + after
            begin += count

    def _write(
        self, lengths: Sequence[int], *, cleaning: bool = False, following: Sequence[int] = ()
    ) -> list[Place]:
        target = self._target_for(lengths, cleaning=cleaning, following=following)
        layout = plan_batch(target.end, lengths)
        count = len(lengths)
        places = target.add_all(
            [at + payload_gap(length) for at, length in zip(layout.offsets, lengths, strict=True)],
            lengths,
            [_KIND] * count,
            [0] * count,
            [0] * count,
        )
        self.written_bytes += align(layout.end, PAGE) - align(target.end, PAGE)
        target.advance(layout.end, sum(lengths))
        if target.end > target.allocated // 2 and self._next is None and self._may_create_beside():
            self._next = self._create(self._disk.segment_bytes)
        return places

    def _target_for(self, lengths: Sequence[int], *, cleaning: bool, following: Sequence[int]) -> Segment:
        if self._open is not None and self._has_room(self._open, lengths):
            return self._open
        size = self._disk.segment_bytes
        if bytes_for(lengths, namespaces=_NAMESPACES) > size:
            raise InvalidArgument(
                "the batch does not fit into one segment with its headers",
                field="lengths",
                value=sum(lengths),
                allowed=f"{size} bytes a segment",
            )
        if self._next is not None:
            made, self._next = self._next, None
        else:
            if not self._may_create():
                exact = bytes_for([*lengths, *following], namespaces=_NAMESPACES + len(following))
                size = min(size, exact)
                if not cleaning or self._free(cleaning=True) < size:
                    raise NoSpace("the disk budget has no room for another segment; reclaim first")
            made = None
        if self._open is not None:
            self._seal(self._open)
        self._open = self._create(size) if made is None else made
        return self._open

    def _create(self, size: int) -> Segment:
        if self._disk.spares:
            self._disk.spares.popitem()
        made = Segment(SegmentIdentity(0, next(self._ids), 0), allocated=size, state=State.OPEN)
        self._table.segments[made.segment_id] = made
        self.written_bytes += PAGE
        return made

    def _seal(self, target: Segment) -> None:
        unused = self._unused()
        self._open = None
        footer = footer_bytes(_NAMESPACES, len(target))
        is_full = unused <= target.allocated // FULL_SHARE
        file_bytes = target.allocated if is_full else align(target.end, PAGE) + footer
        self.written_bytes += file_bytes - align(target.end, PAGE)
        target.advance(file_bytes, 0)
        target.close(file_bytes)
        entries = FOOTER_HEADER_BYTES + 32 * _NAMESPACES + FOOTER_ENTRY_BYTES * len(target)
        row = segment_row(SegmentRow(0, file_bytes, SEALED))
        self.written_bytes += catalog_bytes_of(
            {key_of(b"S", target.segment_id): row, key_of(b"F", target.segment_id): bytes(entries)}
        )

    def _has_room(self, target: Segment, lengths: Sequence[int]) -> bool:
        return fits(
            plan_batch(target.end, lengths),
            capacity=target.allocated,
            namespaces=_NAMESPACES,
            records=len(target) + len(lengths),
        )

    def _fitting(self, lengths: Sequence[int]) -> int:
        target = self._open
        low, high = 0, len(lengths) if target is not None else 0
        while target is not None and low < high:
            middle = (low + high + 1) // 2
            if self._has_room(target, lengths[:middle]):
                low = middle
            else:
                high = middle - 1
        return low

    def _unused(self) -> int:
        target = self._open
        if target is None:
            return 0
        return target.allocated - align(target.end, PAGE) - footer_bytes(_NAMESPACES, len(target))

    def _free(self, *, cleaning: bool) -> int:
        return self._disk.free_bytes(given_back=self._unused(), cleaning=cleaning)

    def _may_create(self) -> bool:
        return self._next is not None or self._free(cleaning=False) >= self._disk.segment_bytes

    def _may_create_beside(self) -> bool:
        room = self._disk.free_bytes(given_back=0, cleaning=False)
        return self._next is not None or room >= self._disk.segment_bytes
