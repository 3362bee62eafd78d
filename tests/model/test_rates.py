"""The prices that a worker begins with."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from kvstore.plan.figures import figures_of
from kvstore.plan.work import scanned
from kvstore.profile.base import Layer, LayerKind
from kvstore_workers.model import Model, measure_rates
from kvstore_workers.model.config import TILE
from kvstore_workers.model.rates import ROUNDS


def _clock(near: float, far: float):  # type: ignore[no-untyped-def]
    """A clock under which tiles take `near` seconds, and `far` once the near ones are done."""
    spent = itertools.chain.from_iterable((0.0, near if i < ROUNDS else far) for i in itertools.count())
    readings = itertools.accumulate(spent)
    return lambda: next(readings)


def test_two_tiles_give_the_two_prices_back(tiny: Model) -> None:
    layer_token, entry, layers = 3e-6, 2e-8, tiny.config.layer_count

    def entries(position: int) -> int:
        return scanned(figures_of(tiny.profile), position, position + TILE)

    def tile(position: int) -> float:
        return layers * TILE * layer_token + entries(position) * entry

    rates = measure_rates(tiny, seconds=_clock(tile(0), tile(2048)), far=2048 + 5)
    assert rates.seconds_per_layer_token == pytest.approx(layer_token, rel=1e-6)
    assert rates.seconds_per_index_entry == pytest.approx(entry, rel=1e-6)
    assert rates.density_spread == (entries(2048) - entries(0)) / (layers * TILE)


def test_a_far_tile_that_was_faster_makes_no_price_negative(tiny: Model) -> None:
    rates = measure_rates(tiny, seconds=_clock(0.5, 0.4), far=1024)
    assert rates.seconds_per_index_entry == 0.0
    assert rates.seconds_per_layer_token == pytest.approx(0.5 / (TILE * tiny.config.layer_count))
    steep = measure_rates(tiny, seconds=_clock(1e-6, 100.0), far=1024)
    assert steep.seconds_per_layer_token == 0.0
    assert steep.seconds_per_index_entry > 0.0


def test_a_model_without_an_index_pays_nothing_for_it(tiny: Model) -> None:
    profile = replace(tiny.profile, name="no index", layers=(Layer(LayerKind.HCA, 16),))
    model = Model.random(replace(tiny.config, profile=profile), seed=1)
    rates = measure_rates(model, seconds=_clock(0.25, 9.0))
    assert rates == (0.25 / TILE, 0.0, 0.0)


def test_the_real_clock_gives_prices_that_a_plan_can_use(tiny: Model) -> None:
    rates = measure_rates(tiny)
    assert 0.0 < rates.seconds_per_layer_token < 1.0
    assert 0.0 <= rates.seconds_per_index_entry < 1e-3
