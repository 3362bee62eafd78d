"""What a session connection may say of memory, and what is made of anything else."""

from __future__ import annotations

import fcntl
import gc
import os
import resource
import socket
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.errors import Unavailable
from kvstore.memory.extent import Extent
from kvstore_client.memory import (
    EXTENTS_MAX,
    LINE_BYTES_MAX,
    Given,
    Memory,
    check_descriptor,
    parse_line,
)
from kvstore_client.session import Session
from tests.support.extents import give, line, lone_extent

F_ADD_SEALS = 1033
SHRINK, GROW = 2, 4


class Ends:
    """A session connection: `service` writes, `memory` reads."""

    def __init__(self) -> None:
        self.service, self._client = socket.socketpair()
        self.session = Session(self._client, number="0" * 32, boot="0" * 32)
        self.memory: Memory = self.session.memory
        self.service.settimeout(5)

    def say(self, said: bytes, *descriptors: int) -> None:
        socket.send_fds(self.service, [said], list(descriptors))

    def close(self) -> None:
        self.session.close()
        self.service.close()


@pytest.fixture(scope="module", autouse=True)
def _nothing_left_of_other_tests() -> None:
    """Descriptors that they left to the collector would go while they are counted here."""
    gc.collect()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def extent() -> Iterator[Extent]:
    made = lone_extent()
    try:
        yield made
    finally:
        made.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings(name: str) -> int:
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum(f"memfd:{name}" in each for each in maps)


# ---- lines --------------------------------------------------------------------------------------------------


def test_the_line_of_the_contract_is_understood() -> None:
    assert parse_line(b'{"extent": 7, "bytes": 67108864}') == Given(7, 67_108_864)
    assert parse_line(b'{"bytes": 4096, "extent": 4294967295}') == Given(4_294_967_295, 4096)


WRONG_LINES = [
    b"",
    b"7",
    b"[]",
    b"null",
    b'"extent"',
    b"{}",
    b"{",
    b"\xff\xfe",
    b"[" * 4000,
    b'{"extent": 7}',
    b'{"bytes": 4096}',
    b'{"extent": 7, "bytes": 4096, "more": 1}',
    b'{"dropped": 7}',
    b'{"extent": 0, "bytes": 4096}',
    b'{"extent": -1, "bytes": 4096}',
    b'{"extent": 4294967296, "bytes": 4096}',
    b'{"extent": true, "bytes": 4096}',
    b'{"extent": 7.0, "bytes": 4096}',
    b'{"extent": "7", "bytes": 4096}',
    b'{"extent": 7, "bytes": 0}',
    b'{"extent": 7, "bytes": 7}',
    b'{"extent": 7, "bytes": -4096}',
    b'{"extent": 7, "bytes": 1e3}',
    b'{"extent": 7, "bytes": NaN}',
    b'{"extent": 7, "bytes": ' + b"9" * 3000 + b"}",
    b'{"extent": 7, "bytes": null}',
]


@pytest.mark.parametrize("said", WRONG_LINES, ids=lambda said: repr(said[:40]))
def test_any_other_line_is_refused(said: bytes) -> None:
    with pytest.raises(ValueError, match="not understood"):
        parse_line(said)


# ---- extents ------------------------------------------------------------------------------------------------


def test_an_extent_is_read_where_it_lies_and_leaves_no_descriptor(ends: Ends, extent: Extent) -> None:
    before = descriptors()
    give(ends.service, extent)
    found = ends.memory.find(extent.number)
    assert found is not None
    assert descriptors() == before
    slot = extent.slots[1]
    view = found.pages[slot.offset : slot.offset + slot.length]
    assert view == b"payload"
    slot.payload[:] = b"changed"
    assert view == b"changed"
    assert found.generations[1] == slot.generation == 2
    extent.step(1)
    assert found.generations[1] == 3
    assert len(found.pages) == extent.bytes


def test_what_is_mapped_cannot_be_written(ends: Ends, extent: Extent) -> None:
    give(ends.service, extent)
    found = ends.memory.find(extent.number)
    assert found is not None
    for view in (found.pages, found.generations):
        assert view.readonly
        with pytest.raises(TypeError):
            view[0] = 1


def test_a_line_may_come_in_pieces_and_many_at_once(ends: Ends, extent: Extent) -> None:
    said = line({"extent": 1, "bytes": extent.bytes})
    ends.say(said[:1], extent.descriptor)
    for at in range(1, len(said)):
        assert ends.memory.read()
        assert len(ends.memory) == 0
        ends.service.send(said[at : at + 1])
    assert ends.memory.read()
    assert len(ends.memory) == 1
    others = [lone_extent(number) for number in range(2, 40)]
    for other in others:
        give(ends.service, other)
    assert ends.memory.read()
    assert len(ends.memory) == 1 + 38
    for other in others:
        other.close()


