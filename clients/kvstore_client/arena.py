"""Memory that this session writes to and the service reads from: who may fill which part of it."""

from __future__ import annotations

import ctypes
import threading
import weakref
from bisect import insort
from collections.abc import Callable
from contextlib import suppress

from kvstore.errors import LimitExceeded, MemoryUnavailable
from kvstore.pages import SharedPages

ARENA_BYTES = 64 << 20
ARENA_BYTES_LEAST = 4 << 20
"""Where the service has no room for so large a one, smaller ones are asked for, down to this."""

ARENA_WRITE_BYTES_MIN = 64 << 10
"""What is smaller in all is not worth a session's arena: the socket takes it a millisecond later at most."""

_ALIGNED = 4096


class Room:
    """A part of the arena that one writer fills, from its byte `begin` on. `view` is good until it is given back."""

    __slots__ = ("_arena", "_memory", "begin", "end", "view")

    def __init__(self, arena: Arena, pages: memoryview, begin: int, end: int) -> None:
        self._arena = arena
        self.begin = begin
        self.end = end
        # An object of the room's own, which lives as long as any view of it: a view's end is not that of its slices.
        memory = (ctypes.c_ubyte * (end - begin)).from_buffer(pages, begin)
        self._memory = weakref.ref(memory)
        self.view = memoryview(memory).cast("B")

    def give_back(self) -> None:
        """Nobody writes there any more: its view can not be used from now on. Where somebody has made a view of that view,
        the room stays lent until it is gone."""
        self._arena.give_back(self)

    def release(self) -> bool:
        """Let nobody write there any more; whether nobody can."""
        with suppress(BufferError):
            self.view.release()
        return self._memory() is None


class Arena:
    """The whole of it, lent in parts. Any thread; nobody waits here."""

    def __init__(self, pages: SharedPages) -> None:
        self.bytes = len(pages.view)
        self._pages = pages
        self._lock = threading.Lock()
        self._lent: list[Room] = []
        """By where they begin."""
        self._kept: list[Room] = []
        """Given back while somebody still had a view of them."""

    def take(self, length: int) -> Room | None:
        """Room for `length` bytes, one or more; None while there is none in one piece."""
        with self._lock:
            self._look_at_kept()
            begin = 0
            for room in self._lent:
                if room.begin - begin >= length:
                    break
                begin = -(-room.end // _ALIGNED) * _ALIGNED
            if self.bytes - begin < length:
                return None
            made = Room(self, self._pages.view, begin, begin + length)
            insort(self._lent, made, key=lambda room: room.begin)
        self._pages.enlarge(made.begin, made.end)
        return made

    def give_back(self, room: Room) -> None:
        """As Room.give_back."""
        with self._lock:
            self._kept.append(room)
            self._look_at_kept()

    def take_all_back(self) -> None:
        """In a forked child, which is not to write to what its parent fills. Without the lock, which another thread may have
        held when it was made."""
        for room in self._lent:
            room.release()

    def _look_at_kept(self) -> None:
        kept, self._kept = self._kept, []
        for room in kept:
            if room.release():
                self._lent.remove(room)
            else:
                self._kept.append(room)


class SessionArena:
    """The arena of one session, asked for when somebody first wants it. Refused once, it is not asked for again."""

    def __init__(self) -> None:
        self._asking = threading.Lock()
        self._arena: Arena | None = None
        self.refused = False

    @property
    def now(self) -> Arena | None:
        """What there is, without asking."""
        return self._arena

    def get(self, ask: Callable[[int], SharedPages | None]) -> Arena | None:
        """`ask` makes one of so many bytes, and gives its pages, None where this process cannot map them. None while
        another thread asks: nobody waits for what Write does as well. Raises what `ask` raises, but for refusals."""
        if self._arena is not None or self.refused:
            return self._arena
        if not self._asking.acquire(blocking=False):
            return None
        try:
            if self._arena is None and not self.refused:
                self._arena = self._asked(ask)
                self.refused = self._arena is None
        finally:
            self._asking.release()
        return self._arena

    def close(self) -> None:
        """The session has ended; who fills a part of its arena may go on, in vain. Closing twice does nothing."""
        self.refused, self._arena = True, None

    def _asked(self, ask: Callable[[int], SharedPages | None]) -> Arena | None:
        size = ARENA_BYTES
        while size >= ARENA_BYTES_LEAST:
            try:
                pages = ask(size)
            except LimitExceeded:
                size //= 4
            except MemoryUnavailable:
                return None
            else:
                return None if pages is None else Arena(pages)
        return None
