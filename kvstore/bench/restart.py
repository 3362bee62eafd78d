"""How long a start takes, by what it has to go on: a whole catalogue, footers only, records only.

Every start is measured in a process of its own, so that its memory is its own, with files that no cache holds.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from kvstore.clock import SystemClock
from kvstore.core import Core, describe
from kvstore.errors import InvalidArgument, KvstoreError
from kvstore.pool import StatePool
from kvstore.prefix import NamespaceIdentity
from kvstore.profile.base import Profile
from kvstore.profile.registry import get_profile
from kvstore.service.process import give_back_freed_memory
from kvstore.store import Record, RecordKind, open_log
from kvstore.store.catalog import LmdbCatalog
from kvstore.store.format import TRAILER_BYTES, Verdict, decode_trailer
from kvstore.types import BlockKey, Checks, Lineage, NamespaceDigest

T = TypeVar("T")

BLOCK_BYTES = 4096
CHAIN_BLOCKS = 256
"""A chain is so long; every second one branches off the one before it half-way."""
BATCH_BLOCKS = 1024
SEGMENT_BYTES = 256 << 20
BYTES_PER_BLOCK_MAX = 5120
"""What a block takes with header, footer and catalogue rows, rounded up generously: for the budget."""
BUILD_SECONDS_PER_BLOCK = 1e-3
START_SECONDS_MAX = 900.0
"""No step takes longer, or the bench ends with an error."""
CHECK_SECONDS = 0.1

BARS = {"killed": 2.0, "clean": 2.0, "catalogue lost": 10.0, "footers lost": 60.0}
"""Seconds that a start with a million blocks may take."""
BAR_BLOCKS = 1_000_000


@dataclass(frozen=True, slots=True)
class Start:
    """One start. Seconds; `peak_bytes` above what the process took before it, `kept_bytes` when all was loaded."""

    what: str
    blocks: int
    seconds: float
    open_seconds: float
    load_seconds: float
    peak_bytes_per_block: float
    kept_bytes_per_block: float
    index_bytes_per_block: float
    rebuilt: bool

    @property
    def within_bar(self) -> bool | None:
        """None: there is no bar for so many blocks."""
        return self.seconds < BARS[self.what] if self.blocks == BAR_BLOCKS else None


def bench_profile() -> Profile:
    """A small geometry whose blocks have exactly BLOCK_BYTES."""
    tiny = get_profile("tiny")
    profile = replace(
        tiny, name="bench-4k", layers=(*tiny.layers[:3], *3 * tiny.layers[3:4], *tiny.layers[3:])
    )
    assert profile.block_bytes == BLOCK_BYTES
    return profile


def measure(
    directory: Path,
    blocks: int,
    *,
    seed: int,
    tell: Callable[[str], None],
    check: Callable[[], None],
) -> list[Start]:
    """Build a store of so many blocks below `directory` and start it in every way. tell: what happens now. check: called
    while a step is waited for; when it raises, the step's process is gone first.

    Raises InvalidArgument for a directory that holds something, KvstoreError when a step fails or takes too long.
    """
    if directory.exists() and any(directory.iterdir()):
        raise InvalidArgument(
            "the bench fills a directory of its own", field="--dir", value=directory, allowed="an empty one"
        )
    tell(f"writing {blocks:,} blocks of {BLOCK_BYTES} bytes (seed {seed})")
    build(directory, blocks, seed=seed, check=check)
    starts = []
    for what, prepare in (
        ("killed", _nothing),
        ("clean", _nothing),
        ("catalogue lost", _lose_catalogue),
        ("footers lost", _lose_footers),
    ):
        prepare(directory)
        _forget_cached(directory, check)
        start = _in_process(
            _start, str(directory), what, budget_for(blocks), seconds=START_SECONDS_MAX, check=check
        )
        if start.blocks != blocks:
            raise KvstoreError(
                f"{what}: {start.blocks:,} of {blocks:,} blocks were found again (seed {seed})"
            )
        tell(f"{what}: {start.seconds:.2f} s")
        starts.append(start)
    return starts


def build(directory: Path, blocks: int, *, seed: int, check: Callable[[], None]) -> None:
    """Write a store of so many blocks, as a service leaves it that is killed. check: as `measure`."""
    limit = 60 + blocks * BUILD_SECONDS_PER_BLOCK
    _in_process(_build, str(directory), blocks, seed, seconds=limit, check=check)


def extrapolate(starts: Sequence[Start], blocks: int) -> dict[str, dict[str, float]]:
    """Seconds and peak bytes of a start with so many blocks, by the straight line through the smallest and the largest
    measured; nothing when only one size was."""
    answer = {}
    for what in BARS:
        own = sorted((start for start in starts if start.what == what), key=lambda start: start.blocks)
        if len(own) < 2 or own[0].blocks == own[-1].blocks:
            continue
        small, large = own[0], own[-1]
        share = (blocks - small.blocks) / (large.blocks - small.blocks)
        peaks = [start.peak_bytes_per_block * start.blocks for start in (small, large)]
        answer[what] = {
            "seconds": small.seconds + share * (large.seconds - small.seconds),
            "peak_bytes": peaks[0] + share * (peaks[1] - peaks[0]),
        }
    return answer


def report(starts: Sequence[Start], *, seed: int, extrapolated_blocks: int) -> dict[str, Any]:
    return {
        "block_bytes": BLOCK_BYTES,
        "seed": seed,
        "bars_seconds_per_1000000_blocks": BARS,
        "starts": [asdict(start) | {"within_bar": start.within_bar} for start in starts],
        "extrapolated": {"blocks": extrapolated_blocks, "starts": extrapolate(starts, extrapolated_blocks)},
    }


def budget_for(blocks: int) -> int:
    return 8 * SEGMENT_BYTES + blocks * BYTES_PER_BLOCK_MAX


# ---- steps, each in a process of its own ---------------------------------------------------------------------------


def _build(directory: str, blocks: int, seed: int) -> None:
    """Write, and leave the last segment open."""
    rng = random.Random(seed)
    identity = NamespaceIdentity(bench_profile(), weights_revision="bench", numerics="bench")
    log, _ = open_log(
        directory, budget_bytes=budget_for(blocks), segment_bytes=SEGMENT_BYTES, clock=SystemClock()
    )
    digest, step, payload = identity.digest(), identity.profile.block_tokens, rng.randbytes(BLOCK_BYTES)
    description = describe(identity, "bench", "endpoints")
    log.append(
        [_record(RecordKind.NAMESPACE, digest, digest, parent=bytes(32), position=0, payload=description)]
    )
    batch: list[Record] = []
    chain: list[bytes] = []
    for number in range(blocks):
        if number % CHAIN_BLOCKS == 0:
            chain = chain[: CHAIN_BLOCKS // 2] if number // CHAIN_BLOCKS % 2 else []
        key, parent = rng.randbytes(32), chain[-1] if chain else digest
        chain.append(key)
        position = len(chain) * step
        batch.append(
            _record(RecordKind.BLOCK, digest, key, parent=parent, position=position, payload=payload)
        )
        if len(batch) == BATCH_BLOCKS:
            log.append(batch)
            batch = []
    log.append(batch)
    # Without a close: whoever made this process kills it now.


def _record(
    kind: RecordKind, namespace: NamespaceDigest, key: bytes, *, parent: bytes, position: int, payload: bytes
) -> Record:
    return Record(
        kind,
        namespace,
        BlockKey(key),
        BlockKey(parent),
        position,
        Lineage.EXACT,
        payload,
        Checks(zlib.crc32(payload)),
    )


def _start(directory: str, what: str, budget_bytes: int) -> Start:
    clock = SystemClock()
    before = _resident_bytes()
    begin = time.perf_counter()
    log, recovery = open_log(directory, budget_bytes=budget_bytes, segment_bytes=SEGMENT_BYTES, clock=clock)
    opened = time.perf_counter()
    core = Core(pool=StatePool(1 << 20, 600.0))
    loaded = core.load(recovery.records, recovery.policies, now_wall=clock.wall())
    end = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    rebuilt = recovery.rebuilt
    # As the service does: what recovery told is not kept.
    del recovery
    give_back_freed_memory()
    kept = _resident_bytes()
    log.close()
    return Start(
        what,
        loaded.blocks,
        seconds=end - begin,
        open_seconds=opened - begin,
        load_seconds=end - opened,
        peak_bytes_per_block=(peak - before) / max(1, loaded.blocks),
        kept_bytes_per_block=(kept - before) / max(1, loaded.blocks),
        index_bytes_per_block=core.statistics().index_bytes_per_block,
        rebuilt=rebuilt,
    )


def _resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * resource.getpagesize()


def _nothing(directory: Path) -> None:
    """The start before has left all that there can be."""


def _lose_catalogue(directory: Path) -> None:
    (directory / LmdbCatalog.DATA_NAME).unlink()


def _lose_footers(directory: Path) -> None:
    _lose_catalogue(directory)
    for path in directory.glob("segment-*.log"):
        size = path.stat().st_size
        with path.open("r+b") as file:
            file.seek(size - TRAILER_BYTES)
            trailer = decode_trailer(file.read())
            if not isinstance(trailer, Verdict):
                file.truncate(trailer[0])


def _forget_cached(directory: Path, check: Callable[[], None]) -> None:
    for path in directory.iterdir():
        check()
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _in_process(step: Callable[..., T], *args: object, seconds: float, check: Callable[[], None]) -> T:
    """What the step returns, from a process of its own. Raises KvstoreError when it ends without an answer in time."""
    context = multiprocessing.get_context("spawn")
    answers, target = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(target, step, args))
    process.start()
    target.close()
    limit = time.monotonic() + seconds
    try:
        while not (has_answered := answers.poll(CHECK_SECONDS)) and time.monotonic() < limit:
            check()
        answer: T | KvstoreError = answers.recv() if has_answered else KvstoreError("it took too long")
    except EOFError:
        process.join()
        answer = KvstoreError(f"it ended with code {process.exitcode}")
    finally:
        answers.close()
        process.kill()
        process.join()
    if isinstance(answer, KvstoreError):
        raise KvstoreError(f"{step.__name__.strip('_')} failed: {answer}")
    return answer


def _answer(target: Connection[object, object], step: Callable[..., object], args: Sequence[object]) -> None:
    try:
        target.send(step(*args))
    except KvstoreError as error:
        target.send(KvstoreError(str(error)))
