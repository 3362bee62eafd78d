"""The items of a fetch as they arrive: in the order asked for, complete, and with their checksums."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from kvstore.errors import DamagedBytes
from kvstore.profile.layout import LayerSlice
from kvstore.types import Lineage
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.checks import matches
from kvstore_client.framing import ItemJoiner
from kvstore_client.values import FetchedItem, FetchedSlice
from kvstore_client.wanted import Place, Sliced, Whole

Frames = Generator[pb.ItemFrame, None, None]
Found = tuple[Place, bytes | None, Lineage | None]
"""An item, or a slice of one; without payload and lineage where it is missing."""


class StoredAgain(DamagedBytes):
    """The rest of an item is not of the bytes that came first: another has stored it meanwhile. It has to start anew."""


@dataclass(frozen=True, slots=True)
class _Coming:
    """An item under way; `had`: its first bytes, which came with an earlier stream."""

    header: pb.ItemHeader
    had: bytes = b""

    @property
    def length(self) -> int:
        return self.header.length - len(self.had)

    @property
    def missing(self) -> bool:
        return self.header.missing


class ItemReader:
    """Takes the frames of a fetch, or of several that go on with one another.

    DamagedBytes where the frames are not exactly the wanted items in their order, or bytes do not have their checksum; what
    was found before is good.
    """

    def __init__(self, wanted: Whole | Sliced, *, verify: bool) -> None:
        self.seen = 0
        """How many items were found."""
        self._wanted = wanted
        self._verify = verify
        self._joiner: ItemJoiner[_Coming] = ItemJoiner()
        self._held: _Coming | None = None
        self._skip = 0

    @property
    def is_complete(self) -> bool:
        return self.seen == len(self._wanted)

    @property
    def held_bytes(self) -> int:
        """How many bytes of the next item are here."""
        return 0 if self._held is None else len(self._held.had)

    def feed(self, frame: pb.ItemFrame) -> Iterator[Found]:
        """What ends in this frame."""
        for coming, rest in self._joiner.feed(map(self._coming, frame.items), frame.data):
            header = coming.header
            number = self.seen - self._skip
            if number == len(self._wanted):
                raise DamagedBytes("an item came that nobody asked for", field="index", value=header.index)
            place = self._wanted.place(number)
            payload = coming.had + rest if coming.had else rest
            _check(header, payload, place, verify=self._verify)
            if self._skip:
                self._skip -= 1
                continue
            self.seen += 1
            yield (place, None, None) if header.missing else (place, payload, Lineage(header.lineage))

    def finish(self) -> None:
        """The stream has ended; DamagedBytes if anything has not come."""
        self._joiner.finish()
        if not self.is_complete:
            raise DamagedBytes(
                "the stream ended early",
                field="items",
                value=self.seen,
                allowed=f"{len(self._wanted)} items",
            )

    def go_on(self, *, keep: bool, skip: int = 0) -> None:
        """Another stream comes for what is not here yet, after `skip` items that are. `keep`: what came of the item under
        way stays, and the stream is asked to begin after it."""
        opened = self._joiner.opened()
        if opened is not None:
            coming, begun = opened
            self._held = _Coming(coming.header, coming.had + begun)
        if not keep:
            self._held = None
        self._joiner = ItemJoiner()
        self._skip = skip

    def _coming(self, header: pb.ItemHeader) -> _Coming:
        held, self._held = self._held, None
        if header.missing or (header.offset == 0):
            return _Coming(header)
        if held is None or header.offset != len(held.had):
            raise DamagedBytes(
                "an item begins elsewhere than was asked for", field="offset", value=header.offset
            )
        if _identity(header) != _identity(held.header):
            raise StoredAgain(
                "an item was stored again while it was fetched", field="index", value=header.index
            )
        return _Coming(header, held.had)


def cut_items(items: Sequence[FetchedItem], wanted: Sliced) -> Iterator[FetchedItem | FetchedSlice]:
    """Items that came whole, as a sliced fetch brings them."""
    yield from items[wanted.block_count :]
    for number, cut in enumerate(wanted.slices):
        for item in items[: wanted.block_count]:
            yield cut_block(item, number, cut)


def _identity(header: pb.ItemHeader) -> tuple[object, ...]:
    return (
        header.kind,
        header.index,
        header.length,
        header.crc32,
        header.xxh3_64,
        header.has_xxh3,
        header.lineage,
    )


def read_slices(
    frames: Frames, wanted: Sliced, *, verify: bool
) -> Generator[FetchedItem | FetchedSlice, None, None]:
    """Each item as soon as it is complete and, with `verify`, as its checksum has been found right; the state's items come
    whole. DamagedBytes as ItemReader. `frames` is closed at the end, whatever the end."""
    reader = ItemReader(wanted, verify=verify)
    with closing(frames):
        for frame in frames:
            yield from map(item_or_slice, reader.feed(frame))
    reader.finish()


def item_or_slice(found: Found) -> FetchedItem | FetchedSlice:
    place, payload, lineage = found
    if place.slice is None:
        return FetchedItem(kind=place.kind, index=place.index, payload=payload, lineage=lineage)
    return FetchedSlice(slice=place.slice, index=place.index, payload=payload, lineage=lineage)


def cut_block(item: FetchedItem, number: int, cut: LayerSlice) -> FetchedSlice:
    """Slice `number` of a block that came whole."""
    payload = None if item.payload is None else item.payload[cut.offset : cut.end]
    return FetchedSlice(slice=number, index=item.index, payload=payload, lineage=item.lineage)


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
