"""Who may fill which part of a session's arena, and how a session comes by one."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator

import pytest

from kvstore.errors import LimitExceeded, MemoryUnavailable, Unavailable
from kvstore.memory import why_not_mapped
from kvstore.memory.arena import Arena as Given
from kvstore.pages import SharedPages
from kvstore_client.arena import ARENA_BYTES, ARENA_BYTES_LEAST, Arena, Room, SessionArena
from kvstore_client.memory import parse_line
from tests.support.extents import give, line, lone_extent
from tests.unit.test_client_memory import Ends

PAGE = 4096


def pages_of(size: int) -> SharedPages:
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        return SharedPages(descriptor, size, writable=True)
    finally:
        os.close(descriptor)


def arena_of(pages: int) -> Arena:
    return Arena(pages_of(pages * PAGE))


def taken(arena: Arena, length: int) -> Room:
    room = arena.take(length)
    assert room is not None
    return room


def test_rooms_do_not_overlap_and_are_lent_again_when_they_came_back() -> None:
    arena = arena_of(4)
    first, second, third = (taken(arena, PAGE) for _ in range(3))
    assert [room.begin for room in (first, second, third)] == [0, PAGE, 2 * PAGE]
    assert arena.take(PAGE + 1) is None
    second.give_back()
    assert arena.take(PAGE + 1) is None
    assert taken(arena, 1).begin == PAGE
    assert taken(arena, PAGE).begin == 3 * PAGE
    assert arena.take(1) is None
    first.give_back()
    assert taken(arena, PAGE).begin == 0


def test_a_view_is_of_its_room_and_of_no_use_afterwards() -> None:
    pages = pages_of(2 * PAGE)
    arena = Arena(pages)
    taken(arena, 10)
    room = taken(arena, 5)
    room.view[:] = b"later"
    assert pages.view[PAGE : PAGE + 5] == b"later"
    view = room.view
    room.give_back()
    with pytest.raises(ValueError, match="released"):
        view[0] = 1


def test_a_room_of_which_somebody_keeps_a_view_is_not_lent_to_others() -> None:
    arena = arena_of(1)
    room = taken(arena, PAGE)
    kept = room.view[10:20]
    room.give_back()
    assert arena.take(1) is None
    kept.release()
    assert taken(arena, 1).begin == 0


def test_rooms_by_chance_never_overlap() -> None:
    chance = random.Random(5)
    arena = arena_of(16)
    lent: list[Room] = []
    refusals = 0
    for _ in range(2000):
        if lent and chance.random() < 0.5:
            lent.pop(chance.randrange(len(lent))).give_back()
            continue
        room = arena.take(chance.randrange(1, 5 * PAGE))
        if room is None:
            refusals += 1
            continue
        assert 0 <= room.begin < room.end <= arena.bytes
        assert all(room.end <= other.begin or other.end <= room.begin for other in lent)
        lent.append(room)
    assert refusals
    for room in lent:
        room.give_back()
    assert taken(arena, arena.bytes).begin == 0


# ---- how a session comes by one -------------------------------------------------------------------------------------


def test_a_service_with_little_room_is_asked_for_less() -> None:
    asked: list[int] = []

    def ask(size: int) -> SharedPages:
        asked.append(size)
        if size > 20 << 20:
            raise LimitExceeded("no room")
        return pages_of(size)

    session = SessionArena()
    found = session.get(ask)
    assert found is not None
    assert asked == [ARENA_BYTES, ARENA_BYTES // 4]
    assert found.bytes == ARENA_BYTES // 4
    assert session.get(ask) is found is session.now


@pytest.mark.parametrize("error", [LimitExceeded("none"), MemoryUnavailable("none"), None])
def test_refused_once_it_is_not_asked_for_again(error: Exception | None) -> None:
    asked: list[int] = []

    def ask(size: int) -> SharedPages | None:
        asked.append(size)
        if error is not None:
            raise error
        return None

    session = SessionArena()
    assert session.get(ask) is None
    count = len(asked)
    assert session.get(ask) is None
    assert len(asked) == count
    assert session.refused
    assert min(asked) >= ARENA_BYTES_LEAST


def test_a_failure_is_the_callers_and_the_next_one_asks_again() -> None:
    def fails(size: int) -> SharedPages:
        raise Unavailable("away")

    session = SessionArena()
    with pytest.raises(Unavailable):
        session.get(fails)
    assert session.get(pages_of) is not None


def test_while_one_thread_asks_nobody_waits() -> None:
    asking, answer = threading.Event(), threading.Event()

    def slow(size: int) -> SharedPages:
        asking.set()
        assert answer.wait(10)
        return pages_of(size)

    def never(size: int) -> SharedPages:
        raise AssertionError("two have asked")

    session = SessionArena()
    thread = threading.Thread(target=session.get, args=(slow,))
    thread.start()
    assert asking.wait(10)
    assert session.get(never) is None
    answer.set()
    thread.join()
    assert session.get(never) is not None


# ---- what the session connection says of it -------------------------------------------------------------------------


@pytest.fixture
def ends() -> Iterator[Ends]:
    if reason := why_not_mapped():
        pytest.skip(reason)
    made = Ends()
    yield made
    made.close()


@pytest.fixture
def given() -> Iterator[Given]:
    made = Given(3, 2 * PAGE)
    yield made
    made.close()


def tell(ends: Ends, number: int, arena: Given, size: int | None = None) -> None:
    said = line({"arena": number, "bytes": arena.bytes if size is None else size})
    ends.say(said, arena.descriptor)


def test_the_line_of_an_arena_is_understood() -> None:
    assert parse_line(b'{"arena": 3, "bytes": 8192}').is_arena
    assert not parse_line(b'{"extent": 3, "bytes": 8192}').is_arena


def test_what_is_written_to_it_the_other_end_reads(ends: Ends, given: Given) -> None:
    tell(ends, 3, given)
    pages = ends.memory.find_arena(3)
    assert pages is not None
    pages.view[PAGE : PAGE + 5] = b"hello"
    copy = memoryview(bytearray(5))
    given.copy(PAGE, copy)
    assert copy == b"hello"
    # Told again, it is the same memory; and an extent may have its number.
    tell(ends, 3, given)
    extent = lone_extent(3)
    give(ends.service, extent)
    assert ends.memory.find_arena(3) is pages
    assert ends.memory.find(3) is not None
    extent.close()


@pytest.mark.parametrize("wrong", ["another", "size", "no descriptor"])
def test_what_no_service_says_of_an_arena_ends_the_session(ends: Ends, given: Given, wrong: str) -> None:
    tell(ends, 3, given)
    assert ends.memory.find_arena(3) is not None
    if wrong == "another":
        tell(ends, 4, given)
    elif wrong == "size":
        tell(ends, 3, given, size=PAGE)
    else:
        ends.service.send(line({"arena": 3, "bytes": given.bytes}))
    assert not ends.session.alive()


def test_an_arena_that_was_not_given_ends_the_session(ends: Ends) -> None:
    with pytest.raises(Unavailable, match="arena"):
        ends.memory.find_arena(9)
    assert not ends.session.alive()
