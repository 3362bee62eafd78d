"""A service that is stopped, ended or drained under its clients: each call ends by its deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from kvstore.errors import Draining, Unavailable, UnknownLease
from kvstore_client import CacheClient, Deadlines, OpenedNamespace
from tests.support.calls import look, within
from tests.support.chains import Chain, identity_of, open_state
from tests.support.service import ServiceProcess, running_service


@pytest.fixture
def service() -> Iterator[ServiceProcess]:
    with running_service() as process:
        yield process


@pytest.fixture
def client(service: ServiceProcess) -> Iterator[CacheClient]:
    with CacheClient(service.directory, owner="tests") as made:
        yield made


def opened(client: CacheClient, profile: str = "tiny") -> OpenedNamespace:
    return client.open_namespace(identity_of(profile), name=f"failures-{profile}")


def test_a_stopped_service_costs_one_deadline_and_then_almost_nothing(service: ServiceProcess) -> None:
    deadlines = Deadlines(lookup=0.3, connect=0.3, release=0.1, probe=0.05)
    with CacheClient(service.directory, owner="tests", deadlines=deadlines) as client:
        chain = Chain.of(opened(client), 2, seed=30)
        chain.store(client, states=[1])
        found = look(client, chain)
        boot = client.boot
        assert found.lease is not None
        with service.suspended():
            start = time.monotonic()
            with pytest.raises(Unavailable):
                look(client, chain)
            assert 0.25 < time.monotonic() - start < 3.0
            spent: list[float] = []
            start = time.monotonic()
            while time.monotonic() - start < 1.0:
                before = time.monotonic()
                with pytest.raises(Unavailable):
                    look(client, chain)
                spent.append(time.monotonic() - before)
            print(f"{len(spent)} calls in 1 s against a stopped service, slowest {1000 * max(spent):.0f} ms")
            # The slowest may have waited for a processor.
            assert sorted(spent)[len(spent) // 2] < 0.1
            assert max(spent) < 2.0
        again = within(2.0, lambda: look(client, chain))
        assert client.boot == boot
        assert again.blocks_held == 2
        # The session has survived, and what it holds with it.
        assert all(item.payload is not None for item in chain.fetch(client, found))


def test_every_kind_of_call_ends_by_its_deadline(service: ServiceProcess) -> None:
    deadlines = Deadlines(
        lookup=0.3,
        fetch=0.3,
        write=0.3,
        commit=0.3,
        release=0.3,
        control=0.3,
        handoff=0.3,
        write_per_mib=0,
        fetch_per_item=0,
        pause_first=0,
        pause_most=0,
    )
    with CacheClient(service.directory, owner="tests", deadlines=deadlines) as client:
        namespace = opened(client, "flash-slim")
        chain, other = Chain.of(namespace, 4, seed=31), Chain.of(namespace, 1, seed=32)
        within(10.0, lambda: chain.store(client))
        found = look(client, chain)
        lease = found.lease
        assert lease is not None
        reservation = client.reserve(namespace.digest, [other.block_item(0)])
        payload = other.payload(other.block_item(0))
        calls: dict[str, Callable[[], object]] = {
            "fetch": lambda: list(client.fetch(lease, first_block=0, block_count=1, state=False)),
            "write": lambda: reservation.write({0: payload}),
            "commit": reservation.commit,
            "reserve": lambda: client.reserve(namespace.digest, [other.block_item(0)]),
            "put": lambda: client.put_handoff(namespace.digest, position=1, payload=open_state("tiny", 1)),
            "lookup of a long prompt": lambda: client.lookup(
                namespace.digest, [b"k" * 32] * 40_000, prompt_tokens=40_000 * 128
            ),
            "take": lambda: client.take_handoff(namespace.digest, bytes(16)),
        }
        with service.suspended():
            for what, call in calls.items():
                start = time.monotonic()
                with pytest.raises(Unavailable):
                    call()
                assert 0.25 < time.monotonic() - start < 3.0, what
            start = time.monotonic()
            lease.release()
            assert reservation.abort() is False
            assert 0.5 < time.monotonic() - start < 4.0


def test_a_service_that_ends_in_order_is_a_miss_and_no_hang(
    service: ServiceProcess, client: CacheClient
) -> None:
    chain = Chain.of(opened(client), 2, seed=33)
    chain.store(client, states=[1])
    found = look(client, chain)
    assert service.stop() == 0
    with pytest.raises(UnknownLease):
        chain.fetch(client, found)
    with pytest.raises(Unavailable):
        look(client, chain)
    service.start()
    assert within(2.0, lambda: look(client, chain)).blocks_held == 2


def test_a_draining_service_says_so(service: ServiceProcess, client: CacheClient) -> None:
    chain = Chain.of(opened(client), 2, seed=34)
    chain.store(client, states=[1])
    found = look(client, chain)
    assert client.drain(0.1) == 1
    with pytest.raises(Draining):
        look(client, chain)
    with pytest.raises(Draining):
        client.reserve(chain.namespace.digest, [chain.block_item(0)])
    with pytest.raises(Draining):
        client.put_handoff(chain.namespace.digest, position=1, payload=open_state("tiny", 1))
    # What was promised before is kept, and reading figures is no new work.
    assert all(item.payload is not None for item in chain.fetch(client, found))
    assert found.lease is not None
    found.lease.release()
    assert client.drain(1.0) == 0
    assert client.stats()["leases"] == 0
