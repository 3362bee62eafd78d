"""Which of several workers gets a request. Pure: time and the table of workers come in as values."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

EDGE_TOKENS = 128
EDGES_MAX = 1024
"""Prefixes are told apart at multiples of EDGE_TOKENS, up to EDGES_MAX of them: 131,072 tokens."""

FAMILIAR_MAX = 65_536
"""Prefixes whose last worker is remembered."""

AWAY_SECONDS_FIRST = 0.05
AWAY_SECONDS_MAX = 2.0


@dataclass(frozen=True, slots=True)
class Load:
    """A worker as the choice sees it: requests it has from us, and until when (monotonic seconds) it is passed over."""

    in_flight: int = 0
    away_until: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """per_worker: requests that one worker may have. slack: how many more requests than the least loaded worker the one
    that knows the prefix may have and still be chosen."""

    per_worker: int
    slack: int = 0


def choose(
    loads: Sequence[Load], rule: Rule, *, now: float, turn: int, familiar: int | None = None
) -> int | None:
    """The worker to ask, by its place in `loads`: the familiar one if it is not too busy, else the least loaded, ties
    going round from `turn`. None when each is away or full."""
    free = [i for i, load in enumerate(loads) if load.away_until <= now and load.in_flight < rule.per_worker]
    if not free:
        return None
    least = min(loads[i].in_flight for i in free)
    if familiar in free and loads[familiar].in_flight - least <= rule.slack:
        return familiar
    ties = [i for i in free if loads[i].in_flight == least]
    return min(ties, key=lambda i: (i - turn) % len(loads))


def away_seconds(failures: int) -> float:
    """How long a worker is passed over after that many failures in a row, from 1."""
    return min(AWAY_SECONDS_FIRST * 2.0 ** min(failures - 1, 30), AWAY_SECONDS_MAX)


def edges(tokens: Sequence[int]) -> list[bytes]:
    """A digest of each prefix of `tokens` that ends at a multiple of EDGE_TOKENS, the shortest first."""
    ids = array("I", tokens[: EDGE_TOKENS * EDGES_MAX]).tobytes()
    step = EDGE_TOKENS * array("I").itemsize
    digest = hashlib.sha256()
    found = []
    for end in range(step, len(ids) + 1, step):
        digest.update(ids[end - step : end])
        found.append(digest.digest()[:16])
    return found


class Familiar:
    """Which worker last had each prefix; the prefixes that were not asked for longest are forgotten first."""

    def __init__(self, limit: int = FAMILIAR_MAX) -> None:
        self._limit = limit
        self._workers: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._workers)

    def worker(self, prefixes: Sequence[bytes]) -> int | None:
        """The worker that last had the longest of `prefixes` (shortest first) that anyone had."""
        return next((self._workers[edge] for edge in reversed(prefixes) if edge in self._workers), None)

    def note(self, prefixes: Sequence[bytes], worker: int) -> None:
        # The longest first, so that the shortest, which most requests share, are forgotten last.
        for edge in reversed(prefixes):
            self._workers[edge] = worker
            self._workers.move_to_end(edge)
        while len(self._workers) > self._limit:
            self._workers.popitem(last=False)