def test_with_the_session_an_extent_is_unmapped_but_for_who_still_reads_it() -> None:
    extents = [lone_extent(number, b"kept") for number in (901, 902)]
    ends = Ends()
    for extent in extents:
        give(ends.service, extent)
    found = ends.memory.find(901)
    assert found is not None
    view = found.pages[extents[0].slots[0].offset :][:4]
    del found
    ours = mappings("kvstore-901"), mappings("kvstore-902")
    ends.close()
    assert len(ends.memory) == 0
    assert (mappings("kvstore-901"), mappings("kvstore-902")) == (ours[0], ours[1] - 1)
    assert view == b"kept"
    del view
    assert mappings("kvstore-901") == ours[0] - 1
    for extent in extents:
        extent.close()


def test_the_end_of_the_session_unmaps_everything(extent: Extent) -> None:
    before, ours = descriptors(), mappings("kvstore-1")
    ends = Ends()
    give(ends.service, extent)
    assert ends.memory.read()
    assert mappings("kvstore-1") == ours + 1
    ends.say(b"{", extent.descriptor)
    assert ends.memory.read()
    ends.close()
    assert mappings("kvstore-1") == ours
    assert descriptors() == before
    assert not ends.session.alive()


def test_memory_that_cannot_be_mapped_is_done_without(ends: Ends) -> None:
    # More than there are addresses.
    descriptor = memfd(1 << 50, seals=SHRINK | GROW)
    ends.say(line({"extent": 1, "bytes": 1 << 50}), descriptor)
    os.close(descriptor)
    assert ends.memory.find(1) is None
    assert ends.memory.refused
    assert ends.session.alive()


def test_any_thread_may_read(ends: Ends) -> None:
    extents = [lone_extent(number) for number in range(1, 101)]
    start = threading.Barrier(5)
    wrong: list[object] = []

    def search() -> None:
        start.wait()
        for extent in extents:
            while len(ends.memory) < len(extents) and ends.memory.read():
                pass
            found = ends.memory.find(extent.number)
            if found is None or len(found.pages) != extent.bytes:
                wrong.append(extent.number)

    threads = [threading.Thread(target=search) for _ in range(4)]
    for thread in threads:
        thread.start()
    start.wait()
    for extent in extents:
        give(ends.service, extent)
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert wrong == []
    for extent in extents:
        extent.close()


# ---- alive --------------------------------------------------------------------------------------------------


def test_a_session_with_lines_to_read_is_alive_until_its_end(ends: Ends, extent: Extent) -> None:
    second = lone_extent(2)
    assert ends.session.alive()
    give(ends.service, extent)
    assert ends.session.alive()
    assert len(ends.memory) == 1
    give(ends.service, second)
    ends.service.close()
    # The end lies behind a line.
    assert not ends.session.alive()
    assert len(ends.memory) == 2
    second.close()


def test_after_a_wrong_line_a_session_is_not_alive(ends: Ends) -> None:
    ends.service.send(b"what?\n" + SAID)
    assert not ends.session.alive()
    assert not ends.session.alive()


# ---- a service that says what none may -------------------------------------------------------------------------


