"""Large blocks through the client beside the raw disk: durable commits, and cold reads into mapped memory."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kvstore.bench.blocks import SEGMENT_BYTES
from kvstore.bench.pairs import interleaved
from kvstore.bench.raw import RawReads, RawWrites, Threads, device_written_bytes
from kvstore.bench.serving import opened, service_directory, serving
from kvstore.bench.storage import COMMIT_BYTES, PROFILE, Rates, pair_of, ratio_of, told_pairs
from kvstore.errors import KvstoreError
from kvstore.profile.registry import get_profile
from kvstore.store.buffers import carved
from kvstore.store.format import record_span
from kvstore.store.lanes import LANES
from kvstore.store.segment import segment_id_of
from kvstore_client import CacheClient, Deadlines

CLIENTS = 2
COMMITS = 4
"""Of each client under way at once."""

LEASED_SHARE = 4
"""At most one part in so many of the set is leased at once."""

CACHE_SHARE = 3 / 8
"""Of the set lies in the service's memory. That is less than one client reads, always in one order: however far one is ahead of
the other, what is asked for next left long ago."""

READ_SHARE_MIN = 0.99
"""Of what was read by clients, so much at least must have come from the disk."""

_MIB = 1 << 20
_PAGES = 64
"""Different payloads of a raw write."""


def measure(
    directory: Path,
    *,
    size: int,
    pairs: int,
    seed: int,
    tell: Callable[[str], None],
    check: Callable[[], None],
) -> Rates:
    """In an empty directory that the caller removes. `size`: payload bytes of one pass. check: called between the passes."""
    profile = get_profile(PROFILE)
    block, span = profile.block_bytes, record_span(profile.block_bytes)
    commit = _blocks_together(size, block)
    chains = max(size // (commit * block * CLIENTS), 1)
    payload = chains * CLIENTS * commit * block
    with ExitStack() as ends:
        threads = Threads(LANES, check)
        ends.callback(threads.close)
        # First: it says whether there is a raw rate here to compare with.
        raw_writes = _raw_writes(directory, payload, span, seed)
        ends.callback(raw_writes.close)
        ends.enter_context(serving(directory, _options(payload)))
        client = ends.enter_context(
            CacheClient(
                service_directory(directory),
                owner="bench",
                deadlines=Deadlines(pause_first=0, pause_most=0),
            )
        )
        opened(client, profile, check, policy="zero")
        peers = ends.enter_context(_peers(directory, seed))
        bench = _Bench(directory, client, peers, chains=chains, commit=commit, payload=payload)
        tell(f"filling {2 * payload >> 20} MiB")
        bench.warm()
        for _ in range(2):
            # Files are used again from the third pass on at the latest.
            check()
            bench.write()
            raw_writes.write(threads, payload // block, sync_slots=commit)
        bench.device.clear()
        bench.counted.clear()
        writes = told_pairs(
            "write",
            pairs,
            interleaved(
                pairs,
                ours=bench.write,
                theirs=lambda: raw_writes.write(threads, payload // block, sync_slots=commit) * block / span,
            ),
            tell,
        )
        bench.write()
        raw_reads = RawReads(_extents(service_directory(directory), span, payload // block))
        ends.callback(raw_reads.close)
        order = _order(payload // block, commit, seed)
        bench.read()
        reads = told_pairs(
            "read",
            pairs,
            interleaved(
                pairs,
                ours=bench.read,
                theirs=lambda: raw_reads.read(threads, order, depth=LANES, held=4 * LANES) * block / span,
            ),
            tell,
        )
    device = statistics.median(bench.device) if bench.device else None
    return Rates(writes, reads, device, statistics.median(bench.counted))


def report(rates: Rates, *, size: int, seed: int) -> dict[str, Any]:
    device = rates.counted_ratio if rates.device_ratio is None else rates.device_ratio
    return {
        "write": ratio_of(rates.writes),
        "read": ratio_of(rates.reads),
        "device_bytes_per_payload_byte": device,
        "detail": {
            "through": "client",
            "what": {
                "write": "from the first Reserve to the last answer of Commit, durable: payloads lie in the arena as a device "
                "would leave them there, are summed up by the client, copied and checked by the service",
                "read": "from the first Lookup until one byte of each page of every block has been read where Map says that it "
                "lies; the service has checked all checksums, the client only that the block is still there",
                "raw": "the same pages and as many syncs, unbuffered, by threads of one process",
            },
            "unit": "MB/s of payload",
            "size_bytes": size,
            "seed": seed,
            "pairs": len(rates.writes),
            "block_bytes": get_profile(PROFILE).block_bytes,
            "blocks_in_commit_and_lease": _blocks_together(size, get_profile(PROFILE).block_bytes),
            "clients": CLIENTS,
            "commits_at_once": CLIENTS * COMMITS,
            "threads": LANES,
            "device_bytes_from": "the log's own count" if rates.device_ratio is None else "the block device",
            "device_bytes_counted_by_log_per_payload_byte": rates.counted_ratio,
            "write_pairs": [pair_of(pair) for pair in rates.writes],
            "read_pairs": [pair_of(pair) for pair in rates.reads],
        },
    }


def _blocks_together(size: int, block: int) -> int:
    """In one commit, and under one lease."""
    return min(COMMIT_BYTES, size // (LEASED_SHARE * CLIENTS * COMMITS)) // block


def _options(payload: int) -> dict[str, object]:
    return {
        # What is cleared is given back with the next append, so that two passes lie there for a moment.
        "--disk": 2 * payload + 8 * SEGMENT_BYTES,
        "--segment": SEGMENT_BYTES,
        "--cache": int(payload * CACHE_SHARE),
        "--pool": 16 * _MIB,
        "--handoff": 16 * _MIB,
        "--staging": (CLIENTS * COMMITS + 2) * COMMIT_BYTES,
        "--arenas": CLIENTS * 64 * _MIB,
        "--lease": "1h",
    }


class _Bench:
    """Passes of the client's side. `device`, `counted`: device bytes for each payload byte of each write."""

    def __init__(
        self,
        directory: Path,
        client: CacheClient,
        peers: Sequence[_PeerProcess],
        *,
        chains: int,
        commit: int,
        payload: int,
    ) -> None:
        self._directory = directory
        self._client = client
        self._peers = peers
        self._chains = chains
        self._commit = commit
        self._payload = payload
        self.device: list[float] = []
        self.counted: list[float] = []

    def warm(self) -> None:
        self._all(do="warm", blocks=self._commit)

    def renew(self) -> None:
        """Nothing is held any more, and the clients have new keys."""
        self._client.clear()
        self._all(do="prepare", chains=self._chains, blocks=self._commit)

    def write(self) -> float:
        """One pass; payload bytes per second."""
        self.renew()
        before, device = self._client.stats(), device_written_bytes(self._directory)
        rate = self._timed("write")
        after, device_after = self._client.stats(), device_written_bytes(self._directory)
        through = after["arena_written_bytes_total"] - before["arena_written_bytes_total"]
        if through != self._payload:
            raise KvstoreError(
                "not all payloads went through shared memory; the service's log says why",
                field="arena_written_bytes",
                value=through,
                allowed=f"{self._payload}",
            )
        if device is not None and device_after is not None:
            self.device.append((device_after - device) / self._payload)
        written = after["log_written_bytes_total"] - before["log_written_bytes_total"]
        self.counted.append(written / self._payload)
        return rate

    def read(self) -> float:
        """One pass; payload bytes per second."""
        before = self._client.stats()["disk_read_payload_bytes_total"]
        rate = self._timed("read")
        read = self._client.stats()["disk_read_payload_bytes_total"] - before
        if read < READ_SHARE_MIN * self._payload:
            raise KvstoreError("memory answered reads that are to be cold", field="read_bytes", value=read)
        return rate

    def _timed(self, what: str) -> float:
        begin = time.perf_counter()
        moved = sum(answer["bytes"] for answer in self._all(do=what))
        seconds = time.perf_counter() - begin
        if moved != self._payload:
            raise KvstoreError(f"a {what} moved {moved} bytes", field="bytes", allowed=f"{self._payload}")
        return self._payload / seconds

    def _all(self, **told: object) -> list[dict[str, Any]]:
        for peer in self._peers:
            peer.tell(told)
        return [peer.answer() for peer in self._peers]


