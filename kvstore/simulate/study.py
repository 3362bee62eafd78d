"""What is asked of a log, as cases in the order of the question, and their answers as rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvstore.errors import InvalidArgument, ProfileError
from kvstore.policy import EVICTION_POLICIES, EvictionPolicy, LruPolicy
from kvstore.policy.window import WindowPolicy
from kvstore.profile.base import Profile
from kvstore.simulate.belady import BeladyPolicy, NextUses
from kvstore.simulate.case import Case, Outcome, Replay, TtlFrom, counting_profile
from kvstore.simulate.formats import LoadedLog
from kvstore.simulate.run import Simulation, keys_of
from kvstore.simulate.sizes import ALL, Size, parse_capacity

INFINITE = "infinite"
"""Not a policy: nothing is evicted, whatever the size."""

POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    **EVICTION_POLICIES,
    "belady": BeladyPolicy,
    INFINITE: LruPolicy,
}

DEFAULT_SIZES = ("1%", "3%", "10%", "30%")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Texts as given; empty ones ask for the defaults: all sizes of the table under lru, or, where retention or window states
    are asked for, no limit. ttl: (text, seconds)."""

    policies: Sequence[str] = ()
    sizes: Sequence[str] = ()
    windows: Sequence[str] = ()
    ttl: Sequence[tuple[str, float]] = ()
    ttl_from: TtlFrom = TtlFrom.USE
    replay: Replay = Replay.NONE
    as_served: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    size: str
    ttl: str | None
    case: Case
    outcome: Outcome


@dataclass(slots=True)
class Study:
    """Cases of one log. Checked as a whole before the first is simulated: InvalidArgument, ProfileError."""

    loaded: LoadedLog
    question: Question
    profile: Profile | None = None
    cases: list[tuple[Size, str | None, Case]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.profile = _fitted(self.profile, self.loaded.log.block_tokens)
        self.cases = list(self._cases())

    def rows(self, check: Callable[[], None] = lambda: None) -> Iterator[Row]:
        """One for each case, in order. Equal cases are simulated once. `check` is called often and may raise."""
        log = self.loaded.log
        keys = keys_of(log)
        uses: NextUses | None = None
        known: dict[Case, Outcome] = {}
        for size, ttl, case in self.cases:
            if case not in known:
                ranks = POLICIES[case.policy]()
                if isinstance(ranks, BeladyPolicy) and uses is None:
                    uses = NextUses(log)
                simulation = Simulation(log, case, ranks=ranks, profile=self.profile, keys=keys, uses=uses)
                known[case] = simulation.run(check)
            yield Row(size.text, ttl, case, known[case])

    def _cases(self) -> Iterator[tuple[Size, str | None, Case]]:
        asked = self.question
        special = bool(asked.windows or asked.ttl)
        names = asked.policies or ((INFINITE,) if special and not asked.sizes else ("lru",))
        for name in names:
            if name not in POLICIES:
                raise InvalidArgument(
                    "unknown policy", field="--policy", value=name, allowed=", ".join(POLICIES)
                )
        texts = asked.sizes or ((ALL,) if special or set(names) == {INFINITE} else DEFAULT_SIZES)
        footprint = self.loaded.log.footprint
        sizes = [parse_capacity(text, footprint=footprint, profile=self.profile) for text in texts]
        needs_model = asked.replay is not Replay.NONE
        if needs_model and self.profile is None:
            raise InvalidArgument(
                "what a replay costs depends on the model",
                field="--replay",
                value=asked.replay,
                allowed="none, or --profile NAME",
            )
        model = self.profile or counting_profile(self.loaded.log.block_tokens)
        for text in asked.windows:
            WindowPolicy.parse(text, model)
        for name in names:
            for size in sizes:
                for ttl in asked.ttl or (None,):
                    for windows in asked.windows or (None,):
                        case = Case(
                            policy=name,
                            capacity=None if name == INFINITE else size.blocks,
                            retention_seconds=None if ttl is None else ttl[1],
                            ttl_from=asked.ttl_from,
                            windows=windows,
                            replay=asked.replay,
                            as_served=asked.as_served,
                        )
                        yield size, None if ttl is None else ttl[0], case


def _fitted(profile: Profile | None, block_tokens: int) -> Profile | None:
    """The model with the log's blocks."""
    if profile is None:
        return None
    try:
        return replace(profile, block_tokens=block_tokens)
    except ProfileError as error:
        raise InvalidArgument(
            f"blocks of the log do not fit the model: {error}",
            field="--profile",
            value=profile.name,
            allowed=f"blocks of the model's size, {profile.block_tokens} tokens, or a multiple: see --block and --group",
        ) from error


def facts(loaded: LoadedLog, question: Question) -> dict[str, Any]:
    """What the log is, and how it was read."""
    log = loaded.log
    return {
        "format": loaded.format.name,
        "requests": len(log),
        "span_seconds": log.span_seconds,
        "input_tokens": log.input_tokens_total,
        "output_tokens": int(log.output_tokens.sum()),
        "block_accesses": log.accesses,
        "footprint_blocks": log.footprint,
        "block_tokens": log.block_tokens,
        "id_tokens": log.id_tokens,
        "group": log.group,
        "rekeyed_by_parent": log.rekeyed,
        "warm_up_share": 0.0,
        "outputs_count": "when they come back as input",
        "rule": "as served" if question.as_served else "ids",
        "skipped": dict(sorted(log.skipped.items())),
        "skipped_lines": log.skipped.total(),
    }


def row_values(row: Row, footprint: int) -> dict[str, Any]:
    """One of `rows[]`. Rates in percent, shares of the footprint in percent."""
    case, outcome = row.case, row.outcome
    return {
        "policy": case.policy,
        "size": row.size,
        "token_hit_rate": outcome.token_hit_rate,
        "ttl": row.ttl,
        "ttl_from": case.ttl_from.value if row.ttl is not None else None,
        "windows": case.windows,
        "replay": case.replay.value,
        "as_served": case.as_served,
        "capacity_blocks": case.capacity,
        "hit_tokens": outcome.hit_tokens,
        "input_tokens": outcome.input_tokens,
        "requests": outcome.requests,
        "blocks_asked": outcome.blocks_asked,
        "blocks_hit": outcome.blocks_hit,
        "blocks_stored": outcome.blocks_stored,
        "blocks_refused": outcome.blocks_refused,
        "blocks_evicted": outcome.blocks_evicted,
        "blocks_expired": outcome.blocks_expired,
        "blocks_held": outcome.blocks_held,
        "blocks_held_most": outcome.blocks_held_most,
        "held_share": 100.0 * outcome.held_blocks_mean / footprint,
        "states_per_request": outcome.states_stored / outcome.requests if outcome.requests else 0.0,
        "index_bytes_per_block": outcome.index_bytes_per_block,
    }
