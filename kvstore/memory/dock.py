"""Memory of a client's own that it lends the service, as an engine's pool of rows: read and written by offset, and never mapped, so
that a file that shrinks under us is an answer and no signal."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import threading
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvstore.bytelock import BYTE_MAX, lock_byte, unlock_byte
from kvstore.errors import InvalidArgument, LimitExceeded, MemoryUnavailable
from kvstore.types import BytesLike

BLOCK = 512
"""What st_blocks counts in."""
CALLS_PER_DOCK = 16
"""That may move bytes at once; each holds two batches of the reader's, or what staging lets in."""


class Dock:
    """The first `bytes` bytes of a file in memory. `users`: calls that are at it.

    While something is written, the byte `lock` of the file is locked here, beside others. Who has that byte alone knows that nothing
    is being written; and while it has it, nothing is.
    """

    def __init__(self, descriptor: int, *, size: int, lock: int) -> None:
        """`descriptor` stays the caller's. InvalidArgument unless it is a file in memory, as large as is said, that may be written."""
        if not 0 <= lock <= BYTE_MAX:
            raise InvalidArgument("not a byte to lock", field="lock", value=lock, allowed=f"0 to {BYTE_MAX}")
        _check(descriptor, size)
        self.bytes = size
        self.lock = lock
        self.users = 0
        self.ended = False
        try:
            # Opened anew: flags of what was handed over, as O_APPEND, are its owner's to change at any moment, and so are its
            # locks. Without waiting for whoever may have a lease on it.
            self._descriptor = os.open(
                f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
            )
        except OSError as error:
            raise MemoryUnavailable(
                f"the dock's file cannot be opened here: {error.strerror}",
                field="dock",
                value=size,
                allowed="Map and WriteArena, which move the same bytes",
            ) from error
        self._mutex = threading.Lock()
        self._writing = 0

    def copy(self, offset: int, target: memoryview) -> None:
        """What lies there now, `len(target)` bytes of it. MemoryUnavailable where the file has no more so many. Any thread."""
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self._descriptor, [target[done:]], offset + done)
            except OSError as error:
                raise self._lost(f"reading failed: {error.strerror}", offset) from error
            if not count:
                raise self._lost("the file is shorter than was said", offset)
            done += count

    def write(self, pieces: Sequence[tuple[int, BytesLike]], stopped: Callable[[], bool]) -> None:
        """Each payload to its offset. MemoryUnavailable where its owner, or the system, does not let us; nothing is written after
        that, nor once `stopped()`. Any thread."""
        for offset, payload in pieces:
            if self.ended or stopped():
                raise self._lost("its session, or the call, has ended", offset)
            self._begin(offset)
            try:
                self._write(offset, memoryview(payload).cast("B"))
            finally:
                self._end()

    def close(self) -> None:
        """Nobody is at it any more."""
        assert not self.users
        os.close(self._descriptor)

    # ---- inside ---------------------------------------------------------------------------------------------

    def _write(self, offset: int, payload: memoryview) -> None:
        end = offset + len(payload)
        try:
            found = os.fstat(self._descriptor)
            # A page that is not there yet would be this process's to pay for. Whether one is missing somewhere is known at once; to look
            # for it takes longer than to write.
            if found.st_size < end or found.st_blocks * BLOCK < found.st_size:
                raise self._lost("the file is shorter than was said, or has less memory", offset)
            done = 0
            while done < len(payload):
                done += os.pwritev(self._descriptor, [payload[done:]], offset + done)
        except OSError as error:
            raise self._lost(f"writing failed: {error.strerror}", offset) from error

    def _begin(self, offset: int) -> None:
        with self._mutex:
            try:
                # The lock is the file's, whichever thread of ours took it.
                if not self._writing and not lock_byte(self._descriptor, self.lock, alone=False):
                    raise self._lost("its owner has closed it", offset)
            except OSError as error:
                raise self._lost(f"it cannot be locked: {error.strerror}", offset) from error
            self._writing += 1

    def _end(self) -> None:
        with self._mutex:
            self._writing -= 1
            if not self._writing:
                unlock_byte(self._descriptor, self.lock)

    def _lost(self, why: str, offset: int) -> MemoryUnavailable:
        return MemoryUnavailable(
            f"the dock is of no use: {why}",
            field="offset",
            value=offset,
            allowed=f"a file in memory that keeps its {self.bytes} bytes; or Map and WriteArena",
        )


