"""Looking at what lives before anybody asks for it: every checksum of every record, and every segment's footer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvstore.store.base import Damage, Place, Verified
from kvstore.store.columns import Footer, read_footer
from kvstore.store.device import DeviceFile, read_fully
from kvstore.store.format import (
    FOOTER_HEADER_BYTES,
    PAGE,
    SEGMENT_HEADER_BYTES,
    TRAILER_BYTES,
    SegmentHeader,
    SegmentIdentity,
    Verdict,
    decode_record_header,
    decode_segment_header,
    decode_slices,
    decode_trailer,
    footer_extent,
    payload_gap,
    slices_hold,
)
from kvstore.store.reader import Checked
from kvstore.store.segment import COVERED_KINDS, Segment
from kvstore.store.state import OpenedStore

_Seen = tuple[Footer | None, list[Damage]]

WHAT_RECORD = "record"
WHAT_SLICES = "table of slices"
WHAT_MISFILED = "footer names another record here"
WHAT_FOOTER = "footer"
WHAT_HEADER = "segment header"


def verify_segment(store: OpenedStore, segment_id: int, *, begin: int, bytes_max: int) -> Verified:
    """See RecordLog.verify."""
    with store.table.reading(segment_id) as segment:
        if segment is None:
            return Verified(0, 0, [], None)
        with store.files.use(segment.name) as file:
            return _verify(store, segment, file, begin, bytes_max)


def _verify(
    store: OpenedStore, segment: Segment, file: DeviceFile | None, begin: int, bytes_max: int
) -> Verified:
    with store.table.lock:
        numbers, after = _next_numbers(segment, begin, bytes_max)
        places = [segment.place(number) for number in numbers]
        has_footer = segment.has_footer
    damages: list[Damage] = []
    footer: Footer | None = None
    if file is not None:
        if begin == 0:
            # What memory holds of the file says nothing about the disk.
            file.forget_cached(0, 0)
        if has_footer:
            footer, wrong = _looked_at_twice(file, lambda: _footer_of(file, segment.identity))
            damages += wrong if begin == 0 else []
        if begin == 0:
            _, wrong = _looked_at_twice(file, lambda: (None, _header_damage(file, segment.identity)))
            damages += wrong
    records = store.reader.records(places)
    for place, record in zip(places, records, strict=True):
        key = _key_in(footer, place)
        what = _damage_of(record, key)
        if what is None:
            continue
        if record is not None:
            key = record.header.key
        elif not key and file is not None:
            key = _key_at(file, segment.identity, place)
        damages.append(Damage(place, key, what))
        _quarantine(store, segment, place)
    return Verified(len(places), sum(place.length for place in places), damages, after)


def _looked_at_twice(file: DeviceFile, look: Callable[[], _Seen]) -> _Seen:
    """What a first look finds wrong may have been bent on its way."""
    found = look()
    if found[1]:
        file.forget_cached(0, 0)
        found = look()
    return found


def _next_numbers(segment: Segment, begin: int, bytes_max: int) -> tuple[list[int], int | None]:
    """Live records from number `begin` on, at least one, about so many bytes; where the next step begins."""
    chosen: list[int] = []
    total = 0
    for number in range(begin, len(segment)):
        if not segment.is_live(number):
            continue
        if chosen and total >= bytes_max:
            return chosen, number
        chosen.append(number)
        total += segment.place(number).length
    return chosen, None


def _damage_of(record: Checked | None, key: bytes) -> str | None:
    """`key`: what the segment's footer says; empty where it says nothing."""
    if record is None:
        return WHAT_RECORD
    slices = decode_slices(record.head, record.header)
    if isinstance(slices, Verdict):
        return WHAT_SLICES
    begin = 0
    for each in slices:
        if not slices_hold(slices, begin, record.payload[begin : each.end]):
            return WHAT_SLICES
        begin = each.end
    return WHAT_MISFILED if key and key != record.header.key else None


def _quarantine(store: OpenedStore, segment: Segment, place: Place) -> None:
    """Dead from now on; what the reader found is so already."""
    with store.table.lock:
        number = segment.find(place)
        # A clear goes on covering what it covers, whatever became of its bytes.
        is_needed = number is not None and segment.kind(number) in COVERED_KINDS
        if number is not None and segment.is_live(number) and not is_needed:
            segment.kill(number)
            store.table.count_locked("quarantined_records")
            store.table.count_locked("damaged_records")


def _header_damage(file: DeviceFile, identity: SegmentIdentity) -> list[Damage]:
    header = decode_segment_header(read_fully(file, 0, SEGMENT_HEADER_BYTES))
    is_whole = isinstance(header, SegmentHeader) and header.salt == identity.salt
    return [] if is_whole else [Damage(Place(identity.segment_id, 0, PAGE), b"", WHAT_HEADER)]


def _footer_of(file: DeviceFile, identity: SegmentIdentity) -> tuple[Footer | None, list[Damage]]:
    """The footer of a sealed segment."""
    size = file.size()
    at = max(0, size - TRAILER_BYTES)
    trailer = decode_trailer(read_fully(file, at, TRAILER_BYTES))
    # One of another salt was left by an earlier life: this life's was never written there, or not to the end.
    if (
        isinstance(trailer, Verdict)
        or trailer[1] != identity.salt
        or not SEGMENT_HEADER_BYTES <= trailer[0] < size
    ):
        return None, [Damage(Place(identity.segment_id, at, TRAILER_BYTES), b"", WHAT_FOOTER)]
    offset = trailer[0]
    extent = footer_extent(read_fully(file, offset, FOOTER_HEADER_BYTES))
    if isinstance(extent, Verdict) or extent > size - offset:
        return None, [Damage(Place(identity.segment_id, offset, size - offset), b"", WHAT_FOOTER)]
    footer = read_footer(read_fully(file, offset, extent), identity=identity)
    if isinstance(footer, Verdict):
        return None, [Damage(Place(identity.segment_id, offset, extent), b"", WHAT_FOOTER)]
    return footer, []


def _key_in(footer: Footer | None, place: Place) -> bytes:
    if footer is None:
        return b""
    offsets = footer.entries["offset"]
    at = int(np.searchsorted(offsets, place.offset))
    if at >= len(offsets) or offsets[at] != place.offset:
        return b""
    return bytes(footer.entries["key"][at].tobytes())


def _key_at(file: DeviceFile, identity: SegmentIdentity, place: Place) -> bytes:
    """What the record itself says, where its header can be read."""
    begin = place.offset - payload_gap(place.length)
    header = decode_record_header(
        read_fully(file, begin, payload_gap(place.length)), identity=identity, offset=begin
    )
    return b"" if isinstance(header, Verdict) else header.key
