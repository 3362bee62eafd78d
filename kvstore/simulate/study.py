"""What is asked of a log, as cases in the order of the question, and their answers as rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvstore.errors import InvalidArgument, ProfileError
from kvstore.policy import EVICTION_POLICIES, EvictionPolicy, LruPolicy
from kvstore.policy.admission import Admission
from kvstore.policy.window import WindowPolicy
from kvstore.prefix.joined import JoinedKeys
from kvstore.profile.base import Profile
from kvstore.profile.registry import get_profile
from kvstore.simulate.belady import BeladyPolicy, NextUses
from kvstore.simulate.case import Case, Outcome, Replay, TtlFrom, counting_profile
from kvstore.simulate.disk import segment_size
from kvstore.simulate.formats import LoadedLog
from kvstore.simulate.recommend import Prices, Recommendation, Weighed, recommend
from kvstore.simulate.run import Simulation, keys_of
from kvstore.simulate.sizes import ALL, Size, parse_capacity
from kvstore.types import StateSource

INFINITE = "infinite"
"""Not a policy: nothing is evicted, whatever the size."""

POLICIES: dict[str, Callable[[], EvictionPolicy]] = {
    **EVICTION_POLICIES,
    "belady": BeladyPolicy,
    INFINITE: LruPolicy,
}

DEFAULT_SIZES = ("1%", "3%", "10%", "30%")
DEFAULT_PROFILE = "deepseek-v4-flash"
"""The model of states and replays where none is named."""

ZERO = "zero"
DAY_SECONDS = 86_400.0
KEPT_HOURS = 72.0
"""For how long the service keeps what it stores, where no retention is asked about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Texts as given; empty ones ask for the defaults: all sizes of the table under lru, or, where retention or window states
    are asked for, no limit. ttl: (text, seconds). admissions: which new blocks are written.
    weighs_writes: whether bytes written are asked for, and not counts alone: then segments are simulated, of `segment_bytes` or of
    the size that the service would choose."""

    policies: Sequence[str] = ()
    sizes: Sequence[str] = ()
    windows: Sequence[str] = ()
    ttl: Sequence[tuple[str, float]] = ()
    ttl_from: TtlFrom = TtlFrom.USE
    replay: Replay = Replay.NONE
    as_served: bool = False
    admissions: Sequence[Admission] = (Admission.ALWAYS,)
    weighs_writes: bool = False
    segment_bytes: int | None = None
    prices: Prices = field(default_factory=Prices)


@dataclass(frozen=True, slots=True)
class Row:
    size: str
    ttl: str | None
    case: Case
    outcome: Outcome


@dataclass(slots=True)
class Study:
    """Cases of one log. Checked as a whole before the first is simulated: InvalidArgument, ProfileError. Equal cases are
    simulated once."""

    loaded: LoadedLog
    question: Question
    profile: Profile | None = None
    cases: list[tuple[Size, str | None, Case]] = field(default_factory=list)
    _keys: JoinedKeys | None = field(default=None, init=False)
    _uses: NextUses | None = field(default=None, init=False)
    _known: dict[Case, Outcome] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.profile = _model(self.profile, self.question, self.loaded.log.block_tokens)
        self.cases = list(self._cases())

    def rows(self, check: Callable[[], None] = lambda: None) -> Iterator[Row]:
        """One for each case, in order. `check` is called often and may raise."""
        for size, ttl, case in self.cases:
            yield Row(size.text, ttl, case, self._outcome(case, check))

    def recommendation(self, check: Callable[[], None] = lambda: None) -> Recommendation | None:
        """Of the window states asked about, compared where most is saved of the policies, sizes and retentions asked
        about, but not under a policy that knows the log; None where none were, or no model says what they weigh.
        Simulates what `rows` has not yet, and states at no edge with exact replays."""
        if not self.question.windows or self.profile is None:
            return None
        outcomes = [(each, self._outcome(each[2], check)) for each in self.cases]
        # Of policies that can serve, where there is one.
        (size, ttl, most), _ = max(
            outcomes, key=lambda each: (each[0][2].policy in EVICTION_POLICIES, each[1].token_hit_rate)
        )
        here = [
            self._weighed(case, outcome)
            for (_, _, case), outcome in outcomes
            if replace(case, windows=None) == replace(most, windows=None)
        ]
        zero = replace(most, windows=ZERO, replay=Replay.EXACT)
        return recommend(
            here,
            self._weighed(zero, self._outcome(zero, check)),
            where=", ".join(part for part in (most.policy, size.text, ttl) if part is not None),
            prices=self.question.prices,
            kept_hours=KEPT_HOURS if most.retention_seconds is None else most.retention_seconds / 3600,
            block_bytes_per_token=self.profile.block_bytes / self.profile.block_tokens,
        )

    def _weighed(self, case: Case, outcome: Outcome) -> Weighed:
        tokens = outcome.blocks_stored * self.loaded.log.block_tokens
        return Weighed(
            windows=case.windows or ZERO,
            replay=case.replay,
            saved_rate=outcome.token_hit_rate,
            state_bytes_per_token=outcome.state_bytes / tokens if tokens else 0.0,
            state_bytes_per_input_token=outcome.state_bytes / outcome.input_tokens,
        )

    def _outcome(self, case: Case, check: Callable[[], None]) -> Outcome:
        log = self.loaded.log
        if case not in self._known:
            ranks = POLICIES[case.policy]()
            if isinstance(ranks, BeladyPolicy) and self._uses is None:
                self._uses = NextUses(log)
            self._keys = self._keys or keys_of(log)
            # Where nothing is replayed hits do not depend on the model, and one of a single layer plans faster.
            model = None if case.replay is Replay.NONE and case.segment_bytes is None else self.profile
            simulation = Simulation(log, case, ranks=ranks, profile=model, keys=self._keys, uses=self._uses)
            outcome = self._known[case] = simulation.run(check)
            if self.profile is not None and case.windows is not None:
                policy = WindowPolicy.parse(case.windows, self.profile)
                outcome.state_bytes = outcome.states_stored * policy.item_bytes(self.profile)
        return self._known[case]

    def _cases(self) -> Iterator[tuple[Size, str | None, Case]]:
        asked = self.question
        special = bool(asked.windows or asked.ttl)
        names = asked.policies or ((INFINITE,) if special and not asked.sizes else ("lru",))
        for name in names:
            if name not in POLICIES:
                raise InvalidArgument(
                    "unknown policy", field="--policy", value=name, allowed=", ".join(POLICIES)
                )
        footprint = self.loaded.log.footprint
        # Of a small log some shares hold no block: those that nobody asked for are left out.
        shares = [text for text in DEFAULT_SIZES if footprint * int(text.rstrip("%")) >= 100] or [ALL]
        texts = asked.sizes or ((ALL,) if special or set(names) == {INFINITE} else shares)
        sizes = [parse_capacity(text, footprint=footprint, profile=self.profile) for text in texts]
        model = self.profile or counting_profile(self.loaded.log.block_tokens)
        for text in asked.windows:
            _check_windows(text, model)
        for name in names:
            for size in sizes:
                for ttl in asked.ttl or (None,):
                    for windows in asked.windows or (None if asked.replay is Replay.NONE else ZERO,):
                        for admission in asked.admissions:
                            case = Case(
                                policy=name,
                                capacity=None if name == INFINITE else size.blocks,
                                retention_seconds=None if ttl is None else ttl[1],
                                ttl_from=asked.ttl_from,
                                windows=windows,
                                replay=asked.replay,
                                as_served=asked.as_served,
                                admission=admission,
                                segment_bytes=self._segment_bytes(name, size),
                            )
                            yield size, None if ttl is None else ttl[0], case

    def _segment_bytes(self, policy: str, size: Size) -> int | None:
        """None where no segments are simulated: those of a policy that knows the log would be nobody's."""
        asked = self.question
        if not asked.weighs_writes or self.profile is None or policy == BeladyPolicy.name:
            return None
        if asked.ttl and asked.ttl_from is TtlFrom.INSERTION:
            raise InvalidArgument(
                "what is written anew when its time is over is not simulated in segments",
                field="--ttl-from",
                value=asked.ttl_from.value,
                allowed=f"{TtlFrom.USE.value}, or no --segment and no --endurance",
            )
        blocks, block_bytes = None if policy == INFINITE else size.blocks, self.profile.block_bytes
        return segment_size(
            None if blocks is None else blocks * block_bytes, asked.segment_bytes, block_bytes
        )


