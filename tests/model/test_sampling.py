from __future__ import annotations

import pytest
import torch

from kvstore.errors import InvalidArgument
from kvstore_workers.model import pick

LOGITS = torch.tensor([[0.0, 2.0, 1.0, 2.0]])


def test_temperature_0_takes_the_largest_and_the_lowest_id_among_equals() -> None:
    assert pick(LOGITS, seed=None, temperature=0.0, position=5) == 1
    assert pick(LOGITS[0], seed=9, temperature=0.0, position=6) == 1


@pytest.mark.parametrize("seed", [0, 1, -3, 2**70])
def test_a_draw_depends_on_seed_and_position_alone(seed: int) -> None:
    first = [pick(LOGITS, seed=seed, temperature=1.0, position=at) for at in range(50)]
    torch.rand(3)
    assert [pick(LOGITS, seed=seed, temperature=1.0, position=at) for at in reversed(range(50))] == first[
        ::-1
    ]
    assert len(set(first)) > 1, f"seed {seed}"


def test_neighbouring_seeds_do_not_repeat_each_others_draws() -> None:
    wide = torch.zeros(1000)
    a = [pick(wide, seed=7, temperature=1.0, position=at) for at in range(40)]
    b = [pick(wide, seed=8, temperature=1.0, position=at) for at in range(40)]
    assert sum(x == y for x, y in zip(a[1:], b, strict=False)) < 5


def test_draws_follow_the_softmax() -> None:
    count = 4000
    draws = torch.tensor([pick(LOGITS, seed=3, temperature=0.5, position=at) for at in range(count)])
    shares = torch.bincount(draws, minlength=4) / count
    expected = torch.softmax(LOGITS[0] / 0.5, 0)
    assert bool(((shares - expected).abs() < 4 * (expected / count).sqrt()).all()), shares


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-9])
def test_the_smallest_temperatures_draw_among_the_largest_alone(temperature: float) -> None:
    drawn = {pick(LOGITS, seed=5, temperature=temperature, position=at) for at in range(40)}
    assert drawn == {1, 3}


@pytest.mark.parametrize("temperature", [-0.1, float("nan"), float("inf")])
def test_a_bad_temperature_is_refused(temperature: float) -> None:
    with pytest.raises(InvalidArgument, match="temperature"):
        pick(LOGITS, seed=1, temperature=temperature, position=0)


def test_sampling_without_a_seed_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="seed"):
        pick(LOGITS, seed=None, temperature=1.0, position=0)
