"""Memory of this process that the service reads from and writes to by itself, as an engine's pool of rows: where it is a file."""

from __future__ import annotations

import ctypes
import os
import secrets
import socket
import threading
from array import array
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

from kvstore.bytelock import BYTE_MAX, lock_byte
from kvstore.errors import (
    InvalidArgument,
    KvstoreError,
    LimitExceeded,
    MemoryUnavailable,
    Unavailable,
    UnknownSession,
)

LOOK_AGAIN_SECONDS = 0.002
"""How long to leave the service before looking again whether it still writes; the kernel wakes nobody who could also be told to stop."""


class Dock:
    """A piece of memory that is mapped from a file in memory, and shared. It stays mapped while this is used; `close` when no call
    uses it any more. Any thread."""

    def __init__(self, descriptor: int, *, address: int, length: int, begin: int) -> None:
        """`length` bytes at `address` are those of the file from its byte `begin` on. The descriptor is this object's."""
        self._descriptor = descriptor
        self._address = address
        self._length = length
        self._begin = begin
        self._mutex = threading.Lock()
        self._is_shut = self._is_closed = False
        self.bytes = begin + length
        """Of the file, that the service is to have."""

    @classmethod
    def behind(cls, view: memoryview) -> Self | None:
        """The dock of which this is the memory: flat, of bytes, and writable. None where it is no shared file, or one that cannot
        be opened here."""
        if view.readonly or not view.nbytes:
            return None
        address = _address(view)
        mapped = _mapped_at(address, view.nbytes)
        descriptor = None if mapped is None else _opened(mapped)
        if mapped is None or descriptor is None:
            return None
        return cls(descriptor, address=address, length=view.nbytes, begin=mapped.offset)

    def place_of(self, view: memoryview | bytearray) -> int | None:
        """Where in the file these bytes lie; None where they do not."""
        memory = memoryview(view)
        if memory.readonly or not memory.nbytes:
            return None
        at = _address(memory) - self._address
        return self._begin + at if 0 <= at <= self._length - memory.nbytes else None

    def send(self, way: socket.socket) -> None:
        """Hand the file over. OSError."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [self._descriptor]))]
        way.sendmsg([b"\0"], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def shut(self, lock: int, is_over: Callable[[], bool]) -> bool:
        """Let nobody write who holds the byte `lock` to write: when this returns True, nothing is being written, and nothing will
        be. It waits for that as long as the service lives and writes, or until `is_over()`, which is False then."""
        pause = threading.Event()
        while not is_over():
            with self._mutex:
                if self._is_closed:
                    return False
                if lock_byte(self._descriptor, lock, alone=True):
                    self._is_shut = True
                    return True
            pause.wait(LOOK_AGAIN_SECONDS)
        return False

    def close(self) -> None:
        """Closing twice does nothing. One that was shut stays so as long as this process lives: the lock would go with the descriptor,
        and a service that was stopped right before a write would make it when it goes on."""
        with self._mutex:
            was_closed, self._is_closed = self._is_closed, True
            if not was_closed and not self._is_shut:
                os.close(self._descriptor)


class SessionDock:
    """Whether the service has this session's dock, and by which lock it writes there. It is lent when somebody first wants it; refused
    or shut once, the session has none any more. Any thread."""

    def __init__(self) -> None:
        self._asking = threading.Lock()
        self._dock: Dock | None = None
        self._lock: int | None = None
        self._refused = False

    def lock_of(self, dock: Dock, lend: Callable[[Dock, int], None]) -> int | None:
        """None where the service has not `dock`, or while another thread asks: nobody waits for what other ways do as well. `lend`
        hands it over with a lock. Raises what `lend` raises, but for refusals."""
        if self._lock is not None and self._dock is dock and not self._refused:
            return self._lock
        if self._refused or not self._asking.acquire(blocking=False):
            return None
        try:
            if self._dock is None and not self._refused:
                self._lend(dock, lend)
        finally:
            self._asking.release()
        return self._lock if self._dock is dock and not self._refused else None

    def refuse(self) -> None:
        """Lend and use none any more: there is none, it is of no use, or the session has ended."""
        self._refused = True

    close = refuse

    def _lend(self, dock: Dock, lend: Callable[[Dock, int], None]) -> None:
        # Nobody else's: whoever shut a dock of an earlier session keeps its byte.
        lock = secrets.randbelow(BYTE_MAX)
        try:
            lend(dock, lock)
        except (Unavailable, UnknownSession):
            raise
        except (MemoryUnavailable, LimitExceeded, InvalidArgument, OSError):
            self.refuse()
        except KvstoreError:
            self.refuse()
            raise
        else:
            self._dock, self._lock = dock, lock


class _Mapped(NamedTuple):
    device: int
    inode: int
    offset: int


def _mapped_at(address: int, length: int) -> _Mapped | None:
    """The one file that all of these bytes are mapped from, shared and writable, and where in it they begin."""
    found: _Mapped | None = None
    at = address
    with suppress(OSError), open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            span, rights, offset, device, inode, *_ = line.split(maxsplit=5)
            begin, end = (int(part, 16) for part in span.split("-"))
            if end <= at:
                continue
            major, minor = (int(part, 16) for part in device.split(":"))
            part = _Mapped(os.makedev(major, minor), int(inode), int(offset, 16) + at - begin)
            if begin > at or rights[:4] != "rw-s" or not part.inode:
                return None
            # One mapping may be told of in several pieces.
            if found is not None and part != found._replace(offset=found.offset + at - address):
                return None
            found = found or part
            at = end
            if at >= address + length:
                return found
    return None


def _opened(mapped: _Mapped) -> int | None:
    """The file anew, by one of this process's own descriptors of it: its name may be gone, and who maps a file by Python keeps one."""
    with suppress(OSError):
        for path in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                found = path.stat()
                if (found.st_dev, found.st_ino) == (mapped.device, mapped.inode):
                    return os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    return None


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view.cast("B")))
