"""What it is worth to keep something on, learned from when things of its class were used again."""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

BUCKETS = 40
"""Of ages: 0, then two to an octave."""

SAMPLE_MAX = 1 << 15
HORIZON = 64
"""A sample is to reach back over so many uses for each that is held. It begins with all marks, and has half of them whenever
SAMPLE_MAX has no room for more and it does not reach so far."""

SAMPLE_BYTES = 220
PRIOR = 200.0
"""Every class begins with so many observations of the mean of all."""

_FIRST_LEARNED = 64
_EDGES = np.concatenate(([0.0], np.exp2(np.arange(BUCKETS) / 2)))


def bucket_of(age: int) -> int:
    return min(1 + math.floor(2 * math.log2(age)), BUCKETS - 1) if age >= 1 else 0


def worth_of(used: NDArray[np.float64], unused: NDArray[np.float64]) -> NDArray[np.float64]:
    """For each class (row) and age (column) the uses to be had per unit of time of keeping, when what is kept is given up at the
    best age: the Gittins index of a use that comes once. `used[c, a]`: how many were used again at age a; `unused`: how many
    had not been, when they were last looked at. Older is never worth more.

    The hazards of reuse by class and age are those of LHD (Beckmann, Chen, Cidon: "LHD: Improving Cache Hit Rate by Maximizing
    Hit Density", NSDI 2018), which sums over all later ages; to give up early is allowed here."""
    ended = used + unused
    at_risk = np.cumsum(ended[:, ::-1], axis=1)[:, ::-1] - unused / 2
    hazard = np.divide(used, at_risk, out=np.zeros_like(used), where=at_risk > 0)
    lasting = np.cumprod(1.0 - np.minimum(hazard, 1.0), axis=1)
    before = np.hstack((np.ones((len(used), 1)), lasting[:, :-1]))
    zero = np.zeros((len(used), 1))
    uses = np.hstack((zero, np.cumsum(before - lasting, axis=1)))
    kept = np.hstack((zero, np.cumsum((before + lasting) / 2 * np.diff(_EDGES), axis=1)))
    worth = np.zeros_like(used)
    for age in range(BUCKETS):
        gain, cost = uses[:, age + 1 :] - uses[:, age, None], kept[:, age + 1 :] - kept[:, age, None]
        # Where nothing lasts so long there is nothing to be had.
        worth[:, age] = np.divide(gain, cost, out=np.zeros_like(gain), where=cost > 0).max(axis=1)
    return np.maximum.accumulate(worth[:, ::-1], axis=1)[:, ::-1]


class Worth:
    """Learns from a sample of marks (32 evenly spread bits of a key) what each of `classes` is worth at each age. Whether a thing
    is held makes no difference: the sample remembers it all the same."""

    def __init__(self, classes: int) -> None:
        self._classes = classes
        self._used = array("d", bytes(8 * classes * BUCKETS))
        self._unused = array("d", bytes(8 * classes * BUCKETS))
        self._sample: OrderedDict[int, tuple[int, int]] = OrderedDict()
        self._most = self._reach = _FIRST_LEARNED
        self._seen = 0
        self._learn_at = _FIRST_LEARNED
        self._forget_at = SAMPLE_MAX
        self._table: list[list[float]] = [[0.0] * BUCKETS] * classes
        self.mask = 0
        """Marks that have any of these bits are not in the sample."""

    def at(self, number: int, age: int) -> float:
        return self._table[number][bucket_of(age)]

    def use(self, mark: int, number: int, now: int) -> None:
        """What bears the mark is used, and of this class from now on."""
        sample = self._sample
        before = sample.pop(mark, None)
        if before is not None:
            self._used[before[0] * BUCKETS + bucket_of(now - before[1])] += 1
        sample[mark] = (number, now)
        self._seen += 1
        if len(sample) > self._most:
            self._make_room(now)

    def learn(self, count: int, now: int) -> None:
        """Once in a while, from what was seen; `count` are held."""
        if self._seen < self._learn_at:
            return
        self._learn_at = self._seen + max(_FIRST_LEARNED, min(self._seen // 2, self._most // 4))
        self._most = min(max(HORIZON * count, _FIRST_LEARNED), SAMPLE_MAX)
        self._reach = HORIZON * count
        used, unused = self._columns()
        if self._seen >= self._forget_at:
            self._forget_at = self._seen + self._most
            used /= 2
            unused /= 2
        unused = unused.copy()
        for number, since in self._sample.values():
            unused[number, bucket_of(now - since)] += 1
        total = used.sum() + unused.sum()
        share = PRIOR / total if total else 0.0
        self._table = worth_of(used + share * used.sum(axis=0), unused + share * unused.sum(axis=0)).tolist()

    def _make_room(self, now: int) -> None:
        sample = self._sample
        if self._most * (self.mask + 1) < self._reach:
            self.mask = 2 * self.mask + 1
            for mark in [mark for mark in sample if mark & self.mask]:
                del sample[mark]
        while len(sample) > self._most:
            _, (number, since) = sample.popitem(last=False)
            self._unused[number * BUCKETS + bucket_of(now - since)] += 1

    def _columns(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        shape = (self._classes, BUCKETS)
        used, unused = np.frombuffer(self._used), np.frombuffer(self._unused)
        return used.reshape(shape), unused.reshape(shape)

    def memory_bytes(self) -> int:
        return SAMPLE_BYTES * len(self._sample) + 3 * 8 * self._classes * BUCKETS

    def check_integrity(self) -> None:
        assert len(self._sample) <= SAMPLE_MAX, "sample"
        assert min(self._used) >= 0, "uses"
        assert min(self._unused) >= 0, "observations that ended without one"
