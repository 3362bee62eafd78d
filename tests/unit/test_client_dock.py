"""Memory of this process that can be lent: found by its address, and taken back only when nobody writes to it."""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstore.bytelock import lock_byte
from kvstore.errors import DamagedBytes, InvalidArgument, MemoryUnavailable, Unavailable
from kvstore.v1 import cache_pb2 as pb
from kvstore_client import CacheClient
from kvstore_client.dock import Dock, SessionDock
from kvstore_client.landing import checked, lend
from kvstore_client.memory import parse_line
from tests.support.docks import pool_file
from tests.support.double import service_double
from tests.support.service import short_directory

PAGE = 4096
SIZE = 16 * PAGE


@pytest.fixture
def pool() -> Iterator[tuple[int, mmap.mmap]]:
    with pool_file(SIZE) as made:
        yield made


def test_the_file_behind_memory_is_found_with_where_it_begins(pool: tuple[int, mmap.mmap]) -> None:
    _descriptor, memory = pool
    with memoryview(memory) as view, view[3 * PAGE : 9 * PAGE] as part:
        for piece, begin in ((view, 0), (part, 3 * PAGE)):
            dock = Dock.behind(piece)
            assert dock is not None
            assert dock.bytes == begin + piece.nbytes
            assert dock.place_of(piece[PAGE : 2 * PAGE]) == begin + PAGE
            assert dock.place_of(piece[-1:]) == begin + piece.nbytes - 1
            os.pwrite(dock._descriptor, b"there", begin)
            assert bytes(piece[:5]) == b"there"
            dock.close()
            dock.close()
        dock = Dock.behind(part)
        assert dock is not None
        assert dock.place_of(view[:PAGE]) is None
        assert dock.place_of(view[2 * PAGE : 4 * PAGE]) is None
        assert dock.place_of(view[8 * PAGE : 10 * PAGE]) is None
        assert dock.place_of(bytearray(PAGE)) is None
        assert dock.place_of(part.toreadonly()) is None
        dock.close()


def test_memory_that_is_no_shared_writable_file_has_none(pool: tuple[int, mmap.mmap]) -> None:
    descriptor, _memory = pool
    assert Dock.behind(memoryview(bytearray(SIZE))) is None
    assert Dock.behind(memoryview(bytes(SIZE))) is None
    with mmap.mmap(-1, SIZE) as nameless, memoryview(nameless) as view:
        # The kernel keeps a file for it, which this process has no descriptor of.
        assert Dock.behind(view) is None
    with mmap.mmap(descriptor, SIZE, flags=mmap.MAP_PRIVATE) as private, memoryview(private) as view:
        assert Dock.behind(view) is None


def test_memory_whose_name_is_gone_is_found_by_a_descriptor() -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(SIZE)
        with mmap.mmap(file.fileno(), SIZE) as memory, memoryview(memory) as view:
            dock = Dock.behind(view)
            assert dock is not None
            dock.close()


def test_it_is_shut_when_nobody_writes_any_more(pool: tuple[int, mmap.mmap]) -> None:
    descriptor, memory = pool
    with memoryview(memory) as view:
        dock = Dock.behind(view)
        assert dock is not None
        writer = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
        assert lock_byte(writer, 9, alone=False)
        looked = threading.Semaphore(0)
        found: list[bool] = []

        def over() -> bool:
            looked.release()
            return False

        thread = threading.Thread(target=lambda: found.append(dock.shut(9, over)))
        thread.start()
        for _ in range(5):
            assert looked.acquire(timeout=10)
        assert found == []
        # Whoever writes has ended: the kernel knows.
        os.close(writer)
        thread.join(10)
        assert found == [True]
        writer = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
        assert not lock_byte(writer, 9, alone=False)
        assert lock_byte(writer, 10, alone=False)
        assert dock.shut(9, lambda: False)
        assert not dock.shut(10, lambda: True)
        dock.close()
        dock.close()
        assert not dock.shut(11, lambda: False)
        assert not lock_byte(writer, 9, alone=False), "shut for good, though it is closed"
        os.close(writer)


def dock_of(memory: mmap.mmap) -> Dock:
    dock = Dock.behind(memoryview(memory))
    assert dock is not None
    return dock


