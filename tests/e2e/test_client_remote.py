"""The client on a way to another machine that breaks, is cut, or is not let in."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import InvalidArgument, KvstoreError, Unauthenticated, Unavailable, UnknownLease
from kvstore_client import CacheClient, Deadlines
from kvstore_client.aio import AsyncCacheClient
from kvstore_client.fetching import RESUMPTIONS_MAX
from tests.support.blocking import Blocking, LoopThread
from tests.support.breaking import Breaking
from tests.support.cable import Cable
from tests.support.calls import look
from tests.support.chains import Chain, identity_of
from tests.support.remote import TOKENS, Secrets, make_secrets, port_of
from tests.support.service import ServiceProcess, running_service

BLOCKS = 60
PATIENT = Deadlines(connect=5.0)


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Secrets:
    return make_secrets(tmp_path_factory.mktemp("secrets"))


@pytest.fixture(scope="module")
def service(secrets: Secrets) -> Iterator[ServiceProcess]:
    with running_service(**secrets.options) as process:
        yield process


@pytest.fixture(scope="module")
def chain(service: ServiceProcess) -> Chain:
    """27 MB of blocks and a state, stored."""
    with CacheClient(service.directory, owner="writer") as client:
        namespace = client.open_namespace(identity_of("flash-slim"), name="remote")
        made = Chain.of(namespace, BLOCKS, seed=1)
        made.store(client, last=BLOCKS // 2)
        made.store(client, first=BLOCKS // 2, states=[BLOCKS - 1])
    return made


@pytest.fixture(params=["sync", "async"])
def connect(request: pytest.FixtureRequest, secrets: Secrets) -> Iterator[Any]:
    """connect(port, **options): a client of either kind."""
    with ExitStack() as stack:

        def made(port: int, **options: Any) -> CacheClient:
            given = {
                "address": f"tcp://localhost:{port}",
                "owner": "tests",
                "token": TOKENS[0],
                "ca": secrets.folder / "issuer.pem",
                "deadlines": PATIENT,
                **options,
            }
            if request.param == "sync":
                return stack.enter_context(CacheClient(**given))
            thread = LoopThread(asyncio.new_event_loop)
            stack.callback(thread.close)
            client: Any = Blocking(AsyncCacheClient(**given), thread)
            return stack.enter_context(client)

        yield made


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def total(chain: Chain) -> int:
    return BLOCKS * chain.namespace.block_bytes + chain.namespace.state_bytes


@pytest.mark.parametrize("breaks", [1, RESUMPTIONS_MAX])
def test_a_fetch_goes_on_where_it_broke_off(
    service: ServiceProcess, chain: Chain, connect: Any, breaks: int
) -> None:
    with Breaking(port_of(service), breaks=breaks) as way:
        client = connect(way.port)
        found = look(client, chain)
        boot = client.boot
        # Not a whole number of blocks: it breaks inside one. What was not read by then is asked for again.
        way.carries = total(chain) // (breaks + 1) - (1 << 20)
        items = chain.fetch(client, found)
        assert [item.payload is not None for item in items] == [True] * (BLOCKS + 1)
        assert way.broken == breaks
        assert client.boot == boot
        # What was read before it broke is not read again.
        found.lease.release()


def test_a_lookup_whose_answer_was_lost_on_its_way_is_made_once_more_in_its_session(
    service: ServiceProcess, chain: Chain, connect: Any
) -> None:
    with Breaking(port_of(service), breaks=0) as way:
        client = connect(way.port)
        look(client, chain).lease.release()
        boot = client.boot
        way.swallows, way.carries, way.breaks = True, 1, 1
        found = look(client, chain)
        assert (way.broken, found.blocks_held) == (1, BLOCKS)
        # Its session has lived on: what it leases can be read.
        assert client.boot == boot
        assert len(chain.fetch(client, found)) == BLOCKS + 1
        found.lease.release()


def test_a_lookup_that_announces_is_not_made_twice_in_one_session(
    service: ServiceProcess, chain: Chain, connect: Any
) -> None:
    with Breaking(port_of(service), breaks=0) as way:
        client = connect(way.port)
        look(client, chain).lease.release()
        way.swallows, way.carries, way.breaks = True, 1, 1
        tokens = len(chain.keys) * chain.namespace.block_tokens
        with pytest.raises(Unavailable):
            client.lookup(chain.namespace.digest, chain.keys, prompt_tokens=tokens + 1, announce=True)
        assert way.broken == 1


def test_a_way_that_breaks_too_often_is_no_way(service: ServiceProcess, chain: Chain, connect: Any) -> None:
    with Breaking(port_of(service)) as way:
        client = connect(way.port)
        found = look(client, chain)
        way.carries = total(chain) // (RESUMPTIONS_MAX + 3)
        with pytest.raises(Unavailable):
            chain.fetch(client, found)
        assert way.broken == RESUMPTIONS_MAX + 1
        way.carries = 0
        # The lease has outlived all of them.
        assert len(chain.fetch(client, found)) == BLOCKS + 1


def test_a_fetch_whose_way_does_not_come_back_ends_with_its_time(
    service: ServiceProcess, chain: Chain, connect: Any
) -> None:
    with Breaking(port_of(service)) as way:
        client = connect(way.port, deadlines=Deadlines(connect=20.0, fetch=1.0, fetch_per_item=0.0))
        found = look(client, chain)
        way.carries = total(chain) // 4
        way.is_away = True
        # What is connected already stays, and breaks.
        items = client.fetch(found.lease, first_block=0, block_count=BLOCKS, state=False)
        start = time.monotonic()
        with pytest.raises(Unavailable):
            list(items)
        assert time.monotonic() - start < 10


def test_retries_of_one_client_are_a_small_part_of_its_calls(
    service: ServiceProcess, chain: Chain, connect: Any
) -> None:
    with Breaking(port_of(service)) as way:
        client = connect(way.port)
        found = look(client, chain)
        way.carries = 1 << 20
        for _ in range(10):
            with pytest.raises(Unavailable):
                chain.fetch(client, found)
        # 10 fetches, and the 10 retries that a client begins with.
        assert 18 <= way.broken <= 22


@pytest.mark.slow
def test_a_cut_cable_is_noticed_and_the_client_comes_back(
    service: ServiceProcess, chain: Chain, connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Sooner than shipped; what a session takes to end with what is shipped, test_across_hosts.py tells.
    monkeypatch.setattr("kvstore_client.link_base.KEEPALIVE_SECONDS", 1.0)
    monkeypatch.setattr("kvstore_client.link_base.KEEPALIVE_TIMEOUT_SECONDS", 1.0)
    with Cable(port_of(service)) as cable:
        client = connect(cable.port)
        found = look(client, chain)
        cable.cut()
        start = time.monotonic()
        pause = threading.Event()
        while client.boot is not None:
            assert time.monotonic() - start < 10, "the cut is not noticed"
            pause.wait(0.1)
        print(f"noticed after {time.monotonic() - start:.1f} s")
        with pytest.raises(UnknownLease):
            chain.fetch(client, found)


def test_who_has_no_token_or_another_one_is_refused_by_name(service: ServiceProcess, connect: Any) -> None:
    for token in (None, "another"):
        with pytest.raises(Unauthenticated):
            connect(port_of(service), token=token).open_namespace(identity_of(), name="n")


def test_a_certificate_of_another_issuer_is_not_believed(
    service: ServiceProcess, connect: Any, tmp_path: Path
) -> None:
    other = make_secrets(tmp_path / "other")
    client = connect(port_of(service), ca=other.folder / "issuer.pem")
    with pytest.raises(Unavailable, match="no service to be reached"):
        client.open_namespace(identity_of(), name="n")


def test_plaintext_to_a_service_that_wants_tls_fails_in_time(service: ServiceProcess, connect: Any) -> None:
    client = connect(port_of(service), ca=None, insecure=True, deadlines=Deadlines(connect=1.0))
    start = time.monotonic()
    with pytest.raises(KvstoreError):
        client.open_namespace(identity_of(), name="n")
    assert time.monotonic() - start < 5


def test_where_nobody_listens_calls_fail_at_once(service: ServiceProcess, connect: Any) -> None:
    with Breaking(port_of(service)) as way:
        port = way.port
    client = connect(port)
    for _ in range(5):
        start = time.monotonic()
        with pytest.raises(Unavailable):
            client.open_namespace(identity_of(), name="n")
        assert time.monotonic() - start < 2
    assert client.boot is None


def test_tasks_read_beside_each_other_and_a_cancelled_one_leaves_the_others(
    service: ServiceProcess, chain: Chain, secrets: Secrets
) -> None:
    async def read(client: AsyncCacheClient) -> int:
        found = await look(client, chain)  # type: ignore[arg-type, misc]
        async with found.lease:
            got = [
                item
                async for item in client.fetch(found.lease, first_block=0, block_count=BLOCKS, state=True)
            ]
        assert all(item.payload == chain.right_bytes(item) for item in got)
        return len(got)

    async def main() -> list[int | BaseException]:
        async with AsyncCacheClient(
            f"tcp://localhost:{port_of(service)}",
            owner="tests",
            token=TOKENS[0],
            ca=secrets.folder / "issuer.pem",
            deadlines=PATIENT,
        ) as client:
            tasks = [asyncio.create_task(read(client)) for _ in range(4)]
            await asyncio.sleep(0)
            tasks[2].cancel()
            return await asyncio.gather(*tasks, return_exceptions=True)

    got = asyncio.run(main())
    assert [each for each in got if not isinstance(each, BaseException)] == [BLOCKS + 1] * 3
    assert isinstance(got[2], asyncio.CancelledError)


def test_administration_is_refused_by_name_and_calls_go_on(service: ServiceProcess, connect: Any) -> None:
    client = connect(port_of(service))
    for ask in (
        client.stats,
        client.clear,
        client.namespaces,
        client.set_memory,
        client.drop_states,
        lambda: client.drain(0),
        lambda: client.set_policy(b"", "zero"),
    ):
        with pytest.raises(InvalidArgument, match="not served to other machines"):
            ask()
    client.open_namespace(identity_of(), name="n")


def test_fetches_that_are_cancelled_leave_nothing_in_the_client(
    service: ServiceProcess, chain: Chain
) -> None:
    async def cancelled(client: AsyncCacheClient, lease: Any, rounds: int) -> None:
        for number in range(rounds):
            # The first is read, and the task waits for others that are on their way.
            reading = asyncio.create_task(read(client, lease))
            await asyncio.sleep(0.001 * (number % 20))
            reading.cancel()
            await asyncio.wait({reading})

    async def read(client: AsyncCacheClient, lease: Any) -> None:
        async for _ in client.fetch(lease, first_block=0, block_count=BLOCKS, state=False):
            continue

    async def grown_by() -> int:
        async with AsyncCacheClient(service.directory, owner="tests") as client:
            found = await look(client, chain)  # type: ignore[arg-type, misc]
            await cancelled(client, found.lease, 50)
            before = resident_bytes()
            await cancelled(client, found.lease, 300)
            return resident_bytes() - before

    # A message of 1 MiB each, where they are lost.
    grown = asyncio.run(grown_by())
    print(f"grown by {grown >> 20} MiB")
    assert grown < 30 << 20
    assert "unexpected error" not in service.log