def _check_windows(text: str, profile: Profile) -> None:
    try:
        WindowPolicy.parse(text, profile)
    except InvalidArgument as error:
        raise InvalidArgument(
            "unknown window-state policy", field="--windows", value=text, allowed=error.allowed
        ) from error


def _model(named: Profile | None, question: Question, block_tokens: int) -> Profile | None:
    """The one that was named; where states or replays are asked about, else the default. It may be missing where blocks are
    too short for it and nothing is replayed: then nobody says what a state weighs."""
    if named is not None:
        return _fitted(named, block_tokens)
    if question.replay is not Replay.NONE:
        return _fitted(get_profile(DEFAULT_PROFILE), block_tokens)
    default = get_profile(DEFAULT_PROFILE)
    admits = any(each is not Admission.ALWAYS for each in question.admissions)
    weighs = question.windows or question.weighs_writes or admits
    if weighs and block_tokens % default.block_tokens == 0:
        return _fitted(default, block_tokens)
    return None


def _fitted(profile: Profile, block_tokens: int) -> Profile:
    """The model with the log's blocks."""
    try:
        return replace(profile, block_tokens=block_tokens)
    except ProfileError as error:
        raise InvalidArgument(
            f"blocks of the log do not fit the model: {error}",
            field="--profile",
            value=profile.name,
            allowed=f"blocks of the model's size, {profile.block_tokens} tokens, or a multiple: see --block and --group",
        ) from error


