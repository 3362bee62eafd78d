"""Large blocks beside the raw disk: durable writes, and reads that no cache answers."""

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

from kvstore.bench.blocks import SEGMENT_BYTES, SPARE_SEGMENTS, BlockLog
from kvstore.bench.pairs import Pair, interleaved, spread
from kvstore.bench.raw import RawReads, RawWrites, Threads, device_written_bytes
from kvstore.errors import KvstoreError
from kvstore.profile.layout import slice_ends
from kvstore.profile.registry import get_profile
from kvstore.store import Wanted
from kvstore.store.buffers import aligned
from kvstore.store.format import align, payload_gap, record_span
from kvstore.store.lanes import LANES
from kvstore.types import ItemKind

PROFILE = "deepseek-v4-flash"
COMMIT_BYTES = 32 << 20
KEPT_SEGMENTS = 2
"""While writes are measured."""
APPENDS = 2
"""Commits under way at once: one is made ready while another is written."""
READ_BLOCKS = 16
READ_CALLS = 4
"""Calls under way at once: as many as the service has threads for."""

MEGABYTE = 1e6


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second, payload bytes of the log beside the pages of raw ones; and what the writes cost the device."""

    writes: list[Pair]
    reads: list[Pair]
    device_ratio: float | None
    counted_ratio: float


def measure(
    directory: Path,
    *,
    size: int,
    pairs: int,
    seed: int,
    tell: Callable[[str], None],
    check: Callable[[], None],
) -> Rates:
    """In an empty directory that the caller removes. `size`: payload bytes of one pass. check: called often, where nothing
    is half done; what it raises comes out when all is closed."""
    profile = get_profile(PROFILE)
    block, span = profile.block_bytes, record_span(profile.block_bytes)
    count, commit = size // block, COMMIT_BYTES // block
    with ExitStack() as ends:
        threads = Threads(LANES, check)
        ends.callback(threads.close)
        blocks = BlockLog(
            directory / "log",
            block_bytes=block,
            kept_bytes=KEPT_SEGMENTS * SEGMENT_BYTES,
            budget_bytes=size * 9 // 8 + SPARE_SEGMENTS * SEGMENT_BYTES,
            ends=slice_ends(profile, ItemKind.BLOCK, block),
            seed=seed,
            check=check,
        )
        ends.callback(blocks.log.close)
        tell(f"filling {blocks.budget_bytes >> 20} MiB")
        blocks.fill(commit)
        writer = _Writer(blocks, count, commit)
        ends.callback(writer.close)
        writes = told_pairs(
            "write",
            pairs,
            interleaved(
                pairs,
                ours=writer.write,
                theirs=lambda: _raw_write(blocks, threads, count, commit) * block / span,
            ),
            tell,
        )
        blocks.keep(size + SEGMENT_BYTES, commit)
        held = list(blocks.held)[-count:]
        gap = payload_gap(block)
        raw_reads = RawReads([(blocks.path_of(place), place.offset - gap, span) for _, place in held])
        ends.callback(raw_reads.close)
        order = random.Random(seed).sample(range(count), count)
        wanted = blocks.wanted(held)
        reader = _Reader(blocks, [wanted[number] for number in order])
        ends.callback(reader.close)
        reads = told_pairs(
            "read",
            pairs,
            interleaved(
                pairs,
                ours=reader.read,
                theirs=lambda: (
                    raw_reads.read(threads, order, depth=LANES, held=READ_CALLS * READ_BLOCKS) * block / span
                ),
            ),
            tell,
        )
    device = statistics.median(writer.device) if writer.device else None
    return Rates(writes, reads, device, statistics.median(writer.counted))


def _raw_write(blocks: BlockLog, threads: Threads, count: int, commit: int) -> float:
    """Over the files that the log lets wait, which it uses next: how fast a disk is differs from place to place."""
    blocks.let_go()
    pages = [slot.pages for slot in blocks.slots]
    raw = RawWrites(blocks.spares(), pages=pages, file_bytes=SEGMENT_BYTES)
    try:
        return raw.write(threads, count, sync_slots=commit)
    finally:
        raw.close()


def report(rates: Rates, *, size: int, seed: int) -> dict[str, Any]:
    device = rates.counted_ratio if rates.device_ratio is None else rates.device_ratio
    return {
        "write": ratio_of(rates.writes),
        "read": ratio_of(rates.reads),
        "device_bytes_per_payload_byte": device,
        "detail": {
            "unit": "MB/s of payload",
            "size_bytes": size,
            "seed": seed,
            "pairs": len(rates.writes),
            "block_bytes": get_profile(PROFILE).block_bytes,
            "commit_bytes": COMMIT_BYTES,
            "threads": LANES,
            "read_blocks_per_call": READ_BLOCKS,
            "read_calls_at_once": READ_CALLS,
            "read_memory_blocks": READ_CALLS * READ_BLOCKS,
            "device_bytes_from": "the log's own count" if rates.device_ratio is None else "the block device",
            "device_bytes_counted_by_log_per_payload_byte": rates.counted_ratio,
            "write_pairs": [pair_of(pair) for pair in rates.writes],
            "read_pairs": [pair_of(pair) for pair in rates.reads],
        },
    }


class _Writer:
    def __init__(self, blocks: BlockLog, count: int, commit: int) -> None:
        self._blocks = blocks
        self._count = count
        self._commit = commit
        self._threads = ThreadPoolExecutor(APPENDS)
        self.device: list[float] = []
        self.counted: list[float] = []

    def write(self) -> float:
        """One pass; payload bytes per second."""
        payload = self._count * self._blocks.block_bytes
        before, counted = device_written_bytes(self._blocks.directory), self._blocks.written_bytes()
        made = [
            self._blocks.make(min(self._commit, self._count - first))
            for first in range(0, self._count, self._commit)
        ]
        begin = time.perf_counter()
        for _ in self._threads.map(self._blocks.append_made, made):
            pass
        seconds = time.perf_counter() - begin
        after = device_written_bytes(self._blocks.directory)
        if before is not None and after is not None:
            self.device.append((after - before) / payload)
        self.counted.append((self._blocks.written_bytes() - counted) / payload)
        return payload / seconds

    def close(self) -> None:
        self._threads.shutdown()


class _Reader:
    def __init__(self, blocks: BlockLog, wanted: list[Wanted]) -> None:
        self._blocks = blocks
        self._calls = [wanted[at : at + READ_BLOCKS] for at in range(0, len(wanted), READ_BLOCKS)]
        self._threads = ThreadPoolExecutor(READ_CALLS)
        self._rooms = [
            aligned(READ_BLOCKS * align(record_span(blocks.block_bytes), 4096)) for _ in range(READ_CALLS)
        ]

    def read(self) -> float:
        """All blocks; payload bytes per second."""
        queue = iter(self._calls)
        begin = time.perf_counter()
        total = sum(self._threads.map(partial(self._take, queue), self._rooms))
        return total / (time.perf_counter() - begin)

    def _take(self, queue: Iterator[list[Wanted]], room: memoryview) -> int:
        total = 0
        for wanted in queue:
            self._blocks.check()
            for payload in self._blocks.log.read(wanted, room):
                if payload is None:
                    raise KvstoreError(
                        "a block that was written is not there; the disk lost it, or the log is wrong"
                    )
                total += memoryview(payload).nbytes
        return total

    def close(self) -> None:
        self._threads.shutdown()


def told_pairs(what: str, count: int, pairs: Iterator[Pair], tell: Callable[[str], None]) -> list[Pair]:
    found = []
    for pair in pairs:
        found.append(pair)
        tell(
            f"{what} {len(found)} of {count}: {pair.ours / MEGABYTE:,.0f} MB/s, raw {pair.theirs / MEGABYTE:,.0f}, "
            f"ratio {pair.ratio:.3f}"
        )
    return found


def ratio_of(pairs: list[Pair]) -> dict[str, Any]:
    found = spread([pair.ratio for pair in pairs])
    return {
        "ratio": found.median,
        "interval": [found.low, found.high],
        "raw": statistics.median(pair.theirs for pair in pairs) / MEGABYTE,
    }


def pair_of(pair: Pair) -> dict[str, float]:
    return {"engine": pair.ours / MEGABYTE, "raw": pair.theirs / MEGABYTE, "ratio": pair.ratio}
