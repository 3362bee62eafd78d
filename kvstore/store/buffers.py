"""Page-aligned memory for unbuffered reads and writes, and its reuse."""

from __future__ import annotations

import mmap
from collections import Counter
from contextlib import suppress

from kvstore.store.format import LARGE_PAYLOAD_BYTES, PAGE, align, payload_gap, record_span

_HUGE_BYTES = 2 << 20
_ARENA_BYTES = 8 << 20


def aligned(length: int) -> memoryview:
    """Fresh memory of at least `length` bytes, whole pages, at a page boundary."""
    size = max(PAGE, align(length, PAGE))
    if size < _HUGE_BYTES:
        return memoryview(mmap.mmap(-1, size))
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # The device is told of each piece of memory that lies together: small pages, wherever they happen to lie, made the same
    # reads slower by up to a half. Where there are no huge pages, all is as it was.
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def carved(size: int, count: int) -> list[memoryview]:
    """`count` pieces of `size` bytes, whole pages, out of one piece of fresh memory."""
    arena = aligned(size * count)
    return [arena[at : at + size] for at in range(0, size * count, size)]


class BufferPool:
    """Buffers of one size, lent one by one; `keep` of them are used again, those beyond are for once."""

    def __init__(self, buffer_bytes: int, *, keep: int) -> None:
        self.buffer_bytes = align(buffer_bytes, PAGE)
        self._keep = keep
        self._idle: list[memoryview] | None = None

    def take(self) -> memoryview:
        """A buffer; what it holds is left from earlier loans. One that is never given back is only garbage."""
        if self._idle is None:
            self._idle = carved(self.buffer_bytes, self._keep)
        try:
            return self._idle.pop()
        except IndexError:
            return aligned(self.buffer_bytes)

    def give_back(self, buffer: memoryview) -> None:
        """Nobody looks at it or writes to it any more."""
        idle = self._idle
        if idle is not None and len(idle) < self._keep:
            idle.append(buffer)


class Slot:
    """Memory in the shape of a large record: room for its head, the payload, zeros to the end of the last page. What was
    put together here is written as it lies, without a copy. `payload` may be written to until the slot is handed on."""

    __slots__ = ("pages", "payload")

    def __init__(self, length: int, pages: memoryview | None = None) -> None:
        assert length >= LARGE_PAYLOAD_BYTES, "small records share pages with others"
        span = record_span(length)
        self.pages = aligned(span)[:span] if pages is None else pages
        assert len(self.pages) == span
        gap = payload_gap(length)
        self.payload = self.pages[gap : gap + length]

    def finish(self, head: bytes) -> memoryview:
        """All pages, once the payload is there."""
        self.pages[: len(head)] = head
        tail = self.pages[len(head) + len(self.payload) :]
        tail[:] = bytes(len(tail))
        return self.pages


class SlotPool:
    """Slots that are used again. It keeps up to `keep_bytes` of idle ones: fresh memory costs as much as filling it."""

    def __init__(self, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        self._idle_bytes = 0
        self._idle: dict[int, list[memoryview]] = {}
        self._asked: Counter[int] = Counter()

    def take(self, length: int) -> Slot:
        """A slot for a payload of `length` bytes. What it holds is left from earlier ones."""
        span = record_span(length)
        idle = self._idle.get(span)
        if not idle:
            count = self._carve_at_once(span)
            if count < 2:
                return Slot(length)
            idle = self._idle[span] = carved(span, count)
            self._idle_bytes += span * count
        self._idle_bytes -= span
        return Slot(length, idle.pop())

    def give_back(self, slot: Slot) -> None:
        """Nobody looks at it or writes to it any more."""
        span = len(slot.pages)
        if self._idle_bytes + span > self._keep_bytes:
            # Sizes that are asked for no more must not keep out those that are.
            self._idle.clear()
            self._asked.clear()
            self._idle_bytes = 0
        self._idle.setdefault(span, []).append(slot.pages)
        self._idle_bytes += span

    def _carve_at_once(self, span: int) -> int:
        """Several at once lie in large pages; but all of them stay while one is held, so that only sizes that are asked for
        again and again are carved."""
        self._asked[span] += 1
        count = _ARENA_BYTES // span
        fits = self._idle_bytes + span * count <= self._keep_bytes
        return count if fits and self._asked[span] > count else 1
