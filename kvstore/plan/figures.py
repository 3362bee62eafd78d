"""The numbers of a profile that every plan and every index entry needs, worked out once."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.profile.base import Profile

KEPT = 256


@dataclass(frozen=True, slots=True)
class Figures:
    """Copied from the profile; the names are the profile's own."""

    profile: Profile
    block_tokens: int
    block_bytes: int
    state_bytes: int
    layer_count: int
    window_rows: int
    exact_replay_tokens: int
    bounded_replay_tokens: int


# By identity: hashing a profile walks its layers, which costs more than what is looked up. An entry holds its profile, so
# that no other object can have its id.
_figures: dict[int, Figures] = {}


def figures_of(profile: Profile) -> Figures:
    found = _figures.get(id(profile))
    if found is None:
        if len(_figures) >= KEPT:
            _figures.clear()
        found = _figures[id(profile)] = Figures(
            profile,
            profile.block_tokens,
            profile.block_bytes,
            profile.state_bytes,
            profile.layer_count,
            profile.window_rows,
            profile.exact_replay_tokens,
            profile.bounded_replay_tokens,
        )
    return found
