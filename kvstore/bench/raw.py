"""What the disk does without a store: the same pages, unbuffered, from as many threads as a log has."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from itertools import cycle
from pathlib import Path

from kvstore.errors import KvstoreError
from kvstore.store.buffers import aligned
from kvstore.store.device import PROBE_NAME, why_not_direct

SECTOR_BYTES = 512
_FIELD_SECTORS_WRITTEN = 6


class Threads:
    """`count` threads that share out pieces of work. check: called before each piece; it may raise."""

    def __init__(self, count: int, check: Callable[[], None] = lambda: None) -> None:
        self._pool = ThreadPoolExecutor(count)
        self._count = count
        self.check = check

    def run(self, work: Sequence[Callable[[], None]]) -> None:
        """Do all of it; raises what failed, when nobody works any more."""
        queue = iter(work)
        shares = [self._pool.submit(self._run_all, queue) for _ in range(self._count)]
        wait(shares)
        for share in shares:
            share.result()

    def _run_all(self, queue: Iterator[Callable[[], None]]) -> None:
        for piece in queue:
            self.check()
            piece()

    def close(self) -> None:
        self._pool.shutdown()


class RawWrites:
    """Writes of whole `pages`, all of one length, over files of `file_bytes` that are there already. Unbuffered."""

    def __init__(self, paths: Sequence[Path], *, pages: Sequence[memoryview], file_bytes: int) -> None:
        if not paths:
            raise KvstoreError("there is no file to compare with; this is an error in the bench")
        reason = why_not_direct(paths[0].with_name(PROBE_NAME))
        if reason:
            raise KvstoreError(
                f"there is no raw rate to compare with in {paths[0].parent}: {reason}; use another --dir"
            )
        self.slot_bytes = len(pages[0])
        self._slots = file_bytes // self.slot_bytes
        self._pages = pages
        self._files = [os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT) for path in paths]

    def write(self, threads: Threads, count: int, *, sync_slots: int) -> float:
        """So many slots, file after file and round again, with an fdatasync for each `sync_slots`. Bytes per second."""
        begin = time.perf_counter()
        for first in range(0, count, sync_slots):
            slots = range(first, min(first + sync_slots, count))
            threads.run([partial(self._put, slot) for slot in slots])
            for file in {self._file(slots[0]), self._file(slots[-1])}:
                os.fdatasync(file)
        return count * self.slot_bytes / (time.perf_counter() - begin)

    def _file(self, slot: int) -> int:
        return self._files[slot // self._slots % len(self._files)]

    def _put(self, slot: int) -> None:
        page = self._pages[slot % len(self._pages)]
        written = os.pwrite(self._file(slot), page, slot % self._slots * self.slot_bytes)
        if written != self.slot_bytes:
            raise KvstoreError(f"a raw write of {self.slot_bytes} bytes wrote {written}")

    def close(self) -> None:
        for file in self._files:
            os.close(file)


class RawReads:
    """Reads of pages that another wrote: (file, offset, length) each, unbuffered, into memory that is used again."""

    def __init__(self, extents: Sequence[tuple[Path, int, int]]) -> None:
        self._files = {
            path: os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
            for path in {path for path, _, _ in extents}
        }
        self._extents = [(self._files[path], offset, length) for path, offset, length in extents]
        # One piece, as a store's rooms are: the kernel backs it with large pages, and unbuffered reads are the faster for it.
        self._memory = aligned(1)
        self.total_bytes = sum(length for _, _, length in extents)

    def read(self, threads: Threads, order: Sequence[int], *, depth: int, held: int) -> float:
        """All of them, in `order`, `depth` at a time, into memory for `held` of them, a multiple of `depth`, in turns: a
        processor's cache favours who overwrites what it has just read. Bytes per second."""
        queue = iter(order)
        size = max(length for _, _, length in self._extents)
        if len(self._memory) < held * size:
            self._memory = aligned(held * size)
        rooms = [self._memory[at : at + size] for at in range(0, held * size, size)]
        begin = time.perf_counter()
        threads.run(
            [partial(self._take, queue, rooms[first::depth], threads.check) for first in range(depth)]
        )
        return self.total_bytes / (time.perf_counter() - begin)

    def _take(self, queue: Iterator[int], rooms: Sequence[memoryview], check: Callable[[], None]) -> None:
        for number, room in zip(queue, cycle(rooms), strict=False):
            check()
            descriptor, offset, length = self._extents[number]
            read = os.preadv(descriptor, [room[:length]], offset)
            if read != length:
                raise KvstoreError(f"a raw read of {length} bytes at {offset} read {read}")

    def close(self) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)


def device_written_bytes(directory: Path) -> int | None:
    """Bytes that the block device below `directory` was given to write since it came up, by everyone; None where the file
    system has no block device of its own."""
    device = directory.stat().st_dev
    stat = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat")
    try:
        fields = stat.read_text(encoding="ascii").split()
    except OSError:
        return None
    return int(fields[_FIELD_SECTORS_WRITTEN]) * SECTOR_BYTES
