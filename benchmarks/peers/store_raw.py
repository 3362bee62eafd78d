"""The disk without a store: one large file, whole pages, unbuffered, an fdatasync for every 32 MiB. What there is to reach.

As many transfers at once as kvstore's log has. Copies: none but the disk's own.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from benchmarks.peers.base import Peer, PeerFailed, Place, Prompt

LANES = 16
SYNC_BYTES = 32 << 20
PAGES_BYTES = 450_560
"""A block of 449,824 bytes in whole pages."""


class Store(Peer):
    block_bytes = PAGES_BYTES

    def __init__(self, place: Place, *, threads: int) -> None:
        super().__init__(place)
        if threads != 1:
            raise ValueError(f"threads: {threads}; it has {LANES} of its own, and one that waits for them")
        self._file = -1
        self._lanes: ThreadPoolExecutor | None = None
        self._at: dict[int, int] = {}
        self._end = 0
        self._unsynced = 0
        self._lock = threading.Lock()

    def start(self) -> None:
        self._lanes = ThreadPoolExecutor(LANES)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_DIRECT
        try:
            self._file = os.open(self.place.directory / "raw", flags, 0o600)
        except OSError as error:
            raise PeerFailed(
                f"no unbuffered files in {self.place.directory.parent}: {error.strerror}"
            ) from error
        os.posix_fallocate(self._file, 0, self.place.set_bytes + (64 << 20))

    def stop(self) -> None:
        if self._lanes is not None:
            self._lanes.shutdown()
        if self._file >= 0:
            os.close(self._file)
        self._file, self._lanes = -1, None

    def put(self, prompt: Prompt, payloads: Sequence[memoryview]) -> None:
        first = self._end
        self._at[prompt.number] = first
        self._end += sum(len(payload) for payload in payloads)
        self._each(self._write, payloads, first)
        self._unsynced += self._end - first
        if self._unsynced >= SYNC_BYTES:
            self.settle()

    def get(
        self, prompt: Prompt, rooms: Sequence[memoryview], got: Callable[[int], None], *, verify: bool
    ) -> None:
        self._each(self._read, rooms, self._at[prompt.number])
        for number in range(len(rooms)):
            got(number)

    def settle(self) -> None:
        os.fdatasync(self._file)
        self._unsynced = 0

    def forget(self) -> None:
        self._end = 0

    def _each(
        self, transfer: Callable[[memoryview, int], None], pages: Sequence[memoryview], first: int
    ) -> None:
        assert self._lanes is not None, "start comes first"
        offsets = [first + number * self.block_bytes for number in range(len(pages))]
        for _ in self._lanes.map(transfer, pages, offsets):
            pass

    def _write(self, page: memoryview, offset: int) -> None:
        if (written := os.pwrite(self._file, page, offset)) != len(page):
            raise PeerFailed(f"a raw write of {len(page)} bytes wrote {written}")

    def _read(self, page: memoryview, offset: int) -> None:
        if (read := os.preadv(self._file, [page], offset)) != len(page):
            raise PeerFailed(f"a raw read of {len(page)} bytes read {read}")


assert PAGES_BYTES % mmap.PAGESIZE == 0
