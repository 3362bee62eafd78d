"""What is remembered of what has left, and how large a place on trial is."""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque

GHOSTS_MAX = 1 << 20
GHOST_BYTES = 160
TRIAL_REQUESTS = 4
"""A place on trial holds what the last so many requests brought, however small its share, but not more than half of all: a
chain that is pushed out by its own end is never seen again."""


class Ghosts:
    """Tags of what has left, the latest ones. Two keys may have one tag: that costs a wrong guess and nothing else."""

    def __init__(self) -> None:
        self._tags: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tags)

    def add(self, tag: int, most: int) -> None:
        """`most`: how many may be remembered with it, GHOSTS_MAX at most."""
        self._tags.pop(tag, None)
        self._tags[tag] = None
        while len(self._tags) > min(max(most, 1), GHOSTS_MAX):
            self._tags.popitem(last=False)

    def take(self, tag: int) -> bool:
        """Whether it is remembered; no longer, then."""
        if tag not in self._tags:
            return False
        del self._tags[tag]
        return True

    def memory_bytes(self) -> int:
        return GHOST_BYTES * len(self._tags)


class Trial:
    """How many handles a place on trial may hold: a share of all, or what the last requests brought."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._brought: deque[int] = deque((0,), TRIAL_REQUESTS)

    def begin(self) -> None:
        """Another request begins."""
        if self._brought[-1]:
            self._brought.append(0)

    def bring(self) -> None:
        """A handle came."""
        self._brought[-1] += 1

    def size(self, count: int) -> int:
        """Of `count` handles in all."""
        return max(int(self._share * count), min(sum(self._brought), count // 2), 1)


class Times:
    """When what has left was last used, by marks of 32 bits: a table of PLACES_EACH places for each that is held, in which the
    later of two that meet stays."""

    PLACES_EACH = 4
    _LEAST = 1 << 10
    _NEVER = 0

    def __init__(self) -> None:
        self._marks = array("I", bytes(4 * self._LEAST))
        self._since = array("q", bytes(8 * self._LEAST))

    def add(self, mark: int, since: int, count: int) -> None:
        """`count`: how many are held. Times are above 0."""
        if len(self._marks) < min(self.PLACES_EACH * count, GHOSTS_MAX):
            self._widen()
        place = mark % len(self._marks)
        self._marks[place], self._since[place] = mark, since

    def take(self, mark: int) -> int | None:
        """The time, which is forgotten then."""
        place = mark % len(self._marks)
        if self._marks[place] != mark or self._since[place] == self._NEVER:
            return None
        since = self._since[place]
        self._since[place] = self._NEVER
        return since

    def _widen(self) -> None:
        known = list(zip(self._marks, self._since, strict=True))
        size = 2 * len(known)
        self._marks, self._since = array("I", bytes(4 * size)), array("q", bytes(8 * size))
        for mark, since in known:
            self._marks[mark % size], self._since[mark % size] = mark, since

    def memory_bytes(self) -> int:
        return self._marks.itemsize * len(self._marks) + self._since.itemsize * len(self._since)