class _PeerProcess:
    def __init__(self, directory: Path, seed: int) -> None:
        self._log = directory / f"peer-{seed}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "kvstore.bench.peer",
                    str(service_directory(directory)),
                    PROFILE,
                    str(COMMITS),
                    str(seed),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                # A terminal's Ctrl-C is for the bench, which ends them; without it they end with their input.
                start_new_session=True,
            )

    def tell(self, told: dict[str, object]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(told) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            last = self._log.read_text(errors="replace").strip().splitlines()[-1:] or ["without a word"]
            raise KvstoreError(f"a client of the bench has ended: {last[0]}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise KvstoreError(f"a client of the bench failed: {answer['error']}")
        return answer

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


@contextmanager
def _peers(directory: Path, seed: int) -> Iterator[list[_PeerProcess]]:
    with ExitStack() as ends:
        peers = []
        for number in range(CLIENTS):
            peers.append(_PeerProcess(directory, seed + number))
            ends.callback(peers[-1].end)
        for peer in peers:
            peer.answer()
        yield peers


def _raw_writes(directory: Path, payload: int, span: int, seed: int) -> RawWrites:
    """Over files of its own, as large as segments, and laid out as they are."""
    chance = random.Random(seed)
    pages = carved(span, _PAGES)
    for page in pages:
        page[:] = chance.randbytes(span)
    count = -(-payload // (SEGMENT_BYTES // span * span)) + 1
    paths = [directory / f"raw-{number}" for number in range(count)]
    for path in paths:
        with path.open("xb") as file:
            os.posix_fallocate(file.fileno(), 0, SEGMENT_BYTES)
    return RawWrites(paths, pages=pages, file_bytes=SEGMENT_BYTES)


def _extents(directory: Path, span: int, count: int) -> list[tuple[Path, int, int]]:
    """Where in the service's segments as many pages lie as it reads."""
    found = [
        (path, offset, span)
        for path in sorted(directory.iterdir())
        if segment_id_of(path.name) is not None
        for offset in range(4096, path.stat().st_size - span + 1, span)
    ]
    if len(found) < count:
        raise KvstoreError(f"{len(found)} blocks' pages in the segments, of {count}")
    return found[:count]


def _order(count: int, commit: int, seed: int) -> list[int]:
    """Neighbours that were written together in order, as they are read."""
    firsts = list(range(0, count, commit))
    random.Random(seed).shuffle(firsts)
    return [number for first in firsts for number in range(first, min(first + commit, count))]
