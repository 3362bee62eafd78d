"""Writes through an arena: what an honest client gets, and what one that is not gets."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc
import pytest

from kvstore.memory import why_not_mapped
from kvstore.v1 import cache_pb2 as pb
from tests.e2e.service_raw import Chain, Raw, error_of, payload_of
from tests.support.arenas import OpenedArena, arena_request, open_arena, told
from tests.support.service import ServiceProcess, running_service

pytestmark = pytest.mark.skipif(bool(why_not_mapped()), reason=why_not_mapped() or "there is such memory")

SIZE = 4 << 20
BUDGET = 8 << 20


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceProcess]:
    with running_service(arenas=BUDGET) as process:
        yield process


@pytest.fixture
def arena(raw: Raw) -> Iterator[OpenedArena]:
    made = open_arena(raw, SIZE)
    yield made
    made.close()


@contextmanager
def refused(name: str, *words: str) -> Iterator[None]:
    with pytest.raises(grpc.RpcError) as caught:
        yield
    assert error_of(caught.value) == name
    for word in words:
        assert word in (caught.value.details() or "")


def wait_for(holds: Callable[[], bool]) -> None:
    """Ask again until it is so; the question itself takes a while, so this needs no pause."""
    end = time.monotonic() + 10.0
    while not holds():
        assert time.monotonic() < end, "it did not come to be"


def nothing_is_held(raw: Raw) -> bool:
    figures = raw.stats()
    return not any(figures[name] for name in ("staged_bytes", "uploads", "reservations", "arena_bytes"))


def reserved(raw: Raw, namespace: pb.Namespace, blocks: int, *, seed: int = 1) -> tuple[Chain, int]:
    chain = Chain(namespace, blocks, seed=seed)
    reply = raw.reserve(namespace, [chain.block(i) for i in range(blocks)])
    return chain, reply.reservation_id


# ---- what it is for -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("profile", "blocks"), [("tiny", 40), ("flash-slim", 5)])
def test_what_was_written_through_the_arena_is_what_is_read(
    raw: Raw, arena: OpenedArena, profile: str, blocks: int
) -> None:
    namespace = raw.open(f"through {profile}", profile=profile)
    chain, number = reserved(raw, namespace, blocks)
    items, at = [], 64
    for index, key in enumerate(chain.keys):
        payload = payload_of(key, namespace.block_bytes)
        arena.put(at, payload)
        items.append((index, at, payload))
        at += len(payload)
    before = raw.stats()["arena_written_bytes_total"]
    half = blocks // 2
    assert arena.write(number, items[:half]).items == half
    # Some of one reservation may come the other way.
    raw.write(number, {items[half][0]: items[half][2]})
    assert arena.write(number, items[half + 1 :]).bytes == sum(len(each[2]) for each in items[half + 1 :])
    arena.put(0, bytes(SIZE))
    assert raw.commit(number).items == blocks
    assert raw.stats()["arena_written_bytes_total"] - before == (blocks - 1) * namespace.block_bytes
    found = raw.lookup(chain)
    fetched = raw.fetch(found.lease_id, count=blocks)
    assert all(chain.is_right(header, data) for header, data in fetched)
    raw.call("Release", pb.ReleaseRequest(lease_id=found.lease_id))


def test_asking_again_tells_of_the_same_arena_again(raw: Raw, arena: OpenedArena) -> None:
    held = raw.stats()["arena_bytes"]
    reply = raw.call("OpenArena", pb.OpenArenaRequest(bytes=2 * SIZE))
    line, descriptor = told(raw)
    assert (reply.arena, reply.bytes) == (arena.number, SIZE) == (line["arena"], line["bytes"])
    assert os.fstat(descriptor).st_ino == os.fstat(arena.descriptor).st_ino
    os.close(descriptor)
    assert raw.stats()["arena_bytes"] == held


def test_arenas_share_one_budget_and_a_session_that_ends_gives_its_own_back(service: ServiceProcess) -> None:
    with Raw(service.directory) as first, Raw(service.directory) as second:
        wait_for(lambda: nothing_is_held(second))
        mine = open_arena(first, BUDGET - SIZE + 1)
        with refused("LIMIT_EXCEEDED", "bytes", f"{SIZE}"):
            second.call("OpenArena", pb.OpenArenaRequest(bytes=SIZE))
        with refused("LIMIT_EXCEEDED"):
            second.call("OpenArena", pb.OpenArenaRequest(bytes=(1 << 64) - 1))
        mine.put(0, b"still there")
        first.close()
        wait_for(lambda: nothing_is_held(second))
        # Whoever maps it still has nothing of the service's memory.
        assert mine.memory[:11] == bytes(11)
        mine.close()
        open_arena(second, BUDGET).close()


# ---- who is not honest ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, SIZE - 4096, SIZE + 4096])
def test_its_size_never_changes(arena: OpenedArena, size: int) -> None:
    with pytest.raises(OSError, match="not permitted") as refusal:
        os.ftruncate(arena.descriptor, size)
    assert refusal.value.errno == errno.EPERM
    with pytest.raises(OSError, match="not permitted"):
        fcntl.fcntl(arena.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_lies_about_places_are_refused_by_name_and_cost_nothing(
    raw: Raw, namespace: pb.Namespace, arena: OpenedArena
) -> None:
    chain, number = reserved(raw, namespace, 2)
    payload = payload_of(chain.keys[0], namespace.block_bytes)
    arena.put(0, payload)
    for offset in (SIZE, SIZE - len(payload) + 1, (1 << 64) - 1, (1 << 64) - len(payload)):
        with refused("INVALID_ARGUMENT", "offset[0]", f"{SIZE} bytes"):
            arena.write(number, [(0, offset, payload)])
    for length in (len(payload) - 1, len(payload) + 1, 0, SIZE + 1, (1 << 64) - 1):
        request = arena_request(number, [(0, 0, payload)])
        request.items[0].length = length
        with refused("INVALID_ARGUMENT"):
            raw.call("WriteArena", request)
    request = arena_request(number, [(0, 0, payload)])
    request.offset.append(0)
    with refused("INVALID_ARGUMENT", "offset"):
        raw.call("WriteArena", request)
    with refused("INVALID_ARGUMENT", "items.item"):
        arena.write(number, [(0, 0, payload), (0, 0, payload)])
    with refused("INVALID_ARGUMENT", "items.item"):
        arena.write(number, [(7, 0, payload)])
    with refused("UNKNOWN_RESERVATION"):
        arena.write(number + 1, [(0, 0, payload)])
    assert raw.stats()["staged_bytes"] == 0
    assert arena.write(number, [(0, 0, payload)]).items == 1
    with refused("INVALID_ARGUMENT", "items.item"):
        arena.write(number, [(0, 0, payload)])
    assert raw.commit(number).items == 1


def test_items_may_lie_over_each_other_and_each_is_held_to_its_own_checksum(
    raw: Raw, namespace: pb.Namespace, arena: OpenedArena
) -> None:
    chain, number = reserved(raw, namespace, 2)
    payload = payload_of(b"both", namespace.block_bytes)
    arena.put(0, payload)
    assert arena.write(number, [(0, 0, payload), (1, 0, payload)]).items == 2
    assert raw.commit(number).items == 2
    found = raw.lookup(chain)
    assert {data for _, data in raw.fetch(found.lease_id, count=2)} == {payload}
    raw.call("Release", pb.ReleaseRequest(lease_id=found.lease_id))


def test_bytes_that_change_while_they_are_copied_are_damaged_or_whole_and_nobody_else_notices(
    service: ServiceProcess, raw: Raw, arena: OpenedArena
) -> None:
    namespace = raw.open("changing", profile="flash-slim")
    count = SIZE // namespace.block_bytes
    chain = Chain(namespace, count, seed=2)
    payloads = [payload_of(key, namespace.block_bytes) for key in chain.keys]
    items = [(index, index * namespace.block_bytes, payload) for index, payload in enumerate(payloads)]
    stop = threading.Event()

    def scribble() -> None:
        while not stop.is_set():
            for _, at, payload in items:
                arena.memory[at : at + 64] = bytes(64)
                arena.memory[at : at + 64] = payload[:64]

    for _, at, payload in items:
        arena.put(at, payload)
    thread = threading.Thread(target=scribble)
    thread.start()
    outcomes = set()
    try:
        for _ in range(20):
            number = raw.reserve(namespace, [chain.block(i) for i in range(count)]).reservation_id
            try:
                arena.write(number, items)
                outcomes.add("whole")
            except grpc.RpcError as error:
                outcomes.add(error_of(error))
            with Raw(service.directory) as other:
                assert other.stats()["ready"] == 1
            raw.call("Abort", pb.AbortRequest(reservation_id=number))
    finally:
        stop.set()
        thread.join()
    assert outcomes <= {"whole", "DAMAGED_BYTES"}
    # What it scribbles before the copy is damaged for certain.
    number = raw.reserve(namespace, [chain.block(i) for i in range(count)]).reservation_id
    arena.memory[items[1][1] + 5] ^= 1
    with refused("DAMAGED_BYTES", "item 1", "crc32"):
        arena.write(number, items)
    assert raw.stats()["staged_bytes"] == 0
    arena.memory[items[1][1] + 5] ^= 1
    arena.write(number, items)
    assert raw.commit(number).items == count
    found = raw.lookup(chain)
    assert all(chain.is_right(*each) for each in raw.fetch(found.lease_id, count=count))


def test_an_arena_is_asked_for_first(raw: Raw, namespace: pb.Namespace) -> None:
    _, number = reserved(raw, namespace, 1)
    with refused("INVALID_ARGUMENT", "OpenArena"):
        raw.call("WriteArena", arena_request(number, [(0, 0, b"")]))
    with refused("INVALID_ARGUMENT", "bytes"):
        raw.call("OpenArena", pb.OpenArenaRequest())
    with refused("UNKNOWN_SESSION"):
        raw.cache.OpenArena(pb.OpenArenaRequest(bytes=SIZE), timeout=10)


def test_who_does_not_listen_is_hung_up_on_and_his_memory_comes_back(
    service: ServiceProcess, raw: Raw
) -> None:
    wait_for(lambda: nothing_is_held(raw))
    with Raw(service.directory) as deaf:
        with refused("UNKNOWN_SESSION"):
            for _ in range(100_000):
                try:
                    deaf.call("OpenArena", pb.OpenArenaRequest(bytes=SIZE))
                except grpc.RpcError as error:
                    # So many descriptors may not be on their way; asking on fills the connection all the same.
                    if error_of(error) != "MEMORY_UNAVAILABLE":
                        raise
        wait_for(lambda: nothing_is_held(raw))


# It reserves and writes through its arena, again and again, until it is killed.
_WRITER = """
import ctypes, sys
ctypes.CDLL(None).prctl(1, 9)
from pathlib import Path
from kvstore.v1 import cache_pb2 as pb
from tests.e2e.service_raw import Chain, Raw
from tests.support.arenas import arena_request, open_arena
with Raw(Path(sys.argv[1])) as raw:
    space = raw.open("killed", profile="flash-slim")
    arena = open_arena(raw, 4 << 20)
    count = arena.memory.size() // space.block_bytes
    payload = bytes(space.block_bytes)
    chain = Chain(space, count, seed=5)
    number = raw.reserve(space, [chain.block(i) for i in range(count)]).reservation_id
    # Each is refused: they are never all right.
    items = [(i, i * len(payload), payload) for i in range(count - 1)] + [(count - 1, 0, b"x" * len(payload))]
    print("ready", flush=True)
    while True:
        calls = [raw.cache.WriteArena.future(arena_request(number, items), metadata=raw.metadata) for _ in range(4)]
        for call in calls:
            assert call.exception() is not None
"""


def test_a_writer_that_is_killed_gives_everything_back(service: ServiceProcess, raw: Raw) -> None:
    wait_for(lambda: nothing_is_held(raw))
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(service.directory)], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            wait_for(lambda: raw.stats()["staged_bytes"] > 0)
            os.kill(writer.pid, signal.SIGKILL)
            writer.wait()
        wait_for(lambda: nothing_is_held(raw))
        assert raw.stats()["arenas"] == 0
