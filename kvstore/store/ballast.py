"""A file that holds room for the moment when the file system has none: it goes, and what must be written fits."""

from __future__ import annotations

import threading
from contextlib import suppress

from kvstore.errors import DeviceError, NoSpace
from kvstore.store.format import PAGE
from kvstore.store.spares import drop_spare
from kvstore.store.state import OpenedStore

BALLAST_NAME = "ballast"
BALLAST_BYTES_MAX = 64 << 20
BUDGET_BYTES_MIN = 1 << 30
"""Below, a ballast of use would be too large a part of the budget."""

BUDGET_PARTS = 64
FREE_FACTOR = 4
"""It is made again when the file system has this many times its size, or it would be the one that fills it."""

AGAIN_SECONDS = 1.0
AGAIN_AFTER_RELEASE_SECONDS = 30.0


def ballast_bytes_for(budget_bytes: int) -> int:
    """How large the ballast of such a budget is; 0: none."""
    if budget_bytes < BUDGET_BYTES_MIN:
        return 0
    return min(BALLAST_BYTES_MAX, budget_bytes // BUDGET_PARTS // PAGE * PAGE)


class Ballast:
    """`release` from any thread, `restore` in the log's turn. What it takes is part of `other` in the space's books."""

    def __init__(self, store: OpenedStore, *, size_bytes: int) -> None:
        self._store = store
        self._size = size_bytes
        self._lock = threading.Lock()
        self._is_there = store.device.allocated(BALLAST_NAME) > 0
        self._try_at = 0.0

    def is_wanted(self) -> bool:
        """Whether `restore` has something to try now."""
        return self._is_there != (self._size > 0) and self._store.clock.monotonic() >= self._try_at

    def release(self) -> bool:
        """Give it back to the file system; False when there is none, or even its removal failed."""
        with self._lock:
            if not self._is_there:
                return False
            self._try_at = self._store.clock.monotonic() + AGAIN_AFTER_RELEASE_SECONDS
            return self._remove()

    def restore(self) -> None:
        """Make it again where budget and file system have room, a spare's if need be. Nothing happens otherwise, and a
        failure is tried again later."""
        with self._lock:
            if not self.is_wanted():
                return
            self._try_at = self._store.clock.monotonic() + AGAIN_SECONDS
            if not self._size:
                self._remove()
            elif self._has_room():
                self._make()
        self._store.disk.refresh()

    def _has_room(self) -> bool:
        disk = self._store.disk
        disk.refresh()
        if disk.free_bytes(given_back=0, cleaning=False) < self._size:
            return False
        while disk.free_bytes(given_back=0, cleaning=False) - disk.spare_bytes() < self._size:
            if not drop_spare(self._store):
                return False
        return self._store.device.free_bytes() >= FREE_FACTOR * self._size

    def _make(self) -> None:
        device = self._store.device
        try:
            file = device.create(BALLAST_NAME)
            try:
                file.allocate(self._size)
            finally:
                file.close()
            self._is_there = True
        except (DeviceError, NoSpace):
            self._try_at += AGAIN_AFTER_RELEASE_SECONDS
            with suppress(
                DeviceError, NoSpace
            ):  # the next attempt finds the name taken, and the next start the file
                device.unlink(BALLAST_NAME)

    def _remove(self) -> bool:
        try:
            self._store.device.unlink(BALLAST_NAME)
        except (DeviceError, NoSpace):
            return False
        self._is_there = False
        return True
