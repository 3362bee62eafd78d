"""Processes beside a measured service: a bare echo, and clients that call one or the other as fast as answers come.

`python -m kvstore.bench.lookup_peers echo '{...}'` and `... client '{...}'`; both end when their standard input does. A
client reads a line of JSON for each task and answers with one.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import grpc.aio

from kvstore.clock import SystemClock
from kvstore.types import KEY_BYTES
from kvstore.v1 import cache_pb2 as pb
from kvstore_client import CacheClient, Costs
from kvstore_client.session import open_session

LOOKUP = "/kvstore.v1.Cache/Lookup"
ECHO = "/kvstore.bench.Echo/Echo"
EAGER = Costs(seconds_per_layer_token=1.0)
"""A price of computing at which every plan restores all that it can."""
CALLS_MAX = 1000
"""Of one client in one task: each has a lease until its end."""
CALL_SECONDS = 10.0
_MESSAGE_BYTES_MAX = 64 << 20


def prompt_keys(seed: int, number: int, blocks: int) -> list[bytes]:
    """Keys of prompt `number`; the same in every process."""
    chance = random.Random(f"{seed}/{number}")
    return [chance.randbytes(KEY_BYTES) for _ in range(blocks)]


def request_of(digest: bytes, keys: Sequence[bytes], *, block_tokens: int, rest: int) -> pb.LookupRequest:
    """`rest`: tokens behind the last whole block."""
    return pb.LookupRequest(
        namespace=digest,
        keys=b"".join(keys),
        prompt_tokens=len(keys) * block_tokens + rest,
        costs=pb.Costs(seconds_per_layer_token=EAGER.seconds_per_layer_token),
        lease=True,
    )


# ---- the processes' own side ----------------------------------------------------------------------------------------


async def _echo(path: str, reply_bytes: int) -> None:
    """A handler that returns the same bytes always, until standard input ends."""
    reply = bytes(reply_bytes)

    async def answer(request: bytes, context: Any) -> bytes:
        return reply

    server = grpc.aio.server(options=[("grpc.max_receive_message_length", _MESSAGE_BYTES_MAX)])
    service, method = ECHO.strip("/").split("/")
    handlers = {method: grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    server.add_insecure_port(f"unix:{path}")
    await server.start()
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await server.stop(0)


class _Caller:
    """One client: its prompts are `prompts` of `blocks` blocks, numbered from `first` on."""

    def __init__(self, given: dict[str, Any]) -> None:
        self._service = Path(given["service"])
        self._calls = {
            "lookup": bare_call(self._service / "kvstore.sock", LOOKUP),
            "echo": bare_call(Path(given["echo"]), ECHO),
        }
        self._digest = bytes.fromhex(given["digest"])
        self._size = given["block_tokens"]
        self._keys = [
            prompt_keys(given["seed"], number, given["blocks"])
            for number in range(given["first"], given["first"] + given["prompts"])
        ]
        self._requests = [
            request_of(self._digest, keys, block_tokens=self._size, rest=1 + place % self._size)
            for place, keys in enumerate(self._keys)
        ]
        self._bytes = [request.SerializeToString() for request in self._requests]

    def do(self, way: str, seconds: float) -> list[float]:
        """Milliseconds of each call, one after another for so long. `lookup` and `echo` send bytes that were made before and
        take the answer's as they are; `client` is all that CacheClient does."""
        if way == "client":
            with CacheClient(self._service, owner="bench") as client:
                return _timed(self._lookups(client), seconds)
        with in_session(self._service, self._calls[way]) as call:
            return _timed([partial(call, request) for request in self._bytes], seconds)

    def _lookups(self, client: CacheClient) -> list[Callable[[], object]]:
        return [
            partial(client.lookup, self._digest, keys, prompt_tokens=request.prompt_tokens, costs=EAGER)
            for keys, request in zip(self._keys, self._requests, strict=True)
        ]


@contextmanager
def in_session(service: Path, call: Any) -> Iterator[Callable[[bytes], bytes]]:
    """The call with the metadata of a new session, which ends with all its leases afterwards."""
    session = open_session(service / "session.sock", timeout=CALL_SECONDS, clock=SystemClock())
    try:
        yield partial(call, timeout=CALL_SECONDS, metadata=(("kvstore-session", session.number),))
    finally:
        session.close()


def bare_call(socket: Path, method: str) -> Any:
    """Bytes to bytes, on a channel that stays."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    return grpc.insecure_channel(f"unix:{quote(str(socket))}", options=options).unary_unary(method)


def reply_bytes(service: Path, request: pb.LookupRequest) -> int:
    """Bytes of the service's answer to a lookup."""
    with in_session(service, bare_call(service / "kvstore.sock", LOOKUP)) as call:
        return len(call(request.SerializeToString()))


def _timed(calls: Sequence[Callable[[], object]], seconds: float) -> list[float]:
    # The first finds the way; answers stay until the end, since a lease that is let go is one more call.
    kept = [calls[0]()]
    found = []
    clock = time.perf_counter
    end = clock() + seconds
    before = clock()
    while before < end and len(found) < CALLS_MAX:
        kept.append(calls[len(found) % len(calls)]())
        now = clock()
        found.append((now - before) * 1000)
        before = now
    return found


def _client(given: dict[str, Any]) -> None:
    caller = _Caller(given)
    print("ready", flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        print(json.dumps(caller.do(task["way"], task["seconds"])), flush=True)


def main(arguments: Sequence[str]) -> None:
    what, given = arguments[0], json.loads(arguments[1])
    if what == "client":
        _client(given)
        return
    import uvloop

    uvloop.run(_echo(given["path"], given["reply_bytes"]))


# ---- who starts them ------------------------------------------------------------------------------------------------


class Peer:
    """One such process, ready."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def read(self) -> str:
        """Its next line; EOFError where it has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EOFError(f"a process of the bench ended with {self._process.wait()}")
        return line

    def begin(self, way: str, seconds: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"way": way, "seconds": seconds}) + "\n")
        self._process.stdin.flush()

    def end(self) -> list[float]:
        """What the task that was begun has found: milliseconds of each call."""
        found: list[float] = json.loads(self.read())
        return found


@contextmanager
def peers(descriptions: Sequence[tuple[str, dict[str, Any]]]) -> Iterator[list[Peer]]:
    """Processes of these kinds, started side by side, all ready; ended afterwards."""
    with ExitStack() as ends:
        started = []
        for what, given in descriptions:
            process = subprocess.Popen(
                [sys.executable, "-m", "kvstore.bench.lookup_peers", what, json.dumps(given)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            ends.callback(_stop, process)
            started.append(Peer(process))
        for peer in started:
            peer.read()
        yield started


def _stop(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


if __name__ == "__main__":
    main(sys.argv[1:])
