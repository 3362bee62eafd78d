"""A service and its clients on two hosts: what a cable can carry is used, and a cable that is cut, a way that loses packets
and a host that vanishes cost deadlines and nothing else.

Hosts are network namespaces (tests/support/netns.py). A scenario is a function that runs in a process of the client's host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import Unavailable
from kvstore.service.process import KEPT_FREE_BYTES
from kvstore.v1 import cache_pb2 as pb
from kvstore_client import CacheClient, Deadlines, FetchedItem, Lookup
from tests.e2e.service_raw import Raw
from tests.support import longway, netns
from tests.support.across import BLOCKS, PORT, PROFILE, Ground, bare_seconds, service_on, start_on, timed
from tests.support.calls import Caller, look, within
from tests.support.chains import Chain, open_state
from tests.support.longway import LongWay
from tests.support.netns import Hosts, run_there, two_hosts, what_hosts_lack
from tests.support.polling import wait_for
from tests.support.remote import Secrets, make_secrets
from tests.support.service import ServiceProcess

MBIT = 200.0
SHARE_LEAST = 0.8
TRIES = 4
"""The machine is shared: what is asked for is that the cable can be filled, not that it always is."""
SLACK_SECONDS = 1.5
SESSION_SECONDS_MAX = 20.0
QUICK = Deadlines(
    connect=1.0, lookup=1.0, control=1.0, fetch=4.0, fetch_per_item=0, write=4.0, write_per_mib=0, commit=2.0
)
WAYS = {
    "wire": (netns.SERVICE_IP, netns.CLIENT_IP),
    "far": (longway.SERVICE_IP, longway.CLIENT_IP),
}
"""By their device: where the service is, and where clients come from."""
RESTING = (
    *("sessions", "leases", "reservations", "reserved_items", "flights", "uploads", "staged_bytes"),
    *("fetching_bytes", "handoff_takes_out", "memory_allocated_bytes", "memory_held_bytes", "jobs_waiting"),
)
"""What is as before when nobody is there any more."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    lack = what_hosts_lack()
    if lack:
        # The fixture `require` belongs to single tests, and says so there.
        yield Hosts("", "")
        return
    with two_hosts() as made:
        yield made


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Secrets:
    return make_secrets(tmp_path_factory.mktemp("secrets"), netns.SERVICE_IP, longway.SERVICE_IP)


@pytest.fixture(scope="module")
def service(hosts: Hosts, secrets: Secrets) -> Iterator[ServiceProcess | None]:
    if not hosts.service:
        yield None
        return
    with service_on(hosts, secrets, PORT) as process:
        yield process


@pytest.fixture
def ground(
    hosts: Hosts,
    service: ServiceProcess | None,
    secrets: Secrets,
    require: Any,
    request: pytest.FixtureRequest,
) -> Iterator[Ground]:
    require("netns", service is not None, what_hosts_lack())
    assert service is not None
    hosts.limit(MBIT)
    yield Ground(hosts, secrets, service.directory, service.pid, seed=abs(hash(request.node.name)) % 10**6)
    hosts.mend()


# ---- what the cable carries -------------------------------------------------------------------------------------------


def fills_the_cable(
    ground: Ground, what: str, size: int, call: Callable[[], object], *, up: bool = False
) -> None:
    """`call` moves `size` bytes nearly as fast as a bare stream does right before it."""
    shares: list[float] = []
    while not shares or max(shares) < SHARE_LEAST:
        assert len(shares) < TRIES, f"{what}: {shares} of a bare stream"
        bare = bare_seconds(ground.hosts, size, up=up)
        taken = timed(call)
        shares.append(bare / taken)
        print(f"{what} ({ground.kind}): bare {size * 8 / bare / 1e6:.0f} Mbit/s, {shares[-1]:.2f} of it")


def fetched(client: CacheClient, found: Lookup) -> list[FetchedItem]:
    return list(client.fetch(found.lease, first_block=0, block_count=found.blocks_held, state=False))


