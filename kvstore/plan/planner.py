"""The planner: every way to resume that could be the cheapest, priced; the cheapest wins."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import NamedTuple

from kvstore.errors import InvalidArgument
from kvstore.plan.base import Alternative, Costs, Coverage, RestorePlan
from kvstore.plan.coverage import check_coverage, longest_restore, usable, whole_blocks
from kvstore.plan.figures import KEPT, Figures, figures_of
from kvstore.plan.save import save_states
from kvstore.plan.work import replay_scanned, replay_to, scanned, scanned_before, triangle
from kvstore.policy.window import WindowPolicy
from kvstore.profile.base import MAX_BLOCK_TOKENS, Profile
from kvstore.profile.layout import rows_needed
from kvstore.types import Exactness, StateSource

# Among equal costs: the one that reads least from the device.
_SOURCE_ORDER = (
    StateSource.POOL,
    StateSource.CHECKPOINT,
    StateSource.ROWS,
    StateSource.REPLAY,
    StateSource.NONE,
)


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

    Equal costs go to an exact way first, then POOL before CHECKPOINT before ROWS before REPLAY, then the longer
    `compute_from`. The plan is NONE when no restore costs less than computing everything. For REPLAY `state_at` equals
    `compute_from`: the position at which the replay has rebuilt the state. `runner_up` is the cheapest of the other
    candidates with another source or boundary (see `_candidates` for what is a candidate), NONE among them.

    exact_only=False also allows a bounded replay (the last W tokens in all layers), and then `exact_coverage` tells
    which part of `coverage` has EXACT bytes (None: all of it); with exact_only `coverage` itself must be EXACT.
    `wait_for` (indices of blocks that someone is writing) is passed through. InvalidArgument for a negative prompt
    length, for costs that are not finite and >= 0, and for edges that are not edges.
    """
    best, others = _ranked(
        profile, coverage, prompt_tokens, costs, exact_only=exact_only, exact_coverage=exact_coverage
    )
    chosen = best.way
    blocks_missing = whole_blocks(profile, prompt_tokens) - coverage.blocks
    return RestorePlan(
        prompt_tokens,
        chosen,
        _runner_up(chosen, others),
        Exactness.EXACT if best.exact else Exactness.BOUNDED,
        save_states(
            policy,
            profile,
            prompt_tokens=prompt_tokens,
            coverage=coverage,
            compute_from=chosen.compute_from,
            rebuilt=chosen.replay_from < chosen.compute_from,
        ),
        blocks_missing if blocks_missing > 0 else 0,
        wait_for,
    )


def _runner_up(chosen: Alternative, others: list[_Candidate]) -> Alternative | None:
    for way, _ in others:
        if way.compute_from != chosen.compute_from or way.state_source is not chosen.state_source:
            return way
    return None


def ways(
    profile: Profile,
    coverage: Coverage,
    *,
    prompt_tokens: int,
    costs: Costs,
    exact_only: bool = True,
) -> tuple[Alternative, ...]:
    """All that `plan` chooses from, best first: what it chooses, then the others with NONE among them. Refusals are those
    of `plan`."""
    best, others = _ranked(
        profile, coverage, prompt_tokens, costs, exact_only=exact_only, exact_coverage=None
    )
    return tuple(candidate.way for candidate in (best, *others))


def replay_layer_tokens(profile: Profile, replay_from: int, position: int) -> int:
    """Layer-tokens of an exact replay of [replay_from, position) with entries read.

    Layer l of L is run only at positions >= max(replay_from, position - (L - l)(W - 1)).
    """
    return triangle(figures_of(profile), max(position - replay_from, 0))


def tokens_saved(profile: Profile, way: Alternative, prompt_tokens: int) -> float:
    """Tokens not computed thanks to the restore: what replay recomputes is not saved."""
    spent = way.replay_layer_tokens + (prompt_tokens - way.compute_from) * profile.layer_count
    return prompt_tokens - spent / profile.layer_count


class _Candidate(NamedTuple):
    way: Alternative
    exact: bool

    def rank(self) -> tuple[float, bool, int, int]:
        return (
            self.way.seconds,
            not self.exact,
            _SOURCE_ORDER.index(self.way.state_source),
            -self.way.compute_from,
        )


