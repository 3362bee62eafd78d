"""Memory that one session writes to: it may change there at any moment, so that who reads it copies first and looks then."""

from __future__ import annotations

import ctypes
import fcntl
import os

from kvstore.errors import LimitExceeded
from kvstore.memory.extent import whole_pages
from kvstore.pages import SharedPages, copy_from

ARENA_BYTES_MAX = 256 << 20
"""Of one arena: to give up more at once would hold up everybody else for tens of milliseconds."""

SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # FALLOC_FL_* of linux/falloc.h


class Arena:
    """`bytes` bytes, whole pages, in a memfd whose size never changes. `users`: how many are copying out of it.

    Raises OSError where the system has no such memory to give.
    """

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.bytes = whole_pages(size)
        self.users = 0
        self.ended = False
        self.descriptor = os.memfd_create(f"kvstore-arena-{number}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, self.bytes)
            # Before anybody else has it: reading behind the end of a file that has shrunk kills who reads.
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)
            # Nothing is written to it here.
            self._shared = SharedPages(self.descriptor, self.bytes, writable=False)
        except BaseException:
            os.close(self.descriptor)
            raise

    def copy(self, offset: int, target: memoryview) -> None:
        """What lies there now, `len(target)` bytes of it, all within the arena. Any thread."""
        assert 0 <= offset <= self.bytes - len(target)
        if len(target):
            copy_from(self._shared.address + offset, target)

    def close(self) -> None:
        """Give up the memory, also that of a process which still maps it: there it is zeros from now on."""
        _empty(self.descriptor, self.bytes)
        os.close(self.descriptor)
        self._shared.view.release()


class Arenas:
    """The arenas of all sessions by the session's number, one each, within `budget_bytes`. For one thread.

    What a session's end gives back counts until nobody copies out of it any more.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.held_bytes = 0
        self.refused_total = 0
        self._open: dict[str, Arena] = {}
        self._next_number = 1

    def __len__(self) -> int:
        return len(self._open)

    def find(self, session: str) -> Arena | None:
        return self._open.get(session)

    def make(self, session: str, size: int) -> Arena:
        """Of at least `size` bytes. LimitExceeded where there is no room for it, OSError where the system has none."""
        assert session not in self._open, "a session has one arena"
        most = min(self.budget_bytes - self.held_bytes, ARENA_BYTES_MAX)
        if size > most or whole_pages(size) > most:
            self.refused_total += 1
            raise LimitExceeded(
                "no room for so large an arena; ask for a smaller one, or use Write",
                field="bytes",
                value=size,
                allowed=f"{most} bytes: what is left of {self.budget_bytes} for all sessions, at most {ARENA_BYTES_MAX}",
            )
        arena = Arena(self._next_number, size)
        self._next_number += 1
        self.held_bytes += arena.bytes
        self._open[session] = arena
        return arena

    def borrow(self, arena: Arena) -> None:
        """Somebody copies out of it, until `give_back`."""
        assert not arena.ended
        arena.users += 1

    def give_back(self, arena: Arena) -> None:
        arena.users -= 1
        assert arena.users >= 0
        self._close_unused(arena)

    def end(self, session: str) -> None:
        """The session has ended, or could not be told of its arena. Ending twice does nothing."""
        arena = self._open.pop(session, None)
        if arena is not None:
            arena.ended = True
            self._close_unused(arena)

    def _close_unused(self, arena: Arena) -> None:
        if arena.ended and not arena.users:
            arena.close()
            self.held_bytes -= arena.bytes


def _empty(descriptor: int, size: int) -> None:
    """Where the system cannot, the memory goes with its last mapping."""
    libc = ctypes.CDLL(None)
    libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    libc.fallocate(descriptor, _PUNCH_HOLE | _KEEP_SIZE, 0, size)
