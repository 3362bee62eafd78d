"""Blocks over TCP: how fast Fetch streams what is in memory, beside a bare gRPC stream of as many frames."""

from __future__ import annotations

import re
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self, cast

import grpc

from kvstore.bench.bare import METHOD
from kvstore.bench.pairs import Pair, spread
from kvstore.bench.serving import EAGER, LOG, Chain, opened, options_for, serving
from kvstore.errors import KvstoreError
from kvstore.profile.registry import get_profile
from kvstore.service.callers import AUTHORIZATION
from kvstore.service.frames import FRAME_BYTES
from kvstore.service.session import SESSION_METADATA
from kvstore.service.tokens import SCHEME
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1 import cache_pb2_grpc
from kvstore_client import CacheClient

PROFILE = "deepseek-v4-flash"
RATIO_BAR = 0.8
"""Of the bare stream's rate."""
MEGABYTE = 1e6
MESSAGE_BYTES_MAX = 64 << 20
CALL_SECONDS_MAX = 120.0
WARM_ROUNDS = 2
TURN_BLOCKS = 72
"""Asked for in one call: some 30 MiB."""

_FETCH = "/kvstore.v1.Cache/Fetch"
_OPTIONS = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]


@dataclass(slots=True)
class Readings:
    """`streams`: bytes per second, Fetch beside the bare stream."""

    blocks: int
    block_bytes: int
    streams: list[Pair] = field(default_factory=list)


class Way(Protocol):
    """One way to get blocks. A further one, as a client library's own loop, is another class of these."""

    def take(self, first: int, count: int) -> tuple[int, float]:
        """Bytes that came for these blocks, and in how many seconds."""


