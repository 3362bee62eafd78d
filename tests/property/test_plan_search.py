"""The planner against a search over all ways, written from the equations alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.plan import Costs, Coverage, RestorePlan, plan
from kvstore.policy.window import WindowPolicy
from kvstore.profile.base import Profile
from kvstore.profile.registry import PROFILES, get_profile
from kvstore.types import Exactness, StateSource

TINY = get_profile("tiny")
SMALL = replace(TINY, name="small", layers=TINY.layers[:3], block_tokens=4, window_tokens=5)


def work(profile: Profile, start: int, end: int) -> int:
    layers, rows = profile.layer_count, profile.window_tokens - 1
    return sum(end - max(start, end - (layers - layer) * rows) for layer in range(layers))


def cheapest(profile: Profile, coverage: Coverage, n: int, costs: Costs, *, bounded: bool) -> float:
    """Seconds of the cheapest of all (boundary, source, state edge)."""
    size, layers, window = profile.block_tokens, profile.layer_count, profile.window_tokens
    token = costs.seconds_per_layer_token
    prices = [n * layers * token]
    for boundary in range(size, min(coverage.blocks * size, max(n - 1, 0)) + 1, size):
        base = costs.seconds_per_fetch + boundary // size * profile.block_bytes * costs.seconds_per_ssd_byte
        base += (n - boundary) * layers * token
        for edges, rate in (
            (coverage.pool_states, costs.seconds_per_memory_byte),
            (coverage.checkpoints, costs.seconds_per_ssd_byte),
        ):
            for edge in edges:
                if edge <= boundary:
                    prices.append(base + profile.state_bytes * rate + work(profile, edge, boundary) * token)
        reach = max(0, boundary - layers * (window - 1))
        prices.append(base + work(profile, reach, boundary) * token)
        if bounded and boundary > window:
            prices.append(base + window * layers * token)
    return min(prices)


def check_laws(
    profile: Profile, result: RestorePlan, coverage: Coverage, n: int, *, exact_only: bool
) -> None:
    size = profile.block_tokens
    assert 0 <= result.replay_from <= result.compute_from <= max(n - 1, 0)
    assert result.compute_from % size == 0
    assert result.compute_from <= coverage.blocks * size
    assert result.replay_tokens == result.compute_from - result.replay_from
    for way in filter(None, (result.chosen, result.runner_up)):
        if way.state_source not in (StateSource.REPLAY, StateSource.NONE):
            assert way.state_at == way.replay_from
        if way.state_source is StateSource.POOL:
            assert way.state_at in coverage.pool_states
        if way.state_source is StateSource.CHECKPOINT:
            assert way.state_at in coverage.checkpoints
        if way.state_source is StateSource.REPLAY:
            assert way.state_at == way.compute_from > 0
        if way.state_source is StateSource.NONE:
            assert (way.compute_from, way.replay_from, way.bytes_ssd, way.bytes_memory) == (0, 0, 0, 0)
    if result.runner_up is not None:
        assert result.chosen.seconds <= result.runner_up.seconds
        assert (result.chosen.state_source, result.compute_from) != (
            result.runner_up.state_source,
            result.runner_up.compute_from,
        )
    if exact_only:
        assert result.exactness is Exactness.EXACT
    assert result.blocks_missing == max(n // size - coverage.blocks, 0)
    saves = result.save_states
    for edges in (saves.pool, saves.ssd):
        assert list(edges) == sorted(set(edges))
        assert all(result.compute_from <= edge <= n and edge % size == 0 for edge in edges)
    if not result.replay_tokens:
        assert all(edge > result.compute_from for edge in (*saves.pool, *saves.ssd))


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
)


@st.composite
def coverages(draw: st.DrawFn, size: int, most: int) -> Coverage:
    blocks = draw(st.integers(0, most))
    edges = st.lists(st.integers(1, blocks), unique=True, max_size=6) if blocks else st.just([])
    return Coverage(
        blocks, tuple(size * i for i in sorted(draw(edges))), tuple(size * i for i in sorted(draw(edges)))
    )


@pytest.mark.parametrize("profile", [SMALL, TINY], ids=lambda profile: profile.name)
@pytest.mark.parametrize("exact_only", [True, False])
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_way_is_cheaper_than_the_plan(profile: Profile, exact_only: bool, data: st.DataObject) -> None:
    most = 24 if profile is SMALL else 8
    coverage = data.draw(coverages(profile.block_tokens, most))
    n = data.draw(lengths(profile.block_tokens, most + 1))
    costs = data.draw(all_costs)
    policy = WindowPolicy.parse(
        data.draw(st.sampled_from(["zero", "endpoints", f"periodic:{2 * profile.block_tokens}"])), profile
    )
    result = plan(profile, coverage, prompt_tokens=n, costs=costs, policy=policy, exact_only=exact_only)
    check_laws(profile, result, coverage, n, exact_only=exact_only)
    best = cheapest(profile, coverage, n, costs, bounded=not exact_only)
    assert result.chosen.seconds == pytest.approx(best, rel=1e-9, abs=1e-12)
    if result.state_source is not StateSource.NONE:
        assert result.chosen.seconds < n * profile.layer_count * costs.seconds_per_layer_token


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES.keys())
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_shipped_profiles_are_planned_as_cheaply_as_can_be(profile: Profile, data: st.DataObject) -> None:
    size = profile.block_tokens
    coverage = data.draw(coverages(size, 70))
    n = data.draw(lengths(size, 72))
    costs = Costs(
        seconds_per_layer_token=data.draw(st.floats(1e-7, 1e-3)),
        seconds_per_ssd_byte=data.draw(st.floats(1e-11, 1e-6)),
        seconds_per_memory_byte=data.draw(st.floats(1e-11, 1e-8)),
        seconds_per_fetch=data.draw(st.floats(0, 1e-1)),
    )
    result = plan(
        profile, coverage, prompt_tokens=n, costs=costs, policy=WindowPolicy.parse("endpoints", profile)
    )
    check_laws(profile, result, coverage, n, exact_only=True)
    assert result.chosen.seconds == pytest.approx(
        cheapest(profile, coverage, n, costs, bounded=False), rel=1e-9
    )
