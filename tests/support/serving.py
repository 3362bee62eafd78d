"""A service in the test's own event loop: its clock and its device are the test's."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kvstore.clock import SystemClock
from kvstore.config import ServiceConfig
from kvstore.errors import KvstoreError
from kvstore.service.server import run_service
from kvstore.store.device import Device, DeviceFile, PosixDevice
from kvstore.types import BytesLike
from tests.support.service import SMALL


class SetClock(SystemClock):
    """`offset` seconds are by how much the wall clock is wrong; `ahead`, by how much more time has passed than has."""

    offset = 0.0
    ahead = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead

    def wall(self) -> float:
        return super().wall() + self.offset


class HeldDevice(PosixDevice):
    """Reads of bulk files that callers wait for stand still while it is held; writes and the writer's own reads go on."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._going = threading.Event()
        self._going.set()
        self.standing = 0
        """Reads that have been held up so far."""

    @property
    def is_held(self) -> bool:
        return not self._going.is_set()

    def hold(self) -> None:
        self._going.clear()

    def let_go(self) -> None:
        self._going.set()

    def pass_by(self) -> None:
        if threading.current_thread().name.startswith("kvstore-reader") and self.is_held:
            self.standing += 1
            assert self._going.wait(60), "nobody let the device go"

    def create(self, name: str, *, bulk: bool = False) -> DeviceFile:
        made = super().create(name, bulk=bulk)
        return _HeldFile(made, self) if bulk else made

    def open(self, name: str, *, bulk: bool = False) -> DeviceFile | None:
        found = super().open(name, bulk=bulk)
        return _HeldFile(found, self) if bulk and found is not None else found


class _HeldFile:
    def __init__(self, file: DeviceFile, device: HeldDevice) -> None:
        self._file = file
        self._device = device

    def read_into(self, offset: int, target: memoryview) -> int:
        self._device.pass_by()
        return self._file.read_into(offset, target)

    def pread(self, offset: int, length: int) -> bytes:
        self._device.pass_by()
        return self._file.pread(offset, length)

    def pwritev(self, offset: int, parts: Sequence[BytesLike]) -> int:
        return self._file.pwritev(offset, parts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class SyncHeldDevice(PosixDevice):
    """Syncs of bulk files stand still while it is held; `error`, where one is set, is how they end then."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._going = threading.Event()
        self._going.set()
        self.error: KvstoreError | None = None

    def hold(self) -> None:
        self._going.clear()

    def let_go(self, error: KvstoreError | None = None) -> None:
        self.error = error
        self._going.set()

    def end_sync(self) -> None:
        assert self._going.wait(60), "nobody let the device go"
        if self.error is not None:
            raise self.error

    def create(self, name: str, *, bulk: bool = False) -> DeviceFile:
        made = super().create(name, bulk=bulk)
        return _SyncHeldFile(made, self) if bulk else made

    def open(self, name: str, *, bulk: bool = False) -> DeviceFile | None:
        found = super().open(name, bulk=bulk)
        return _SyncHeldFile(found, self) if bulk and found is not None else found


class _SyncHeldFile:
    def __init__(self, file: DeviceFile, device: SyncHeldDevice) -> None:
        self._file = file
        self._device = device

    def sync(self) -> None:
        self._file.sync()
        self._device.end_sync()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@asynccontextmanager
async def serving(
    directory: Path, *, clock: SystemClock | None = None, device: Device | None = None, **options: Any
) -> AsyncIterator[None]:
    """A ready service inside; it is told to stop by a signal to this process. Options are those of ServiceConfig over SMALL."""
    ready = asyncio.Event()
    config = ServiceConfig(**{**SMALL, **options, "dir": str(directory)})
    service = asyncio.create_task(run_service(config, clock=clock, device=device, ready=ready.set))
    started = asyncio.create_task(ready.wait())
    await asyncio.wait({service, started}, timeout=20, return_when=asyncio.FIRST_COMPLETED)
    assert ready.is_set()
    try:
        yield
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(service, 20)
