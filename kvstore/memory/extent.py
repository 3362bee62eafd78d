"""Memory in pieces that other processes may map: they can read it, and neither write to it nor change its size."""

from __future__ import annotations

import fcntl
import os

from kvstore.pages import SharedPages

PAGE = 4096
GENERATION_BYTES = 8
_SEAL_FUTURE_WRITE = 0x10
"""F_SEAL_FUTURE_WRITE of linux/fcntl.h: mappings that are there keep their rights, new ones cannot write."""
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _SEAL_FUTURE_WRITE


def whole_pages(length: int) -> int:
    return -(-length // PAGE) * PAGE


class Extent:
    """`slots` slots of `slot_bytes` bytes, whole pages, in a memfd.

    Layout: for each slot its generation, 8 bytes little-endian, zeros to the end of the page, then the slots. A generation
    is odd while the slot changes: who reads a slot compares it before and after, and takes what it read only where both
    are the one that it was told.

    Raises OSError where the system has no such memory to give.
    """

    def __init__(self, number: int, *, domain: str, slot_bytes: int, slots: int) -> None:
        assert slot_bytes % PAGE == 0
        self.number = number
        self.domain = domain
        self.slot_bytes = slot_bytes
        self.slots_begin = whole_pages(GENERATION_BYTES * slots)
        self.bytes = self.slots_begin + slots * slot_bytes
        self.descriptor = os.memfd_create(f"kvstore-{number}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, self.bytes)
            self._shared = SharedPages(self.descriptor, self.bytes, writable=True)
            # Ours is mapped already, and stays writable.
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)
        except BaseException:
            os.close(self.descriptor)
            raise
        self.pinned = self.given = self.tick = 0
        """Their owner's notes: slots in use by somebody, sessions that have the descriptor, and the last use of any slot."""
        self._view = self._shared.view
        self._generations = self._view[: GENERATION_BYTES * slots].cast("Q")
        self.slots = [Slot(self, index) for index in range(slots)]

    def generation(self, index: int) -> int:
        return self._generations[index]

    def step(self, index: int) -> None:
        """The slot begins to change, or has changed."""
        self._generations[index] += 1

    def pages(self, index: int) -> memoryview:
        begin = self.slots_begin + index * self.slot_bytes
        return self._view[begin : begin + self.slot_bytes]

    def enlarge(self, index: int) -> None:
        """As SharedPages.enlarge, of a slot that is about to be filled. Any thread."""
        begin = self.slots_begin + index * self.slot_bytes
        self._shared.enlarge(begin, begin + self.slot_bytes)

    def close(self) -> None:
        """Give up the memory: it goes when nobody maps it any more."""
        self.slots = []
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        # Where a view of a slot is still about, as of a call that has failed, its end is the mapping's.
        self._generations.release()
        self._view.release()


class Slot:
    """One slot of an extent. `payload`: where what it holds lies in its pages; empty until there is something. `pins`: who
    reads it or reads into it; it is not used again meanwhile. `about`: what its owner notes of it."""

    __slots__ = ("about", "begin", "extent", "index", "length", "pins", "tick")

    def __init__(self, extent: Extent, index: int) -> None:
        self.extent = extent
        self.index = index
        self.begin = self.length = 0
        self.pins = 0
        self.tick = 0
        self.about: object = None

    @property
    def pages(self) -> memoryview:
        return self.extent.pages(self.index)

    def enlarge(self) -> None:
        """As Extent.enlarge."""
        self.extent.enlarge(self.index)

    @property
    def payload(self) -> memoryview:
        return self.pages[self.begin : self.begin + self.length]

    @property
    def offset(self) -> int:
        """Of the payload in the extent."""
        return self.extent.slots_begin + self.index * self.extent.slot_bytes + self.begin

    @property
    def generation(self) -> int:
        return self.extent.generation(self.index)


def why_not_mapped() -> str:
    """Why this system gives no memory that others may map; empty where it does."""
    try:
        Extent(0, domain="", slot_bytes=PAGE, slots=1).close()
    except (OSError, AttributeError) as error:
        return f"no sealed shared memory: {error}"
    return ""
