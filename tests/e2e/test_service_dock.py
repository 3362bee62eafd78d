"""A session's dock, by hand: what an honest client gets, and what one that is not gets."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator, Sequence

import grpc
import pytest

from kvstore.bytelock import lock_byte, unlock_byte
from kvstore.v1 import cache_pb2 as pb
from tests.e2e.service_raw import Chain, Raw, error_of, payload_of
from tests.e2e.test_service_arena import refused, wait_for
from tests.support.docks import LOCK, lend, pool_file, send, way_of
from tests.support.service import ServiceProcess

SIZE = 4 << 20


@pytest.fixture
def pool() -> Iterator[tuple[int, mmap.mmap]]:
    with pool_file(SIZE) as made:
        yield made


def write_request(number: int, items: Sequence[tuple[int, int, bytes]]) -> pb.WriteDockRequest:
    """Items as (place in the reserve call, offset, payload)."""
    return pb.WriteDockRequest(
        reservation_id=number,
        items=[pb.WriteItem(item=i, length=len(data), crc32=zlib.crc32(data)) for i, _, data in items],
        offset=[offset for _, offset, _ in items],
    )


def stored(raw: Raw, namespace: pb.Namespace, blocks: int, *, seed: int = 1) -> Chain:
    chain = Chain(namespace, blocks, seed=seed)
    raw.store(chain)
    return chain


def leased(raw: Raw, chain: Chain) -> int:
    lease: int = raw.lookup(chain).lease_id
    assert lease
    return lease


def fetch(raw: Raw, lease: int, offsets: Sequence[int], **more: int) -> pb.FetchDockReply:
    """All that was told, as one message."""
    found = pb.FetchDockReply()
    for reply in raw.call("FetchDock", pb.FetchDockRequest(lease_id=lease, offset=offsets, **more)):
        found.MergeFrom(reply)
    return found


def nothing_is_held(raw: Raw) -> bool:
    figures = raw.stats()
    return not any(figures[name] for name in ("staged_bytes", "uploads", "reservations", "docks", "leases"))


@pytest.mark.parametrize(("profile", "blocks"), [("tiny", 40), ("flash-slim", 5)])
def test_what_is_taken_from_a_dock_is_what_is_put_into_another(
    service: ServiceProcess, raw: Raw, pool: tuple[int, mmap.mmap], profile: str, blocks: int
) -> None:
    descriptor, memory = pool
    namespace = raw.open(f"docks {profile}", profile=profile)
    length = namespace.block_bytes
    lend(raw, descriptor, SIZE)
    chain = Chain(namespace, blocks, seed=1)
    number = raw.reserve(namespace, [chain.block(i) for i in range(blocks)]).reservation_id
    items = []
    for index, key in enumerate(chain.keys):
        at, payload = 64 + index * length, payload_of(key, length)
        memory[at : at + length] = payload
        items.append((index, at, payload))
    assert raw.call("WriteDock", write_request(number, items)).bytes == blocks * length
    memory[:] = bytes(SIZE)
    assert raw.commit(number).items == blocks
    with Raw(service.directory) as other, pool_file(SIZE) as (theirs, room):
        lend(other, theirs, SIZE, lock=LOCK + 1)
        offsets = [SIZE - (index + 1) * length for index in range(blocks)]
        reply = fetch(other, leased(other, chain), offsets[1:], first_block=1)
        assert set(reply.length) == {length}
        for key, at, crc32 in zip(chain.keys[1:], offsets[1:], reply.crc32, strict=True):
            assert room[at : at + length] == payload_of(key, length)
            assert crc32 == zlib.crc32(room[at : at + length])
        assert room[SIZE - length :] == b"\xee" * length
        assert other.stats()["docks"] == 2


def test_lies_about_places_are_refused_by_name(
    raw: Raw, namespace: pb.Namespace, pool: tuple[int, mmap.mmap]
) -> None:
    chain = stored(raw, namespace, 2)
    lease = leased(raw, chain)
    with refused("INVALID_ARGUMENT", "OpenDock"):
        fetch(raw, lease, [0])
    with refused("INVALID_ARGUMENT", "OpenDock"):
        raw.call("WriteDock", write_request(1, []))
    # Less than the file has is what the service goes by.
    size = SIZE // 2
    lend(raw, pool[0], size)
    for offset in (size, size - namespace.block_bytes + 1, SIZE, (1 << 64) - 1):
        with refused("INVALID_ARGUMENT", "offset", f"within {size}"):
            fetch(raw, lease, [0, offset])
    with refused("INVALID_ARGUMENT", "block_count"):
        fetch(raw, lease, [0, 0, 0])
    with refused("INVALID_ARGUMENT", "offset"):
        fetch(raw, lease, [])
    with refused("LIMIT_EXCEEDED", "1024"):
        fetch(raw, lease, [0] * 1025)
    with refused("UNKNOWN_LEASE"):
        fetch(raw, lease + 1, [0])
    more = Chain(namespace, 2, seed=9)
    number = raw.reserve(namespace, [more.block(0)]).reservation_id
    payload = payload_of(more.keys[0], namespace.block_bytes)
    for offset in (size, size - len(payload) + 1, (1 << 64) - len(payload)):
        with refused("INVALID_ARGUMENT", "offset[0]"):
            raw.call("WriteDock", write_request(number, [(0, offset, payload)]))
    with refused("DAMAGED_BYTES", "crc32"):
        raw.call("WriteDock", write_request(number, [(0, 0, payload)]))
    assert raw.stats()["staged_bytes"] == 0
    assert set(pool[1][:]) == {0xEE}


def test_no_lie_about_the_file_is_believed(raw: Raw, pool: tuple[int, mmap.mmap]) -> None:
    for size in (0, SIZE + 1, (1 << 64) - 1):
        with refused("INVALID_ARGUMENT", "bytes", f"{SIZE}"):
            lend(raw, pool[0], size)
    with refused("INVALID_ARGUMENT", "lock"):
        lend(raw, pool[0], SIZE, lock=1 << 63)
    with refused("INVALID_ARGUMENT", "a file in memory"):
        lend(raw, raw.socket.fileno(), SIZE)
    number, way = way_of(raw)
    with way:
        with refused("INVALID_ARGUMENT", "no descriptor"):
            raw.call("TakeDock", pb.TakeDockRequest(dock=number, bytes=SIZE))
        with refused("INVALID_ARGUMENT", "on its way"):
            raw.call("TakeDock", pb.TakeDockRequest(dock=number, bytes=SIZE))
    number, way = way_of(raw)
    with way, refused("INVALID_ARGUMENT", "on its way"):
        send(way, pool[0])
        raw.call("TakeDock", pb.TakeDockRequest(dock=number + 1, bytes=SIZE))
    assert raw.stats()["docks"] == 0
    # What is no dock leaves the one that there is.
    lend(raw, pool[0], SIZE)
    with refused("INVALID_ARGUMENT"):
        lend(raw, pool[0], SIZE + 1)
    assert raw.stats()["docks"] == 1


def test_a_file_that_shrinks_costs_its_owner_a_named_answer(
    service: ServiceProcess, raw: Raw, namespace: pb.Namespace, pool: tuple[int, mmap.mmap]
) -> None:
    chain = stored(raw, namespace, 4)
    lease = leased(raw, chain)
    lend(raw, pool[0], SIZE)
    os.ftruncate(pool[0], 4096)
    with refused("MEMORY_UNAVAILABLE", "shorter"):
        fetch(raw, lease, [0, SIZE // 2])
    more = Chain(namespace, 1, seed=5)
    number = raw.reserve(namespace, [more.block(0)]).reservation_id
    with refused("MEMORY_UNAVAILABLE", "shorter"):
        raw.call("WriteDock", write_request(number, [(0, SIZE // 2, bytes(namespace.block_bytes))]))
    # It may be as long again, and has no memory: that is not made at the service's expense.
    os.ftruncate(pool[0], SIZE)
    with refused("MEMORY_UNAVAILABLE", "has less memory"):
        fetch(raw, lease, [SIZE // 2])
    assert os.fstat(pool[0]).st_blocks * 512 == 4096
    assert (raw.stats()["staged_bytes"], raw.stats()["damaged_total"]) == (0, 0)
    with refused("DAMAGED_BYTES"):
        raw.call("WriteDock", write_request(number, [(0, SIZE // 2, b"x" * namespace.block_bytes)]))


def test_a_file_that_shrinks_and_grows_while_it_is_used_kills_nobody(
    service: ServiceProcess, raw: Raw, pool: tuple[int, mmap.mmap]
) -> None:
    chain = stored(raw, raw.open("shrinking", profile="flash-slim"), 8)
    lease = leased(raw, chain)
    lend(raw, pool[0], SIZE)
    stop = threading.Event()

    def breathe() -> None:
        while not stop.is_set():
            os.ftruncate(pool[0], 0)
            os.ftruncate(pool[0], SIZE)
            os.posix_fallocate(pool[0], 0, SIZE)

    thread = threading.Thread(target=breathe)
    thread.start()
    outcomes = set()
    try:
        for _ in range(30):
            try:
                fetch(raw, lease, [index * chain.namespace.block_bytes for index in range(8)])
                outcomes.add("whole")
            except grpc.RpcError as error:
                outcomes.add(error_of(error))
    finally:
        stop.set()
        thread.join()
    assert outcomes <= {"whole", "MEMORY_UNAVAILABLE"}
    with Raw(service.directory) as other:
        assert other.stats()["ready"] == 1
        read = other.fetch(leased(other, chain), count=8)
        assert all(chain.is_right(*each) for each in read)


def test_nothing_is_written_once_its_owner_has_shut_it(
    raw: Raw, namespace: pb.Namespace, pool: tuple[int, mmap.mmap]
) -> None:
    chain = stored(raw, namespace, 3)
    lease = leased(raw, chain)
    lend(raw, pool[0], SIZE)
    own = os.open(f"/proc/self/fd/{pool[0]}", os.O_RDWR)
    assert lock_byte(own, LOCK, alone=True)
    with refused("MEMORY_UNAVAILABLE", "its owner has closed it"):
        fetch(raw, lease, [0, 65_536, 131_072])
    assert set(pool[1][:]) == {0xEE}
    # Under another byte it may be lent again, while the old one stays taken.
    lend(raw, pool[0], SIZE, lock=LOCK + 1)
    assert all(fetch(raw, lease, [0, 65_536, 131_072]).length)
    unlock_byte(own, LOCK)
    os.close(own)


def test_calls_that_are_cancelled_write_no_more_once_the_byte_is_taken_and_hold_nothing(
    raw: Raw, pool: tuple[int, mmap.mmap]
) -> None:
    chain = stored(raw, raw.open("cancelled", profile="flash-slim"), 8)
    length = chain.namespace.block_bytes
    lease = leased(raw, chain)
    for turn in range(12):
        lock = LOCK + turn
        lend(raw, pool[0], SIZE, lock=lock)
        own = os.open(f"/proc/self/fd/{pool[0]}", os.O_RDWR)
        request = pb.FetchDockRequest(lease_id=lease, offset=[index * length for index in range(8)])
        call = raw.cache.FetchDock(request, metadata=raw.metadata)
        if turn % 3:
            next(call)
        call.cancel()
        wait_for(lambda own=own, lock=lock: lock_byte(own, lock, alone=True))  # type: ignore[misc]
        pool[1][:] = b"\xee" * SIZE
        raw.stats()
        assert set(pool[1][:]) == {0xEE}
        os.close(own)
    wait_for(lambda: raw.stats()["fetching_bytes"] == 0)
    lend(raw, pool[0], SIZE, lock=1)
    assert all(fetch(raw, lease, [index * length for index in range(8)]).length)


def test_what_is_damaged_is_missing_and_the_rest_comes(
    raw: Raw, namespace: pb.Namespace, pool: tuple[int, mmap.mmap]
) -> None:
    chain = stored(raw, namespace, 3)
    lease = leased(raw, chain)
    lend(raw, pool[0], SIZE)
    raw.admin.Clear(pb.ClearRequest(namespace=namespace.digest), timeout=10)
    reply = fetch(raw, lease, [0, 65_536, 131_072])
    assert list(reply.length) == [0, 0, 0]
    assert set(pool[1][:]) == {0xEE}


def test_a_session_that_ends_takes_its_dock_along(
    service: ServiceProcess, raw: Raw, pool: tuple[int, mmap.mmap]
) -> None:
    wait_for(lambda: nothing_is_held(raw))
    before = descriptors_of(service)
    with Raw(service.directory) as other:
        lend(other, pool[0], SIZE)
        way_of(other)[1].close()
        assert raw.stats()["docks"] == 1
    wait_for(lambda: nothing_is_held(raw))
    wait_for(lambda: descriptors_of(service) <= before)


def descriptors_of(service: ServiceProcess) -> int:
    return len(os.listdir(f"/proc/{service.pid}/fd"))


# It has blocks written to its dock, again and again, until it is killed.
_READER = """
import ctypes, sys
ctypes.CDLL(None).prctl(1, 9)
from pathlib import Path
from kvstore.v1 import cache_pb2 as pb
from tests.e2e.service_raw import Chain, Raw
from tests.support.docks import lend, pool_file
size = 4 << 20
with Raw(Path(sys.argv[1])) as raw, pool_file(size) as (descriptor, memory):
    space = raw.open("killed dock", profile="flash-slim")
    chain = Chain(space, 8, seed=1)
    lend(raw, descriptor, size)
    lease = raw.lookup(chain).lease_id
    request = pb.FetchDockRequest(lease_id=lease, offset=[i * space.block_bytes for i in range(8)])
    print("ready", flush=True)
    while True:
        calls = [raw.cache.FetchDock(request, metadata=raw.metadata) for _ in range(4)]
        for call in calls:
            assert all(all(reply.length) for reply in call)
"""


def test_a_reader_that_is_killed_gives_everything_back(service: ServiceProcess, raw: Raw) -> None:
    chain = stored(raw, raw.open("killed dock", profile="flash-slim"), 8)
    wait_for(lambda: nothing_is_held(raw))
    for _ in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", _READER, str(service.directory)], stdout=subprocess.PIPE, text=True
        ) as reader:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "ready\n"
            before = raw.stats()["dock_fetched_bytes_total"]
            wait_for(lambda before=before: raw.stats()["dock_fetched_bytes_total"] > before)  # type: ignore[misc]
            os.kill(reader.pid, signal.SIGKILL)
            reader.wait()
        wait_for(lambda: nothing_is_held(raw))
    assert all(chain.is_right(*each) for each in raw.fetch(leased(raw, chain), count=8))