def read_all(client: CacheClient, chain: Chain) -> None:
    with look(client, chain).lease as lease:
        items = list(client.fetch(lease, first_block=0, block_count=len(chain.keys), state=False))
    assert [item.payload for item in items] == [
        chain.payload(chain.block_item(i)) for i in range(len(chain.keys))
    ]


def size_of(chain: Chain) -> int:
    return len(chain.keys) * int(chain.namespace.block_bytes)


def _fetch_and_write(ground: Ground) -> None:
    chain = ground.chain()
    with ground.client() as client:
        found = look(client, chain)
        with found.lease:
            fills_the_cable(ground, "fetch", size_of(chain), lambda: fetched(client, found))
        read_all(client, chain)
        new = ground.chain(30, number=1, stored=False)
        items = [new.block_item(index) for index in range(30)]
        payloads = {index: new.payload(item) for index, item in enumerate(items)}

        def write() -> None:
            with client.reserve(new.namespace.digest, items) as reservation:
                reservation.write(payloads)

        fills_the_cable(ground, "write", size_of(new), write, up=True)
        new.store(client)
        read_all(client, new)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_fetch_and_write_fill_the_cable(ground: Ground, kind: str) -> None:
    run_there(ground.hosts.client, _fetch_and_write, replace(ground, kind=kind), seconds=60)


def _lookups_beside_a_fetch(ground: Ground) -> None:
    chain = ground.chain()
    with ground.client() as bulk, ground.client() as client:
        look(client, chain, lease=False)
        reading = Caller(lambda: [read_all(bulk, chain) for _ in range(3)])
        reading.start()
        seconds: list[float] = []
        while reading.is_alive():
            seconds.append(timed(lambda: look(client, chain, lease=False)))
        reading.join()
        assert reading.error is None
        assert reading.answer == [None] * 3
    assert len(seconds) >= 10
    late = sorted(seconds)[int(0.99 * len(seconds))]
    print(f"{len(seconds)} lookups, the 99th of a hundred after {late * 1000:.0f} ms")
    assert late < 1.0


def test_lookups_stay_quick_beside_another_client_s_bulk_fetch(ground: Ground) -> None:
    run_there(ground.hosts.client, _lookups_beside_a_fetch, ground, seconds=60)


# ---- a cable that is cut ----------------------------------------------------------------------------------------------


def resting(raw: Raw) -> dict[str, float]:
    stats = raw.stats()
    return {name: stats[name] for name in RESTING}


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * 4096


def fails_in_time(seconds: float, call: Callable[[], object]) -> None:
    begin = time.monotonic()
    with pytest.raises(Unavailable):
        call()
    taken = time.monotonic() - begin
    assert taken < seconds + SLACK_SECONDS, f"{taken:.1f} s"


