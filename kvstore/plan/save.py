"""Which states the worker is to keep, from the namespace's policy and the resume that was chosen."""

from __future__ import annotations

from kvstore.plan.base import SaveStates
from kvstore.policy.window import WindowPolicy
from kvstore.profile.base import Profile


def save_states(
    policy: WindowPolicy, profile: Profile, *, prompt_tokens: int, compute_from: int, rebuilt: bool
) -> SaveStates:
    """States at edges after `compute_from` are new, and with `rebuilt` the one at `compute_from` is too: a replay has just
    made it again and nobody holds it. The pool gets that one and the last usable edge, where the next turn resumes,
    whatever the policy; the policy decides about SSD.
    """
    after = compute_from - 1 if rebuilt and compute_from > 0 else compute_from
    pool = policy.pool_edges(profile, prompt_tokens=prompt_tokens, after=after)
    ssd = policy.ssd_edges(profile, prompt_tokens=prompt_tokens, after=after)
    return SaveStates(
        pool=(compute_from, *pool) if after < compute_from and compute_from not in pool else pool,
        ssd=ssd,
        output_edge_pool=True,
        output_edge_ssd=policy.output_edge_on_ssd,
        every_tokens=policy.every_tokens,
    )