def test_a_session_is_lent_one_dock_once(pool: tuple[int, mmap.mmap]) -> None:
    dock, other = dock_of(pool[1]), dock_of(pool[1])
    session = SessionDock()
    lent: list[int] = []
    lock = session.lock_of(dock, lambda each, byte: lent.append(byte))
    assert lent == [lock]
    assert session.lock_of(dock, lambda each, byte: lent.append(byte)) == lock
    assert session.lock_of(other, lambda each, byte: lent.append(byte)) is None
    session.refuse()
    assert session.lock_of(dock, lambda each, byte: lent.append(byte)) is None
    assert len(lent) == 1
    dock.close()
    other.close()


@pytest.mark.parametrize("refusal", [MemoryUnavailable("no"), InvalidArgument("no"), OSError("no")])
def test_what_is_refused_once_is_not_asked_for_again(pool: tuple[int, mmap.mmap], refusal: Exception) -> None:
    dock, session = dock_of(pool[1]), SessionDock()
    calls = 0

    def lend(each: Dock, byte: int) -> None:
        nonlocal calls
        calls += 1
        raise refusal

    assert session.lock_of(dock, lend) is None
    assert session.lock_of(dock, lend) is None
    assert calls == 1
    dock.close()


def test_a_service_that_is_away_refuses_nothing(pool: tuple[int, mmap.mmap]) -> None:
    dock, session = dock_of(pool[1]), SessionDock()

    def away(each: Dock, byte: int) -> None:
        raise Unavailable("away")

    with pytest.raises(Unavailable):
        session.lock_of(dock, away)
    assert session.lock_of(dock, lambda each, byte: None) is not None
    dock.close()


def test_a_service_from_before_it_could_take_one_says_so(pool: tuple[int, mmap.mmap]) -> None:
    def no_such_call(request: object, context: grpc.ServicerContext) -> None:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")

    dock, session = dock_of(pool[1]), SessionDock()
    with short_directory() as folder:
        folder.mkdir()
        asked_of_an_older_one(folder, no_such_call, dock, session)
    dock.close()


def asked_of_an_older_one(folder: Path, no_such_call: Any, dock: Dock, session: SessionDock) -> None:
    with (
        service_double(folder, answers={"OpenDock": no_such_call}),
        CacheClient(folder, owner="t") as client,
    ):
        link = client._link
        connection = link.connection()
        with pytest.raises(MemoryUnavailable):
            lend(link, connection, dock, 1)
        assert session.lock_of(dock, lambda each, byte: lend(link, connection, each, byte)) is None
        assert connection.usable()


def test_a_session_line_may_bring_a_way() -> None:
    assert parse_line(b'{"dock": 7}').is_way
    for wrong in (b'{"dock": 0}', b'{"dock": "7"}', b'{"dock": 7, "bytes": 5}', b'{"dock": 4294967296}'):
        with pytest.raises(ValueError, match="not understood"):
            parse_line(wrong)


CRC32 = 0xED82CD11
"""Of abcd."""


def told(*lengths: int, crc32: int = CRC32) -> pb.FetchDockReply:
    count = len(lengths)
    return pb.FetchDockReply(
        length=lengths, crc32=[crc32] * count, xxh3_64=[0] * count, has_xxh3=[False] * count
    )


def test_what_was_written_counts_by_its_checksum() -> None:
    targets = [memoryview(text) for text in (b"abcd....", b"abce....", b"abc", b"abcd")]
    assert checked([told(4, 4), told(4), told(0)], targets) == [True, False, False, False]


@pytest.mark.parametrize(
    "replies",
    [
        [],
        [told(4)],
        [told(4), told(4, 4)],
        [told(4, 4, 4)],
        [pb.FetchDockReply(length=[4, 4], crc32=[CRC32], xxh3_64=[0, 0], has_xxh3=[False, False])],
        [pb.FetchDockReply(crc32=[CRC32, CRC32])],
    ],
)
def test_an_answer_that_tells_of_other_blocks_is_not_believed(replies: list[pb.FetchDockReply]) -> None:
    with pytest.raises(DamagedBytes):
        checked(replies, [memoryview(b"abcd"), memoryview(b"abcd")])
