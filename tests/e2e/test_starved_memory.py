"""Memory that others hold: whoever waits for it ends with bytes, a miss or a named refusal, and nobody else notices."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import grpc
import pytest

from kvstore.memory import why_not_mapped
from kvstore.v1 import cache_pb2 as pb
from tests.e2e.service_raw import Chain, Raw, error_of
from tests.support.mapping import Mapped, header_of
from tests.support.polling import wait_for
from tests.support.probe import LOADED, Probe
from tests.support.service import running_service

CLIENTS = 16
PREFETCHES = 500
POOL_BLOCKS = 50
PROFILE = "flash-slim"
BLOCK_BYTES = 449_824
FETCHED_BLOCKS = (8 << 20) // BLOCK_BYTES
ANSWER_SECONDS_MAX = 0.1
SMALL = {
    "memory": 256 << 20,
    "pool": 1 << 20,
    "handoff": 1 << 20,
    "arenas": 1 << 20,
    "staging": 8 << 20,
    "cache": POOL_BLOCKS * BLOCK_BYTES,
    "segment": 16 << 20,
    "lease": 120.0,
}

mapped_only = pytest.mark.skipif(bool(why_not_mapped()), reason=why_not_mapped() or "it is mapped")


def stored(raw: Raw, blocks: int, *, seed: int) -> Chain:
    chain = Chain(raw.open("starved", profile=PROFILE), blocks, seed=seed)
    for first in range(0, blocks, 8):
        raw.store(chain, first=first, last=min(first + 8, blocks))
    return chain


def check_health(raw: Raw, probe: Probe) -> None:
    """Others were answered all the time, and the service itself held its loop up for no longer than it may."""
    assert not probe.errors
    assert probe.answers
    assert probe.slowest_seconds < ANSWER_SECONDS_MAX * LOADED
    assert raw.stats()["loop_gap_own_seconds_max"] < ANSWER_SECONDS_MAX


def fetch_seconds(raw: Raw, chain: Chain) -> float:
    """Of one fetch of all of it, which is right."""
    found = raw.lookup(chain)
    begin = time.monotonic()
    items = raw.fetch(found.lease_id, count=len(chain.keys))
    seconds = time.monotonic() - begin
    assert all(chain.is_right(*item) for item in items)
    assert raw.call("Release", pb.ReleaseRequest(lease_id=found.lease_id)).was_held
    return seconds


def hold(raw: Raw, chain: Chain) -> tuple[str, Mapped]:
    """Map all of it, fetch what has no room, and keep the lease: how it went."""
    mapped = Mapped(raw)
    found = raw.lookup(chain)
    shown = mapped.map(found.lease_id, count=len(chain.keys))
    right = all(chain.is_right(header_of(each), mapped.payload(each)) for each in shown if each.extent)
    for each in shown:
        if not each.extent:
            try:
                items = raw.fetch(found.lease_id, first=each.index, count=1)
            except grpc.RpcError as error:
                return error_of(error), mapped
            right = right and all(chain.is_right(*item) for item in items)
    return "right" if right else "wrong", mapped


@mapped_only
def test_who_waits_for_memory_that_sixteen_hold_ends_and_full_speed_comes_back() -> None:
    with running_service(**SMALL) as service, Raw(service.directory) as raw, ExitStack() as clients:
        chains = [stored(raw, FETCHED_BLOCKS, seed=seed) for seed in range(CLIENTS)]
        wanted = stored(raw, POOL_BLOCKS, seed=100)
        before = min(fetch_seconds(raw, chains[0]) for _ in range(3))
        raws = [clients.enter_context(Raw(service.directory)) for _ in range(CLIENTS)]
        with (
            Probe(service.target, period_seconds=0.1) as probe,
            ThreadPoolExecutor(CLIENTS) as threads,
        ):
            held = list(threads.map(hold, raws, chains))
            assert {how for how, _ in held} <= {"right", "LIMIT_EXCEEDED"}, held
            assert raw.stats()["mapped_items"] > 0
            # All memory is held. Those who come now get theirs by Fetch, or nothing of it, and wait for nobody.
            found = raw.lookup(wanted)
            calls = [
                raw.cache.Map(
                    pb.MapRequest(lease_id=found.lease_id, first_block=number % POOL_BLOCKS, block_count=1),
                    metadata=raw.metadata,
                    timeout=60,
                )
                for number in range(PREFETCHES)
            ]
            ended = [_ending(lambda call=call: sum(len(reply.extent) for reply in call)) for call in calls]
            assert set(ended) <= {"1", "LIMIT_EXCEEDED"}, ended
            check_health(raw, probe)
        for each, (_, mapped) in zip(raws, held, strict=True):
            mapped.close()
            each.close()
        raw.call("Release", pb.ReleaseRequest(lease_id=found.lease_id))
        wait_for(lambda: not any(raw.stats()[name] for name in ("mapped_items", "leases", "fetching_bytes")))
        assert raw.stats()["sessions"] == 1
        # Within what a machine that others use makes of it.
        assert min(fetch_seconds(raw, chains[0]) for _ in range(3)) < before * LOADED
        how, mapped = hold(raw, wanted)
        mapped.close()
        assert how == "right"


def _ending(call: Callable[[], object]) -> str:
    try:
        return str(call())
    except grpc.RpcError as error:
        return error_of(error)


def _no_room_for_a_state_in_the_pool(raw: Raw, namespace: pb.Namespace) -> str:
    chain = Chain(namespace, 1, seed=7)
    raw.store(chain)
    state = chain.state(0, pool=True, ssd=False)
    return _ending(lambda: raw.store_items(namespace, [state]).items)


def _no_room_for_a_state_in_staging(raw: Raw, namespace: pb.Namespace) -> str:
    chain = Chain(namespace, 1, seed=8)
    raw.store(chain)
    return _ending(lambda: raw.store_items(namespace, [chain.state(0)]).items)


def _no_room_for_a_state_among_handoffs(raw: Raw, namespace: pb.Namespace) -> str:
    header = pb.HandoffHeader(
        namespace=namespace.digest,
        position=128,
        length=namespace.state_bytes,
        lineage=pb.LINEAGE_EXACT,
    )
    return _ending(lambda: raw.call("PutHandoff", iter([pb.HandoffFrame(header=header)])))


@pytest.mark.parametrize(
    ("options", "try_it", "allowed"),
    [
        ({}, _no_room_for_a_state_in_the_pool, {"0", "LIMIT_EXCEEDED"}),
        ({"staging": 1 << 20}, _no_room_for_a_state_in_staging, {"LIMIT_EXCEEDED"}),
        ({}, _no_room_for_a_state_among_handoffs, {"LIMIT_EXCEEDED"}),
    ],
    ids=["pool", "staging", "handoffs"],
)
def test_an_item_larger_than_all_of_its_memory_is_refused_at_once_and_evicts_nothing(
    options: dict[str, int], try_it: Callable[[Raw, pb.Namespace], str], allowed: set[str]
) -> None:
    with running_service(**{**SMALL, **options}) as service, Raw(service.directory) as raw:
        namespace = raw.open("large", profile=PROFILE)
        kept = Chain(namespace, 2, seed=1)
        for index in range(2):
            raw.store(kept, first=index, last=index + 1)
        fetch_seconds(raw, kept)
        before = raw.stats()
        assert try_it(raw, namespace) in allowed
        after = raw.stats()
        for name in ("memory_evicted_total", "states_pool_evicted_total", "evicted_blocks_total"):
            assert after[name] == before[name], name
        assert (after["staged_bytes"], after["handoffs"], after["states_pool"]) == (0, 0, 0)
        assert raw.lookup(kept, lease=False).blocks_held == 2


@mapped_only
def test_a_block_larger_than_the_cache_comes_by_fetch_and_evicts_nothing() -> None:
    with running_service(**{**SMALL, "cache": 256 << 10}) as service, Raw(service.directory) as raw:
        chain = stored(raw, 2, seed=1)
        small = Chain(raw.open("small"), 20, seed=2)
        raw.store(small)
        fetch_seconds(raw, small)
        held = raw.stats()["memory_items"]
        assert held
        found = raw.lookup(chain)
        mapped = Mapped(raw)
        assert [each.extent for each in mapped.map(found.lease_id, count=2)] == [0, 0]
        fetch_seconds(raw, chain)
        assert raw.stats()["memory_items"] == held
        mapped.close()
