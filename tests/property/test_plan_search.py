"""The planner against a search over all ways, written from the equations alone."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from functools import cache
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.plan import Alternative, Costs, Coverage, RestorePlan, plan, ways
from kvstore.policy.window import WindowPolicy
from kvstore.profile.base import Layer, LayerKind, Profile
from kvstore.profile.layout import rows_needed
from kvstore.profile.registry import PROFILES, get_profile
from kvstore.types import Exactness, StateSource
from tests.support.long import examples

TINY = get_profile("tiny")
CSA, HCA, WINDOW = Layer(LayerKind.CSA, 2), Layer(LayerKind.HCA, 4), Layer(LayerKind.WINDOW)
# Windows inside a block, over several blocks, and a block of one CSA group; an index in the last layer and not there.
SMALL = replace(TINY, name="small", layers=TINY.layers[:3], block_tokens=4, window_tokens=5)
WIDE = replace(TINY, name="wide", layers=(CSA, HCA, CSA, WINDOW), block_tokens=4, window_tokens=12)
NO_OVERLAP = replace(
    TINY, name="no-overlap", layers=(WINDOW, Layer(LayerKind.CSA2, 2)), block_tokens=4, window_tokens=4
)
MADE_UP = (SMALL, WIDE, NO_OVERLAP, TINY)
LONGEST = 128 * 80


def work(profile: Profile, start: int, end: int) -> int:
    layers, rows = profile.layer_count, profile.window_tokens - 1
    return sum(end - max(start, end - (layers - layer) * rows) for layer in range(layers))


@cache
def seen_before(ratio: int) -> list[int]:
    """[x]: entries that the queries at 0, ..., x - 1 see; a query at p sees (p + 1) // ratio."""
    return [0, *accumulate((p + 1) // ratio for p in range(LONGEST))]


def scan(profile: Profile, start: int, end: int) -> int:
    return sum(
        seen_before(layer.ratio)[end] - seen_before(layer.ratio)[start]
        for layer in profile.layers
        if layer.kind.has_keys
    )


def replay_scan(profile: Profile, start: int, end: int) -> int:
    """A layer's queries run where the next layer runs, the last layer's nowhere."""
    rows, total = profile.window_tokens - 1, 0
    for index, layer in enumerate(profile.layers):
        if layer.kind.has_keys:
            first = max(start, end - (profile.layer_count - index - 1) * rows)
            total += seen_before(layer.ratio)[end] - seen_before(layer.ratio)[first]
    return total


def cheapest(profile: Profile, coverage: Coverage, n: int, costs: Costs, *, bounded: bool) -> float:
    """Seconds of the cheapest of all (boundary, source, state edge)."""
    size, layers, window = profile.block_tokens, profile.layer_count, profile.window_tokens
    token, entry, ssd = (
        costs.seconds_per_layer_token,
        costs.seconds_per_index_entry,
        costs.seconds_per_ssd_byte,
    )

    def replayed(start: int, end: int) -> float:
        return work(profile, start, end) * token + replay_scan(profile, start, end) * entry

    last = -(-n // costs.tile_tokens) * costs.tile_tokens
    prices = [last * layers * token + scan(profile, 0, last) * entry]
    for boundary in range(size, min(coverage.blocks * size, max(n - 1, 0)) + 1, size):
        base = costs.seconds_per_fetch + boundary // size * profile.block_bytes * ssd
        base += (last - boundary) * layers * token + scan(profile, boundary, last) * entry
        for edges, rate in (
            (coverage.pool_states, costs.seconds_per_memory_byte),
            (coverage.checkpoints, ssd),
        ):
            for edge in edges:
                if edge <= boundary:
                    prices.append(base + profile.state_bytes * rate + replayed(edge, boundary))
        for edges, overlap, each in (
            (coverage.rows, False, profile.rows_block_bytes),
            (coverage.rows_overlap, True, profile.rows_overlap_block_bytes),
        ):
            for edge in edges:
                needed = rows_needed(profile, edge, overlap=overlap)
                # Where a block is one CSA group, rows without the overlap are not used.
                if edge <= boundary and (overlap or profile.overlap_tokens < size):
                    prices.append(base + needed.blocks * each * ssd + replayed(needed.state_at, boundary))
        prices.append(base + replayed(max(0, boundary - layers * (window - 1)), boundary))
        if bounded and boundary > window:
            prices.append(base + window * layers * token + scan(profile, boundary - window, boundary) * entry)
    return min(prices)


def check_way(profile: Profile, way: Alternative, coverage: Coverage) -> None:
    size = profile.block_tokens
    assert way.seconds == pytest.approx(way.read_seconds + way.replay_seconds + way.compute_seconds)
    if way.state_source not in (StateSource.REPLAY, StateSource.NONE):
        assert way.state_at == way.replay_from
    if way.state_source is StateSource.POOL:
        assert way.state_at in coverage.pool_states
    if way.state_source is StateSource.CHECKPOINT:
        assert way.state_at in coverage.checkpoints
    if way.state_source is StateSource.ROWS:
        edges = {
            *(edge - profile.overlap_tokens for edge in coverage.rows),
            *coverage.rows_overlap,
        }
        assert way.state_at in edges
        blocks = way.compute_from // size * profile.block_bytes
        assert way.bytes_ssd > blocks
        assert way.bytes_memory == 0
    if way.state_source is StateSource.REPLAY:
        assert way.state_at == way.compute_from > 0
    if way.state_source is StateSource.NONE:
        assert (way.compute_from, way.replay_from, way.bytes_ssd, way.bytes_memory) == (0, 0, 0, 0)
        assert (way.read_seconds, way.replay_seconds) == (0, 0)


def check_laws(
    profile: Profile, result: RestorePlan, coverage: Coverage, n: int, *, exact_only: bool
) -> None:
    size = profile.block_tokens
    assert 0 <= result.replay_from <= result.compute_from <= max(n - 1, 0)
    assert result.compute_from % size == 0
    assert result.compute_from <= coverage.blocks * size
    assert result.replay_tokens == result.compute_from - result.replay_from
    for way in filter(None, (result.chosen, result.runner_up)):
        check_way(profile, way, coverage)
    if result.runner_up is not None:
        assert result.chosen.seconds <= result.runner_up.seconds
        assert (result.chosen.state_source, result.compute_from) != (
            result.runner_up.state_source,
            result.runner_up.compute_from,
        )
    if exact_only:
        assert result.exactness is Exactness.EXACT
    assert result.blocks_missing == max(n // size - coverage.blocks, 0)
    check_saved(result, coverage, n, size)


def check_saved(result: RestorePlan, coverage: Coverage, n: int, size: int) -> None:
    saves = result.save_states
    for edges, held in ((saves.pool, coverage.pool_states), (saves.ssd, coverage.checkpoints)):
        assert list(edges) == sorted(set(edges))
        assert all(result.compute_from <= edge <= n and edge % size == 0 for edge in edges)
        assert not set(edges) & set(held), "what a tier holds is not saved there again"
    if not result.replay_tokens:
        assert all(edge > result.compute_from for edge in (*saves.pool, *saves.ssd))
    if coverage.branch_at > result.compute_from:
        assert coverage.branch_at in (*saves.pool, *coverage.pool_states)


def lengths(size: int, most: int) -> st.SearchStrategy[int]:
    return st.one_of(
        st.sampled_from([0, 1]),
        st.integers(0, most).flatmap(
            lambda k: st.sampled_from([k * size, k * size + 1, k * size + size - 1])
        ),
    )


rates = st.one_of(st.just(0.0), st.floats(1e-9, 10.0))
all_costs = st.builds(
    Costs,
    seconds_per_layer_token=rates,
    seconds_per_ssd_byte=st.one_of(rates, st.floats(1e-5, 1e-1)),
    seconds_per_memory_byte=rates,
    seconds_per_fetch=rates,
    seconds_per_index_entry=rates,
    tile_tokens=st.sampled_from([1, 7, 128]),
)


@st.composite
def coverages(draw: st.DrawFn, size: int, most: int) -> Coverage:
    blocks = draw(st.integers(0, most))
    edges = st.lists(st.integers(1, blocks), unique=True, max_size=6) if blocks else st.just([])
    held = [tuple(size * i for i in sorted(draw(edges))) for _ in range(4)]
    return Coverage(blocks, *held, branch_at=draw(st.sampled_from([0, blocks * size])))


def policies(profile: Profile) -> st.SearchStrategy[WindowPolicy]:
    texts = ["zero", "endpoints", f"periodic:{2 * profile.block_tokens}", "full", "full+overlap"]
    return st.sampled_from([WindowPolicy.parse(text, profile) for text in texts])


@pytest.mark.parametrize("profile", MADE_UP, ids=lambda profile: profile.name)
@pytest.mark.parametrize("exact_only", [True, False])
@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_no_way_is_cheaper_than_the_plan(profile: Profile, exact_only: bool, data: st.DataObject) -> None:
    most = 8 if profile is TINY else 24
    coverage = data.draw(coverages(profile.block_tokens, most))
    n = data.draw(lengths(profile.block_tokens, most + 1))
    # A prompt leaves what is held only where it goes on itself.
    coverage = coverage._replace(branch_at=coverage.branch_at if coverage.branch_at < n else 0)
    costs = data.draw(all_costs)
    policy = data.draw(policies(profile))
    result = plan(profile, coverage, prompt_tokens=n, costs=costs, policy=policy, exact_only=exact_only)
    check_laws(profile, result, coverage, n, exact_only=exact_only)
    best = cheapest(profile, coverage, n, costs, bounded=not exact_only)
    assert result.chosen.seconds == pytest.approx(best, rel=1e-9, abs=1e-12)
    last = -(-n // costs.tile_tokens) * costs.tile_tokens
    cold = last * profile.layer_count * costs.seconds_per_layer_token
    cold += scan(profile, 0, last) * costs.seconds_per_index_entry
    if result.state_source is not StateSource.NONE:
        assert result.chosen.seconds < cold
    ranked = ways(profile, coverage, prompt_tokens=n, costs=costs, exact_only=exact_only)
    assert ranked[0] == result.chosen
    assert sum(way.state_source is StateSource.NONE for way in ranked) == 1
    for way in ranked:
        check_way(profile, way, coverage)


@pytest.mark.parametrize("profile", MADE_UP, ids=lambda profile: profile.name)
@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_a_bounded_plan_is_exact_only_with_exact_bytes(profile: Profile, data: st.DataObject) -> None:
    size, most = profile.block_tokens, 8
    coverage = data.draw(coverages(size, most))
    exact_blocks = data.draw(st.integers(0, coverage.blocks))

    def trusted(edges: tuple[int, ...]) -> tuple[int, ...]:
        kept = edges[: bisect_right(edges, exact_blocks * size)]
        return tuple(edge for edge in kept if data.draw(st.booleans()))

    exact = Coverage(
        exact_blocks,
        trusted(coverage.pool_states),
        trusted(coverage.checkpoints),
        trusted(coverage.rows),
        trusted(coverage.rows_overlap),
    )
    n = data.draw(lengths(size, most + 1))
    result = plan(
        profile,
        coverage,
        prompt_tokens=n,
        costs=data.draw(all_costs),
        policy=data.draw(policies(profile)),
        exact_only=False,
        exact_coverage=exact,
    )
    if result.exactness is Exactness.EXACT and result.state_source is not StateSource.NONE:
        assert result.compute_from <= exact_blocks * size
        held = {
            StateSource.POOL: exact.pool_states,
            StateSource.CHECKPOINT: exact.checkpoints,
            StateSource.ROWS: (
                *(edge - profile.overlap_tokens for edge in exact.rows),
                *exact.rows_overlap,
            ),
            StateSource.REPLAY: (result.state_at,),
        }
        assert result.state_at in held[result.state_source]
        if result.state_source is StateSource.REPLAY:
            assert result.replay_from == max(0, result.compute_from - profile.exact_replay_tokens)


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES.keys())
@settings(max_examples=examples(16), deadline=None)
@given(data=st.data())
def test_the_shipped_profiles_are_planned_as_cheaply_as_can_be(profile: Profile, data: st.DataObject) -> None:
    size = profile.block_tokens
    coverage = data.draw(coverages(size, 70))
    n = data.draw(lengths(size, 72))
    coverage = coverage._replace(branch_at=coverage.branch_at if coverage.branch_at < n else 0)
    costs = Costs(
        seconds_per_layer_token=data.draw(st.floats(1e-7, 1e-3)),
        seconds_per_ssd_byte=data.draw(st.floats(1e-11, 1e-6)),
        seconds_per_memory_byte=data.draw(st.floats(1e-11, 1e-8)),
        seconds_per_fetch=data.draw(st.floats(0, 1e-1)),
        seconds_per_index_entry=data.draw(st.floats(0, 1e-6)),
    )
    result = plan(
        profile, coverage, prompt_tokens=n, costs=costs, policy=WindowPolicy.parse("endpoints", profile)
    )
    check_laws(profile, result, coverage, n, exact_only=True)
    assert result.chosen.seconds == pytest.approx(
        cheapest(profile, coverage, n, costs, bounded=False), rel=1e-9
    )
