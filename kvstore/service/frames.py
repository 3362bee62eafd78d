"""Items as one stream of bytes, cut into frames: the sending and the receiving half. No I/O here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

import xxhash
from isal import isal_zlib

from kvstore.errors import DamagedBytes, InvalidArgument, LimitExceeded
from kvstore.memory import Slot as Shown
from kvstore.store.buffers import Slot
from kvstore.store.format import PayloadSums, payload_sums
from kvstore.types import BytesLike, Checks

FRAME_BYTES = 1 << 20
"""Data bytes of one frame at most."""

H = TypeVar("H")

Frame = tuple[list[H], list[memoryview]]
"""The headers of the items that begin in it, and the pieces of its data."""


class Cutter(Generic[H]):
    """Cuts a stream of (header, payload) into frames of at most FRAME_BYTES. Nothing is copied: a frame's data are pieces of
    the payloads, good for as long as those are."""

    def __init__(self) -> None:
        self._headers: list[H] = []
        self._parts: list[memoryview] = []
        self._size = 0

    def add(self, header: H, payload: BytesLike) -> Iterator[Frame[H]]:
        """Frames that are full with this item; what does not fill one is kept for the next call."""
        self._headers.append(header)
        view = memoryview(payload)
        at = 0
        while len(view) - at >= FRAME_BYTES - self._size:
            end = at + FRAME_BYTES - self._size
            self._parts.append(view[at:end])
            yield self._take()
            at = end
        if at < len(view):
            self._parts.append(view[at:])
            self._size += len(view) - at

    def rest(self) -> Iterator[Frame[H]]:
        """The last frame, if anything is left for it."""
        if self._headers or self._parts:
            yield self._take()

    def _take(self) -> Frame[H]:
        frame = self._headers, self._parts
        self._headers, self._parts, self._size = [], [], 0
        return frame


class Incoming:
    """The bytes of one item on their way in: exactly `length` of them, checked against its checksums at the end. They
    are put together in `slot`, if there is one, which lies in the pages of `shown` where that is given: a slot that was begun
    for them in memory that clients map."""

    def __init__(
        self, name: str, length: int, checks: Checks, slot: Slot | None = None, *, shown: Shown | None = None
    ) -> None:
        self.name = name
        self.length = length
        self.checks = checks
        self.slot = slot
        self.shown = shown
        """None once others end it, or it has ended."""
        self.is_mapped = shown is not None
        self._buffer = bytearray(length) if slot is None else slot.payload
        assert len(self._buffer) == length
        self._filled = 0
        self._crc32 = 0
        self._is_right = False
        self._xxh3: xxhash.xxh3_64 | None = None
        """Of what came by and by."""
        self.sums: PayloadSums | None = None
        """What the log is going to say about it, where that is known already."""

    @property
    def missing_bytes(self) -> int:
        return self.length - self._filled

    def feed(self, data: memoryview) -> int:
        """Take up to what is missing from the front of `data`; bytes taken. A frame's worth of checksum is quick
        (0.1 ms), so this never holds up the event loop."""
        part = data[: self.missing_bytes]
        self._buffer[self._filled : self._filled + len(part)] = part
        self._filled += len(part)
        if not self.checks.has_xxh3:
            self._crc32 = isal_zlib.crc32(part, self._crc32)
            return len(part)
        if self._xxh3 is None:
            self._xxh3 = xxhash.xxh3_64()
        self._xxh3.update(part)
        return len(part)

    def fill(self, copy: Callable[[memoryview], None], slices: Sequence[int]) -> None:
        """Take all of it at once: `copy` fills the memory that it is given. What is summed up is what lies here then,
        whatever the source says later, and the log needs no sums of its own. In any thread."""
        assert self._filled == 0
        if self.shown is not None:
            self.shown.enlarge()
        view = memoryview(self._buffer)
        copy(view)
        # XXH3 brings the bytes near, so that the others find them in a processor's cache.
        self.sums = payload_sums(view, slices)
        if not self.checks.has_xxh3:
            self._crc32 = isal_zlib.crc32(view)
        self._filled = self.length

    def check(self) -> None:
        """The item is whole: DamagedBytes when it does not have its checksum: the XXH3 that came with it, or else its
        CRC-32. One of them says that these are the bytes that its writer summed up."""
        assert self.missing_bytes == 0, "the item is complete"
        if self._is_right:
            return
        field, got, announced = "crc32", self._crc32, self.checks.crc32
        if self.checks.has_xxh3:
            field, announced = "xxh3_64", self.checks.xxh3_64
            got = (self._xxh3 or xxhash.xxh3_64()).intdigest() if self.sums is None else self.sums.xxh3_64
        if got != announced:
            raise DamagedBytes(
                f"the bytes of {self.name} do not have their checksum",
                field=field,
                value=f"{got:#x}",
                allowed=f"{announced:#x} as announced",
            )
        self._is_right = True

    def payload(self) -> BytesLike:
        """The item, checked."""
        self.check()
        return self._buffer


class Receiver:
    """Puts frames together again. Items complete in the order announced, and each announced item must complete."""

    def __init__(self) -> None:
        self._waiting: deque[Incoming] = deque()

    def accept(self, announced: Iterable[Incoming], data: bytes) -> Iterator[Incoming]:
        """Items that this frame completes."""
        if len(data) > FRAME_BYTES:
            raise LimitExceeded(
                "a frame is too large", field="data", value=len(data), allowed=f"{FRAME_BYTES} bytes a frame"
            )
        self._waiting.extend(announced)
        view = memoryview(data)
        while self._waiting:
            item = self._waiting[0]
            view = view[item.feed(view) :]
            if item.missing_bytes:
                break
            self._waiting.popleft()
            yield item
        if view:
            raise InvalidArgument(
                "a frame carries bytes past the items announced",
                field="data",
                value=len(view),
                allowed="0 bytes more",
            )

    def finish(self) -> None:
        """The stream has ended: InvalidArgument when an item is not whole."""
        if self._waiting:
            item = self._waiting[0]
            raise InvalidArgument(
                f"the stream ended inside {item.name}",
                field="data",
                value=item.length - item.missing_bytes,
                allowed=f"{item.length} bytes",
            )
