"""At which edges of a prompt window rows are held, so that a resume can start from them."""

from __future__ import annotations

from functools import lru_cache

from kvstore.profile.base import Profile
from kvstore.profile.layout import rows_needed


def deepest_edge(profile: Profile, marks: bytes, *, longest_blocks: int, overlap: bool) -> int:
    """The last edge, in tokens, of the first `longest_blocks` blocks at which all rows are held that a resume there needs;
    0 where there is none. `marks` has a 1 for each block of the prompt whose rows are held, from the first block on.
    """
    if marks.find(1) < 0:
        return 0
    size = profile.block_tokens
    run, behind = run_far_from_start(profile, overlap)
    # Away from the prompt's start every edge needs a run of one length, which ends `behind` blocks before it.
    start = marks.rfind(b"\1" * run, 0, max(longest_blocks - behind, 0))
    if start >= 0:
        return (start + run + behind) * size
    for edge in range(min(longest_blocks, run + behind), 0, -1):
        needed = rows_needed(profile, edge * size, overlap=overlap)
        if marks.find(b"\1" * needed.blocks, 0, needed.blocks) == 0 and needed.first_block == 0:
            return edge * size
    return 0


@lru_cache(maxsize=256)
def run_far_from_start(profile: Profile, overlap: bool) -> tuple[int, int]:
    """(Blocks that an edge far from the start needs the rows of, blocks between the last of them and the edge.)"""
    size = profile.block_tokens
    far = (profile.window_tokens + profile.overlap_tokens) // size + 2
    needed = rows_needed(profile, far * size, overlap=overlap)
    return needed.blocks, far - needed.first_block - needed.blocks
