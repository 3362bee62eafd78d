"""Prompts of a million tokens, beside who waits, who writes and who goes away; and the largest items in the largest batch."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from kvstore.errors import KvstoreError
from kvstore.profile.registry import get_profile
from kvstore.types import ItemKind
from kvstore.v1 import cache_pb2 as pb
from kvstore_client import CacheClient, Deadlines, ReserveItem
from kvstore_client.aio import AsyncCacheClient
from tests.e2e.service_raw import EAGER, Chain, Raw, error_of
from tests.support.calls import EAGER as DEAR
from tests.support.chains import identity_of
from tests.support.polling import wait_for
from tests.support.probe import LOADED, Probe
from tests.support.service import ServiceProcess, running_service

TOKENS = 1_000_000
BLOCK_TOKENS = 128
BLOCKS = TOKENS // BLOCK_TOKENS
PROFILE = replace(get_profile("tiny"), name="tiny-128", block_tokens=BLOCK_TOKENS)
WAITING = 200
CANCELLED = 1000
ANSWER_SECONDS_MAX = 0.1


def open_long(raw: Raw, name: str) -> pb.Namespace:
    profile = pb.Profile(name=PROFILE.name, geometry=PROFILE.geometry())
    return raw.call("OpenNamespace", pb.OpenNamespaceRequest(name=name, profile=profile, tenant_salt=name))


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceProcess]:
    size = PROFILE.block_bytes * BLOCKS
    with running_service(disk=size + size // 4 + (64 << 20), segment=8 << 20, lease=30.0) as process:
        yield process


@pytest.fixture(scope="module")
def long(service: ServiceProcess) -> Chain:
    with Raw(service.directory) as raw:
        chain = Chain(open_long(raw, "long"), BLOCKS, seed=1)
        for first in range(0, BLOCKS, 1000):
            raw.store(chain, first=first, last=min(first + 1000, BLOCKS))
        return chain


def ask(raw: Raw, namespace: bytes, keys: bytes, **changed: object) -> pb.LookupReply:
    request = pb.LookupRequest(
        namespace=namespace,
        keys=keys,
        prompt_tokens=TOKENS,
        costs=EAGER,
        **changed,  # type: ignore[arg-type]
    )
    reply: pb.LookupReply = raw.call("Lookup", request)
    return reply


@contextmanager
def waiting_lookups(service: ServiceProcess, raw: Raw, namespace: pb.Namespace) -> Iterator[None]:
    """So many lookups that wait for what another has announced; they are cancelled at the end."""
    with Raw(service.directory) as owner:
        keys = [os.urandom(32) for _ in range(WAITING)]
        for key in keys:
            found = owner.call(
                "Lookup",
                pb.LookupRequest(
                    namespace=namespace.digest,
                    keys=key,
                    prompt_tokens=BLOCK_TOKENS + 1,
                    costs=pb.Costs(seconds_per_layer_token=10.0),
                    lease=True,
                    announce=True,
                ),
            )
            assert found.flight_id
        calls = [
            raw.cache.Lookup.future(
                pb.LookupRequest(
                    namespace=namespace.digest,
                    keys=key,
                    prompt_tokens=BLOCK_TOKENS + 1,
                    costs=pb.Costs(seconds_per_layer_token=10.0),
                    lease=True,
                    wait_seconds=60.0,
                ),
                metadata=raw.metadata,
                timeout=90,
            )
            for key in keys
        ]
        wait_for(lambda: raw.stats()["flights_waiting"] == WAITING)
        yield
        assert raw.stats()["flights_waiting"] == WAITING
        for call in calls:
            call.cancel()
        wait_for(lambda: raw.stats()["flights_waiting"] == 0)


@contextmanager
def writing(service: ServiceProcess) -> Iterator[None]:
    """Another writes all the time, more than the disk has room for beside what is leased."""
    over = threading.Event()

    def write() -> int:
        with Raw(service.directory) as raw:
            namespace, seed = open_long(raw, "writer"), 0
            while not over.is_set():
                raw.store(Chain(namespace, 100, seed=seed))
                seed += 1
            return seed

    with ThreadPoolExecutor(1) as threads:
        written = threads.submit(write)
        try:
            yield
        finally:
            over.set()
        assert written.result() > 0


def test_a_million_tokens_are_looked_up_while_others_wait_and_eviction_runs(
    service: ServiceProcess, long: Chain
) -> None:
    held = b"".join(long.keys)
    half = held[: 32 * (BLOCKS // 2)] + os.urandom(32 * (BLOCKS - BLOCKS // 2))
    with Raw(service.directory) as raw:
        lease = ask(raw, long.namespace.digest, held, lease=True)
        assert lease.blocks_held == BLOCKS
        with (
            waiting_lookups(service, raw, open_long(raw, "waiting")),
            writing(service),
            Probe(service.target) as probe,
        ):
            wait_for(lambda: raw.stats()["evicted_blocks_total"] > 0, seconds=60)
            for _ in range(5):
                for keys, blocks in ((held, BLOCKS), (half, BLOCKS // 2), (os.urandom(len(held)), 0)):
                    reply = ask(raw, long.namespace.digest, keys)
                    assert reply.blocks_held == blocks
                    assert reply.plan.blocks_missing == BLOCKS - blocks
        assert raw.call("Release", pb.ReleaseRequest(lease_id=lease.lease_id)).was_held
        assert not probe.errors
        assert probe.answers
        assert probe.slowest_seconds < ANSWER_SECONDS_MAX * LOADED
        assert raw.stats()["loop_gap_own_seconds_max"] < ANSWER_SECONDS_MAX


def resident_bytes(pid: int) -> int:
    pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def cancel_futures(raw: Raw, namespace: bytes, keys: bytes, count: int, seed: int) -> None:
    """Long lookups that take a lease, cancelled at any moment between their sending and their answer."""
    chance = random.Random(seed)
    request = pb.LookupRequest(
        namespace=namespace, keys=keys, prompt_tokens=TOKENS, costs=EAGER, lease=True, announce=True
    )
    for _ in range(count):
        call = raw.cache.Lookup.future(request, metadata=raw.metadata, timeout=30)
        # The time that this takes is the time that the call has had.
        for _ in range(chance.randrange(200)):
            call.done()
        call.cancel()


async def cancel_tasks(directory: Path, namespace: bytes, keys: list[bytes], count: int) -> int:
    """The same through the client; how many had their answer by then."""
    answered = 0
    async with AsyncCacheClient(directory, owner="tests") as client:
        await client.stats()
        for number in range(count):
            call = asyncio.create_task(client.lookup(namespace, keys, prompt_tokens=TOKENS, wait_seconds=5.0))
            for _ in range(number % 20):
                await asyncio.sleep(0)
            call.cancel()
            try:
                await call
                answered += 1
            except (asyncio.CancelledError, KvstoreError):
                continue
    return answered


def test_a_thousand_long_calls_that_are_cancelled_leave_nothing(service: ServiceProcess, long: Chain) -> None:
    digest, keys = long.namespace.digest, b"".join(long.keys)

    def cancel(count: int, seed: int) -> None:
        with Raw(service.directory) as other:
            cancel_futures(other, digest, keys, count // 2, seed)
        asyncio.run(cancel_tasks(service.directory, digest, list(long.keys), count // 2))

    names = (
        "leases",
        "flights",
        "flights_waiting",
        "sessions",
        "fetching_bytes",
        "staged_bytes",
        "mapped_items",
    )
    with Raw(service.directory) as raw:
        # What the first ones leave is what a process keeps for its next calls.
        cancel(CANCELLED // 5, seed=1)
        wait_for(lambda: raw.stats()["sessions"] == 1)
        before = raw.stats()
        memory, files = resident_bytes(service.pid), descriptors(service.pid)
        cancel(CANCELLED, seed=2)
        wait_for(lambda: all(raw.stats()[name] == before[name] for name in names), seconds=60)
        wait_for(lambda: descriptors(service.pid) <= files + 4)
        assert resident_bytes(service.pid) < memory + (32 << 20)
        assert ask(raw, digest, keys).blocks_held == BLOCKS


# ---- the largest -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def default() -> Iterator[ServiceProcess]:
    """With what it has by itself for everything that bounds a message."""
    with running_service(pool=64 << 20) as process:
        yield process


@pytest.mark.parametrize("profile", ["deepseek-v4-pro", "deepseek-v4-flash"])
def test_the_largest_items_pass_in_one_call_with_default_settings(
    default: ServiceProcess, profile: str
) -> None:
    with CacheClient(default.directory, owner="tests") as client:
        space = client.open_namespace(identity_of(profile, salt=profile), name=profile)
        count = (24 << 20) // space.block_bytes
        keys = [os.urandom(32) for _ in range(count)]
        items = [
            ReserveItem(
                kind=ItemKind.BLOCK,
                key=key,
                parent=keys[number - 1] if number else space.digest,
                position=(number + 1) * space.block_tokens,
                length=space.block_bytes,
            )
            for number, key in enumerate(keys)
        ]
        edge = count * space.block_tokens
        items.append(
            ReserveItem(
                kind=ItemKind.STATE, key=keys[-1], position=edge, length=space.state_bytes, to_ssd=True
            )
        )
        payload = os.urandom(max(space.block_bytes, space.state_bytes))
        with client.reserve(space.digest, items) as reservation:
            reservation.write({number: payload[: item.length] for number, item in enumerate(items)})
            reservation.commit()
        found = client.lookup(space.digest, keys, prompt_tokens=edge + 1, costs=DEAR)
        assert found.lease is not None
        for read in (client.fetch, client.map):
            came = list(read(found.lease, first_block=0, block_count=count, state=True))
            assert [
                item.payload == payload[: each.length] for item, each in zip(came, items, strict=True)
            ] == [True] * len(items)


def test_the_largest_batch_passes_and_a_larger_one_is_refused_with_both_limits(
    default: ServiceProcess,
) -> None:
    patient = Deadlines(control=60, lookup=60)
    with CacheClient(default.directory, owner="tests", deadlines=patient) as client, ExitStack() as ends:
        space = client.open_namespace(identity_of("tiny", salt="batch"), name="batch")
        keys = [os.urandom(32) for _ in range(65_536)]
        items = [
            ReserveItem(
                kind=ItemKind.BLOCK,
                key=key,
                parent=keys[number - 1] if number else space.digest,
                position=(number + 1) * space.block_tokens,
                length=space.block_bytes,
            )
            for number, key in enumerate(keys)
        ]
        reservation = ends.enter_context(client.reserve(space.digest, items))
        assert len(reservation.granted) == 65_536
        with pytest.raises(KvstoreError, match=r"keys=65537; allowed: 65536"):
            client.lookup(space.digest, [*keys, keys[0]], prompt_tokens=65_537 * space.block_tokens + 1)
    with Raw(default.directory) as raw:
        huge = pb.LookupRequest(namespace=space.digest, keys=bytes(60 << 20)).SerializeToString()
        call = raw.channel.unary_unary("/kvstore.v1.Cache/Lookup")
        with pytest.raises(grpc.RpcError, match=r"larger than max \(\d+ vs\. \d+\)") as refused:
            call(huge, metadata=raw.metadata, timeout=30)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error_of(refused.value) == ""
