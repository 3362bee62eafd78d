"""Where a request of a log resumes, from what, and what that saves."""

from __future__ import annotations

from typing import NamedTuple

from kvstore.plan.base import Alternative, Coverage
from kvstore.plan.coverage import longest_restore, usable
from kvstore.profile.base import Profile
from kvstore.simulate.case import Case, Replay
from kvstore.types import StateSource


class Resume(NamedTuple):
    """Blocks [0, compute_from) are restored; `source` None: nothing was asked about states. `rebuilt`: a replay has made the
    state at `compute_from` anew."""

    compute_from: int
    source: StateSource | None
    replay_tokens: int = 0
    replay_layer_tokens: int = 0

    @property
    def rebuilt(self) -> bool:
        return self.replay_tokens > 0

    def saved_tokens(self, input_tokens: int, layers: int) -> float:
        """Of the input; what a replay computes is not saved. A last block counts as far as the input fills it."""
        return max(min(self.compute_from, input_tokens) - self.replay_layer_tokens / layers, 0.0)


def resume_of(
    case: Case, profile: Profile, coverage: Coverage, way: Alternative, prompt_tokens: int
) -> Resume:
    """As the plan says, which chose `way`; where no replay is allowed, at the last state that is held."""
    if case.replay is not Replay.NONE:
        return Resume(way.compute_from, way.state_source, way.replay_tokens, way.replay_layer_tokens)
    limit = coverage.blocks * profile.block_tokens
    if case.as_served:
        limit = longest_restore(profile, coverage, prompt_tokens)
    if case.windows is None:
        return Resume(limit, None)
    checkpoint = _last(coverage.checkpoints, limit)
    rows = max(_last(coverage.rows, limit), _last(coverage.rows_overlap, limit))
    if not checkpoint and not rows:
        return Resume(0, StateSource.NONE)
    return Resume(max(checkpoint, rows), StateSource.CHECKPOINT if checkpoint >= rows else StateSource.ROWS)


def _last(edges: tuple[int, ...], limit: int) -> int:
    return usable(edges, limit)[-1] if usable(edges, limit) else 0


def within(coverage: Coverage, blocks: int, block_tokens: int) -> Coverage:
    """What is left of a coverage when only its first `blocks` blocks are of use."""
    end = blocks * block_tokens
    return Coverage(
        blocks,
        usable(coverage.pool_states, end),
        usable(coverage.checkpoints, end),
        usable(coverage.rows, end),
        usable(coverage.rows_overlap, end),
        coverage.branch_at if coverage.branch_at <= end else 0,
    )
