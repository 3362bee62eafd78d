"""Shared models and runs. Every random choice here comes from a seed that is part of the test's parameters or name."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from kvstore.profile.base import Layer, LayerKind, Profile
from kvstore.profile.formats import RowFormat
from kvstore_workers.model import Model, Sequence, self_check
from tests.support.models import quick_config


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other by spinning starve when other tests run beside these."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny() -> Model:
    model = Model.random(quick_config(), seed=1)
    assert self_check(model, far=()).bit_equal
    return model


@pytest.fixture(scope="session")
def quantised() -> Model:
    """Tiny with the stored formats of V4-Flash."""
    base = quick_config()
    csa, hca, window = Layer(LayerKind.CSA, 4), Layer(LayerKind.HCA, 16), Layer(LayerKind.WINDOW)
    profile = Profile(
        name="tiny-quantised",
        layers=(window, csa, hca, csa),
        block_tokens=32,
        window_tokens=16,
        head_dim=72,
        rope_dim=8,
        index_head_dim=32,
        entry_format=RowFormat.FP8_ROPE_BF16,
        key_format=RowFormat.FP4_UE8M0,
        row_format=RowFormat.FP8_ROPE_BF16,
    )
    model = Model.random(replace(base, profile=profile), seed=2)
    assert self_check(model, far=()).bit_equal
    return model


@pytest.fixture(scope="session")
def tokens_of() -> Callable[[Model, int, int], list[int]]:
    def make(model: Model, count: int, seed: int) -> list[int]:
        rng = random.Random(seed)
        return [rng.randrange(model.config.vocab_size) for _ in range(count)]

    return make


@pytest.fixture(scope="session")
def blocks_of() -> Callable[[Sequence], list[bytes]]:
    def make(sequence: Sequence) -> list[bytes]:
        return [sequence.block_payload(i) for i in range(sequence.position // sequence.profile.block_tokens)]

    return make
