"""Memory that a client lends: what its owner may do to it, and what that costs the service."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.bytelock import BYTE_MAX, lock_byte, unlock_byte
from kvstore.errors import InvalidArgument, LimitExceeded, MemoryUnavailable
from kvstore.memory import Dock, Docks
from kvstore.memory.dock import CALLS_PER_DOCK
from tests.support.docks import LOCK, pool_file, send

SIZE = 64 << 10


def never() -> bool:
    return False


@pytest.fixture
def pool() -> Iterator[tuple[int, memoryview]]:
    with pool_file(SIZE) as (descriptor, memory), memoryview(memory) as view:
        yield descriptor, view


@pytest.fixture
def dock(pool: tuple[int, memoryview]) -> Iterator[Dock]:
    made = Dock(pool[0], size=SIZE, lock=LOCK)
    yield made
    made.close()


def owners(descriptor: int) -> int:
    """The file opened once more, so that its locks are its own."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)


def test_bytes_go_both_ways_by_their_offset(dock: Dock, pool: tuple[int, memoryview]) -> None:
    dock.write([(5, b"hello"), (SIZE - 3, bytearray(b"end"))], never)
    assert bytes(pool[1][4:11]) == b"\xeehello\xee"
    target = bytearray(8)
    dock.copy(SIZE - 8, memoryview(target))
    assert target == b"\xee" * 5 + b"end"


@pytest.mark.parametrize("size", [0, SIZE + 1, 1 << 62])
def test_a_size_that_the_file_has_not_is_refused(pool: tuple[int, memoryview], size: int) -> None:
    with pytest.raises(InvalidArgument, match=f"1 to {SIZE}"):
        Dock(pool[0], size=size, lock=LOCK)


def test_a_lock_that_no_file_has_is_refused(pool: tuple[int, memoryview]) -> None:
    with pytest.raises(InvalidArgument, match="lock"):
        Dock(pool[0], size=SIZE, lock=BYTE_MAX + 1)


@pytest.mark.parametrize("kind", ["file", "pipe", "directory", "device"])
def test_what_is_no_file_in_memory_is_refused(tmp_path: Path, kind: str) -> None:
    path = {"file": tmp_path / "file", "directory": tmp_path, "device": Path("/dev/null")}.get(kind)
    if kind == "file":
        (tmp_path / "file").write_bytes(bytes(SIZE))
    ends = list(os.pipe()) if path is None else [os.open(path, os.O_RDONLY)]
    with pytest.raises(InvalidArgument, match="a file in memory"):
        Dock(ends[0], size=1, lock=LOCK)
    for each in ends:
        os.close(each)


def test_a_file_that_may_not_be_written_is_an_answer() -> None:
    sealed = os.memfd_create("sealed", os.MFD_ALLOW_SEALING)
    os.write(sealed, bytes(SIZE))
    # Root may write where nobody else may, but not here.
    fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    dock = Dock(sealed, size=SIZE, lock=LOCK)
    with pytest.raises(MemoryUnavailable, match="not permitted"):
        dock.write([(0, b"x")], never)
    dock.close()
    os.close(sealed)


