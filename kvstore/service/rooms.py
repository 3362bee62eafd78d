"""Memory that records are read into: page-aligned, and used again."""

from __future__ import annotations

from kvstore.store.buffers import aligned

ROOM_BYTES = 4 << 20
"""A batch of blocks with its headers and padding, or a whole state."""

KEPT_ROOMS = 8
"""Two for each of a few fetches at once: fresh memory costs about as much as the read itself."""


class Rooms:
    """Rooms of ROOM_BYTES, lent and taken back; what needs more gets memory of its own for once. Any thread may call."""

    def __init__(self) -> None:
        self._idle: list[memoryview] = []

    def lend(self, length: int) -> memoryview:
        """At least `length` bytes at a page boundary. They hold what earlier loans left there."""
        if length > ROOM_BYTES:
            return aligned(length)
        try:
            return self._idle.pop()
        except IndexError:
            return aligned(ROOM_BYTES)

    def take_back(self, room: memoryview) -> None:
        """Nobody looks at it any more, and nothing is read into it: the next loan may be the same bytes. A room that is
        never given back is only garbage."""
        if len(room) == ROOM_BYTES and len(self._idle) < KEPT_ROOMS:
            self._idle.append(room)
