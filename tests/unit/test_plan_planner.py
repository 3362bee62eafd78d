from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest

from kvstore.errors import InvalidArgument
from kvstore.plan import Costs, Coverage, RestorePlan, plan, replay_layer_tokens, tokens_saved
from kvstore.policy.window import WindowPolicy
from kvstore.profile.registry import PROFILES, get_profile
from kvstore.types import Exactness, StateSource

TINY = get_profile("tiny")
FLASH = get_profile("deepseek-v4-flash")
B = TINY.block_tokens
EAGER = Costs(seconds_per_layer_token=1.0)


def planned(
    coverage: Coverage, tokens: int, *, costs: Costs = EAGER, profile=TINY, **more: object
) -> RestorePlan:
    return plan(
        profile,
        coverage,
        prompt_tokens=tokens,
        costs=costs,
        policy=WindowPolicy.parse("endpoints", profile),
        **more,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("held", range(6))
def test_a_held_prompt_leaves_at_least_one_token_to_compute(held: int) -> None:
    edges = tuple(B * (i + 1) for i in range(held))
    whole = held * B
    for tokens, usable in (
        (0, 0),
        (1, 0),
        (whole, max(held - 1, 0) * B),
        (whole + 1, whole),
        (whole + 64, whole),
    ):
        result = planned(Coverage(held, edges, edges), tokens)
        assert result.compute_from == usable, f"{tokens} tokens"
        assert result.state_source is (StateSource.POOL if usable else StateSource.NONE)
        assert result.blocks_missing == max(tokens // B - held, 0)


def test_a_hit_ends_where_blocks_and_a_state_are_both_held() -> None:
    blocks = 8
    for edges, expected in (((4 * B, 8 * B), 8 * B), ((4 * B,), 4 * B)):
        result = planned(
            Coverage(blocks, checkpoints=edges), 8 * B + 76, costs=Costs(seconds_per_layer_token=1.0)
        )
        if expected == 8 * B:
            assert (result.compute_from, result.state_source, result.replay_tokens) == (
                8 * B,
                StateSource.CHECKPOINT,
                0,
            )
        else:
            # Between the state and the last block held the window is recomputed, not the entries.
            assert (result.compute_from, result.replay_from) in {(8 * B, 4 * B), (8 * B, 8 * B - 75)}
    result = planned(Coverage(blocks), 8 * B + 76)
    assert (result.state_source, result.compute_from, result.state_at) == (StateSource.REPLAY, 8 * B, 8 * B)
    assert result.replay_from == 8 * B - TINY.exact_replay_tokens


def test_without_blocks_the_plan_is_cold() -> None:
    result = planned(Coverage(0), 10 * B)
    assert result.state_source is StateSource.NONE
    assert (result.compute_from, result.replay_from, result.state_at) == (0, 0, 0)
    assert result.runner_up is None


def test_equal_costs_go_to_the_pool_then_the_checkpoint_then_the_replay() -> None:
    free = Costs(
        seconds_per_layer_token=1.0, seconds_per_ssd_byte=0, seconds_per_memory_byte=0, seconds_per_fetch=0
    )
    both = planned(Coverage(4, (4 * B,), (4 * B,)), 4 * B + 1, costs=free)
    assert both.state_source is StateSource.POOL
    assert both.runner_up is not None
    assert both.runner_up.state_source is StateSource.CHECKPOINT
    assert both.runner_up.seconds == both.chosen.seconds


def test_an_earlier_state_is_used_without_replay_when_that_is_cheaper() -> None:
    # Reading blocks costs more than computing their tokens, but the state at the first edge saves the rest of nothing.
    dear = Costs(
        seconds_per_layer_token=1.0,
        seconds_per_ssd_byte=TINY.layer_count * B / TINY.block_bytes * 1.01,
        seconds_per_memory_byte=0,
        seconds_per_fetch=0,
    )
    assert (
        planned(Coverage(8, tuple(B * (i + 1) for i in range(8))), 8 * B + 1, costs=dear).state_source
        is StateSource.NONE
    )
    near = replace(dear, seconds_per_ssd_byte=TINY.layer_count * B / TINY.block_bytes * 0.99)
    result = planned(Coverage(8, (2 * B,)), 8 * B + 1, costs=near)
    assert (result.compute_from, result.replay_tokens) == (2 * B, 0)


def test_restoring_at_the_same_cost_as_computing_is_not_done() -> None:
    nothing = Costs(
        seconds_per_layer_token=0, seconds_per_ssd_byte=0, seconds_per_memory_byte=0, seconds_per_fetch=0
    )
    assert planned(Coverage(4, (4 * B,)), 4 * B + 1, costs=nothing).state_source is StateSource.NONE
    assert (
        planned(Coverage(4, (4 * B,)), 4 * B + 1, costs=replace(nothing, seconds_per_fetch=1)).state_source
        is StateSource.NONE
    )


def test_a_triangle_that_reaches_position_0_still_saves() -> None:
    result = planned(Coverage(1), B + 1)
    assert (result.state_source, result.replay_from, result.compute_from) == (StateSource.REPLAY, 0, B)
    assert 0 < tokens_saved(TINY, result.chosen, B + 1) < B


def test_tokens_saved_counts_nothing_that_was_recomputed() -> None:
    result = planned(Coverage(4, (4 * B,)), 4 * B + 10)
    assert tokens_saved(TINY, result.chosen, 4 * B + 10) == 4 * B
    replayed = planned(Coverage(4), 4 * B + 10)
    assert (
        tokens_saved(TINY, replayed.chosen, 4 * B + 10)
        == 4 * B - TINY.exact_replay_layer_tokens / TINY.layer_count
    )
    assert tokens_saved(TINY, planned(Coverage(0), 50).chosen, 50) == 0


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES.keys())
def test_replay_work_is_the_sum_over_layers(profile) -> None:
    layers, rows = profile.layer_count, profile.window_rows
    for start, end in [
        (0, 0),
        (0, 1),
        (0, rows),
        (5, rows + 6),
        (0, layers * rows),
        (0, layers * rows + 1),
        (7, 10**6),
        (3, 3 * rows),
    ]:
        by_hand = sum(end - max(start, end - (layers - layer) * rows) for layer in range(layers))
        assert replay_layer_tokens(profile, start, end) == by_hand
    assert replay_layer_tokens(profile, 0, 10**9) == profile.exact_replay_layer_tokens


def test_published_replay_figures() -> None:
    assert round(FLASH.exact_replay_layer_tokens / FLASH.layer_count) == 2794
    assert FLASH.exact_replay_tokens == 5461


def test_the_cost_of_each_way_is_what_it_reads_and_computes() -> None:
    costs = Costs(
        seconds_per_layer_token=3.0,
        seconds_per_ssd_byte=1e-3,
        seconds_per_memory_byte=1e-4,
        seconds_per_fetch=7.0,
    )
    tokens = 4 * B + 9
    pooled = planned(Coverage(4, (4 * B,), (2 * B,)), tokens, costs=costs).chosen
    assert pooled.bytes_ssd == 4 * TINY.block_bytes
    assert pooled.bytes_memory == TINY.state_bytes
    assert pooled.seconds == pytest.approx(
        7 + 4 * TINY.block_bytes * 1e-3 + TINY.state_bytes * 1e-4 + 9 * 5 * 3
    )
    kept = planned(Coverage(4, (), (4 * B,)), tokens, costs=replace(costs, seconds_per_ssd_byte=1e-6)).chosen
    assert (kept.state_source, kept.bytes_memory) == (StateSource.CHECKPOINT, 0)
    assert kept.bytes_ssd == 4 * TINY.block_bytes + TINY.state_bytes


def test_a_bounded_replay_is_made_only_on_request_and_says_so() -> None:
    n = FLASH.block_tokens * 100 + 1
    exact = planned(Coverage(100), n, profile=FLASH)
    bounded = planned(Coverage(100), n, profile=FLASH, exact_only=False)
    assert (exact.exactness, exact.replay_tokens) == (Exactness.EXACT, 5461)
    assert (bounded.exactness, bounded.replay_tokens) == (Exactness.BOUNDED, 128)
    assert bounded.chosen.replay_layer_tokens == 128 * 43
    short = planned(Coverage(1), 129, profile=FLASH, exact_only=False)
    assert short.exactness is Exactness.EXACT, "a replay of everything before is exact"


def test_a_plan_that_uses_bounded_bytes_is_bounded() -> None:
    held = Coverage(8, (8 * B,))
    mixed = planned(held, 8 * B + 1, exact_only=False, exact_coverage=Coverage(4))
    assert mixed.exactness is Exactness.BOUNDED
    clean = planned(held, 8 * B + 1, exact_only=False, exact_coverage=held)
    assert clean.exactness is Exactness.EXACT


@pytest.mark.parametrize(
    "field",
    ["seconds_per_layer_token", "seconds_per_ssd_byte", "seconds_per_memory_byte", "seconds_per_fetch"],
)
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_costs_that_are_no_rates_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(InvalidArgument) as caught:
        planned(Coverage(1), 100, costs=replace(EAGER, **{field: value}))
    assert caught.value.field == field


@pytest.mark.parametrize(
    "coverage",
    [
        Coverage(-1),
        Coverage(2, (B, B)),
        Coverage(2, (2 * B, B)),
        Coverage(2, (3 * B,)),
        Coverage(2, (), (B + 1,)),
        Coverage(2, (0,)),
    ],
)
def test_coverage_that_cannot_be_is_refused(coverage: Coverage) -> None:
    with pytest.raises(InvalidArgument):
        planned(coverage, 10 * B)


def test_a_negative_prompt_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="prompt_tokens"):
        planned(Coverage(0), -1)


def test_blocks_on_their_way_are_passed_through() -> None:
    assert planned(Coverage(1), 4 * B, wait_for=(1, 2)).wait_for == (1, 2)


def test_a_million_tokens_with_hundreds_of_states_are_planned_in_two_milliseconds() -> None:
    size = FLASH.block_tokens
    coverage = Coverage(
        7812, tuple(size * i for i in range(3, 7812, 17)), tuple(size * i for i in range(5, 7812, 13))
    )
    spent = []
    for _ in range(21):
        start = time.perf_counter()
        planned(coverage, 1_000_000, profile=FLASH, costs=Costs())
        spent.append(time.perf_counter() - start)
    assert sorted(spent)[10] < 0.002, f"median {sorted(spent)[10] * 1e3:.2f} ms"
