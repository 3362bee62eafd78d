"""Payloads that the service takes from its client's memory and puts there by itself, and every way in which it may not."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator, Sequence

import pytest

from kvstore.bytelock import lock_byte
from kvstore.errors import InvalidArgument, KvstoreError, MemoryUnavailable, Unavailable
from kvstore.prefix.identity import NamespaceIdentity
from kvstore.profile.keyed import KeyedProfile
from kvstore_client import CacheClient, Deadlines, Dock, KeyedStore, OpaqueKey
from tests.support.docks import pool_file
from tests.support.service import ServiceProcess

ROW = 64 << 10
ROWS = 16
FETCH_SECONDS = 1.0
LATE = 10.0


@pytest.fixture
def pool() -> Iterator[mmap.mmap]:
    with pool_file(ROW * ROWS) as (_, memory):
        yield memory


@pytest.fixture
def dock(pool: mmap.mmap) -> Iterator[Dock]:
    with memoryview(pool) as view:
        found = Dock.behind(view)
    assert found is not None
    yield found
    found.close()


@pytest.fixture
def client(service: ServiceProcess) -> Iterator[CacheClient]:
    with CacheClient(service.directory, owner="dock", deadlines=Deadlines(fetch=FETCH_SECONDS)) as made:
        yield made


@pytest.fixture
def store(client: CacheClient, dock: Dock, salt: str) -> KeyedStore:
    identity = NamespaceIdentity(KeyedProfile(name="m", payload_bytes=ROW), "w1", "", tenant_salt=salt)
    return KeyedStore(client, identity, name=salt, dock=dock)


def keys_of(count: int) -> list[OpaqueKey]:
    return [OpaqueKey(b"%d" % number) for number in range(count)]


def bytes_of(number: int) -> bytes:
    return (b"%d." % number * ROW)[:ROW]


def rows_of(pool: mmap.mmap, count: int = 4) -> list[memoryview]:
    view = memoryview(pool)
    return [view[at * ROW : (at + 1) * ROW] for at in range(count)]


def fill(rows: Sequence[memoryview]) -> None:
    for number, row in enumerate(rows):
        row[:] = bytes_of(number)


def put(store: KeyedStore, rows: Sequence[memoryview]) -> list[OpaqueKey]:
    fill(rows)
    keys = keys_of(len(rows))
    assert all(store.put(list(zip(keys, rows, strict=True))))
    return keys


def wipe(rows: Sequence[memoryview]) -> None:
    for row in rows:
        row[:] = b"\xee" * ROW


def moved(admin: CacheClient) -> tuple[float, float]:
    figures = admin.stats()
    return figures["dock_written_bytes_total"], figures["dock_fetched_bytes_total"]


def test_rows_go_to_the_service_and_come_back_without_passing_through_here(
    store: KeyedStore, pool: mmap.mmap, admin: CacheClient
) -> None:
    before = moved(admin)
    rows = rows_of(pool)
    keys = put(store, rows)
    wipe(rows)
    # One is not held, and one has its place elsewhere in the pool.
    last = memoryview(pool)[(ROWS - 1) * ROW :]
    asked = [(keys[3], rows[0]), (OpaqueKey(b"none"), rows[1]), (keys[1], last)]
    assert store.get_into(asked) == (True, False, True)
    assert (bytes(rows[0]), bytes(rows[1][:1]), bytes(last)) == (bytes_of(3), b"\xee", bytes_of(1))
    assert moved(admin) == (before[0] + 4 * ROW, before[1] + 2 * ROW)


def test_what_does_not_lie_in_the_pool_goes_the_other_ways(
    store: KeyedStore, pool: mmap.mmap, admin: CacheClient
) -> None:
    rows = rows_of(pool)
    before = moved(admin)
    fill(rows)
    own = bytearray(bytes_of(7))
    keys = keys_of(3)
    assert store.put([(keys[0], rows[0]), (keys[1], own), (keys[2], bytes_of(9))]) == (True,) * 3
    assert moved(admin)[0] == before[0] + ROW
    targets = [bytearray(ROW), memoryview(bytearray(ROW)), rows[3]]
    assert store.get_into(list(zip(keys, targets, strict=True))) == (True,) * 3
    assert [bytes(each) for each in targets] == [bytes_of(0), bytes_of(7), bytes_of(9)]
    assert moved(admin)[1] == before[1]


def test_a_service_that_stood_still_writes_nothing_into_rows_that_were_taken_back(
    store: KeyedStore, pool: mmap.mmap, service: ServiceProcess, admin: CacheClient
) -> None:
    rows = rows_of(pool)
    keys = put(store, rows)
    found = store._client.contains(store.digest, store._names(keys), lease=True)
    assert found.lease is not None
    dock = store._dock
    assert dock is not None
    with service.suspended():
        with pytest.raises(Unavailable):
            found.lease.fetch_into(dock, rows)
        # They are the engine's again.
        wipe(rows)
    admin.stats()
    assert all(bytes(row) == b"\xee" * ROW for row in rows)
    # The session goes on, without its dock.
    fetched = moved(admin)[1]
    assert within_pause(lambda: store.get_into(list(zip(keys, rows, strict=True)))) == (True,) * 4
    assert [bytes(row) for row in rows] == [bytes_of(number) for number in range(4)]
    assert moved(admin)[1] == fetched


def within_pause(call: object) -> object:
    """Calls are refused at once for a moment after a failure."""
    for _ in range(100_000):
        try:
            return call()  # type: ignore[operator]
        except Unavailable:
            continue
    raise AssertionError("the service was not reached again")


def test_a_call_that_was_given_up_comes_back_when_nobody_writes_any_more(
    store: KeyedStore, pool: mmap.mmap, service: ServiceProcess
) -> None:
    rows = rows_of(pool)
    keys = put(store, rows)
    memory = store._client._link.connection().session.memory
    assert memory is not None
    lock = memory.dock._lock
    assert lock is not None
    found = store._client.contains(store.digest, store._names(keys), lease=True)
    lease, dock = found.lease, store._dock
    assert lease is not None
    assert dock is not None
    # Somebody who writes, and does not end though the call's time is over.
    writer = os.open(f"/proc/self/fd/{dock._descriptor}", os.O_RDWR)
    assert lock_byte(writer, lock, alone=False)
    ended: list[type[KvstoreError]] = []

    def fetch() -> None:
        try:
            lease.fetch_into(dock, rows)
        except KvstoreError as error:
            ended.append(type(error))

    with service.suspended():
        thread = threading.Thread(target=fetch)
        thread.start()
        thread.join(2 * FETCH_SECONDS)
        assert thread.is_alive()
        os.close(writer)
        thread.join(LATE)
    assert ended == [Unavailable]


def test_what_the_service_refuses_by_name_leaves_the_dock_as_it_is(
    store: KeyedStore, pool: mmap.mmap, admin: CacheClient
) -> None:
    rows = rows_of(pool)
    keys = put(store, rows)
    found = store._client.contains(store.digest, store._names(keys), lease=True)
    lease, dock = found.lease, store._dock
    assert lease is not None
    assert dock is not None
    with pytest.raises(InvalidArgument, match="block_count"):
        lease.fetch_into(dock, [*rows, rows[0]])
    before = moved(admin)[1]
    assert lease.fetch_into(dock, rows) == [True] * 4
    assert moved(admin)[1] == before + 4 * ROW


def test_who_closes_its_client_waits_for_nobody(
    store: KeyedStore, pool: mmap.mmap, client: CacheClient
) -> None:
    rows = rows_of(pool)
    put(store, rows)
    dock = store._dock
    assert dock is not None
    client.close()
    writer = os.open(f"/proc/self/fd/{dock._descriptor}", os.O_RDWR)
    assert lock_byte(writer, 1, alone=False)
    assert not dock.shut(1, lambda: client._link.is_closed)
    os.close(writer)


def test_a_pool_that_shrinks_is_not_used_again_and_other_ways_are(
    store: KeyedStore, pool: mmap.mmap, admin: CacheClient
) -> None:
    rows = rows_of(pool)
    keys = put(store, rows)
    dock = store._dock
    assert dock is not None
    os.ftruncate(dock._descriptor, 0)
    os.ftruncate(dock._descriptor, ROW * ROWS)
    with pytest.raises(MemoryUnavailable, match="has less memory"):
        store.get_into(list(zip(keys, rows, strict=True)))
    fetched = moved(admin)
    assert store.get_into(list(zip(keys, rows, strict=True))) == (True,) * 4
    assert [bytes(row) for row in rows] == [bytes_of(number) for number in range(4)]
    rows[0][:] = bytes_of(5)
    assert store.put([(OpaqueKey(b"more"), rows[0])]) == (True,)
    assert moved(admin) == fetched


def test_a_new_session_is_lent_the_pool_again(
    store: KeyedStore, pool: mmap.mmap, service: ServiceProcess, admin: CacheClient
) -> None:
    rows = rows_of(pool)
    keys = put(store, rows)
    service.kill()
    service.start()
    wipe(rows)
    assert within_pause(lambda: store.get_into(list(zip(keys, rows, strict=True)))) == (True,) * 4
    assert moved(admin)[1] == 4 * ROW
