"""After how long the blocks of a log are asked for again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvstore.simulate.log import RequestLog

QUANTILES = (50, 90, 99)
"""Percent."""

WITHIN_SECONDS = (1, 5, 15, 60, 300, 900, 3600, 14_400, 86_400, 259_200)
_CURVE_POINTS = 80


@dataclass(frozen=True, slots=True)
class Reuse:
    """Of all accesses to blocks seen before: seconds since the access before. `quantiles`: (percent, seconds); `within`:
    (seconds, percent of them that came within), for the times that the log is long enough for; `curve`: the same for many
    times, from the shortest on. Percent of accesses that reuse, and of blocks asked for once."""

    reuses: int
    reuse_rate: float
    once_rate: float
    longest_seconds: float
    quantiles: tuple[tuple[int, float], ...]
    within: tuple[tuple[float, float], ...]
    curve: tuple[tuple[float, float], ...]


def reuse_of(log: RequestLog, check: Callable[[], None] = lambda: None) -> Reuse:
    """Four bytes an access. `check` is called before each request and may raise."""
    intervals = np.empty(log.accesses, np.float32)
    last = np.full(log.footprint, np.nan)
    counts = np.zeros(log.footprint, np.int32)
    filled = 0
    for request in range(len(log)):
        check()
        blocks, now = log.blocks(request), float(log.seconds[request])
        since = now - last[blocks]
        again = since[~np.isnan(since)]
        intervals[filled : filled + len(again)] = again
        filled += len(again)
        last[blocks] = now
        counts[blocks] += 1
    found = np.sort(intervals[:filled])
    longest = float(found[-1]) if filled else 0.0
    return Reuse(
        filled,
        100.0 * filled / log.accesses if log.accesses else 0.0,
        100.0 * float((counts == 1).mean()) if log.footprint else 0.0,
        longest,
        tuple((each, float(np.percentile(found, each))) for each in QUANTILES) if filled else (),
        tuple((float(each), _within(found, each)) for each in WITHIN_SECONDS if filled and each < longest),
        _curve(found, longest) if filled else (),
    )


def _within(found: np.typing.NDArray[np.float32], seconds: float) -> float:
    return 100.0 * float(np.searchsorted(found, seconds, side="right")) / len(found)


def _curve(found: np.typing.NDArray[np.float32], longest: float) -> tuple[tuple[float, float], ...]:
    first = max(float(found[0]), min(1.0, longest), 1e-3)
    times = np.geomspace(first, max(longest, first), _CURVE_POINTS if longest > first else 1)
    return tuple((float(each), _within(found, float(each))) for each in times)
