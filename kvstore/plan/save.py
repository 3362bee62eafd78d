"""Which states the worker is to keep, from the namespace's policy, what is held, and the resume that was chosen."""

from __future__ import annotations

from bisect import bisect_right

from kvstore.plan.base import Coverage, SaveStates
from kvstore.policy.window import WindowKind, WindowPolicy
from kvstore.profile.base import Profile


def save_states(
    policy: WindowPolicy,
    profile: Profile,
    *,
    prompt_tokens: int,
    coverage: Coverage,
    compute_from: int,
    rebuilt: bool,
) -> SaveStates:
    """States at edges after `compute_from` are new, and with `rebuilt` the one at `compute_from` is too: a replay has just
    made it again and nobody holds it. The pool gets that one, the branch point and the last usable edge, where the next
    turn resumes, whatever the policy; the policy decides about SSD. What `coverage` holds in a tier is not saved there
    again.
    """
    after = compute_from - 1 if rebuilt and compute_from > 0 else compute_from
    branch_at = coverage.branch_at
    pool = policy.pool_edges(profile, prompt_tokens=prompt_tokens, after=after, branch_at=branch_at)
    ssd = (
        pool
        if policy.kind is WindowKind.ENDPOINTS
        else policy.ssd_edges(profile, prompt_tokens=prompt_tokens, after=after, branch_at=branch_at)
    )
    if after < compute_from and compute_from not in pool:
        pool = (compute_from, *pool)
    return SaveStates(
        _without(pool, coverage.pool_states, after) if coverage.pool_states else pool,
        _without(ssd, coverage.checkpoints, after) if coverage.checkpoints else ssd,
        True,
        policy.output_edge_on_ssd,
        policy.every_tokens,
        policy.rows,
        policy.rows_overlap,
    )


def _without(edges: tuple[int, ...], held: tuple[int, ...], after: int) -> tuple[int, ...]:
    """The edges, all > `after`, that are not in `held`, which is ascending."""
    later = set(held[bisect_right(held, after) :])
    return tuple(edge for edge in edges if edge not in later) if later else edges
