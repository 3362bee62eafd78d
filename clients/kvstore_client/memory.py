"""Memory of the service that a session may read: mapped when its descriptor comes, forgotten when the session ends."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
from array import array
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from kvstore.errors import Unavailable
from kvstore.pages import SharedPages
from kvstore_client.arena import SessionArena
from kvstore_client.dock import SessionDock

LINE_BYTES_MAX = 4096
EXTENTS_MAX = 65_536
"""Of one session at once: as many mappings as a process may have."""
NUMBER_MAX = (1 << 32) - 1
GENERATION_BYTES = 8
_READ_BYTES = 65_536
_READS_MAX = 2 * EXTENTS_MAX
"""One after another. A service has no more to say."""
_DESCRIPTORS_MAX = 4
"""In one read. One comes with each line; more would be lost, and be noticed."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@dataclass(frozen=True, slots=True, eq=False)
class Extent:
    """One piece of shared memory. `generations`: the same bytes as numbers of GENERATION_BYTES."""

    pages: memoryview
    generations: memoryview
    address: int = 0
    """Of the first byte; 0 where it is not known."""


@dataclass(frozen=True, slots=True)
class Given:
    """`is_arena`: memory to write to. `is_way`: no memory, but a way to hand over a dock's descriptor by."""

    number: int
    size: int
    is_arena: bool = False
    is_way: bool = False


