"""The deepest edge with rows, against asking of every edge."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.core.windows import deepest_edge
from kvstore.profile.base import Layer, LayerKind
from kvstore.profile.layout import rows_needed
from kvstore.profile.registry import get_profile
from tests.support.long import examples

TINY = get_profile("tiny")
PROFILES = (
    TINY,
    replace(TINY, name="wide", window_tokens=TINY.block_tokens + 9),
    replace(TINY, name="wider", window_tokens=3 * TINY.block_tokens),
    replace(TINY, name="short", layers=(Layer(LayerKind.CSA, 4),), block_tokens=4, window_tokens=19),
    replace(TINY, name="bare", layers=(Layer(LayerKind.WINDOW),), block_tokens=8, window_tokens=20),
    get_profile("deepseek-v4-flash"),
)


@settings(max_examples=examples(200), deadline=None)
@given(
    profile=st.sampled_from(PROFILES),
    held=st.lists(st.sampled_from([0, 1, 1, 1]), max_size=30),
    cut=st.integers(0, 30),
    overlap=st.booleans(),
)
def test_the_deepest_edge_is_the_last_whose_rows_are_all_held(
    profile: object, held: list[int], cut: int, overlap: bool
) -> None:
    assert isinstance(profile, type(TINY))
    longest, size, best = min(cut, len(held)), profile.block_tokens, 0
    for edge in range(1, longest + 1):
        needed = rows_needed(profile, edge * size, overlap=overlap)
        if all(held[needed.first_block : needed.first_block + needed.blocks]):
            best = edge * size
    assert deepest_edge(profile, bytes(held), longest_blocks=longest, overlap=overlap) == best
