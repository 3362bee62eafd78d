"""Memory that processes share, mapped where large pages fit, and made of large pages. Standard library only."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref

LARGE_BYTES = 2 << 20
"""A large page of most systems. Where theirs have another size, memory stays in small ones."""

_MADV_COLLAPSE = 25
"""Of linux/mman.h since 6.1: put what lies in these pages into a large one, now."""
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class SharedPages:
    """The first `size` bytes of a file in memory, mapped at an address where large pages fit. `view`: all of them;
    `address`: of the first one. Unmapped when the last view is gone, and not at the process's end: other threads may read
    until then. It keeps no descriptor, of which a process has only so many.

    Raises OSError where the system maps no more.
    """

    def __init__(self, descriptor: int, size: int, *, writable: bool) -> None:
        self.address = _mapped(descriptor, size, writable=writable)
        owner = (ctypes.c_ubyte * size).from_address(self.address)
        weakref.finalize(owner, _libc.munmap, self.address, size).atexit = False
        view = memoryview(owner).cast("B")
        self.view = view if writable else view.toreadonly()
        self._tried: set[int] = set()
        self._trying = threading.Lock()

    def enlarge(self, begin: int, end: int) -> None:
        """Let what is about to be filled, bytes [begin, end), lie in large pages, where the system has some; each is asked
        for once. Any thread; what lies there stays what it is, and the mapping is not to be unmapped meanwhile.

        Shared memory comes in small pages, whatever it is advised, unless the machine's administrator has said otherwise.
        In them a large item costs a hundred page faults on each side, and devices are told of as many pieces.
        """
        first, last = begin // LARGE_BYTES, -(-min(end, len(self.view)) // LARGE_BYTES)
        if self._tried.issuperset(range(first, last)):
            return
        with self._trying:
            for number in range(first, last):
                if number not in self._tried:
                    self._enlarge(number * LARGE_BYTES)
                    self._tried.add(number)

    def _enlarge(self, begin: int) -> None:
        if len(self.view) - begin >= LARGE_BYTES:
            # The system makes a large page of small ones that are there: one is enough. A refusal leaves all as it was.
            self.view[begin]
            _libc.madvise(self.address + begin, LARGE_BYTES, _MADV_COLLAPSE)


def copy_memory(source: memoryview, target: memoryview) -> None:
    """Bytes of the same length, one or more, while other threads run: slices are copied under the interpreter's lock.
    `target` may be written to."""
    whole = source.obj
    if isinstance(whole, bytes) and len(whole) == len(source):
        ctypes.memmove(address_of(target), whole, len(whole))
    elif source.readonly:
        # Where it lies is not told.
        target[:] = source
    else:
        copy_from(address_of(source), target)


def copy_from(address: int, target: memoryview) -> None:
    """As many bytes as `target` has, one or more, from memory that stays what it is meanwhile; as copy_memory."""
    ctypes.memmove(address_of(target), address, len(target))


def address_of(memory: memoryview) -> int:
    """Of its first byte; it has one, may be written to, and is kept as long as the address is used."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _mapped(descriptor: int, size: int, *, writable: bool) -> int:
    rights = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    if size < LARGE_BYTES:
        return _map(None, size, rights, mmap.MAP_SHARED, descriptor)
    # Room at any address, of which all but a piece that begins at a large page is given back.
    room = _map(None, size + LARGE_BYTES, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    address = -(-room // LARGE_BYTES) * LARGE_BYTES
    try:
        _map(address, size, rights, mmap.MAP_SHARED | _MAP_FIXED, descriptor)
    except OSError:
        _libc.munmap(room, size + LARGE_BYTES)
        raise
    end = address + -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    if address > room:
        _libc.munmap(room, address - room)
    if room + size + LARGE_BYTES > end:
        _libc.munmap(end, room + size + LARGE_BYTES - end)
    return address


_MAP_FIXED = 0x10


def _map(address: int | None, size: int, rights: int, flags: int, descriptor: int) -> int:
    found = _libc.mmap(address, size, rights, flags, descriptor, 0)
    if found == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(found)
