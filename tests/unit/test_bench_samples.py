"""The two tests of `kvstore bench tenants`: they see a difference that is there, and none that is not."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore.bench.samples import compared


def test_samples_of_one_distribution_are_told_apart_as_seldom_as_p_says() -> None:
    chance = np.random.default_rng(2)
    found = [compared(chance.lognormal(size=800), chance.lognormal(size=800)) for _ in range(400)]
    for p in ([each.distance_p for each in found], [each.ranks_p for each in found]):
        assert 0.01 < np.mean(np.array(p) < 0.05) < 0.1
        assert np.mean(np.array(p) < 0.001) < 0.01


def test_a_small_shift_and_another_spread_are_seen() -> None:
    chance = np.random.default_rng(2)
    base = chance.lognormal(size=10_000)
    assert compared(base, chance.lognormal(size=10_000) + 0.1).p < 1e-6
    wider = compared(chance.normal(size=10_000), chance.normal(scale=1.2, size=10_000))
    assert wider.distance_p < 1e-6 < wider.ranks_p


def test_ranks_with_ties_are_counted_by_the_formula() -> None:
    # Of 400 pairs 45 are larger and 10 equal: 50 instead of 200, at a spread of sqrt(400 / 12 * (41 - 60 / 1560)): 4.06 of it.
    first, second = np.arange(0.0, 20.0), np.arange(10.0, 30.0)
    assert compared(first, second).ranks_p == pytest.approx(4.92e-5, rel=0.01)


def test_equal_samples_are_not_told_apart() -> None:
    same = np.arange(0.0, 20.0)
    assert compared(same, same) == (1.0, pytest.approx(1.0))
    assert compared(np.ones(5), np.ones(5)).p == 1.0
