"""Reading records back: neighbours in one read, runs side by side, every byte checked, one second look at damage."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from kvstore.errors import DeviceError, InvalidArgument
from kvstore.store.base import Place, RecordKind, Wanted
from kvstore.store.buffers import aligned
from kvstore.store.device import Device, DeviceFile, read_pages
from kvstore.store.format import (
    LARGE_HEADER_BYTES,
    LARGE_PAYLOAD_BYTES,
    PAGE,
    PAYLOAD_BYTES_MAX,
    RECORD_HEADER_BYTES,
    RecordHeader,
    SegmentIdentity,
    Verdict,
    align,
    covering_slices,
    decode_record_header,
    decode_slices,
    payload_gap,
    payload_holds,
    payload_is_right,
    record_span,
    slices_hold,
)
from kvstore.store.lanes import Lanes, Transfer
from kvstore.store.segment import COVERED_KINDS, Segment
from kvstore.store.table import SegmentTable
from kvstore.types import KEY_BYTES, BlockKey, BytesLike

_NO_KEY = BlockKey(bytes(KEY_BYTES))
RUN_BYTES_MAX = 1 << 20
"""Neighbours are read together up to this: more gains nothing, and runs are read side by side."""

HOLE_BYTES_MAX = 16 << 10
"""What lies between a record's head and the part that is wanted is read with them up to this: one read instead of two."""

_OPEN_FILES_MAX = 256


@dataclass(slots=True)
class _Open:
    file: DeviceFile
    users: int = 0


class OpenFiles:
    """Segment files kept open for reading, at most `files_max` of them idle."""

    def __init__(self, device: Device, *, files_max: int = _OPEN_FILES_MAX) -> None:
        self._device = device
        self._max = files_max
        self._lock = threading.Lock()
        self._files: OrderedDict[str, _Open] = OrderedDict()

    @contextmanager
    def use(self, name: str) -> Iterator[DeviceFile | None]:
        """The file for the length of the block; None when there is no such file."""
        with self._lock:
            kept = self._files.get(name)
            if kept is None:
                opened = self._device.open(name, bulk=True)
                if opened is not None:
                    kept = self._files[name] = _Open(opened)
            else:
                self._files.move_to_end(name)
            if kept is not None:
                kept.users += 1
        try:
            yield None if kept is None else kept.file
        finally:
            if kept is not None:
                with self._lock:
                    kept.users -= 1
                    self._shrink(self._max)

    def drop(self, name: str) -> None:
        """Close a file that nobody uses."""
        with self._lock:
            kept = self._files.pop(name, None)
            if kept is not None:
                assert kept.users == 0, name
                kept.file.close()

    def close(self) -> None:
        with self._lock:
            self._shrink(0)

    def _shrink(self, files_max: int) -> None:
        if len(self._files) <= files_max:
            return
        for name in [name for name, kept in self._files.items() if kept.users == 0]:
            if len(self._files) <= files_max:
                return
            self._files.pop(name).file.close()


class _Item(NamedTuple):
    """`number`: its place among what was asked for. `begin`, `end`: of the record in its file. `part`: what is wanted of
    the payload. `holds`: what is compared with its head's checksums where it is read whole."""

    number: int
    place: Place
    begin: int
    end: int
    part: tuple[int, int]
    holds: Holds

    def is_whole(self) -> bool:
        return self.part == (0, self.place.length)


Holds = Callable[[RecordHeader, memoryview], bool]
"""Whether a payload is what its record's head says."""


@dataclass(slots=True)
class _Run:
    """Pages [begin, end) of a segment, read together for `items` to `room`. A part of a large record comes alone; `head`:
    where the page of its head is, if that does not lie among them: it comes to the room's first page. `own`: the room that
    the one item brought along."""

    segment_id: int
    begin: int
    end: int
    items: list[_Item] = field(default_factory=list)
    is_part: bool = False
    head: int | None = None
    own: memoryview | None = None
    room: memoryview = field(default_factory=lambda: memoryview(b""))
    read: int = 0
    """Bytes of the pages that came, once they did."""
    head_read: int = 0
    _under_way: int = 0

    @property
    def length(self) -> int:
        return self.end - self.begin + self.head_bytes

    @property
    def head_bytes(self) -> int:
        return 0 if self.head is None else PAGE

    @property
    def pages(self) -> memoryview:
        return self.room[self.head_bytes :]

    def transfers(self, file: DeviceFile) -> list[Transfer]:
        """What is to be read; `note` each when it is over."""
        found = []
        if self.end > self.begin:
            found.append(Transfer(file, self.begin, self.pages, is_write=False, tag=self))
        if self.head is not None:
            found.append(Transfer(file, self.head, self.room[:PAGE], is_write=False, tag=self))
        self._under_way = len(found)
        return found

    def note(self, transfer: Transfer) -> bool:
        """Whether that was the last one."""
        if transfer.offset == self.head:
            self.head_read = transfer.done
        else:
            self.read = transfer.done
        self._under_way -= 1
        return self._under_way == 0


class _Opened(NamedTuple):
    """None where it is gone."""

    segment: Segment | None
    file: DeviceFile | None