class _Pricing:
    """`trust`: what is EXACT of the coverage."""

    __slots__ = ("costs", "end", "end_entries", "exact_end", "figures", "trust")

    def __init__(self, figures: Figures, costs: Costs, prompt_tokens: int, trust: Coverage) -> None:
        self.figures = figures
        self.costs = costs
        self.trust = trust
        self.exact_end = trust.blocks * figures.block_tokens
        # The same for every boundary, whatever the tile: what is said about candidates holds for this end too.
        self.end = -(-prompt_tokens // costs.tile_tokens) * costs.tile_tokens
        self.end_entries = scanned_before(figures, self.end)

    def cold(self) -> _Candidate:
        return _Candidate(self._way(0, StateSource.NONE, 0, 0), True)

    def from_state(self, boundary: int, source: StateSource, edge: int) -> _Candidate:
        """The state at `edge`, then an exact replay up to `boundary`."""
        in_pool = source is StateSource.POOL
        held = self.figures.state_bytes
        way = self._replayed(
            boundary,
            source,
            edge,
            edge,
            state_ssd=0 if in_pool else held,
            state_memory=held if in_pool else 0,
        )
        trusted = self.trust.pool_states if in_pool else self.trust.checkpoints
        return _Candidate(way, boundary <= self.exact_end and edge in trusted)

    def from_rows(self, boundary: int, edge: int, *, overlap: bool) -> _Candidate:
        """The state that the window rows before `edge` give, then an exact replay up to `boundary`."""
        figures = self.figures
        needed = rows_needed(figures.profile, edge, overlap=overlap)
        each = figures.rows_overlap_block_bytes if overlap else figures.rows_block_bytes
        start = needed.state_at
        way = self._replayed(boundary, StateSource.ROWS, start, start, state_ssd=needed.blocks * each)
        trusted = self.trust.rows_overlap if overlap else self.trust.rows
        return _Candidate(way, boundary <= self.exact_end and edge in trusted)

    def exact_replay(self, boundary: int) -> _Candidate:
        replay = replay_to(self.figures, boundary)
        way = self._way(
            boundary,
            StateSource.REPLAY,
            boundary,
            replay.start,
            work=replay.work,
            entries=replay.entries,
            before=replay.before,
        )
        return _Candidate(way, boundary <= self.exact_end)

    def bounded_replay(self, boundary: int) -> _Candidate:
        figures = self.figures
        start = boundary - figures.bounded_replay_tokens
        work = figures.bounded_replay_tokens * figures.layer_count
        entries = scanned(figures, start, boundary)
        way = self._way(boundary, StateSource.REPLAY, boundary, start, work=work, entries=entries)
        return _Candidate(way, False)

    def _replayed(
        self,
        boundary: int,
        source: StateSource,
        state_at: int,
        replay_from: int,
        *,
        state_ssd: int = 0,
        state_memory: int = 0,
    ) -> Alternative:
        figures = self.figures
        work = triangle(figures, boundary - replay_from)
        entries = replay_scanned(figures, replay_from, boundary)
        return self._way(
            boundary,
            source,
            state_at,
            replay_from,
            work=work,
            entries=entries,
            state_ssd=state_ssd,
            state_memory=state_memory,
        )

    def _way(
        self,
        boundary: int,
        source: StateSource,
        state_at: int,
        replay_from: int,
        *,
        work: int = 0,
        entries: int = 0,
        state_ssd: int = 0,
        state_memory: int = 0,
        before: int | None = None,
    ) -> Alternative:
        """`work` layer-tokens and `entries` looked at are those of the replay. `before`: entries that computing [0, boundary)
        looks at, where that is known already."""
        costs, figures = self.costs, self.figures
        bytes_ssd = boundary // figures.block_tokens * figures.block_bytes + state_ssd
        rest = (self.end - boundary) * figures.layer_count
        rest_entries = self.end_entries
        layer, entry = costs.seconds_per_layer_token, costs.seconds_per_index_entry
        read = bytes_ssd * costs.seconds_per_ssd_byte + state_memory * costs.seconds_per_memory_byte
        if boundary:
            rest_entries -= scanned_before(figures, boundary) if before is None else before
            read += costs.seconds_per_fetch
        return Alternative(
            boundary,
            source,
            state_at,
            replay_from,
            work,
            bytes_ssd,
            state_memory,
            # Of the whole numbers added first: ways that do equal work must cost the same to the last bit.
            read + ((work + rest) * layer + (entries + rest_entries) * entry),
            entries + rest_entries,
            read,
            work * layer + entries * entry,
            rest * layer + rest_entries * entry,
        )


def _ranked(
    profile: Profile,
    coverage: Coverage,
    prompt_tokens: int,
    costs: Costs,
    *,
    exact_only: bool,
    exact_coverage: Coverage | None,
) -> tuple[_Candidate, list[_Candidate]]:
    """The candidate to choose, and the others, cheapest first. NONE is the first where nothing costs less."""
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
    restores = _candidates(price, coverage, longest, exact_only)
    if not restores:
        return cold, restores
    if len(restores) > 1:
        restores.sort(key=_Candidate.rank)
    best = restores[0]
    if not best.way.seconds < cold.way.seconds:
        return cold, restores
    others = restores[1:]
    others.append(cold)
    if len(others) > 1:
        others.sort(key=_Candidate.rank)
    return best, others


def _candidates(price: _Pricing, coverage: Coverage, longest: int, exact_only: bool) -> list[_Candidate]:
    """The restores that can be the cheapest, out of all (boundary b, source, place of the state c <= b).

    Let G(x) be the entries that an index layer's queries before x see. Its steps never get smaller: G is convex and never
    falls. Computing [b, n) looks at G(n) - G(b) in each such layer, and a replay of [c, b) at G(b) - G(max(c, b - k)) in
    each but the last, k being what the layers above need (0 <= k). In the sum G(b) cancels: a restore at b from c costs

        const + (bytes up to b) - (tokens up to b) + (bytes of the state at c)
              + sum over layers min(b - c, k'(W-1))           layer-tokens of the replay
              - sum over index layers G(max(c, b - k))        and - G(b) for the last layer's.

    max(c, b - k) is convex in b, so is G of it, and so each line is concave in b, as a function on block edges too. A
    concave function is least at an end of its range. Computing everything is never dearer than the restore at b = 0
    (no fetch, no state). Hence, where a restore is to cost less than computing everything:

        a state at b = c      the state's bytes do not depend on c: concave in c, and at c = 0 no cheaper than computing
                              everything; so least at the last usable edge of each tier.
        rows before b = e     as a state, with a replay of the tokens that give the overlap, [max(0, e - o), e): a sum of
                              min(e, o) and of - G(max(0, e - o)); their bytes are those of min(e / B, so many) blocks.
                              All concave in e, nothing at e = 0: the last usable edge. (Where o reaches B the state
                              would lie at a block edge, as if the overlap were stored: not a candidate.)
                              With a replay up to b = longest: concave in e too, and at e = 0 the replay from nothing.
        a replay from c       falls with c at every b, so from the last c <= b: between two states' edges and after the last
                              one. Concave in b: least at b = c (above), at the next edge (which its own state beats), or
                              at b = longest.
        a replay from nothing c = max(0, b - L(W-1)), which no layer's start b - k lies before: the same with c = 0. Concave
                              in b, and no cheaper than computing everything at b = 0: b = longest.
        a bounded replay      min(b, W) tokens in all layers, and - G(max(0, b - W)): likewise b = longest.

    So a handful of candidates stands for all; what ties with them is no longer.
    """
    figures = price.figures
    if longest < figures.block_tokens:
        return []
    found: list[_Candidate] = []
    if coverage.pool_states or coverage.checkpoints:
        for source, held in (
            (StateSource.POOL, coverage.pool_states),
            (StateSource.CHECKPOINT, coverage.checkpoints),
        ):
            edges = usable(held, longest)
            if edges:
                found += [price.from_state(at, source, edges[-1]) for at in {edges[-1], longest}]
    if coverage.rows or coverage.rows_overlap:
        for overlap, held in ((False, coverage.rows), (True, coverage.rows_overlap)):
            edges = usable(held, longest)
            if edges and (overlap or figures.overlap_tokens < figures.block_tokens):
                found += [price.from_rows(at, edges[-1], overlap=overlap) for at in {edges[-1], longest}]
    found.append(price.exact_replay(longest))
    # A bounded replay that reaches the start of the prompt is no cheaper than the exact one and no other.
    if not exact_only and longest > figures.bounded_replay_tokens:
        found.append(price.bounded_replay(longest))
    return found


# By identity, as figures are kept: a service prices plan after plan with the same object.
_checked: dict[int, Costs] = {}


def _check_costs(costs: Costs) -> None:
    if id(costs) in _checked:
        return
    for item in fields(costs):
        value = getattr(costs, item.name)
        if not (math.isfinite(value) and value >= 0):
            raise InvalidArgument(
                "costs are measured rates", field=item.name, value=value, allowed="finite and >= 0"
            )
    if not 1 <= costs.tile_tokens <= MAX_BLOCK_TOKENS:
        raise InvalidArgument(
            "not a tile",
            field="tile_tokens",
            value=costs.tile_tokens,
            allowed=f"1 to {MAX_BLOCK_TOKENS} tokens",
        )
    if len(_checked) >= KEPT:
        _checked.clear()
    _checked[id(costs)] = costs
