"""How far a replay must reach back, by marks: a mark sits on what a replay cannot know and spreads along dependencies.

The dependencies are the model's own: `replay_rows` decides which rows a replay makes, `window_visible` what a query
reads. Comparing numbers would not do, since one missing token in a small window may change nothing in float32.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from kvstore.profile.base import LayerKind, Profile
from kvstore.profile.registry import get_profile
from kvstore_workers.model.config import TILE
from kvstore_workers.model.rows import LayerRows, replay_rows, window_visible


def _marks(
    profile: Profile, rows: tuple[LayerRows, ...], known_from: int, position: int
) -> list[torch.Tensor]:
    """Per layer, bool [W - 1]: which window rows of the final state depend on a token before `known_from`."""
    window = profile.window_tokens
    first = known_from - 2 * window
    positions = torch.arange(first, position)
    # A layer's input is marked where it is unknown: tokens before the replay, later what depends on them.
    unknown = positions < known_from
    final = []
    for layer in rows:
        made = unknown | (positions < layer.keys_from)
        final.append(made[-(window - 1) :])
        output = torch.ones_like(unknown)
        start = max(layer.queries_from - first, window)
        for low in range(start, len(positions), TILE):
            queries = positions[low : low + TILE]
            context = slice(low - window + 1, low + len(queries))
            seen = window_visible(queries, positions[context], window, first)
            output[low : low + len(queries)] = unknown[low : low + len(queries)] | (seen & made[context]).any(
                1
            )
        unknown = output
    return final


@pytest.mark.parametrize("name", ["tiny", "deepseek-v4-flash"])
def test_l_times_w_minus_1_tokens_leave_no_mark_and_one_fewer_marks_one_row_of_the_last_layer(
    name: str,
) -> None:
    profile = get_profile(name)
    position = 64 * profile.block_tokens
    start = position - profile.exact_replay_tokens
    for shape in ("triangle", "rectangle"):
        for missing in (0, 1):
            if shape == "triangle":
                rows = replay_rows(profile.layer_count, profile.window_tokens, start + missing, position)
            else:
                rows = (LayerRows(start + missing, start + missing),) * profile.layer_count
            marks = _marks(profile, rows, start + missing, position)
            assert [int(layer.sum()) for layer in marks] == [0] * (profile.layer_count - 1) + [missing], shape
            if missing:
                assert marks[-1][0], "the oldest row is the one"


@pytest.mark.parametrize("name", ["tiny", "deepseek-v4-flash", "deepseek-v4-pro"])
def test_the_triangle_costs_what_the_profile_says(name: str) -> None:
    profile = get_profile(name)
    position = 128 * profile.block_tokens
    start = position - profile.exact_replay_tokens
    rows = replay_rows(profile.layer_count, profile.window_tokens, start, position)
    assert rows[0].keys_from == start
    assert sum(position - layer.keys_from for layer in rows) == profile.exact_replay_layer_tokens


@pytest.mark.parametrize("name", ["tiny", "deepseek-v4-flash"])
def test_the_compressor_inputs_that_outlive_a_replay_lie_where_every_layer_is_exact(name: str) -> None:
    profile = get_profile(name)
    position = 64 * profile.block_tokens
    rows = replay_rows(
        profile.layer_count, profile.window_tokens, position - profile.exact_replay_tokens, position
    )
    for layer, span in zip(profile.layers, rows, strict=True):
        if layer.kind is LayerKind.CSA:
            assert position - layer.ratio >= span.keys_from


def test_a_layer_of_the_triangle_makes_no_row_that_nothing_reads() -> None:
    profile = get_profile("tiny")
    rows = replay_rows(profile.layer_count, profile.window_tokens, 0, 128)
    for layer, after in itertools.pairwise(rows):
        assert layer.queries_from == after.keys_from
        assert layer.keys_from == layer.queries_from - profile.window_rows
    assert rows[-1].queries_from == 128


def test_near_the_beginning_the_triangle_is_cut_off_at_position_0() -> None:
    profile = get_profile("tiny")
    rows = replay_rows(profile.layer_count, profile.window_tokens, 0, 32)
    assert [layer.keys_from for layer in rows] == [0, 0, 0, 2, 17]
