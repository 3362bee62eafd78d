"""Ratios of pairs that were measured side by side, with their spread."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

RESAMPLES = 5_000
CONFIDENCE = 0.95
PAIRS = 15


@dataclass(frozen=True, slots=True)
class Spread:
    """`median` of the values, and the bootstrap interval [low, high] of that median at 95 %."""

    median: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}] of {self.count}"

    def as_json(self) -> dict[str, float]:
        return asdict(self)


def spread(values: Sequence[float], *, seed: int = 1) -> Spread:
    """`values` is not empty."""
    chance = random.Random(seed)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(RESAMPLES))
    edge = (1.0 - CONFIDENCE) / 2.0
    return Spread(
        statistics.median(values),
        medians[int(edge * RESAMPLES)],
        medians[int((1.0 - edge) * RESAMPLES) - 1],
        len(values),
    )


@dataclass(frozen=True, slots=True)
class Pair:
    """What both sides did at nearly the same time, in units of work per second."""

    ours: float
    theirs: float

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs


def interleaved(count: int, *, ours: Callable[[], float], theirs: Callable[[], float]) -> Iterator[Pair]:
    """Pairs in the order A B, B A, A B, ...: what drifts meanwhile favours neither side."""
    for number in range(count):
        if number % 2 == 0:
            first = ours()
            yield Pair(first, theirs())
        else:
            first = theirs()
            yield Pair(ours(), first)