def facts(study: Study) -> dict[str, Any]:
    """What the log is, and how it was read."""
    loaded, question = study.loaded, study.question
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
        "profile": None if study.profile is None else study.profile.name,
        "skipped": dict(sorted(log.skipped.items())),
        "skipped_lines": log.skipped.total(),
    }


def row_values(row: Row, study: Study) -> dict[str, Any]:
    """One of `rows[]`. Rates in percent, of input tokens; shares of the footprint in percent. Under a replay a hit is what was
    not computed, so that `token_hit_rate` is `tokens_saved_rate`; `restored_rate` counts up to where requests resumed.
    `state_sources`: percent of requests. Bytes of states per token of the blocks that were stored."""
    case, outcome = row.case, row.outcome
    stored = outcome.blocks_stored * study.loaded.log.block_tokens
    keeps = case.windows is not None and study.profile is not None
    return {
        "policy": case.policy,
        "size": row.size,
        "token_hit_rate": outcome.token_hit_rate,
        "ttl": row.ttl,
        "ttl_from": case.ttl_from.value if row.ttl is not None else None,
        "windows": case.windows,
        "replay": case.replay.value,
        "as_served": case.as_served,
        "admission": case.admission.value,
        "capacity_blocks": case.capacity,
        "tokens_saved_rate": outcome.token_hit_rate,
        "restored_rate": outcome.restored_rate,
        "hit_tokens": outcome.hit_tokens,
        "tokens_saved": outcome.hit_tokens,
        "restored_tokens": outcome.restored_tokens,
        "replayed_tokens": outcome.replayed_tokens,
        "replay_layer_tokens": outcome.replay_layer_tokens,
        "input_tokens": outcome.input_tokens,
        "requests": outcome.requests,
        "blocks_asked": outcome.blocks_asked,
        "blocks_hit": outcome.blocks_hit,
        "blocks_stored": outcome.blocks_stored,
        "blocks_refused": outcome.blocks_refused,
        "blocks_not_admitted": outcome.blocks_not_admitted,
        "blocks_evicted": outcome.blocks_evicted,
        "blocks_expired": outcome.blocks_expired,
        "blocks_held": outcome.blocks_held,
        "blocks_held_most": outcome.blocks_held_most,
        "held_share": 100.0 * outcome.held_blocks_mean / study.loaded.log.footprint,
        "states_per_request": outcome.states_stored / outcome.requests if outcome.requests else 0.0,
        "state_sources": None if case.windows is None else _sources(outcome),
        "state_bytes": outcome.state_bytes if keeps else None,
        "state_bytes_per_token": (outcome.state_bytes / stored if stored else 0.0) if keeps else None,
        "index_bytes_per_block": outcome.index_bytes_per_block,
        "written_bytes_per_day": written_per_day(row, study),
        **_device(row, study),
    }


def _device(row: Row, study: Study) -> dict[str, Any]:
    """What a device would have been written; None where no segments were simulated."""
    outcome, span = row.outcome, study.loaded.log.span_seconds
    size = row.case.segment_bytes
    if size is None:
        names = ("device_bytes_written", "copied_bytes", "write_amplification", "device_bytes_per_day")
        return {"segment_bytes": None, **dict.fromkeys(names)}
    stored = outcome.appended_bytes
    return {
        "segment_bytes": size,
        "device_bytes_written": outcome.device_bytes,
        "copied_bytes": outcome.copied_bytes,
        "write_amplification": outcome.device_bytes / stored if stored else None,
        "device_bytes_per_day": outcome.device_bytes * DAY_SECONDS / span if span else None,
    }


def written_per_day(row: Row, study: Study) -> float | None:
    """Bytes of blocks and states; None where no model says what they weigh, or the log takes no time."""
    span = study.loaded.log.span_seconds
    if study.profile is None or not span:
        return None
    written = row.outcome.blocks_stored * study.profile.block_bytes + row.outcome.state_bytes
    return written * DAY_SECONDS / span


def drive_years(bytes_per_day: float | None, endurance_bytes: int | None) -> float | None:
    """Until so much has been written to a drive; None where either is not known, or nothing is written."""
    if not bytes_per_day or endurance_bytes is None:
        return None
    return endurance_bytes / bytes_per_day / 365.25


def _sources(outcome: Outcome) -> dict[str, float]:
    return {
        source.value: 100.0 * outcome.sources[source] / outcome.requests if outcome.requests else 0.0
        for source in StateSource
    }