class Memory:
    """The extents of one session. Any thread may ask.

    What the service says wrongly ends the session: its other end sees that, and calls in it are refused as Unavailable.
    """

    def __init__(self, connection: socket.socket) -> None:
        """`connection` does not block, and is its maker's to close."""
        self.refused = False
        """Whether this session is to have everything by Fetch."""
        self.arena = SessionArena()
        self.dock = SessionDock()
        self._connection = connection
        self._lock = threading.Lock()
        self._rest = b""
        self._descriptors: deque[int] = deque()
        self._extents: dict[int, Extent] = {}
        self._arena: tuple[int, SharedPages | None] | None = None
        """Its number and its pages; None where this process could not map them."""
        self._way: tuple[int, socket.socket] | None = None
        self._unmapped: set[int] = set()
        """Numbers of those that were given, and that this process has no room for."""
        self._wrong = ""

    def __len__(self) -> int:
        return len(self._extents)

    def find(self, number: int) -> Extent | None:
        """None where it could not be mapped. Unavailable where the service has not given it."""
        found = self._extents.get(number)
        if found is not None:
            return found
        # Its line was written before the answer that names it.
        alive = self.read()
        with self._lock:
            found = self._extents.get(number)
            if found is not None or number in self._unmapped:
                return found
            if alive:
                self._give_up(f"an answer names extent {number}, which was not given")
        raise Unavailable(
            f"the session has ended: {self._wrong or 'the service has closed it'}",
            field="extent",
            value=number,
        )

    def find_arena(self, number: int) -> SharedPages | None:
        """Its pages, to write to; None where they could not be mapped. Unavailable where the service has not given it."""
        alive = self.read()
        with self._lock:
            if self._arena is not None and self._arena[0] == number:
                return self._arena[1]
            if alive:
                self._give_up(f"an answer names arena {number}, which was not given")
        raise Unavailable(
            f"the session has ended: {self._wrong or 'the service has closed it'}",
            field="arena",
            value=number,
        )

    def take_way(self, number: int) -> socket.socket | None:
        """The way to hand over that dock's descriptor by, which is the caller's to close; None where it was lost. Unavailable where
        the service has not given it."""
        alive = self.read()
        with self._lock:
            if self._way is not None and self._way[0] == number:
                way, self._way = self._way[1], None
                return way
            if not alive:
                raise Unavailable(
                    f"the session has ended: {self._wrong or 'the service has closed it'}",
                    field="dock",
                    value=number,
                )
        return None

    def read(self) -> bool:
        """Take in what the service has said so far. False once the session has ended."""
        with self._lock:
            for _ in range(_READS_MAX):
                if self._wrong:
                    self._close_descriptors()
                    return False
                try:
                    data, descriptors, lost = _receive(self._connection)
                except (BlockingIOError, InterruptedError):
                    return True
                except OSError:
                    return False
                self._descriptors.extend(descriptors)
                if not data:
                    self._close_descriptors()
                    return False
                try:
                    self._take(data, lost=lost)
                except ValueError as error:
                    self._give_up(str(error))
            self._give_up("the service does not stop talking")
            return False

    def close(self) -> None:
        """Forget everything; views that somebody holds stay good. Closing twice does nothing.

        Without the lock, which another thread may have held when a forked child was made: one that reads now finds
        descriptors gone.
        """
        self._wrong = self._wrong or "this end has closed it"
        self._extents = {}
        self._arena = None
        self.arena.close()
        self.dock.close()
        way, self._way = self._way, None
        if way is not None:
            way[1].close()
        self._close_descriptors()

    # ---- inside, under the lock -----------------------------------------------------------------------------

    def _take(self, data: bytes, *, lost: bool) -> None:
        """ValueError for what no service says."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in (*lines, self._rest):
            if len(line) > LINE_BYTES_MAX:
                raise ValueError(f"a line of more than {LINE_BYTES_MAX} bytes")
        if lost:
            # Whose it was is certain only where one line came, and whole.
            if len(lines) != 1 or self._rest or self._descriptors:
                raise ValueError("a descriptor was lost: too many at once, or too many open files here")
            self._take_given(parse_line(lines[0]), None)
            return
        for line in lines:
            given = parse_line(line)
            descriptor = self._next_descriptor()
            if descriptor is None:
                raise ValueError(f"extent {given.number} came without a descriptor")
            try:
                self._take_given(given, descriptor)
            finally:
                os.close(descriptor)
        # A descriptor lies beside the first byte of its line, so that one may wait for the rest of it.
        if len(self._descriptors) > bool(self._rest):
            raise ValueError("a descriptor of no extent")

    def _take_given(self, given: Given, descriptor: int | None) -> None:
        """`descriptor` None: it was lost, since this process may have no more. What lies there comes by Fetch."""
        if given.is_arena:
            self._take_arena(given, descriptor)
            return
        if given.is_way:
            self._take_way(given, descriptor)
            return
        self._check_new(given)
        if descriptor is None:
            self._unmapped.add(given.number)
            return
        check_descriptor(descriptor, given.size)
        try:
            self._extents[given.number] = _extent(descriptor, given.size)
        except OSError:
            # This process may have no more mappings: that is nobody's fault, and Fetch needs none.
            self.refused = True
            self._unmapped.add(given.number)

    def _take_arena(self, given: Given, descriptor: int | None) -> None:
        """A session has one; of that one it may be told again."""
        known = self._arena
        if known is not None and known[0] != given.number:
            raise ValueError(f"arena {given.number} beside arena {known[0]}")
        if descriptor is not None:
            check_descriptor(descriptor, given.size)
        if known is not None and known[1] is not None:
            return
        pages = None
        if descriptor is not None:
            # As above; Write needs no mapping.
            with suppress(OSError):
                pages = SharedPages(descriptor, given.size, writable=True)
        self._arena = given.number, pages

    def _take_way(self, given: Given, descriptor: int | None) -> None:
        if self._way is not None:
            self._way[1].close()
            self._way = None
        if descriptor is not None:
            with suppress(OSError):
                self._way = given.number, socket.socket(fileno=os.dup(descriptor))

    def _check_new(self, given: Given) -> None:
        if given.number in self._extents or given.number in self._unmapped:
            raise ValueError(f"extent {given.number} was given twice")
        if len(self._extents) + len(self._unmapped) >= EXTENTS_MAX:
            raise ValueError(f"more than {EXTENTS_MAX} extents")

    def _give_up(self, why: str) -> None:
        self._wrong = self._wrong or why
        self.close()
        # Both ends see the end; the number of the descriptor stays taken until the session is closed.
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _close_descriptors(self) -> None:
        while (descriptor := self._next_descriptor()) is not None:
            os.close(descriptor)

    def _next_descriptor(self) -> int | None:
        # Not by its length: another thread may be closing.
        try:
            return self._descriptors.popleft()
        except IndexError:
            return None


def parse_line(line: bytes) -> Given:
    """What a line of the session connection says; ValueError for anything else."""
    wrong = ValueError(f"a line that is not understood: {line[:60]!r}")
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        raise wrong from None
    if not isinstance(said, dict):
        raise wrong
    match said:
        case {"extent": number, "bytes": size} if len(said) == 2 and _is_number(number) and _is_size(size):
            return Given(number, size)
        case {"arena": number, "bytes": size} if len(said) == 2 and _is_number(number) and _is_size(size):
            return Given(number, size, is_arena=True)
        case {"dock": number} if len(said) == 1 and _is_number(number):
            return Given(number, 0, is_way=True)
    raise wrong


def check_descriptor(descriptor: int, size: int) -> None:
    """ValueError unless this is memory of exactly so many bytes for good: reading behind a file's end kills who reads."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ValueError(f"a descriptor of something that cannot be sealed: {error}") from None
    if seals & _SEALS != _SEALS:
        raise ValueError("a descriptor of memory whose size can change")
    if (real := os.fstat(descriptor).st_size) != size:
        raise ValueError(f"a descriptor of {real} bytes for an extent of {size}")


def _receive(connection: socket.socket) -> tuple[bytes, Iterable[int], bool]:
    """Bytes and descriptors that came with them, and whether there were more of those than this process can have."""
    # Not socket.recv_fds, which loses the flag: a program that another thread starts now would get the descriptors too.
    room = socket.CMSG_SPACE(_DESCRIPTORS_MAX * array("i").itemsize)
    data, ancillary, flags, _ = connection.recvmsg(_READ_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    descriptors = array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) // descriptors.itemsize * descriptors.itemsize])
    return data, descriptors, bool(flags & socket.MSG_CTRUNC)


def _extent(descriptor: int, size: int) -> Extent:
    shared = SharedPages(descriptor, size, writable=False)
    pages = shared.view
    return Extent(pages, pages[: size // GENERATION_BYTES * GENERATION_BYTES].cast("Q"), shared.address)


def _is_number(value: object) -> bool:
    return type(value) is int and 0 < value <= NUMBER_MAX


def _is_size(value: object) -> bool:
    return type(value) is int and GENERATION_BYTES <= value < 1 << 62
