"""A service that is killed and restarted under its clients: each call ends, and the same object works again."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

from kvstore.errors import Unavailable, UnknownLease, UnknownReservation, UnknownTicket
from kvstore_client import CacheClient, OpenedNamespace
from tests.support.calls import GONE, Caller, look, within
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


# ---- killed -------------------------------------------------------------------------------------------------


def test_the_same_client_works_again_after_the_service_was_killed(
    service: ServiceProcess, client: CacheClient
) -> None:
    chain = Chain.of(opened(client), 4, seed=1)
    chain.store(client, states=[3])
    found = look(client, chain)
    boot = client.boot
    ticket = client.put_handoff(chain.namespace.digest, position=1, payload=open_state("tiny", 1))
    unwritten = client.reserve(chain.namespace.digest, [Chain.of(chain.namespace, 1, seed=2).block_item(0)])
    service.kill()
    spent: list[float] = []
    for _ in range(10):
        for call in (
            lambda: look(client, chain),
            client.stats,
            lambda: client.take_handoff(chain.namespace.digest, ticket),
        ):
            start = time.monotonic()
            with pytest.raises(Unavailable):
                call()
            spent.append(time.monotonic() - start)
    # The slowest may have waited for a processor.
    assert sorted(spent)[len(spent) * 9 // 10] < 0.1
    assert max(spent) < 2.0
    assert client.boot is None
    service.start()
    start = time.monotonic()
    again = within(2.0, lambda: look(client, chain))
    print(f"first answer {1000 * (time.monotonic() - start):.0f} ms after the service was ready")
    assert client.boot not in (None, boot)
    assert again.blocks_held == 4
    assert all(item.payload is not None for item in chain.fetch(client, again))
    with pytest.raises(UnknownLease):
        chain.fetch(client, found)
    assert found.lease is not None
    found.lease.release()
    with pytest.raises(UnknownReservation):
        unwritten.commit()
    assert unwritten.abort() is False
    with pytest.raises(UnknownTicket):
        client.take_handoff(chain.namespace.digest, ticket)
    # The release of an old lease has not touched a new one, whatever its number.
    assert all(item.payload is not None for item in chain.fetch(client, again))


def test_a_restart_that_nobody_noticed_is_noticed_by_the_next_call(
    service: ServiceProcess, client: CacheClient
) -> None:
    chain = Chain.of(opened(client), 2, seed=3)
    chain.store(client, states=[1])
    boots = [client.boot]
    descriptors, threads = [], []
    for _ in range(4):
        found = look(client, chain)
        service.restart()
        with pytest.raises(UnknownLease):
            chain.fetch(client, found)
        again = look(client, chain)
        assert again.blocks_held == 2
        assert again.lease is not None
        again.lease.release()
        boots.append(client.boot)
        descriptors.append(len(os.listdir("/proc/self/fd")))
        threads.append(threading.active_count())
    assert None not in boots
    assert len(set(boots)) == 5
    # And a restart leaves nothing behind in the client.
    assert descriptors[-1] <= descriptors[0] + 2
    assert threads[-1] <= threads[0] + 1


def test_a_kill_during_a_fetch_ends_it_with_right_bytes_so_far(
    service: ServiceProcess, client: CacheClient
) -> None:
    namespace = opened(client, "flash-slim")
    chain = Chain.of(namespace, 100, seed=4)
    for first in range(0, 100, 25):
        chain.store(client, first=first, last=first + 25, states=[99] if first == 75 else [])
    found = look(client, chain)
    assert found.lease is not None
    items = client.fetch(found.lease, first_block=0, block_count=100, state=False)
    item = next(items)
    assert item.payload == chain.right_bytes(item)
    service.kill()
    got = []
    with pytest.raises(Unavailable):
        got.extend(items)
    assert len(got) < 99
    assert all(item.payload == chain.right_bytes(item) for item in got)
    service.start()
    assert all(
        item.payload is not None for item in chain.fetch(client, within(2.0, lambda: look(client, chain)))
    )


def test_a_kill_during_a_write_ends_it_and_nothing_of_it_is_found(
    service: ServiceProcess, client: CacheClient
) -> None:
    namespace = opened(client, "flash-slim")
    chain = Chain.of(namespace, 60, seed=5)
    items = [chain.block_item(i) for i in range(60)]
    reservation = client.reserve(namespace.digest, items)
    payloads = {i: chain.payload(item) for i, item in enumerate(items)}
    with service.suspended():
        # A stopped service takes what its socket holds, a small part of these 27 MB: the write is under way at the kill.
        caller = Caller(lambda: reservation.write(payloads))
        caller.start()
        service.kill()
    caller.join(5)
    assert not caller.is_alive()
    assert isinstance(caller.error, GONE)
    service.start()
    assert within(2.0, lambda: look(client, chain)).blocks_held == 0
    chain.store(client)
    assert look(client, chain).blocks_held == 60


def test_a_kill_during_a_commit_leaves_all_right_or_nothing(
    service: ServiceProcess, client: CacheClient
) -> None:
    namespace = opened(client)
    for seed in range(3):
        chain = Chain.of(namespace, 20, seed=10 + seed)
        items = [chain.block_item(i) for i in range(20)]
        reservation = client.reserve(namespace.digest, items)
        reservation.write({i: chain.payload(item) for i, item in enumerate(items)})
        caller = Caller(reservation.commit)
        if seed:
            caller.start()
            service.kill()
        else:
            with service.suspended():
                caller.start()
                service.kill()
        caller.join(5)
        assert not caller.is_alive()
        assert caller.error is None or isinstance(caller.error, GONE)
        service.start()
        found = within(2.0, lambda c=chain: look(client, c))
        assert 0 <= found.blocks_held <= 20
        if caller.error is None:
            assert found.blocks_held == 20
        if found.lease is not None:
            assert all(item.payload is not None for item in chain.fetch(client, found))


def test_threads_go_on_through_restarts(service: ServiceProcess, client: CacheClient) -> None:
    chain = Chain.of(opened(client), 8, seed=20)
    chain.store(client, states=[7])
    stop = threading.Event()
    wrong: list[BaseException] = []
    good = [0] * 6

    def work(index: int) -> None:
        while not stop.is_set():
            try:
                found = look(client, chain)
                assert found.lease is not None
                with found.lease:
                    assert all(item.payload is not None for item in chain.fetch(client, found))
                good[index] += 1
            except GONE:
                stop.wait(0.005)
            except BaseException as error:
                wrong.append(error)
                raise

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(3):
            done = list(good)
            deadline = time.monotonic() + 10
            while not wrong and any(now <= before for now, before in zip(good, done, strict=True)):
                assert time.monotonic() < deadline, f"a thread does not go on: {good} after {done}"
                stop.wait(0.01)
            service.restart()
    finally:
        stop.set()
        for thread in threads:
            thread.join(10)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)
    assert within(2.0, client.stats)["leases"] == 0