class Checked(NamedTuple):
    """A record that is what its place says. `head` is what lies before the payload."""

    header: RecordHeader
    payload: memoryview
    head: memoryview

    def slice_ends(self) -> list[int]:
        """Where its table of slices cuts the payload; nothing where the table is damaged."""
        slices = decode_slices(self.head, self.header)
        return [] if isinstance(slices, Verdict) else [each.end for each in slices]


class Reader:
    """Reads from any thread but a lane's. Damage is counted and answered with None; a failing device raises DeviceError."""

    def __init__(self, table: SegmentTable, files: OpenFiles, store_tag: int, lanes: Lanes) -> None:
        self._table = table
        self._files = files
        self._tag = store_tag
        self._lanes = lanes
        self._changed = threading.Condition()
        self._reading = 0
        self._closed = False

    def close(self) -> None:
        """Refuse reads from now on, and return when none is under way any more."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: not self._reading)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        with self._changed:
            if self._closed:
                raise InvalidArgument("the log is closed", field="reads", value="refused")
            self._reading += 1
        try:
            yield
        finally:
            with self._changed:
                self._reading -= 1
                self._changed.notify_all()

    def room_for(self, wanted: Sequence[Wanted]) -> int:
        return _shared_bytes(_plan(wanted))

    def read(self, wanted: Sequence[Wanted], room: memoryview | None = None) -> list[BytesLike | None]:
        found = self._read(_plan(wanted), len(wanted), room)
        payloads: list[BytesLike | None] = []
        misplaced = 0
        for each, record in zip(wanted, found, strict=True):
            if record is None:
                payloads.append(None)
            elif record.header.key != each.key or record.header.kind != each.kind:
                misplaced += 1
                payloads.append(None)
            else:
                payloads.append(record.payload)
        if misplaced:
            self._table.count("damaged_records", misplaced)
        self._table.count("read_records", sum(payload is not None for payload in payloads))
        return payloads

    def records(self, places: Sequence[Place]) -> list[Checked | None]:
        """Checked records in the order asked; None for what is damaged or gone."""
        # Neither key nor kind is looked at on this way.
        wanted = [Wanted(place, _NO_KEY, RecordKind.BLOCK) for place in places]
        return self._read(_plan(wanted, payload_holds), len(places), None)

    def _read(self, runs: list[_Run], count: int, room: memoryview | None) -> list[Checked | None]:
        answers: list[Checked | None] = [None] * count
        total = _shared_bytes(runs)
        if room is None:
            room = aligned(total) if total else memoryview(b"")
        assert len(room) >= total, "the room is smaller than room_for says"
        at = 0
        for run in runs:
            if run.own is not None:
                run.room = run.own
            else:
                run.room, at = room[at : at + run.length], at + run.length
        try:
            with self._counted(), ExitStack() as ends:
                opened = {
                    segment_id: self._open(segment_id, ends)
                    for segment_id in dict.fromkeys(run.segment_id for run in runs)
                }
                for run in runs:
                    if opened[run.segment_id].file is None:
                        self._give_up(opened[run.segment_id].segment, run.items)
                transfers = chain.from_iterable(
                    run.transfers(file) for run in runs if (file := opened[run.segment_id].file) is not None
                )
                for transfer in ends.enter_context(closing(self._lanes.move(transfers))):
                    read = transfer.tag
                    assert isinstance(read, _Run)
                    if read.note(transfer):
                        self._answer(read, opened[read.segment_id], answers)
        except DeviceError:
            self._table.count("device_errors")
            raise
        return answers

    def _open(self, segment_id: int, ends: ExitStack) -> _Opened:
        """A segment and its file, kept until `ends` end."""
        segment = ends.enter_context(self._table.reading(segment_id))
        return _Opened(
            segment, None if segment is None else ends.enter_context(self._files.use(segment.name))
        )

    def _answer(self, run: _Run, opened: _Opened, answers: list[Checked | None]) -> None:
        """All bytes of a run have come."""
        segment, file = opened
        assert segment is not None
        assert file is not None
        for item in run.items:
            if run.is_part:
                answer = _part(segment.identity, file, run) or self._part_again(segment, file, run)
            else:
                data = run.room[item.begin - run.begin : run.read]
                answer = _whole(segment.identity, item, data) or self._look_again(segment, file, run, item)
            answers[item.number] = answer
            if answer is None:
                self._give_up(segment, [item])

    def _look_again(self, segment: Segment, file: DeviceFile, run: _Run, item: _Item) -> Checked | None:
        """What came back wrong once may have been bent on its way; it is read alone this time."""
        begin = item.begin // PAGE * PAGE
        length = align(item.end, PAGE) - begin
        self._table.count("read_again_records")
        file.forget_cached(begin, length)
        again = aligned(length)[:length]
        read = read_pages(file, begin, again)
        mine = run.room[item.begin - run.begin : item.end - run.begin]
        if read < item.end - begin:
            return None
        mine[:] = again[item.begin - begin : item.end - begin]
        return _whole(segment.identity, item, mine)

    def _part_again(self, segment: Segment, file: DeviceFile, run: _Run) -> Checked | None:
        [item] = run.items
        self._table.count("read_again_records")
        file.forget_cached(item.begin // PAGE * PAGE, item.end - item.begin + PAGE)
        for transfer in run.transfers(file):
            transfer.run()
            run.note(transfer)
        return _part(segment.identity, file, run)

    def _give_up(self, segment: Segment | None, items: Sequence[_Item]) -> None:
        """Damage: counted, and the records count as dead, so that nothing copies or reads them any more. A segment that is
        gone has nothing to give up."""
        if segment is None:
            return
        self._table.count("damaged_records", len(items))
        with self._table.lock:
            for item in items:
                index = segment.find(item.place)
                # A clear goes on covering what it covers, whatever became of its bytes.
                is_needed = index is not None and segment.kind(index) in COVERED_KINDS
                if index is not None and segment.is_live(index) and not is_needed:
                    segment.kill(index)
                    self._table.count_locked("quarantined_records")


def _plan(wanted: Sequence[Wanted], holds: Holds = payload_is_right) -> list[_Run]:
    """What is read together, by segment and offset. Impossible places are left out: they get no answer."""
    whole: list[_Item] = []
    runs: list[_Run] = []
    for number, (place, _, _, begin, end, room) in enumerate(wanted):
        start = place.offset - payload_gap(place.length)
        if start < PAGE or not 0 <= place.length <= PAYLOAD_BYTES_MAX:
            continue
        part = (begin, place.length if end is None else end)
        if not 0 <= part[0] <= part[1] <= place.length:
            continue
        item = _Item(number, place, start, place.offset + place.length, part, holds)
        # A small record has no table of slices: it is read whole and cut.
        if place.length < LARGE_PAYLOAD_BYTES or (item.is_whole() and room is None):
            whole.append(item)
        elif item.is_whole() and room is not None:
            # Large records begin with a page: elsewhere there is none.
            if start % PAGE == 0:
                span = record_span(place.length)
                assert len(room) >= span, "the item's own room is smaller than its record"
                runs.append(_Run(place.segment_id, start, start + span, [item], own=room[:span]))
        else:
            runs.append(_run_of_part(item))
    whole.sort(key=lambda item: (item.place.segment_id, item.begin))
    run: _Run | None = None
    for item in whole:
        page, end = item.begin // PAGE * PAGE, align(item.end, PAGE)
        near = run is not None and run.segment_id == item.place.segment_id and page <= run.end + PAGE
        if run is None or not near or max(end, run.end) - run.begin > RUN_BYTES_MAX:
            run = _Run(item.place.segment_id, page, end)
            runs.append(run)
        run.items.append(item)
        run.end = max(run.end, end)
    return runs


def _shared_bytes(runs: Sequence[_Run]) -> int:
    return sum(run.length for run in runs if run.own is None)


def _run_of_part(item: _Item) -> _Run:
    head = item.begin // PAGE * PAGE
    begin = (item.place.offset + item.part[0]) // PAGE * PAGE
    end = align(item.place.offset + item.part[1], PAGE)
    if begin - head <= HOLE_BYTES_MAX:
        return _Run(item.place.segment_id, head, end, [item], is_part=True)
    return _Run(item.place.segment_id, begin, end, [item], is_part=True, head=head)


def _whole(identity: SegmentIdentity, item: _Item, data: memoryview) -> Checked | None:
    """A record at the beginning of `data`, if it is what the place says."""
    header = _head(identity, item, data)
    if header is None:
        return None
    gap = payload_gap(header.length)
    payload = data[gap : gap + header.length]
    begin, end = item.part
    return Checked(header, payload[begin:end], data[:gap]) if item.holds(header, payload) else None


def _part(identity: SegmentIdentity, file: DeviceFile, run: _Run) -> Checked | None:
    """The wanted part of a record, verified by the slices around it."""
    [item] = run.items
    if run.head is not None:
        head = run.room[item.begin - run.head : run.head_read]
    else:
        head = run.room[item.begin - run.begin : run.read]
    header = _head(identity, item, head)
    slices = None if header is None else decode_slices(head, header)
    if header is None or slices is None or isinstance(slices, Verdict):
        return None
    first, last = covering_slices(slices, *item.part)
    begin, pages, read = run.begin, run.pages, run.read
    at = item.place.offset + first
    if at < run.begin or item.place.offset + last > run.end:
        # The part is not cut where slices are: what is around it gets memory of its own.
        begin = at // PAGE * PAGE
        pages = aligned(item.place.offset + last - begin)
        read = read_pages(file, begin, pages)
    around = pages[at - begin : min(at - begin + last - first, read)]
    if not slices_hold(slices, first, around):
        return None
    return Checked(header, around[item.part[0] - first : item.part[1] - first], head[:LARGE_HEADER_BYTES])


def _head(identity: SegmentIdentity, item: _Item, head: memoryview) -> RecordHeader | None:
    """The header at the beginning of `head`, if it is what the place says."""
    header = decode_record_header(bytes(head[:RECORD_HEADER_BYTES]), identity=identity, offset=item.begin)
    return None if isinstance(header, Verdict) or header.length != item.place.length else header
