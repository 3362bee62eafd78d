"""A client that reads in the service's memory: right bytes, for as long as they are its own, and what it does otherwise."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from kvstore.errors import InvalidArgument, Unavailable, UnknownLease
from kvstore.memory import why_not_mapped
from kvstore.types import ItemKind
from kvstore_client import CacheClient, Lookup, MappedItem, OpenedNamespace
from tests.support.calls import GONE, look, within
from tests.support.chains import Chain, identity_of, payload_of
from tests.support.service import ServiceProcess, running_service

CACHE_BYTES = 8 << 20
"""Room for less than 20 blocks of flash-slim."""
BLOCKS = 12


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceProcess]:
    if reason := why_not_mapped():
        pytest.skip(f"shared memory is needed: {reason}")
    with running_service(cache=CACHE_BYTES) as process:
        yield process


@pytest.fixture
def client(service: ServiceProcess) -> Iterator[CacheClient]:
    with CacheClient(service.directory, owner="tests") as made:
        yield made


@pytest.fixture
def namespace(client: CacheClient, salt: str) -> OpenedNamespace:
    return client.open_namespace(identity_of("flash-slim", salt=salt), name=salt)


def stored(client: CacheClient, namespace: OpenedNamespace, *, seed: int, blocks: int = BLOCKS) -> Chain:
    chain = Chain.of(namespace, blocks, seed=seed)
    chain.store(client)
    return chain


def mapped(
    client: CacheClient, found: Lookup, blocks: int = BLOCKS, *, state: bool = False
) -> list[MappedItem]:
    assert found.lease is not None
    return list(client.map(found.lease, first_block=0, block_count=blocks, state=state))


def read(chain: Chain, items: Sequence[MappedItem]) -> list[bool]:
    """Whether each can be copied; where it can, it is asserted to be right."""
    good = []
    for item in items:
        assert item.payload is not None
        target = bytearray(len(item.payload))
        good.append(item.copy_to(target))
        if good[-1]:
            kind, index = item.kind, item.index
            if kind is ItemKind.BLOCK:
                assert target == payload_of(chain.keys[index], chain.namespace.block_bytes)
            else:
                key = chain.keys[index // chain.namespace.block_tokens - 1]
                assert target == payload_of(key, chain.namespace.state_bytes, ItemKind.STATE)
    return good


def churn(client: CacheClient, namespace: OpenedNamespace, *, seed: int) -> None:
    """Read more of others than there is memory for."""
    for number in range(3):
        other = stored(client, namespace, seed=seed + number)
        found = look(client, other)
        assert read(other, mapped(client, found)) == [True] * BLOCKS
        assert found.lease is not None
        found.lease.release()


# ---- right bytes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to_pool", [False, True])
def test_blocks_and_the_state_are_read_where_the_service_keeps_them(
    client: CacheClient, salt: str, to_pool: bool
) -> None:
    namespace = client.open_namespace(identity_of("tiny", salt=salt), name=salt)
    chain = Chain.of(namespace, BLOCKS, seed=1)
    chain.store(client, states=[BLOCKS - 1], to_pool=to_pool)
    found = look(client, chain)
    items = mapped(client, found, state=True)
    assert [(item.kind, item.index) for item in items] == [
        *((ItemKind.BLOCK, index) for index in range(BLOCKS)),
        (ItemKind.STATE, BLOCKS * namespace.block_tokens),
    ]
    assert all(item.is_shared for item in items)
    assert read(chain, items) == [True] * (BLOCKS + 1)
    fetched = chain.fetch(client, found)
    assert [item.payload for item in items] == [item.payload for item in fetched]


def test_a_part_of_large_blocks_is_mapped_again_without_a_copy(
    client: CacheClient, namespace: OpenedNamespace
) -> None:
    chain = stored(client, namespace, seed=10)
    found = look(client, chain)
    assert found.lease is not None
    whole = mapped(client, found)
    part = list(client.map(found.lease, first_block=3, block_count=4, state=False))
    assert [item.index for item in part] == [3, 4, 5, 6]
    # The same memory, so that what one sees the other sees.
    assert [item.payload for item in part] == [item.payload for item in whole[3:7]]
    assert read(chain, part) == [True] * 4


def test_sessions_share_the_memory_of_what_they_read(
    service: ServiceProcess, client: CacheClient, namespace: OpenedNamespace
) -> None:
    chain = stored(client, namespace, seed=20)
    with CacheClient(service.directory, owner="another") as other:
        ours, theirs = (mapped(each, look(each, chain)) for each in (client, other))
        assert read(chain, ours) == read(chain, theirs) == [True] * BLOCKS
        assert all(item.is_shared for item in theirs)


# ---- leases -------------------------------------------------------------------------------------------------


def test_what_is_leased_stays_and_what_is_not_goes_when_others_need_the_memory(
    client: CacheClient, namespace: OpenedNamespace
) -> None:
    chain = stored(client, namespace, seed=30, blocks=4)
    held, let_go = look(client, chain), stored(client, namespace, seed=31, blocks=4)
    kept = mapped(client, held, 4)
    gone = look(client, let_go)
    lost = mapped(client, gone, 4)
    assert read(let_go, lost) == [True] * 4
    assert gone.lease is not None
    gone.lease.release()
    churn(client, namespace, seed=300)
    assert read(chain, kept) == [True] * 4
    assert all(item.is_current() for item in kept)
    assert read(let_go, lost) == [False] * 4
    assert not any(item.check() or item.is_current() for item in lost)
    assert held.lease is not None
    held.lease.release()
    churn(client, namespace, seed=310)
    assert read(chain, kept) == [False] * 4


def test_more_than_there_is_memory_for_comes_by_fetch_in_its_place(
    client: CacheClient, namespace: OpenedNamespace
) -> None:
    chain = stored(client, namespace, seed=40, blocks=40)
    items = mapped(client, look(client, chain), 40)
    assert [item.index for item in items] == list(range(40))
    shared = [item.is_shared for item in items]
    assert True in shared
    assert False in shared
    assert read(chain, items) == [True] * 40


def test_a_lease_that_was_released_maps_nothing(client: CacheClient, namespace: OpenedNamespace) -> None:
    chain = stored(client, namespace, seed=50, blocks=2)
    found = look(client, chain)
    assert found.lease is not None
    items = client.map(found.lease, first_block=0, block_count=2, state=False)
    found.lease.release()
    with pytest.raises(UnknownLease):
        next(items)
    with pytest.raises(UnknownLease):
        client.map(found.lease, first_block=0, block_count=2, state=False)


def test_what_was_cleared_is_missing_and_is_not_read_any_more(
    client: CacheClient, namespace: OpenedNamespace
) -> None:
    chain = stored(client, namespace, seed=60, blocks=4)
    found = look(client, chain)
    assert read(chain, mapped(client, found, 4)) == [True] * 4
    client.clear(namespace.digest)
    items = mapped(client, found, 4)
    assert [item.payload for item in items] == [None] * 4
    assert not any(item.check() for item in items)


def test_many_threads_map_and_read_beside_each_other(client: CacheClient, namespace: OpenedNamespace) -> None:
    chains = [stored(client, namespace, seed=70 + number, blocks=6) for number in range(4)]
    wrong: list[object] = []

    def work(chain: Chain) -> None:
        for _ in range(15):
            found = look(client, chain)
            assert found.lease is not None
            with found.lease:
                if read(chain, mapped(client, found, 6)) != [True] * 6:
                    wrong.append(chain)

    threads = [threading.Thread(target=work, args=(chain,)) for chain in chains]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert wrong == []


# ---- failures -----------------------------------------------------------------------------------------------


def test_a_kill_in_the_middle_ends_the_map_and_what_came_is_right() -> None:
    with running_service(cache=1 << 30) as service, CacheClient(service.directory, owner="tests") as client:
        namespace = client.open_namespace(identity_of(), name="killed")
        chain = Chain.of(namespace, 6000, seed=1)
        for first in range(0, 6000, 1000):
            chain.store(client, first=first, last=first + 1000)
        found = look(client, chain)
        assert found.lease is not None
        with service.suspended():
            items = client.map(found.lease, first_block=0, block_count=6000, state=False)
            service.kill()
            begin = time.monotonic()
            with pytest.raises(Unavailable):
                next(items)
            assert time.monotonic() - begin < 5
        service.start()
        found = within(5.0, lambda: look(client, chain))
        assert found.lease is not None
        items = client.map(found.lease, first_block=0, block_count=6000, state=False)
        came = [next(items)]
        service.kill()
        begin = time.monotonic()
        # What the service has sent lies here already, so that the end may come late or not at all.
        try:
            came.extend(items)
        except GONE:
            assert len(came) < 6000
        assert time.monotonic() - begin < 5
        # Memory outlives who made it.
        assert read(chain, came) == [True] * len(came)
        with pytest.raises(GONE):
            mapped(client, found, 1)


def test_a_child_maps_with_a_client_of_its_own(
    service: ServiceProcess, client: CacheClient, namespace: OpenedNamespace
) -> None:
    chain = stored(client, namespace, seed=80, blocks=4)
    found = look(client, chain)
    items = mapped(client, found, 4)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert found.lease is not None
            try:
                client.map(found.lease, first_block=0, block_count=1, state=False)
            except (InvalidArgument, UnknownLease):
                code = 0 if read(chain, items) == [True] * 4 else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    # The child's end was not the session's.
    assert read(chain, mapped(client, found, 4)) == [True] * 4