def _cut_and_mended(ground: Ground) -> None:
    hosts = ground.hosts
    chain, new = ground.chain(), ground.chain(40, number=1, stored=False)
    beside = replace(ground, kind="async")
    with (
        Raw(ground.directory) as raw,
        ground.client(deadlines=QUICK) as client,
        beside.client(deadlines=QUICK) as another,
    ):
        # Nothing stays in memory: what is fetched is read, and held while it waits for the cable.
        raw.admin.SetMemory(pb.SetMemoryRequest(cache=0), timeout=10)
        with ground.client() as other:
            read_all(other, chain)
        wait_for(lambda: raw.stats()["sessions"] == 1)
        before, memory = resting(raw), resident_bytes(ground.pid)
        found, theirs = look(client, chain), look(another, chain)
        assert look(client, new, announce=True).flight is not None
        ticket = client.put_handoff(chain.namespace.digest, position=1, payload=open_state(PROFILE, 1))
        client.take_handoff(chain.namespace.digest, ticket)
        items = [new.block_item(index) for index in range(40)]
        reservation = client.reserve(new.namespace.digest, items)
        payloads = {index: new.payload(item) for index, item in enumerate(items)}
        callers = [Caller(lambda: chain.fetch(client, found)), Caller(lambda: reservation.write(payloads))]
        # So slow that both are under way for longer than it takes to see that they are.
        hosts.limit(MBIT / 10)
        begin = time.monotonic()
        for each in callers:
            each.start()
        wait_for(lambda: min(raw.stats()[name] for name in ("fetching_bytes", "staged_bytes")) > 0)
        hosts.cut()
        cut = time.monotonic()
        assert raw.stats()["sessions"] == 3
        fails_in_time(QUICK.lookup, lambda: look(client, chain))
        fails_in_time(QUICK.fetch, lambda: chain.fetch(another, theirs))
        for each in callers:
            each.join(QUICK.fetch + SLACK_SECONDS - (time.monotonic() - begin))
            assert not each.is_alive()
            assert type(each.error) is Unavailable, each.error
        for _ in range(3):
            fails_in_time(QUICK.connect + QUICK.lookup, lambda: look(client, chain))
        wait_for(lambda: resting(raw) == before, SESSION_SECONDS_MAX - (time.monotonic() - cut))
        print(f"the service has ended the session after {time.monotonic() - cut:.1f} s")
        assert resident_bytes(ground.pid) < memory + KEPT_FREE_BYTES
        hosts.limit(MBIT)
        hosts.mend()
        mended = time.monotonic()
        again = within(10.0, lambda: look(client, chain))
        within(10.0, lambda: read_all(another, chain))
        print(f"the clients are back, and one has read all, after {time.monotonic() - mended:.1f} s")
        assert raw.stats()["sessions"] == 3
        fills_the_cable(ground, "fetch, mended", size_of(chain), lambda: fetched(client, again))
        new.store(client)
        assert look(client, new).blocks_held == 40


@pytest.mark.slow
def test_a_cut_cable_costs_deadlines_and_leaves_nothing_and_a_mended_one_is_used_again(
    ground: Ground,
) -> None:
    run_there(ground.hosts.client, _cut_and_mended, ground, seconds=80)


def _short_cut(ground: Ground) -> None:
    chain = ground.chain()
    with Raw(ground.directory) as raw, ground.client() as client, ground.client(deadlines=QUICK) as other:
        look(other, chain)
        found = look(client, chain)
        sessions = raw.stats()["sessions_opened_total"]
        items = client.fetch(found.lease, first_block=0, block_count=BLOCKS, state=False)
        got = [next(items) for _ in range(5)]
        ground.hosts.cut()
        fails_in_time(QUICK.lookup, lambda: look(other, chain))
        ground.hosts.mend()
        got += items
        assert [item.payload for item in got] == [chain.right_bytes(item) for item in got]
        assert len(got) == BLOCKS
        assert raw.stats()["sessions_opened_total"] == sessions


def test_a_fetch_waits_for_a_cable_that_is_soon_mended(ground: Ground) -> None:
    run_there(ground.hosts.client, _short_cut, ground, seconds=60)


def _worker(ground: Ground) -> None:
    from tests.support.workers import cold, decode, engine_on, request_of, tokens_of

    prompt = tokens_of(300, seed=30)
    expected = cold(prompt, 4).same
    with (
        ground.client(deadlines=QUICK) as client,
        engine_on(client, salt="across", flush_seconds=3.0) as engine,
    ):
        assert decode(engine, request_of(prompt, 4)).same == expected
        assert decode(engine, request_of(prompt, 4)).report.restored_tokens == 288
        ground.hosts.cut()
        for _ in range(2):
            alone = decode(engine, request_of(prompt, 4))
            assert alone.same == expected
            assert alone.report.restored_tokens == 0
            assert alone.report.miss_reason.startswith("UNAVAILABLE")
        ground.hosts.mend()

        def restores() -> bool:
            answer = decode(engine, request_of(prompt, 4))
            assert answer.same == expected
            return answer.report.restored_tokens == 288

        wait_for(restores, 10.0)


def test_a_worker_computes_alone_while_the_cable_is_cut_and_restores_again_after(ground: Ground) -> None:
    run_there(ground.hosts.client, _worker, ground, seconds=80)