def test_a_file_that_shrinks_is_an_answer_and_not_written_to(
    dock: Dock, pool: tuple[int, memoryview]
) -> None:
    os.ftruncate(pool[0], SIZE // 2)
    dock.copy(0, memoryview(bytearray(SIZE // 2)))
    for offset in (SIZE // 2 - 1, SIZE // 2, SIZE - 2):
        with pytest.raises(MemoryUnavailable, match="shorter"):
            dock.copy(offset, memoryview(bytearray(2)))
        with pytest.raises(MemoryUnavailable, match="shorter"):
            dock.write([(offset, b"no")], never)
    assert os.fstat(pool[0]).st_size == SIZE // 2


def test_memory_that_is_not_there_is_not_made_here(dock: Dock, pool: tuple[int, memoryview]) -> None:
    os.ftruncate(pool[0], 0)
    os.ftruncate(pool[0], SIZE)
    with pytest.raises(MemoryUnavailable, match="has less memory"):
        dock.write([(0, b"x")], never)
    assert os.fstat(pool[0]).st_blocks == 0


def test_flags_of_what_was_handed_over_mean_nothing(dock: Dock, pool: tuple[int, memoryview]) -> None:
    fcntl.fcntl(pool[0], fcntl.F_SETFL, os.O_APPEND)
    dock.write([(7, b"here")], never)
    assert bytes(pool[1][7:11]) == b"here"
    assert os.fstat(pool[0]).st_size == SIZE


def test_nothing_is_written_while_its_owner_has_the_byte_alone(
    dock: Dock, pool: tuple[int, memoryview]
) -> None:
    own = owners(pool[0])
    assert lock_byte(own, LOCK, alone=True)
    with pytest.raises(MemoryUnavailable, match="its owner has closed it"):
        dock.write([(0, b"late")], never)
    assert bytes(pool[1][:4]) == b"\xee" * 4
    unlock_byte(own, LOCK)
    dock.write([(0, b"good")], never)
    assert bytes(pool[1][:4]) == b"good"
    os.close(own)


def test_its_owner_has_the_byte_alone_only_when_nobody_writes(
    pool: tuple[int, memoryview], monkeypatch: pytest.MonkeyPatch
) -> None:
    dock, own = Dock(pool[0], size=SIZE, lock=LOCK), owners(pool[0])
    going = [threading.Event(), threading.Event()]
    standing = threading.Semaphore(0)
    write = os.pwritev

    def held_up(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        standing.release()
        assert going[offset].wait(10)
        return write(descriptor, buffers, offset)

    monkeypatch.setattr(os, "pwritev", held_up)
    threads = [threading.Thread(target=dock.write, args=([(at, b"x")], never)) for at in (0, 1)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert standing.acquire(timeout=10)
    for thread, event in zip(threads, going, strict=True):
        assert not lock_byte(own, LOCK, alone=True)
        event.set()
        thread.join(10)
    assert lock_byte(own, LOCK, alone=True)
    os.close(own)
    dock.close()


@pytest.mark.parametrize("why", ["stopped", "ended"])
def test_what_is_stopped_writes_no_further_piece(dock: Dock, pool: tuple[int, memoryview], why: str) -> None:
    stops = iter([False, why == "stopped"])

    def stopped() -> bool:
        answer = next(stops)
        # Seen before the next piece.
        dock.ended = why == "ended" and bytes(pool[1][:1]) == b"a"
        return answer

    pieces = [(0, b"a"), (1, b"b"), (2, b"c")]
    with pytest.raises(MemoryUnavailable, match="has ended"):
        dock.write(pieces if why == "stopped" else pieces[:1] + pieces, stopped)
    assert bytes(pool[1][1:3]) == b"\xee\xee"


# ---- of all sessions --------------------------------------------------------------------------------------------


def taken(docks: Docks, session: str, descriptor: int, *, size: int = SIZE) -> Dock:
    number, way = docks.begin(session)
    with way:
        send(way, descriptor)
        return docks.take(session, number, size=size, lock=LOCK)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_session_has_one_dock_and_its_end_closes_it_when_nobody_is_at_it(
    pool: tuple[int, memoryview],
) -> None:
    docks, before = Docks(), open_descriptors()
    first = taken(docks, "s", pool[0])
    docks.borrow(first)
    second = taken(docks, "s", pool[0])
    assert docks.find("s") is second
    assert first.ended
    assert open_descriptors() == before + 2
    docks.give_back(first)
    docks.begin("s")[1].close()
    docks.end("s")
    docks.end("s")
    assert (len(docks), open_descriptors()) == (0, before)


def test_calls_at_one_dock_have_a_limit(pool: tuple[int, memoryview]) -> None:
    docks = Docks()
    dock = taken(docks, "s", pool[0])
    for _ in range(CALLS_PER_DOCK):
        docks.borrow(dock)
    with pytest.raises(LimitExceeded, match=f"{CALLS_PER_DOCK} at once"):
        docks.borrow(dock)
    for _ in range(CALLS_PER_DOCK):
        docks.give_back(dock)
    docks.end("s")


def test_what_comes_by_the_way_is_one_descriptor_or_nothing(pool: tuple[int, memoryview]) -> None:
    docks, before = Docks(), open_descriptors()

    def refused(fill: Callable[..., None], *, off: int = 0) -> None:
        number, way = docks.begin("s")
        with way:
            fill(way)
            with pytest.raises(InvalidArgument, match="dock"):
                docks.take("s", number + off, size=SIZE, lock=LOCK)

    refused(lambda way: None)
    refused(lambda way: way.close())
    refused(lambda way: way.send(b"no descriptor"))
    refused(lambda way: send(way, pool[0], pool[0], pool[0]))
    refused(lambda way: send(way, pool[0]), off=1)
    docks.end("s")
    with pytest.raises(InvalidArgument, match="on its way"):
        docks.take("s", 1, size=SIZE, lock=LOCK)
    assert open_descriptors() == before
