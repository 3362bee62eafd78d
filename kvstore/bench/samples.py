"""Whether two samples may come from one distribution: two tests that look at different things."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Sample = NDArray[np.float64]

_TERMS = 100


class Compared(NamedTuple):
    """The chance of samples that differ at least as much, if they come from one distribution: by the largest distance between their
    distributions (Kolmogorov and Smirnov), and by their ranks (Mann and Whitney)."""

    distance_p: float
    ranks_p: float

    @property
    def p(self) -> float:
        return min(self.distance_p, self.ranks_p)


def compared(first: Sample, second: Sample) -> Compared:
    """Both by their limits for large samples: some hundred values each are enough."""
    return Compared(_distance_p(first, second), _ranks_p(first, second))


def _distance_p(first: Sample, second: Sample) -> float:
    values = np.concatenate([first, second])
    one = np.searchsorted(np.sort(first), values, side="right") / len(first)
    two = np.searchsorted(np.sort(second), values, side="right") / len(second)
    distance = float(np.max(np.abs(one - two)))
    size = math.sqrt(len(first) * len(second) / (len(first) + len(second)))
    at = (size + 0.12 + 0.11 / size) * distance
    if at < 0.2:
        # The series below needs more terms there, and it is 1 to ten digits.
        return 1.0
    terms = (2 * (-1) ** (k - 1) * math.exp(-2 * (k * at) ** 2) for k in range(1, _TERMS))
    return float(min(1.0, max(0.0, sum(terms))))


def _ranks_p(first: Sample, second: Sample) -> float:
    n, m = len(first), len(second)
    _, places, counts = np.unique(np.concatenate([first, second]), return_inverse=True, return_counts=True)
    # Equal values share the mean of their ranks.
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    u = float(ranks[:n].sum()) - n * (n + 1) / 2
    ties = float(np.sum(counts.astype(np.float64) ** 3 - counts)) / ((n + m) * (n + m - 1))
    spread = math.sqrt(n * m / 12 * ((n + m + 1) - ties))
    if not spread:
        return 1.0
    return float(math.erfc(abs(u - n * m / 2) / spread / math.sqrt(2)))