# ---- connections that break, and a long way ---------------------------------------------------------------------------


def _reset(ground: Ground, device: str, blocks: int) -> None:
    host, client_ip = WAYS[device]
    chain = ground.chain(blocks)
    with Raw(ground.directory) as raw, ground.client(host) as client:
        found = look(client, chain)
        boot, sessions = client.boot, raw.stats()["sessions_opened_total"]
        before = ground.hosts.carried_bytes(device)
        items = client.fetch(found.lease, first_block=0, block_count=blocks, state=False)
        got = [next(items) for _ in range(3)]
        ground.hosts.reset_busiest(client_ip)
        got += items
        assert [item.payload for item in got] == [chain.right_bytes(item) for item in got]
        assert len(got) == blocks
        assert (client.boot, raw.stats()["sessions_opened_total"]) == (boot, sessions)
        carried = (ground.hosts.carried_bytes(device) - before) / size_of(chain)
        print(f"{carried:.2f} times the payload was carried")
        # What was under way at the reset, twice; the rest once.
        assert blocks < BLOCKS or carried < 1.5
        new = ground.chain(4, number=1, stored=False)
        new.store(client)
        read_all(client, new)


def test_a_fetch_goes_on_after_a_reset(ground: Ground) -> None:
    run_there(ground.hosts.client, _reset, ground, "wire", BLOCKS, seconds=60)


def test_bytes_are_right_over_a_long_way_that_loses_packets(ground: Ground) -> None:
    print(f"seed {ground.seed}")
    with LongWay(ground.hosts, delay=0.02, loss=0.01, seed=ground.seed) as way:
        run_there(ground.hosts.client, _reset, ground, "far", 8, seconds=60)
    print(f"{way.passed} packets passed, {way.dropped} were dropped")
    assert way.dropped > 0


# ---- a host that vanishes ---------------------------------------------------------------------------------------------


def _vanishing(hosts: Hosts, secrets: Secrets) -> None:
    with service_on(hosts, secrets, PORT + 1) as service:
        ground = Ground(hosts, secrets, service.directory, service.pid, PORT + 1)
        for number, moment in enumerate(["before", "after", "during"]):
            with ground.client(deadlines=QUICK) as client:
                _one_that_vanishes(ground, service, client, number, moment)


def _one_that_vanishes(
    ground: Ground, service: ServiceProcess, client: CacheClient, number: int, moment: str
) -> None:
    """`moment` of the host's end: before the service hears of the commit, while it works on it, after it has."""
    chain = ground.chain(8, number=number, stored=False)
    items = [chain.block_item(index) for index in range(8)]
    reservation = client.reserve(chain.namespace.digest, items)
    reservation.write({index: chain.payload(item) for index, item in enumerate(items)})
    committing = Caller(reservation.commit)
    if moment == "before":
        ground.hosts.cut()
        committing.start()
    else:
        with Raw(ground.directory) as raw:
            done = raw.stats()["commits_total"]
            ground.hosts.lose_answers()
            committing.start()
            if moment == "after":
                wait_for(lambda: raw.stats()["commits_total"] > done)
    service.kill()
    committing.join(QUICK.commit + SLACK_SECONDS)
    assert type(committing.error) is Unavailable, (committing.answer, committing.error)
    ground.hosts.mend()
    ground.hosts.unlimit()
    start_on(ground.hosts, service)
    held = within(10.0, lambda: look(client, chain)).blocks_held
    print(f"killed {moment} the commit: {held} of 8 blocks are there")
    assert moment == "during" or held == {"before": 0, "after": 8}[moment]
    if held < 8:
        chain.store(client, first=held)
    read_all(client, chain)


def test_a_service_s_host_that_vanishes_during_a_commit_has_each_item_whole_or_not_at_all(
    ground: Ground,
) -> None:
    run_there(ground.hosts.client, _vanishing, ground.hosts, ground.secrets, seconds=80)