def pair(ours: Way, theirs: Way, blocks: int) -> Pair:
    """All blocks once in each way, in bytes per second. The ways take turns, A B B A, shorter than what else the processors
    do, so that this falls on both; and one is half-way round from the other."""
    turns = [(first, min(TURN_BLOCKS, blocks - first)) for first in range(0, blocks, TURN_BLOCKS)]
    opposite = turns[len(turns) // 2 :] + turns[: len(turns) // 2]
    sums = {id(way): [0, 0.0] for way in (ours, theirs)}
    for number, (one, other) in enumerate(zip(turns, opposite, strict=True)):
        both = [(ours, one), (theirs, other)]
        for way, turn in both if number % 2 == 0 else reversed(both):
            got, seconds = way.take(*turn)
            sums[id(way)][0] += got
            sums[id(way)][1] += seconds
    return Pair(*(got / seconds for got, seconds in sums.values()))


def measure(
    directory: Path,
    *,
    size: int,
    pairs: int,
    seed: int,
    tell: Callable[[str], None],
    check: Callable[[], None],
) -> Readings:
    """In an empty directory that the caller removes, with both services of its own. `size`: bytes of all blocks. check:
    called between the steps, where nothing is half done; what it raises comes out when the services have gone."""
    profile = get_profile(PROFILE)
    found = Readings(size // profile.block_bytes, profile.block_bytes)
    token = secrets.token_urlsafe(32)
    tokens = directory / "tokens"
    tokens.touch(mode=0o600)
    tokens.write_text(token)
    flags = {**options_for(size), "--listen": "127.0.0.1:0", "--token-file": tokens}
    with ExitStack() as ends:
        ends.enter_context(serving(directory, flags, "--unsafe-plaintext-tcp"))
        with CacheClient(directory / "s", owner="bench") as client:
            chain = Chain(opened(client, profile, check), found.blocks, seed)
            tell(f"storing {found.blocks:,} blocks, {size >> 20} MiB (seed {seed})")
            chain.store(client, check)
        fetch: Way = ends.enter_context(_fetching(_port(directory / LOG), token, chain))
        bare: Way = ends.enter_context(_bare(found.blocks, found.block_bytes))
        for number in range(1 - WARM_ROUNDS, pairs + 1):
            check()
            made = pair(fetch, bare, found.blocks)
            if number < 1:
                continue
            found.streams.append(made)
            tell(
                f"{number} of {pairs}: fetch {made.ours / MEGABYTE:,.0f} MB/s, bare {made.theirs / MEGABYTE:,.0f}, "
                f"ratio {made.ratio:.3f}"
            )
    return found


def report(found: Readings, *, seed: int) -> dict[str, Any]:
    """missed: the bars that the medians do not reach."""
    ratios = [pair.ratio for pair in found.streams]
    ratio = spread(ratios)
    return {
        "ratio": ratio.median,
        "missed": ["ratio"] if ratio.median < RATIO_BAR else [],
        "bars": {"ratio": RATIO_BAR},
        "detail": {
            "what": {
                "ratio": "rate of Fetch of blocks that are in the service's memory, for each of a bare gRPC stream of as many "
                "bytes in frames of 1 MiB that were finished before; both over plaintext TCP on this machine, each server a "
                "process with the same loop, and the same loop over frames here, which leaves them unparsed; calls of "
                f"{TURN_BLOCKS} blocks in turns, A B B A",
            },
            "profile": PROFILE,
            "blocks": found.blocks,
            "block_bytes": found.block_bytes,
            "size_bytes": found.blocks * found.block_bytes,
            "pairs": len(found.streams),
            "seed": seed,
            "ratio": {"interval": [ratio.low, ratio.high], "samples": ratios},
            "fetch_mb_per_second": [pair.ours / MEGABYTE for pair in found.streams],
            "bare_mb_per_second": [pair.theirs / MEGABYTE for pair in found.streams],
        },
    }


class _Stream:
    """One call's frames, taken as they come and left as they are."""

    def __init__(
        self,
        channel: grpc.Channel,
        method: str,
        request: Callable[[int, int], bytes],
        *,
        block_bytes: int,
        metadata: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self._call: Any = channel.unary_stream(method)
        self._request = request
        self._block_bytes = block_bytes
        self._metadata = metadata

    def take(self, first: int, count: int) -> tuple[int, float]:
        begin = time.perf_counter()
        got = 0
        request = self._request(first, count)
        for frame in self._call(request, timeout=CALL_SECONDS_MAX, metadata=self._metadata):
            got += len(frame)
        seconds = time.perf_counter() - begin
        low = count * self._block_bytes
        # Frames are a little more than their data, and the bare ones are whole.
        high = low + low // 100 + FRAME_BYTES
        if not low <= got <= high:
            raise KvstoreError(
                "not what was asked for came", field="bytes", value=got, allowed=f"{low} to {high}"
            )
        return got, seconds


# ---- the two servers ------------------------------------------------------------------------------------------------


def _port(log: Path) -> int:
    said = re.search(r"listening on tcp://\S+:([0-9]+) ", log.read_text(errors="replace"))
    if said is None:
        raise KvstoreError("the service does not say where it listens", field="log", value=log)
    return int(said[1])


class _Held:
    """A request stream without requests, open until it is let go."""

    def __init__(self) -> None:
        self._over = threading.Event()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> pb.SessionRequest:
        self._over.wait()
        raise StopIteration

    def end(self) -> None:
        self._over.set()


@contextmanager
def _fetching(port: int, token: str, chain: Chain) -> Iterator[_Stream]:
    """Fetch of the whole chain under one lease, in a session of its own."""
    authorization = ((AUTHORIZATION, f"{SCHEME}{token}"),)
    held = _Held()
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=_OPTIONS) as channel:
        cache = cast(Any, cache_pb2_grpc).CacheStub(channel)
        session = cache.Session(held, metadata=authorization)
        try:
            hello: pb.SessionHello = next(session)
            metadata = (*authorization, (SESSION_METADATA, hello.session))
            reply: pb.LookupReply = cache.Lookup(_lookup(chain), timeout=CALL_SECONDS_MAX, metadata=metadata)

            def request(first: int, count: int) -> bytes:
                asked = pb.FetchRequest(lease_id=reply.lease_id, first_block=first, block_count=count)
                return asked.SerializeToString()

            yield _Stream(
                channel, _FETCH, request, block_bytes=chain.namespace.block_bytes, metadata=metadata
            )
        finally:
            held.end()
            session.cancel()


def _lookup(chain: Chain) -> pb.LookupRequest:
    return pb.LookupRequest(
        namespace=chain.namespace.digest,
        keys=b"".join(chain.keys),
        prompt_tokens=len(chain.keys) * chain.namespace.block_tokens + 1,
        costs=pb.Costs(seconds_per_layer_token=EAGER.seconds_per_layer_token),
        lease=True,
    )


@contextmanager
def _bare(blocks: int, block_bytes: int) -> Iterator[_Stream]:
    def request(first: int, count: int) -> bytes:
        frames = -(-count * block_bytes // FRAME_BYTES)
        begin = min(first * block_bytes // FRAME_BYTES, in_all - frames)
        return b"%d %d" % (begin, frames)

    size = blocks * block_bytes
    in_all = -(-size // FRAME_BYTES)
    process = subprocess.Popen(
        [sys.executable, "-m", "kvstore.bench.bare", str(in_all * FRAME_BYTES)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            port = process.stdout.readline().strip()
            if not port:
                raise KvstoreError("the bare server did not start; its words are above")
            with grpc.insecure_channel(f"127.0.0.1:{port}", options=_OPTIONS) as channel:
                yield _Stream(channel, METHOD, request, block_bytes=block_bytes)
        finally:
            process.kill()
