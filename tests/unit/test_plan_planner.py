from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest

from kvstore.errors import InvalidArgument
from kvstore.plan import Costs, Coverage, RestorePlan, plan, replay_layer_tokens, tokens_saved, ways
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


def test_equal_costs_go_to_the_pool_then_the_checkpoint_then_the_rows() -> None:
    free = Costs(
        seconds_per_layer_token=1.0, seconds_per_ssd_byte=0, seconds_per_memory_byte=0, seconds_per_fetch=0
    )
    both = planned(Coverage(4, (4 * B,), (4 * B,)), 4 * B + 1, costs=free)
    assert both.state_source is StateSource.POOL
    assert both.runner_up is not None
    assert both.runner_up.state_source is StateSource.CHECKPOINT
    assert both.runner_up.seconds == both.chosen.seconds
    rows = Coverage(4, checkpoints=(4 * B,), rows_overlap=(4 * B,))
    kept = planned(rows, 4 * B + 1, costs=free)
    assert kept.state_source is StateSource.CHECKPOINT
    assert kept.runner_up is not None
    assert kept.runner_up.state_source is StateSource.ROWS
    # A replay costs work where nothing else does, unless work is free too.
    lazy = replace(free, seconds_per_layer_token=0, seconds_per_index_entry=1)
    cheap = replace(TINY, name="last", layers=(*TINY.layers[:2], TINY.layers[-1]))
    found = ways(cheap, Coverage(4, rows_overlap=(4 * B,)), prompt_tokens=4 * B + 1, costs=lazy)
    assert [way.state_source for way in found] == [StateSource.ROWS, StateSource.REPLAY, StateSource.NONE]
    assert found[0].seconds == found[1].seconds, "the last layer's index is not scanned in a replay"


def test_rows_without_the_overlap_are_read_and_a_group_of_tokens_is_replayed() -> None:
    edge = 100 * 128
    without = planned(Coverage(100, rows=(edge,)), edge + 9, profile=FLASH, costs=Costs())
    assert (without.state_source, without.compute_from) == (StateSource.ROWS, edge)
    assert (without.state_at, without.replay_from, without.replay_tokens) == (edge - 4, edge - 4, 4)
    assert without.chosen.replay_layer_tokens == 4 * 43
    assert without.chosen.bytes_ssd == 100 * FLASH.block_bytes + 2 * FLASH.rows_block_bytes
    with_overlap = planned(Coverage(100, rows_overlap=(edge,)), edge + 9, profile=FLASH, costs=Costs())
    assert (with_overlap.state_source, with_overlap.replay_tokens) == (StateSource.ROWS, 0)
    assert with_overlap.chosen.bytes_ssd == 100 * FLASH.block_bytes + FLASH.rows_overlap_block_bytes


def test_rows_of_an_earlier_edge_are_replayed_to_the_last_one_where_that_is_cheaper() -> None:
    near, far = planned(Coverage(8, rows=(7 * B,)), 8 * B + 1), planned(Coverage(8, rows=(B,)), 8 * B + 1)
    assert (near.state_source, near.compute_from, near.replay_from) == (StateSource.ROWS, 8 * B, 7 * B - 4)
    assert (far.state_source, far.replay_tokens) == (StateSource.REPLAY, TINY.exact_replay_tokens)


def test_rows_are_not_used_where_a_block_is_one_group_of_the_overlap() -> None:
    one = replace(TINY, name="one", layers=TINY.layers[:3], block_tokens=4)
    found = ways(one, Coverage(8, rows=(32,)), prompt_tokens=33, costs=EAGER)
    assert {way.state_source for way in found} == {StateSource.REPLAY, StateSource.NONE}
    found = ways(one, Coverage(8, rows_overlap=(32,)), prompt_tokens=33, costs=EAGER)
    assert found[0].state_source is StateSource.ROWS


def test_a_plan_from_bounded_rows_is_bounded() -> None:
    held = Coverage(8, rows_overlap=(8 * B,))
    assert planned(held, 8 * B + 1, exact_only=False, exact_coverage=held).exactness is Exactness.EXACT
    mixed = planned(held, 8 * B + 1, exact_only=False, exact_coverage=Coverage(8))
    assert (mixed.state_source, mixed.exactness) == (StateSource.ROWS, Exactness.BOUNDED)


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES.keys())
def test_index_scans_are_counted_token_by_token(profile) -> None:
    size, rows, layers = profile.block_tokens, profile.window_rows, profile.layer_count
    entries = Costs(
        seconds_per_layer_token=1e-9,
        seconds_per_index_entry=1.0,
        seconds_per_ssd_byte=0,
        seconds_per_memory_byte=0,
        seconds_per_fetch=0,
    )
    n = 9 * size + 5

    def scanned(layer: int, start: int, end: int) -> int:
        kind, ratio = profile.layers[layer].kind, profile.layers[layer].ratio
        return sum((p + 1) // ratio for p in range(start, end)) if kind.has_keys else 0

    coverage = Coverage(9, (4 * size,), (9 * size,))
    for way in ways(profile, coverage, prompt_tokens=n, costs=entries):
        expected = sum(scanned(layer, way.compute_from, n) for layer in range(layers))
        for layer in range(layers):
            start = max(way.replay_from, way.compute_from - (layers - layer - 1) * rows)
            expected += scanned(layer, start, way.compute_from)
        assert way.index_entries == expected
        assert way.replay_seconds + way.compute_seconds == pytest.approx(expected, rel=1e-6)


def test_a_far_prompt_is_dearer_to_compute_when_scans_are_priced() -> None:
    scans = Costs(seconds_per_index_entry=1e-9)
    near = planned(Coverage(0), 1_000, profile=FLASH, costs=scans).chosen
    far = planned(Coverage(7_812), 1_000_000, profile=FLASH, costs=scans)
    per_token = near.compute_seconds / 1_000
    assert far.chosen.compute_seconds / (1_000_000 - far.compute_from) > 3 * per_token
    assert far.chosen.seconds == pytest.approx(
        far.chosen.read_seconds + far.chosen.replay_seconds + far.chosen.compute_seconds
    )


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


def test_a_prompt_is_priced_up_to_the_end_of_its_last_tile() -> None:
    rates = replace(EAGER, tile_tokens=128)
    for n in (8 * B + 1, 8 * B + 100):
        tiled = planned(Coverage(0), n, costs=rates)
        end = -(-n // 128) * 128
        assert tiled.chosen.seconds == pytest.approx(planned(Coverage(0), end).chosen.seconds)
    with pytest.raises(InvalidArgument, match="tile_tokens=0; allowed: 1 to"):
        planned(Coverage(1), 100, costs=replace(EAGER, tile_tokens=0))


@pytest.mark.parametrize(
    "field",
    [
        "seconds_per_layer_token",
        "seconds_per_ssd_byte",
        "seconds_per_memory_byte",
        "seconds_per_fetch",
        "seconds_per_index_entry",
    ],
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
        Coverage(2, rows=(3 * B,)),
        Coverage(2, rows_overlap=(B + 4,)),
        Coverage(2, branch_at=3 * B),
        Coverage(2, branch_at=B + 1),
        Coverage(2, branch_at=-B),
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
        start = time.thread_time()
        planned(coverage, 1_000_000, profile=FLASH, costs=Costs())
        spent.append(time.thread_time() - start)
    assert sorted(spent)[10] < 0.002, f"median {sorted(spent)[10] * 1e3:.2f} ms"
