"""What a prompt can use of what is held. Store, evict, lookup and fetch ask these functions and no others."""

from __future__ import annotations

from bisect import bisect_right

from kvstore.errors import InvalidArgument
from kvstore.plan.base import Coverage
from kvstore.policy.window import last_usable_edge
from kvstore.profile.base import Profile


def whole_blocks(profile: Profile, prompt_tokens: int) -> int:
    """Whole blocks in a prompt: how many keys it has."""
    return prompt_tokens // profile.block_tokens


def longest_restore(profile: Profile, coverage: Coverage, prompt_tokens: int) -> int:
    """The last position that a resume could start computing at: a block edge, at most n - 1, all blocks before it held."""
    held, last = coverage.blocks * profile.block_tokens, last_usable_edge(profile, prompt_tokens)
    return held if held < last else last


def usable(edges: tuple[int, ...], limit: int) -> tuple[int, ...]:
    """The state edges that a resume at or before `limit` can start from."""
    return edges[: bisect_right(edges, limit)]


def check_coverage(profile: Profile, coverage: Coverage) -> None:
    """Raise InvalidArgument unless the edges are ascending block edges inside the blocks held, the branch point too."""
    if coverage.blocks < 0:
        raise InvalidArgument("blocks are counted", field="blocks", value=coverage.blocks, allowed=">= 0")
    _, pool_states, checkpoints, rows, rows_overlap, branch_at = coverage
    if not (pool_states or checkpoints or rows or rows_overlap or branch_at):
        return
    end = coverage.blocks * profile.block_tokens
    for field, edges in (
        ("pool_states", pool_states),
        ("checkpoints", checkpoints),
        ("rows", rows),
        ("rows_overlap", rows_overlap),
    ):
        before = 0
        for edge in edges:
            if not before < edge <= end or edge % profile.block_tokens:
                raise InvalidArgument(
                    "not an edge at which a state can be held",
                    field=field,
                    value=edge,
                    allowed=f"ascending multiples of {profile.block_tokens} up to {end}",
                )
            before = edge
    if not 0 <= branch_at <= end or branch_at % profile.block_tokens:
        raise InvalidArgument(
            "not an edge where a prompt can leave what is held",
            field="branch_at",
            value=branch_at,
            allowed=f"0 to {end}, a multiple of {profile.block_tokens}",
        )
