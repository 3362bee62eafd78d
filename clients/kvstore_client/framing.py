"""Items as a stream of bytes cut into frames, in both directions. No I/O.

frame      items: headers of the items whose first byte lies in this frame, in order
           data:  at most FRAME_BYTES of the items' payloads, one after another
An item of no bytes (empty, or missing) is listed where its place is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from kvstore.errors import DamagedBytes
from kvstore.types import BytesLike

FRAME_BYTES = 1 << 20
ITEM_BYTES_MAX = 1 << 28
"""No item is larger; a header that says so is damaged."""


class Header(Protocol):
    @property
    def length(self) -> int: ...
    @property
    def missing(self) -> bool: ...


H = TypeVar("H", bound=Header)
T = TypeVar("T")


class ItemJoiner(Generic[H]):
    """Joins frames to items. Feed frames in order, then call `finish`; DamagedBytes for what no sender may send.

    Memory held is what has arrived of the item under way: a length in a header allocates nothing.
    """

    def __init__(self) -> None:
        self._open: H | None = None
        self._chunks: list[BytesLike] = []
        self._missing_bytes = 0

    def feed(self, headers: Iterable[H], data: bytes) -> Iterator[tuple[H, bytes]]:
        """Items that end in this frame, each with its payload; b"" for a missing one."""
        waiting = iter(headers)
        view = memoryview(data)
        at = 0
        while True:
            if self._open is None:
                header = next(waiting, None)
                if header is None:
                    break
                length = 0 if header.missing else header.length
                if length > ITEM_BYTES_MAX:
                    raise DamagedBytes(
                        "an item is too long",
                        field="length",
                        value=length,
                        allowed=f"at most {ITEM_BYTES_MAX} bytes",
                    )
                if length == 0:
                    yield header, b""
                    continue
                if at == len(data):
                    raise DamagedBytes(
                        "a frame lists an item that begins in a later one", field="length", value=length
                    )
                self._open, self._missing_bytes = header, length
            take = min(self._missing_bytes, len(data) - at)
            self._missing_bytes -= take
            if self._missing_bytes:
                self._chunks.append(view[at:])
                at = len(data)
                if next(waiting, None) is not None:
                    raise DamagedBytes(
                        "a frame lists an item that begins in a later one", field="bytes", value=len(data)
                    )
                break
            header, self._open = self._open, None
            if self._chunks:
                payload = b"".join((*self._chunks, view[at : at + take]))
                self._chunks = []
            else:
                payload = data[at : at + take]
            at += take
            yield header, payload
        if at != len(data):
            raise DamagedBytes("a frame holds bytes of no item", field="bytes", value=len(data) - at)

    def opened(self) -> tuple[H, bytes] | None:
        """The item under way with the bytes of it that have come."""
        return None if self._open is None else (self._open, b"".join(self._chunks))

    def finish(self) -> None:
        """The stream has ended; DamagedBytes if it ended inside an item."""
        if self._open is not None:
            raise DamagedBytes(
                "the stream ended inside an item",
                field="bytes",
                value=self._missing_bytes,
                allowed="none left to come",
            )


def cut_frames(
    items: Iterable[tuple[T, BytesLike]], *, frame_bytes: int = FRAME_BYTES
) -> Iterator[tuple[list[T], bytes]]:
    """(headers, data) of each frame for (header, payload) pairs. `items` is read no further than a frame needs, so
    that a payload's header may be made when its turn comes. No items: no frames."""
    headers: list[T] = []
    parts: list[memoryview] = []
    room = frame_bytes
    for header, payload in items:
        view = memoryview(payload).cast("B")
        if room == 0:
            yield headers, b"".join(parts)
            headers, parts, room = [], [], frame_bytes
        headers.append(header)
        at = 0
        while at < len(view):
            if room == 0:
                yield headers, b"".join(parts)
                headers, parts, room = [], [], frame_bytes
            take = min(room, len(view) - at)
            parts.append(view[at : at + take])
            at += take
            room -= take
    if headers or parts:
        yield headers, b"".join(parts)
