"""Whether one tenant can tell from the time of its calls what another one holds."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from kvstore.bench.samples import Compared, Sample, compared
from kvstore.bench.serving import LOG, Chain, options_for, serving
from kvstore.errors import KvstoreError, Unavailable
from kvstore.prefix.identity import NamespaceIdentity
from kvstore.prefix.keys import block_keys
from kvstore.profile.registry import get_profile
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1.cache_pb2_grpc import CacheStub
from kvstore_client import CacheClient, OpenedNamespace

P_LEAST = 0.001
PROMPTS, BLOCKS = 32, 32
WARM_CALLS = 500
HOLDER, ASKER = "holder", "asker"
_TOKENS = {HOLDER: "a-token-of-the-one-that-holds", ASKER: "a-token-of-the-one-that-asks"}
_READY_SECONDS = 60.0
_MIB = 1 << 20

QUESTIONS = {
    "prompt": "own namespace, a prompt of which the other holds all blocks, or one that nobody holds",
    "keys": "own namespace, the very keys that the other holds, or keys that nobody holds",
    "namespace": "the other's namespace, which is refused, or one that is not there",
}
CONTROL = "control"
"""What can be told apart: a prompt that the asker holds itself, or one that nobody holds. Where this is not, too few calls were made."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Seconds of the calls about what the other has, and about what nobody has."""

    held: Sample
    absent: Sample

    @property
    def compared(self) -> Compared:
        return compared(self.held, self.absent)


def measure(
    directory: Path, *, count: int, seed: int, tell: Callable[[str], None], check: Callable[[], None]
) -> dict[str, Reading]:
    """`count` calls of each kind for each of QUESTIONS, in pairs whose order is drawn, over TCP on this machine."""
    limits = directory / "tenants.toml"
    limits.touch(mode=0o600)
    limits.write_text(
        "".join(f"[tenant.{name}]\ntokens = {json.dumps([token])}\n" for name, token in _TOKENS.items())
    )
    options = {**options_for(64 * _MIB), "--listen": "127.0.0.1:0", "--tenants": limits}
    chance = random.Random(seed)
    with serving(directory, options, "--unsafe-plaintext-tcp"):
        address = f"tcp://127.0.0.1:{_port(directory / LOG, check)}"
        with _client(address, HOLDER) as holder, _client(address, ASKER) as asker:
            theirs, own = _opened(holder, HOLDER), _opened(asker, ASKER)
            prompts = [
                [chance.randrange(65_536) for _ in range(BLOCKS * own.block_tokens)]
                for _ in range(2 * PROMPTS)
            ]
            held, absent = prompts[:PROMPTS], prompts[PROMPTS:]
            for tokens in held:
                _stored(holder, theirs, tokens, chance, check)
            # The asker has something of its own, so that its calls look for something.
            mine = [
                [chance.randrange(65_536) for _ in range(BLOCKS * own.block_tokens)] for _ in range(PROMPTS)
            ]
            for tokens in mine:
                _stored(asker, own, tokens, chance, check)
            requests = _requests(own, theirs, held, absent, mine=mine, nowhere=chance.randbytes(32))
            readings = {}
            with _lookups(address) as ask:
                for question, (first, second) in requests.items():
                    tell(f"{question}: {count:,} pairs of calls")
                    asked = partial(ask, may_hold=question == CONTROL)
                    readings[question] = _timed(asked, first, second, count=count, chance=chance, check=check)
    return readings


def _requests(
    own: OpenedNamespace,
    theirs: OpenedNamespace,
    held: list[list[int]],
    absent: list[list[int]],
    *,
    mine: list[list[int]],
    nowhere: bytes,
) -> dict[str, tuple[list[pb.LookupRequest], list[pb.LookupRequest]]]:
    size = own.block_tokens

    def of_prompts(namespace: bytes, rooted: bytes, prompts: list[list[int]]) -> list[pb.LookupRequest]:
        return [
            _request(namespace, b"".join(block_keys(rooted, each, block_tokens=size))) for each in prompts
        ]

    return {
        "prompt": (of_prompts(own.digest, own.digest, held), of_prompts(own.digest, own.digest, absent)),
        "keys": (of_prompts(own.digest, theirs.digest, held), of_prompts(own.digest, theirs.digest, absent)),
        "namespace": (
            of_prompts(theirs.digest, theirs.digest, held),
            of_prompts(nowhere, theirs.digest, held),
        ),
        CONTROL: (of_prompts(own.digest, own.digest, mine), of_prompts(own.digest, own.digest, absent)),
    }


