from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from kvstore.errors import ProfileError
from kvstore.profile.registry import get_profile
from kvstore_workers.model import Model, ModelConfig, RowsStart, Sequence, StateStart, numerics, self_check
from kvstore_workers.model.config import TILE
from kvstore_workers.model.tensors import random_tensors
from tests.support.long import long
from tests.support.models import quick_config


def _tiny(seed: int, dtype: torch.dtype = torch.float32) -> Model:
    return Model.random(quick_config(), seed=seed, dtype=dtype)


@cache
def _unequal_by_itself() -> set[str]:
    """A processor may compute small tiles otherwise, whatever is restored."""
    return {key for key, ok in self_check(_tiny(3), far=()).details.items() if not ok}


@pytest.mark.parametrize(
    ("dtype", "threads"),
    [(torch.float32, 1), (torch.bfloat16, 2), long(torch.float32, 2), long(torch.bfloat16, 1)],
)
def test_the_check_passes_and_leaves_the_smallest_tile_that_passed(dtype: torch.dtype, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = _tiny(1, dtype)
        # far tiles are large: threads that wait for each other by spinning make them slow where a core is taken
        result = self_check(model, seed=5, far=(4_096,) if threads == 1 else ())
    finally:
        torch.set_num_threads(before)
    assert result.bit_equal, result.details
    assert model.decode_tile == result.decode_tile
    passed = {tile for name, tile in (key.split("/") for key, ok in result.details.items() if ok)}
    assert str(result.decode_tile) in passed
    failed_tiles = {int(key.split("/")[1]) for key, ok in result.details.items() if not ok}
    assert all(tile < result.decode_tile for tile in failed_tiles)


def test_a_model_whose_bits_depend_on_the_tile_gets_a_tile_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = _tiny(2)
    plain = Model._logits

    def uneven(self: Model, streams: torch.Tensor) -> torch.Tensor:
        return plain(self, streams) + (1e-7 if streams.shape[0] < 64 else 0.0)

    monkeypatch.setattr(Model, "_logits", uneven)
    result = self_check(model, far=())
    assert result.bit_equal
    assert result.decode_tile == model.decode_tile == 64
    assert not result.details["decoded/32"]


@pytest.mark.parametrize(
    ("broken", "ways"),
    [
        (RowsStart, ("from rows", "from rows with overlap")),
        long(StateStart, ("resumed", "resumed by slices")),
        long(type(None), ("replayed",)),
    ],
)
def test_a_model_that_restores_wrongly_fails_at_every_tile(
    monkeypatch: pytest.MonkeyPatch, broken: type, ways: tuple[str, ...]
) -> None:
    healthy = _unequal_by_itself()
    model = _tiny(3)
    plain = Model.restore

    def forgetful(self: Model, *, position: int, start: object, **rest: object) -> Sequence:
        sequence = plain(self, position=position, start=start, **rest)  # type: ignore[arg-type]
        if isinstance(start, broken):
            with torch.inference_mode():
                sequence.window[-1].values.rows.zero_()
        return sequence

    monkeypatch.setattr(Model, "restore", forgetful)
    result = self_check(model, far=())
    assert not result.bit_equal
    assert result.decode_tile == model.decode_tile == TILE
    assert {key for key, ok in result.details.items() if not ok} == healthy | {
        f"{way}/{tile}" for way in ways for tile in (8, 16, 32, 64, 128)
    }


def test_a_tile_that_leaves_some_numbers_to_be_computed_otherwise_is_not_tried() -> None:
    config = replace(ModelConfig.for_profile(get_profile("tiny")), hc_mult=2)
    result = self_check(Model.random(config, seed=1), far=())
    assert result.bit_equal
    assert result.decode_tile == 16, "8 rows of 2 stream weights fill half a vector loop"
    assert not any(key.endswith("/8") for key in result.details)


def test_a_model_that_gives_no_numbers_is_refused() -> None:
    config = ModelConfig.for_profile(get_profile("tiny"))
    tensors = random_tensors(config, seed=2)
    tensors["layers.3.attn.wq_a.weight"][5, 7] = float("nan")
    with pytest.raises(ProfileError, match="not finite"):
        self_check(Model(config, tensors, weights_revision="damaged"), far=())


def test_numerics_names_device_dtype_threads_tile_and_build() -> None:
    model = _tiny(4)
    model.decode_tile = 16
    text = numerics(model)
    for part in ("cpu", "float32", f"threads={torch.get_num_threads()}", "tile=128/16", torch.__version__):
        assert part in text
    assert numerics(_tiny(4, torch.bfloat16)) != text


def test_workers_whose_check_failed_are_named_apart_from_those_that_promise_equal_bits() -> None:
    model = _tiny(4)
    assert numerics(model, bit_equal=True) == numerics(model)
    assert numerics(model, bit_equal=False) == numerics(model) + ";unequal"


def test_a_small_tile_that_rounds_a_few_rows_otherwise_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model.random(ModelConfig.for_profile(get_profile("tiny")), seed=5)
    plain = Model._logits

    def rarely(self: Model, streams: torch.Tensor) -> torch.Tensor:
        logits = plain(self, streams)
        if streams.shape[0] == 8:
            logits = torch.where(logits.max(dim=1, keepdim=True).values > 3.6, logits + 1e-6, logits)
        return logits

    whole = model.extend(model.start(), list(range(192)), logits="all")
    assert whole is not None
    share = float((whole.max(dim=1).values > 3.6).float().mean())
    assert 0.0 < share < 0.1, "few rows, as with a kernel of another shape"
    monkeypatch.setattr(Model, "_logits", rarely)
    assert self_check(model, far=()).decode_tile == 16