def memfd(size: int, *, seals: int = 0) -> int:
    descriptor = os.memfd_create("wrong", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    if seals:
        fcntl.fcntl(descriptor, F_ADD_SEALS, seals)
    return descriptor


def a_file(size: int) -> int:
    with tempfile.TemporaryFile() as file:
        file.truncate(size)
        return os.dup(file.fileno())


SAID = line({"extent": 7, "bytes": 8192})
DESCRIPTORS: dict[str, Callable[[], int]] = {
    "without seals": lambda: memfd(8192),
    "that may shrink": lambda: memfd(8192, seals=GROW),
    "that may grow": lambda: memfd(8192, seals=SHRINK),
    "of a smaller file": lambda: memfd(4096, seals=SHRINK | GROW),
    "of a larger file": lambda: memfd(12288, seals=SHRINK | GROW),
    "of a file on disk": lambda: a_file(8192),
    "of a folder": lambda: os.open("/tmp", os.O_RDONLY),
    "of an event": lambda: os.eventfd(0),
    "of a device": lambda: os.open("/dev/zero", os.O_RDONLY),
}


@pytest.mark.parametrize("what", sorted(DESCRIPTORS))
def test_a_descriptor_of_anything_else_ends_the_session(ends: Ends, what: str) -> None:
    descriptor = DESCRIPTORS[what]()
    with pytest.raises(ValueError, match="descriptor"):
        check_descriptor(descriptor, 8192)
    before = descriptors()
    ends.say(SAID, descriptor)
    ended(ends, before)
    os.close(descriptor)


@pytest.mark.parametrize(
    ("said", "count"),
    [
        (SAID, 0),
        (SAID, 2),
        (SAID, 20),
        (SAID + SAID, 1),
        (SAID + SAID, 2),
        (SAID + b"{}\n", 1),
        (b"{", 2),
        (b"\n", 0),
        (b"x" * (LINE_BYTES_MAX + 1), 0),
        (b"x" * (LINE_BYTES_MAX + 1) + b"\n", 0),
        *((each + b"\n", 1) for each in WRONG_LINES),
    ],
)
def test_what_no_service_says_ends_the_session(ends: Ends, said: bytes, count: int) -> None:
    descriptor = memfd(8192, seals=SHRINK | GROW)
    before = descriptors()
    ends.say(said, *[descriptor] * count)
    ended(ends, before)
    os.close(descriptor)


def ended(ends: Ends, descriptors_before: int) -> None:
    """The session is over at both ends, and nothing of what came is left."""
    assert not ends.memory.read()
    assert not ends.session.alive()
    for number in (7, 8):
        with pytest.raises(Unavailable, match="the session has ended"):
            ends.memory.find(number)
    assert ends.service.recv(1) == b""
    assert descriptors() == descriptors_before


def test_an_answer_that_names_an_extent_that_was_not_given_ends_the_session(ends: Ends) -> None:
    with pytest.raises(Unavailable, match="extent 3, which was not given"):
        ends.memory.find(3)
    assert not ends.session.alive()


def test_an_extent_that_is_given_again_ends_the_session_and_harms_nobody_who_reads(
    ends: Ends, extent: Extent
) -> None:
    give(ends.service, extent)
    found = ends.memory.find(1)
    assert found is not None
    give(ends.service, extent)
    assert not ends.session.alive()
    assert found.generations[0] == 2
    ends.session.close()
    assert found.generations[0] == 2


def test_a_session_is_given_so_many_extents_at_most(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    assert EXTENTS_MAX == 65_536
    monkeypatch.setattr("kvstore_client.memory.EXTENTS_MAX", 8)
    descriptor = memfd(4096, seals=SHRINK | GROW)
    for number in range(1, 9):
        ends.say(line({"extent": number, "bytes": 4096}), descriptor)
    assert ends.session.alive()
    ends.say(line({"extent": 9, "bytes": 4096}), descriptor)
    assert not ends.session.alive()
    os.close(descriptor)


@contextmanager
def no_more_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_an_extent_for_which_there_is_no_descriptor_left_is_done_without_and_others_come(
    ends: Ends, extent: Extent
) -> None:
    give(ends.service, extent)
    with no_more_descriptors():
        assert ends.memory.read()
        assert ends.session.alive()
    assert ends.memory.find(extent.number) is None
    assert not ends.memory.refused
    later = lone_extent(2)
    give(ends.service, later)
    assert ends.memory.find(2) is not None
    assert ends.memory.find(extent.number) is None
    give(ends.service, extent)
    assert not ends.session.alive()
    later.close()


@pytest.mark.parametrize("said", [SAID[:5], SAID + b"{", b"{}\n"])
def test_a_descriptor_that_is_lost_with_anything_but_a_whole_line_ends_the_session(
    ends: Ends, extent: Extent, said: bytes
) -> None:
    ends.say(said, extent.descriptor)
    with no_more_descriptors():
        assert not ends.memory.read()
    with pytest.raises(Unavailable, match=r"too many open files here|not understood"):
        ends.memory.find(7)


def test_a_session_that_another_thread_closes_while_a_line_is_read_ends_without_a_trace(
    extent: Extent,
) -> None:
    before, ours = descriptors(), mappings("kvstore-1")
    for _ in range(300):
        ends = Ends()
        for _ in range(2):
            ends.say(b"{", extent.descriptor)
        start = threading.Barrier(2)

        def read(ends: Ends = ends, start: threading.Barrier = start) -> None:
            start.wait()
            # What this raises fails the test.
            while ends.memory.read():
                pass

        thread = threading.Thread(target=read)
        thread.start()
        start.wait()
        ends.memory.close()
        thread.join(10)
        assert not thread.is_alive()
        ends.close()
    assert (descriptors(), mappings("kvstore-1")) == (before, ours)


def test_a_line_whose_descriptor_the_closing_of_the_session_took_is_no_failure(
    ends: Ends, extent: Extent
) -> None:
    """As the closing thread may do between the descriptor's arrival and its use."""
    give(ends.service, extent)
    took: list[int] = []

    class Taken(deque[int]):
        def extend(self, descriptors: Iterable[int]) -> None:
            super().extend(descriptors)
            took.append(len(self))
            ends.memory.close()

    ends.memory._descriptors = Taken()
    assert not ends.memory.read()
    assert took == [1]
    with pytest.raises(Unavailable, match="this end has closed it"):
        ends.memory.find(extent.number)


def test_a_descriptor_does_not_outlive_an_exec(ends: Ends, extent: Extent) -> None:
    ends.say(b"{", extent.descriptor)
    assert ends.memory.read()
    [waiting] = ends.memory._descriptors
    assert not os.get_inheritable(waiting)


# ---- processes ----------------------------------------------------------------------------------------------


def test_a_forked_child_keeps_no_mapping(ends: Ends, extent: Extent) -> None:
    give(ends.service, extent)
    assert ends.memory.read()
    ours = mappings("kvstore-1")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 0 if mappings("kvstore-1") == ours - 1 and len(ends.memory) == 0 else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert mappings("kvstore-1") == ours
    found = ends.memory.find(1)
    assert found is not None
    assert found.generations[0] == 2


def test_the_sealed_size_is_what_keeps_a_reader_alive(extent: Extent) -> None:
    check_descriptor(extent.descriptor, extent.bytes)
    with pytest.raises(PermissionError):
        os.ftruncate(extent.descriptor, 0)
