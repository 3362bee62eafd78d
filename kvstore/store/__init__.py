"""The block tier on SSD: `open_log` opens a directory, `open_memory` keeps the same promises in RAM."""

from __future__ import annotations

import os
from pathlib import Path

from kvstore.clock import Clock
from kvstore.store.aio import KernelLanes
from kvstore.store.base import Found, Place, Record, RecordKind, RecordLog, Recovery, Space, Wanted
from kvstore.store.catalog import Catalog, LmdbCatalog, RamCatalog
from kvstore.store.device import Device, PosixDevice
from kvstore.store.identity import Randomness
from kvstore.store.lanes import InlineLanes, Lanes
from kvstore.store.loading import Progress
from kvstore.store.log import SegmentLog
from kvstore.store.recovery import open_store
from kvstore.store.space import segment_bytes_for

__all__ = [
    "Found",
    "Place",
    "Record",
    "RecordKind",
    "RecordLog",
    "Recovery",
    "Space",
    "Wanted",
    "open_log",
]


def open_log(
    directory: str | os.PathLike[str],
    *,
    budget_bytes: int,
    segment_bytes: int | None = None,
    clock: Clock,
    device: Device | None = None,
    catalog: Catalog | None = None,
    randomness: Randomness = os.urandom,
    lanes: Lanes | None = None,
    progress: Progress = lambda phase, done, total: None,
) -> tuple[RecordLog, Recovery]:
    """Open, or begin, the store in `directory`, and tell what it holds.

    segment_bytes: of new segments, a multiple of 4,096 from 1 MiB; by default a sixteenth of the budget, at most
    256 MiB. device: a double of the directory for simulations; `directory` is then not touched and the catalogue is
    in RAM unless given. randomness: n -> n random bytes, for the store's uuid and the segments' salts. lanes: where
    reads and writes run; threads of its own, or in simulations the caller's. The log closes them.
    progress: told how far a start is, now and then.

    Raises ConfigError (sizes), DirectoryInUse, StoreDamaged or FormatTooNew (nothing is touched), DeviceError or
    NoSpace when the device fails the start (nothing is erased; try again when it is well).
    """
    size = segment_bytes_for(budget_bytes, segment_bytes)
    if device is None:
        device = PosixDevice(directory)
        catalog = catalog or LmdbCatalog(Path(directory))
        lanes = lanes or KernelLanes()
    lanes = lanes or InlineLanes()
    try:
        store, recovery = open_store(
            device,
            catalog or RamCatalog(),
            budget_bytes=budget_bytes,
            segment_bytes=size,
            clock=clock,
            randomness=randomness,
            lanes=lanes,
            progress=progress,
        )
    except BaseException:
        lanes.close()
        raise
    log = SegmentLog(store)
    try:
        log.renew_descriptions(recovery.records)
    except BaseException:
        log.close()
        raise
    return log, recovery