def _request(namespace: bytes, keys: bytes) -> pb.LookupRequest:
    tokens = len(keys) // 32 * get_profile("tiny").block_tokens + 1
    costs = pb.Costs(seconds_per_layer_token=1.0)
    return pb.LookupRequest(namespace=namespace, keys=keys, prompt_tokens=tokens, costs=costs)


def _timed(
    ask: Callable[[pb.LookupRequest], None],
    held: list[pb.LookupRequest],
    absent: list[pb.LookupRequest],
    *,
    count: int,
    chance: random.Random,
    check: Callable[[], None],
) -> Reading:
    seconds = np.zeros((2, count))
    for number in range(-min(WARM_CALLS, count), count):
        if number % 100 == 0:
            check()
        at = chance.randrange(len(held))
        pair = [(0, held[at]), (1, absent[at])]
        chance.shuffle(pair)
        for kind, request in pair:
            begin = time.perf_counter()
            ask(request)
            seconds[kind, max(number, 0)] = time.perf_counter() - begin
    return Reading(seconds[0], seconds[1])


@contextmanager
def _lookups(address: str) -> Iterator[Callable[..., None]]:
    metadata = (("authorization", f"Bearer {_TOKENS[ASKER]}"),)
    with grpc.insecure_channel(address.removeprefix("tcp://")) as channel:
        lookup: Any = CacheStub(channel).Lookup

        def ask(request: pb.LookupRequest, *, may_hold: bool) -> None:
            try:
                reply = lookup(request, metadata=metadata, timeout=30)
            except grpc.RpcError as error:
                refused: Any = error
                if refused.code() is not grpc.StatusCode.NOT_FOUND:
                    raise KvstoreError(f"a lookup failed: {refused.details()}") from error
                return
            if reply.blocks_held and not may_hold:
                raise KvstoreError(
                    "a tenant was told of what another holds", field="blocks_held", value=reply.blocks_held
                )

        yield ask


def _client(address: str, tenant: str) -> CacheClient:
    return CacheClient(address, owner=f"bench-{tenant}", token=_TOKENS[tenant], insecure=True)


def _opened(client: CacheClient, tenant: str) -> OpenedNamespace:
    identity = NamespaceIdentity(get_profile("tiny"), "bench", "bench", tenant_salt=tenant)
    return client.open_namespace(identity, name=tenant)


def _stored(
    client: CacheClient,
    namespace: OpenedNamespace,
    tokens: list[int],
    chance: random.Random,
    check: Callable[[], None],
) -> None:
    chain = Chain(namespace, BLOCKS, chance.getrandbits(32))
    chain.keys = list(block_keys(namespace.digest, tokens, block_tokens=namespace.block_tokens))
    chain.store(client, check)


def _port(log: Path, check: Callable[[], None]) -> int:
    """Where the service listens, as it says."""
    limit = time.monotonic() + _READY_SECONDS
    while True:
        check()
        text = log.read_text(errors="replace")
        said = re.search(r"listening on tcp://\S+:([0-9]+) ", text)
        if said is not None and "ready: " in text:
            return int(said[1])
        if time.monotonic() > limit:
            raise Unavailable(
                "the service does not say where it listens", field="seconds", value=_READY_SECONDS
            )
        threading.Event().wait(0.05)


def report(readings: dict[str, Reading], *, seed: int) -> dict[str, Any]:
    answers = {}
    for name, reading in readings.items():
        found = reading.compared
        answers[name] = {
            "about": QUESTIONS.get(
                name, "own namespace, a prompt that it holds itself, or one that nobody holds"
            ),
            "calls": len(reading.held),
            "median_held_us": float(np.median(reading.held)) * 1e6,
            "median_absent_us": float(np.median(reading.absent)) * 1e6,
            "distance_p": found.distance_p,
            "ranks_p": found.ranks_p,
        }
    control = answers.pop(CONTROL)
    missed = [name for name in answers if readings[name].compared.p < P_LEAST]
    return {"questions": answers, "control": control, "p_least": P_LEAST, "missed": missed, "seed": seed}
