"""Small blocks in batches: how many become durable, and how many are read and verified, in a second."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvstore.bench.blocks import SEGMENT_BYTES, BlockLog
from kvstore.bench.pairs import spread
from kvstore.bench.raw import device_written_bytes
from kvstore.errors import KvstoreError
from kvstore.store import Wanted
from kvstore.store.buffers import aligned

BLOCK_BYTES = 4096
BATCH_BLOCKS = 64
BATCHES_IN_FLIGHT = 8
"""The service gathers what is waiting into one append, and acknowledges all of it after one sync."""
READ_CALLS = 4
"""Calls under way at once: as many as the service has threads for."""

WRITTEN_BAR = 20_000
READ_BAR = 50_000
DEVICE_BAR = 1.5


@dataclass(frozen=True, slots=True)
class Passes:
    """Blocks per second of each pass, and bytes that each payload byte cost the device."""

    written: list[float]
    read: list[float]
    device_ratio: float | None
    counted_ratio: float


def measure(
    directory: Path,
    *,
    blocks: int,
    passes: int,
    seed: int,
    tell: Callable[[str], None],
    check: Callable[[], None],
) -> Passes:
    """`passes` times so many blocks, in an empty directory that the caller removes. check: called often, where nothing is
    half done; what it raises comes out when all is closed."""
    append = BATCH_BLOCKS * BATCHES_IN_FLIGHT
    appends = max(1, blocks // append)
    written, read, device, counted = [], [], [], []
    with ExitStack() as ends:
        kept = appends * append * BLOCK_BYTES
        log = BlockLog(
            directory / "log",
            block_bytes=BLOCK_BYTES,
            kept_bytes=kept + SEGMENT_BYTES,
            seed=seed,
            check=check,
        )
        ends.callback(log.log.close)
        threads = ends.enter_context(ThreadPoolExecutor(READ_CALLS))
        tell(f"filling {log.budget_bytes >> 20} MiB")
        log.fill(append)
        order = random.Random(seed)
        for number in range(passes):
            device_before, counted_before = device_written_bytes(directory), log.written_bytes()
            begin = time.perf_counter()
            for _ in range(appends):
                log.append(append)
            written.append(appends * append / (time.perf_counter() - begin))
            device_after = device_written_bytes(directory)
            if device_before is not None and device_after is not None:
                device.append((device_after - device_before) / kept)
            counted.append((log.written_bytes() - counted_before) / kept)
            wanted = log.wanted(list(log.held)[-appends * append :])
            calls = [wanted[at : at + BATCH_BLOCKS] for at in range(0, len(wanted), BATCH_BLOCKS)]
            order.shuffle(calls)
            queue = iter(calls)
            begin = time.perf_counter()
            rooms = [aligned(log.log.room_for(calls[0]) * 2) for _ in range(READ_CALLS)]
            total = sum(threads.map(partial(_take, log, queue), rooms))
            read.append(total / (time.perf_counter() - begin))
            tell(f"pass {number + 1} of {passes}: {written[-1]:,.0f} written/s, {read[-1]:,.0f} read/s")
    return Passes(written, read, statistics.median(device) if device else None, statistics.median(counted))


def _take(log: BlockLog, queue: Iterator[list[Wanted]], room: memoryview) -> int:
    total = 0
    for wanted in queue:
        log.check()
        for payload in log.log.read(wanted, room):
            if payload is None:
                raise KvstoreError(
                    "a block that was written is not there; the disk lost it, or the log is wrong"
                )
            total += 1
    return total


def report(found: Passes, *, blocks: int, seed: int) -> dict[str, Any]:
    """missed: the bars that the medians do not reach."""
    device = found.counted_ratio if found.device_ratio is None else found.device_ratio
    written, read = _rate(found.written), _rate(found.read)
    is_missed = {
        "written_per_second": written["median"] < WRITTEN_BAR,
        "read_per_second": read["median"] < READ_BAR,
        "device_bytes_per_payload_byte": device > DEVICE_BAR,
    }
    return {
        "written_per_second": written,
        "read_per_second": read,
        "device_bytes_per_payload_byte": device,
        "missed": [name for name, missed in is_missed.items() if missed],
        "bars": {
            "written_per_second": WRITTEN_BAR,
            "read_per_second": READ_BAR,
            "device_bytes_per_payload_byte": DEVICE_BAR,
        },
        "detail": {
            "block_bytes": BLOCK_BYTES,
            "blocks_per_pass": blocks,
            "passes": len(found.written),
            "seed": seed,
            "blocks_per_batch": BATCH_BLOCKS,
            "batches_per_append": BATCHES_IN_FLIGHT,
            "read_calls_at_once": READ_CALLS,
            "device_bytes_from": "the log's own count" if found.device_ratio is None else "the block device",
            "device_bytes_counted_by_log_per_payload_byte": found.counted_ratio,
            "written": found.written,
            "read": found.read,
        },
    }


def _rate(values: list[float]) -> dict[str, Any]:
    found = spread(values)
    return {"median": found.median, "interval": [found.low, found.high]}
