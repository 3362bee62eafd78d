"""Why a plan is as it is, and what other window-state policies would give: words and numbers from the planner alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.plan.base import Alternative, Costs, Coverage
from kvstore.plan.coverage import whole_blocks
from kvstore.plan.planner import plan
from kvstore.plan.save import save_states
from kvstore.policy.window import WindowKind, WindowPolicy
from kvstore.profile.base import Profile
from kvstore.profile.report import PERIODS_IN_BLOCKS
from kvstore.types import StateSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What one way costs more than another, in seconds: in all and by part; negative where it costs less."""

    seconds: float
    read_seconds: float
    replay_seconds: float
    compute_seconds: float

    @property
    def parts(self) -> tuple[tuple[str, float], ...]:
        return (
            ("reading", self.read_seconds),
            ("replaying", self.replay_seconds),
            ("computing", self.compute_seconds),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What a window-state policy means for one prompt: `bytes_ssd` of states and rows kept on SSD inside the prompt, and
    how the next turn would resume from exactly those, with all of the prompt's blocks held and nothing in the pool."""

    policy: WindowPolicy
    bytes_ssd: int
    next_turn: Alternative

    @property
    def restore_seconds(self) -> float:
        """Until the next turn computes its first new token: reading and replaying."""
        return self.next_turn.read_seconds + self.next_turn.replay_seconds


def difference(way: Alternative, other: Alternative) -> Difference:
    """What `other` costs more than `way`."""
    return Difference(
        seconds=other.seconds - way.seconds,
        read_seconds=other.read_seconds - way.read_seconds,
        replay_seconds=other.replay_seconds - way.replay_seconds,
        compute_seconds=other.compute_seconds - way.compute_seconds,
    )


def in_words(profile: Profile, way: Alternative, *, prompt_tokens: int) -> str:
    """One sentence: what is read, from where the window state comes, what is replayed and what is computed."""
    if way.state_source is StateSource.NONE:
        return f"Nothing is restored; all {prompt_tokens:,} tokens are computed."
    blocks = way.compute_from // profile.block_tokens
    sources = {
        StateSource.POOL: f"the state at {way.state_at:,} comes from the pool",
        StateSource.CHECKPOINT: f"the state at {way.state_at:,} comes from SSD",
        StateSource.ROWS: f"window rows from SSD give the state at {way.state_at:,}",
    }
    replayed = f"{way.replay_tokens:,} tokens from {way.replay_from:,} on are replayed"
    if way.state_source is StateSource.REPLAY:
        state = f"{replayed} to get the window state back"
    else:
        state = sources[way.state_source]
        state += f", {replayed}" if way.replay_tokens else ", nothing is replayed"
    left = prompt_tokens - way.compute_from
    return f"{blocks:,} blocks are read, {state}, and the last {left:,} tokens are computed."


def kept_bytes(policy: WindowPolicy, profile: Profile, *, prompt_tokens: int) -> int:
    """Bytes of states and rows that the policy keeps on SSD inside a prompt of which nothing was held. `endpoints` keeps
    one state more where the output ends."""
    saved = _saved(policy, profile, prompt_tokens)
    total = len(saved) * profile.state_bytes
    if policy.rows:
        each = profile.rows_overlap_block_bytes if policy.rows_overlap else profile.rows_block_bytes
        total += whole_blocks(profile, prompt_tokens) * each
    return total


def held_under(policy: WindowPolicy, profile: Profile, *, prompt_tokens: int) -> Coverage:
    """What SSD holds of a prompt that was computed from nothing and stored under the policy."""
    blocks = whole_blocks(profile, prompt_tokens)
    edge = (blocks * profile.block_tokens,) if policy.rows and blocks else ()
    # Without an overlap in the model, rows are all that a resume needs.
    overlap = policy.rows_overlap or not profile.overlap_tokens
    return Coverage(
        blocks,
        checkpoints=_saved(policy, profile, prompt_tokens),
        rows=() if overlap else edge,
        rows_overlap=edge if overlap else (),
    )


def what_if(
    profile: Profile,
    policies: Sequence[WindowPolicy],
    *,
    prompt_tokens: int,
    next_tokens: int,
    costs: Costs,
    exact_only: bool = True,
) -> tuple[Outlook, ...]:
    """For each policy: what it keeps of this prompt, and how a next turn that adds `next_tokens` tokens would resume."""
    return tuple(
        Outlook(
            policy=policy,
            bytes_ssd=kept_bytes(policy, profile, prompt_tokens=prompt_tokens),
            next_turn=plan(
                profile,
                held_under(policy, profile, prompt_tokens=prompt_tokens),
                prompt_tokens=prompt_tokens + next_tokens,
                costs=costs,
                policy=policy,
                exact_only=exact_only,
            ).chosen,
        )
        for policy in policies
    )


_ENDS_OF_OTHER_KINDS = (WindowKind.ENDPOINTS_ONLY, WindowKind.ENDPOINTS_PERIODIC)


def policies_to_compare(profile: Profile, current: WindowPolicy) -> tuple[WindowPolicy, ...]:
    """The current policy and one of each kind, from what keeps least to what keeps most."""
    periods = {blocks * profile.block_tokens for blocks in PERIODS_IN_BLOCKS}
    periods |= {current.every_tokens} - {0}
    texts = (
        "zero",
        "endpoints",
        *([str(current)] if current.kind in _ENDS_OF_OTHER_KINDS else []),
        *(f"periodic:{every}" for every in sorted(periods, reverse=True)),
        "full",
        "full+overlap",
    )
    return tuple(WindowPolicy.parse(text, profile) for text in texts)


def _saved(policy: WindowPolicy, profile: Profile, prompt_tokens: int) -> tuple[int, ...]:
    return save_states(
        policy,
        profile,
        prompt_tokens=prompt_tokens,
        coverage=Coverage(0),
        compute_from=0,
        rebuilt=False,
    ).ssd
