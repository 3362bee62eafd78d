"""The planner: every way to resume that could be the cheapest, priced; the cheapest wins."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

from kvstore.errors import InvalidArgument
from kvstore.plan.base import Alternative, Costs, Coverage, RestorePlan
from kvstore.plan.coverage import check_coverage, longest_restore, usable, whole_blocks
from kvstore.plan.figures import Figures, figures_of
from kvstore.plan.save import save_states
from kvstore.policy.window import WindowPolicy
from kvstore.profile.base import Profile
from kvstore.types import Exactness, StateSource

# Among equal costs: the one that reads least from the device.
_SOURCE_ORDER = (StateSource.POOL, StateSource.CHECKPOINT, StateSource.REPLAY, StateSource.NONE)


def plan(
    profile: Profile,
    coverage: Coverage,
    *,
    prompt_tokens: int,
    costs: Costs,
    policy: WindowPolicy,
    exact_only: bool = True,
    exact_coverage: Coverage | None = None,
    wait_for: tuple[int, ...] = (),
) -> RestorePlan:
    """The cheapest correct way to resume a prompt of `prompt_tokens` tokens.

    Equal costs go to an exact way first, then POOL before CHECKPOINT before REPLAY, then the longer `compute_from`. The
    plan is NONE when no restore costs less than computing everything. For REPLAY `state_at` equals `compute_from`:
    the position at which the replay has rebuilt the state. `runner_up` is the cheapest of the other candidates with
    another source or boundary (see `_candidates` for what is a candidate), NONE among them.

    exact_only=False also allows a bounded replay (the last W tokens in all layers), and then `exact_coverage` tells
    which part of `coverage` has EXACT bytes (None: all of it); with exact_only `coverage` itself must be EXACT.
    `wait_for` (indices of blocks that someone is writing) is passed through. InvalidArgument for a negative prompt
    length, for costs that are not finite and >= 0, and for edges that are not edges.
    """
    if prompt_tokens < 0:
        raise InvalidArgument(
            "a prompt has a length", field="prompt_tokens", value=prompt_tokens, allowed=">= 0"
        )
    _check_costs(costs)
    check_coverage(profile, coverage)
    trust = coverage if exact_coverage is None else exact_coverage
    price = _Pricing(figures_of(profile), costs, prompt_tokens, trust)
    longest = longest_restore(profile, coverage, prompt_tokens)
    cold = price.cold()
    ranked = sorted(_candidates(price, coverage, longest, exact_only=exact_only), key=_Candidate.rank)
    if ranked and ranked[0].way.seconds < cold.way.seconds:
        best = ranked[0]
        others = sorted([*ranked[1:], cold], key=_Candidate.rank)
    else:
        best, others = cold, ranked
    chosen = best.way
    runner_up = next(
        (
            other.way
            for other in others
            if (other.way.state_source, other.way.compute_from) != (chosen.state_source, chosen.compute_from)
        ),
        None,
    )
    blocks = whole_blocks(profile, prompt_tokens)
    return RestorePlan(
        prompt_tokens=prompt_tokens,
        chosen=chosen,
        runner_up=runner_up,
        exactness=Exactness.EXACT if best.exact else Exactness.BOUNDED,
        save_states=save_states(
            policy,
            profile,
            prompt_tokens=prompt_tokens,
            compute_from=chosen.compute_from,
            rebuilt=chosen.replay_tokens > 0,
        ),
        blocks_missing=max(blocks - coverage.blocks, 0),
        wait_for=wait_for,
    )


def replay_layer_tokens(profile: Profile, replay_from: int, position: int) -> int:
    """Layer-tokens of an exact replay of [replay_from, position) with entries read.

    Layer l of L is run only at positions >= max(replay_from, position - (L - l)(W - 1)).
    """
    return _triangle(figures_of(profile), max(position - replay_from, 0))


def tokens_saved(profile: Profile, way: Alternative, prompt_tokens: int) -> float:
    """Tokens not computed thanks to the restore: what replay recomputes is not saved."""
    spent = way.replay_layer_tokens + (prompt_tokens - way.compute_from) * profile.layer_count
    return prompt_tokens - spent / profile.layer_count


def _triangle(figures: Figures, span: int) -> int:
    # The last layer runs at W-1 positions, the one before at twice as many, and so on, but none at more than the span:
    # `whole` of them need no more than it holds.
    rows, layers = figures.window_rows, figures.layer_count
    whole = min(span // rows, layers)
    return rows * whole * (whole + 1) // 2 + (layers - whole) * span


@dataclass(frozen=True, slots=True)
class _Candidate:
    way: Alternative
    exact: bool

    def rank(self) -> tuple[float, bool, int, int]:
        return (
            self.way.seconds,
            not self.exact,
            _SOURCE_ORDER.index(self.way.state_source),
            -self.way.compute_from,
        )


@dataclass(frozen=True, slots=True)
class _Pricing:
    figures: Figures
    costs: Costs
    prompt_tokens: int
    trust: Coverage

    def cold(self) -> _Candidate:
        return _Candidate(self._way(0, StateSource.NONE, state_at=0, replay_from=0), True)

    def from_state(self, boundary: int, source: StateSource, edge: int) -> _Candidate:
        """The state at `edge`, then an exact replay up to `boundary`."""
        in_pool = source is StateSource.POOL
        held = self.figures.state_bytes
        way = self._way(
            boundary,
            source,
            state_at=edge,
            replay_from=edge,
            work=_triangle(self.figures, boundary - edge),
            state_ssd=0 if in_pool else held,
            state_memory=held if in_pool else 0,
        )
        trusted = self.trust.pool_states if in_pool else self.trust.checkpoints
        return _Candidate(way, self._blocks_exact(boundary) and edge in trusted)

    def exact_replay(self, boundary: int) -> _Candidate:
        start = max(0, boundary - self.figures.exact_replay_tokens)
        work = _triangle(self.figures, boundary - start)
        way = self._way(boundary, StateSource.REPLAY, state_at=boundary, replay_from=start, work=work)
        return _Candidate(way, self._blocks_exact(boundary))

    def bounded_replay(self, boundary: int) -> _Candidate:
        start = boundary - self.figures.bounded_replay_tokens
        work = self.figures.bounded_replay_tokens * self.figures.layer_count
        way = self._way(boundary, StateSource.REPLAY, state_at=boundary, replay_from=start, work=work)
        return _Candidate(way, False)

    def _blocks_exact(self, boundary: int) -> bool:
        return boundary <= self.trust.blocks * self.figures.block_tokens

    def _way(
        self,
        boundary: int,
        source: StateSource,
        *,
        state_at: int,
        replay_from: int,
        work: int = 0,
        state_ssd: int = 0,
        state_memory: int = 0,
    ) -> Alternative:
        costs = self.costs
        bytes_ssd = boundary // self.figures.block_tokens * self.figures.block_bytes + state_ssd
        rest = (self.prompt_tokens - boundary) * self.figures.layer_count
        seconds = (work + rest) * costs.seconds_per_layer_token
        seconds += bytes_ssd * costs.seconds_per_ssd_byte + state_memory * costs.seconds_per_memory_byte
        seconds += costs.seconds_per_fetch if boundary else 0.0
        return Alternative(
            compute_from=boundary,
            state_source=source,
            state_at=state_at,
            replay_from=replay_from,
            replay_layer_tokens=work,
            bytes_ssd=bytes_ssd,
            bytes_memory=state_memory,
            seconds=seconds,
        )


def _candidates(
    price: _Pricing, coverage: Coverage, longest: int, *, exact_only: bool
) -> Iterator[_Candidate]:
    """The restores that can be the cheapest, out of all (boundary b, source, state edge c <= b).

    Against computing everything, a restore at b costs k + m b + f: k >= 0 (the fetch, the state) whatever b is; m is the
    price of reading a token's entries less that of computing it; f is the replay. Where m >= 0 no restore is cheaper than
    none. Where m < 0:
        f = 0             a state at b itself: the last usable edge of each tier is the best.
        f(b - c)          a replay from c: f only grows with the distance, so for each b the last edge up to b is the
                          best; f is a sum of min(b - c, k(W-1)), hence concave, and so is the whole in b: least at an
                          end, b = c (above) or b = the next edge, which is beaten by its own state, or b = longest.
        f(min(b, L(W-1))) a replay from nothing: the whole is concave in b and k at b = 0, so that it falls below k only
                          where it goes on falling: b = longest.
        f constant        a bounded replay: b = longest.
    So a handful of candidates stands for all pairs; what ties with them is no longer.
    """
    if longest < price.figures.block_tokens:
        return
    for source, held in (
        (StateSource.POOL, coverage.pool_states),
        (StateSource.CHECKPOINT, coverage.checkpoints),
    ):
        edges = usable(held, longest)
        if edges:
            yield from (price.from_state(boundary, source, edges[-1]) for boundary in {edges[-1], longest})
    yield price.exact_replay(longest)
    # A bounded replay that reaches the start of the prompt is no cheaper than the exact one and no other.
    if not exact_only and longest > price.figures.bounded_replay_tokens:
        yield price.bounded_replay(longest)


def _check_costs(costs: Costs) -> None:
    for item in fields(costs):
        value = getattr(costs, item.name)
        if not (math.isfinite(value) and value >= 0):
            raise InvalidArgument(
                "costs are measured rates", field=item.name, value=value, allowed="finite and >= 0"
            )