class Docks:
    """The docks of all sessions by the session's number, one each, and the ways by which their descriptors come. For one thread."""

    def __init__(self) -> None:
        self._open: dict[str, Dock] = {}
        self._ways: dict[str, tuple[int, socket.socket]] = {}
        self._next_number = 1
        self.refused_total = 0

    def __len__(self) -> int:
        return len(self._open)

    def find(self, session: str) -> Dock | None:
        return self._open.get(session)

    def begin(self, session: str) -> tuple[int, socket.socket]:
        """A number for a dock of this session, and the end of a way that its descriptor is to be sent by; the caller closes that
        end. A way from before ends. OSError where the system has none."""
        self._end_way(session)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        number, self._next_number = self._next_number, self._next_number % 0xFFFF_FFFF + 1
        self._ways[session] = number, ours
        return number, theirs

    def take(self, session: str, number: int, *, size: int, lock: int) -> Dock:
        """The dock whose descriptor has come by the way of that number, from now on the session's, instead of the one that it had.
        Raises as Dock does, and InvalidArgument where no descriptor has come."""
        known, way = self._ways.get(session, (0, None))
        if way is None or known != number:
            raise InvalidArgument(
                "no such dock is on its way",
                field="dock",
                value=number,
                allowed="the one of the last OpenDock",
            )
        descriptor = _received(way)
        self._end_way(session)
        if descriptor is None:
            raise InvalidArgument(
                "no descriptor has come by the dock's way",
                field="dock",
                value=number,
                allowed="one byte, with one descriptor beside it, before TakeDock",
            )
        try:
            dock = Dock(descriptor, size=size, lock=lock)
        except BaseException:
            self.refused_total += 1
            raise
        finally:
            os.close(descriptor)
        self._end_dock(session)
        self._open[session] = dock
        return dock

    def borrow(self, dock: Dock) -> None:
        """Somebody moves bytes there, until `give_back`. LimitExceeded."""
        assert not dock.ended
        if dock.users >= CALLS_PER_DOCK:
            self.refused_total += 1
            raise LimitExceeded(
                "too many calls are at the session's dock",
                field="docks",
                value=dock.users + 1,
                allowed=f"{CALLS_PER_DOCK} at once",
            )
        dock.users += 1

    def give_back(self, dock: Dock) -> None:
        dock.users -= 1
        self._close_unused(dock)

    def end(self, session: str) -> None:
        """The session has ended. What is being written ends with the payload it is at. Ending twice does nothing."""
        self._end_way(session)
        self._end_dock(session)

    def _end_way(self, session: str) -> None:
        if (known := self._ways.pop(session, None)) is not None:
            known[1].close()

    def _end_dock(self, session: str) -> None:
        dock = self._open.pop(session, None)
        if dock is not None:
            dock.ended = True
            self._close_unused(dock)

    def _close_unused(self, dock: Dock) -> None:
        if dock.ended and not dock.users:
            dock.close()


def _check(descriptor: int, size: int) -> None:
    """InvalidArgument unless this is a file in memory of at least `size` bytes. Nothing of it is opened before that is known."""
    found = os.fstat(descriptor)
    try:
        if not stat.S_ISREG(found.st_mode):
            raise OSError("no file")
        # Only files in memory have seals, if only the one that there shall be none. Any other may keep a thread waiting.
        fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise InvalidArgument(
            "a dock is a file in memory",
            field="dock",
            value=stat.filemode(found.st_mode),
            allowed="a file of a tmpfs as /dev/shm, or a memfd",
        ) from error
    if not 0 < size <= found.st_size:
        raise InvalidArgument(
            "the dock's file is not as large as is said",
            field="bytes",
            value=size,
            allowed=f"1 to {found.st_size}",
        )


def _received(way: socket.socket) -> int | None:
    """The one descriptor that has come; None for anything else."""
    room = socket.CMSG_SPACE(array("i").itemsize)
    descriptors = array("i")
    # Nothing has come yet, or the other end is gone.
    with suppress(OSError):
        _, ancillary, _, _ = way.recvmsg(1, room, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors.frombytes(content[: len(content) // descriptors.itemsize * descriptors.itemsize])
    if len(descriptors) == 1:
        return descriptors[0]
    for descriptor in descriptors:
        os.close(descriptor)
    return None
