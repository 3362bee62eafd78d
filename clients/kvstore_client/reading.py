"""The items of a fetch as they arrive: in the order asked for, complete, and with their checksums."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing

from kvstore.errors import DamagedBytes
from kvstore.profile.layout import LayerSlice
from kvstore.types import Lineage
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.checks import matches
from kvstore_client.framing import ItemJoiner
from kvstore_client.values import FetchedItem, FetchedSlice
from kvstore_client.wanted import Place, Sliced, Whole

Frames = Generator[pb.ItemFrame, None, None]


def read_items(frames: Frames, wanted: Whole, *, verify: bool) -> Generator[FetchedItem, None, None]:
    """Each item as soon as it is complete and, with `verify`, as its checksum has been found right.

    DamagedBytes where the frames are not exactly the wanted items in their order, or bytes do not have their checksum;
    what was yielded before is good. `frames` is closed at the end, whatever the end.
    """
    with closing(_read(frames, wanted, verify=verify)) as found:
        for place, payload, lineage in found:
            yield FetchedItem(kind=place.kind, index=place.index, payload=payload, lineage=lineage)


def read_slices(
    frames: Frames, wanted: Sliced, *, verify: bool
) -> Generator[FetchedItem | FetchedSlice, None, None]:
    """The same of a sliced fetch; the state's items come whole."""
    with closing(_read(frames, wanted, verify=verify)) as found:
        for place, payload, lineage in found:
            if place.slice is None:
                yield FetchedItem(kind=place.kind, index=place.index, payload=payload, lineage=lineage)
            else:
                yield FetchedSlice(slice=place.slice, index=place.index, payload=payload, lineage=lineage)


def cut_block(item: FetchedItem, number: int, cut: LayerSlice) -> FetchedSlice:
    """Slice `number` of a block that came whole."""
    payload = None if item.payload is None else item.payload[cut.offset : cut.end]
    return FetchedSlice(slice=number, index=item.index, payload=payload, lineage=item.lineage)


def _read(
    frames: Frames, wanted: Whole | Sliced, *, verify: bool
) -> Generator[tuple[Place, bytes | None, Lineage | None], None, None]:
    seen = 0
    with closing(frames):
        joiner: ItemJoiner[pb.ItemHeader] = ItemJoiner()
        for frame in frames:
            for header, payload in joiner.feed(frame.items, frame.data):
                if seen == len(wanted):
                    raise DamagedBytes(
                        "an item came that nobody asked for", field="index", value=header.index
                    )
                place = wanted.place(seen)
                _check(header, payload, place, verify=verify)
                yield (place, None, None) if header.missing else (place, payload, Lineage(header.lineage))
                seen += 1
        joiner.finish()
        if seen != len(wanted):
            raise DamagedBytes(
                "the stream ended early", field="items", value=seen, allowed=f"{len(wanted)} items"
            )


def _check(header: pb.ItemHeader, payload: bytes, place: Place, *, verify: bool) -> None:
    if (int(header.kind), header.index, header.slice) != (place.kind, place.index, place.slice or 0):
        raise DamagedBytes(
            "an item came in another's place",
            field="item",
            value=f"kind {header.kind} index {header.index} slice {header.slice}",
            allowed=f"kind {int(place.kind)} index {place.index} slice {place.slice or 0}",
        )
    if header.missing:
        return
    if place.length not in (None, len(payload)):
        raise DamagedBytes(
            "a slice has another length", field="length", value=len(payload), allowed=f"{place.length} bytes"
        )
    if header.lineage not in (pb.LINEAGE_EXACT, pb.LINEAGE_BOUNDED):
        raise DamagedBytes(
            "an item has no lineage", field="lineage", value=header.lineage, allowed="EXACT or BOUNDED"
        )
    if verify and not matches(payload, header):
        raise DamagedBytes(
            "an item does not have its checksum",
            field="item",
            value=f"{place.kind.name.lower()} {place.index}",
        )
