"""The numbers of a profile that every plan and every index entry needs, worked out once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.profile.base import Profile

KEPT = 256


# Compared and hashed by identity: every plan looks up what was worked out for a scan.
@dataclass(frozen=True, slots=True, eq=False)
class Scan:
    """The layers with an index of one `ratio`. In the forward pass all `layers` of them look at their entries. A replay
    that ends at t needs the queries of each only from t - reach on, one `reaches` per layer, ascending; the last layer
    of a model makes no queries in a replay, and has none."""

    ratio: int
    layers: int
    reaches: tuple[int, ...]


class Replay(NamedTuple):
    """The exact replay that rebuilds the state at `edge` from entries: where it begins, its layer-tokens, and the entries that
    it looks at. `before`: entries that computing [0, edge) looks at."""

    start: int
    work: int
    entries: int
    before: int


@dataclass(frozen=True, slots=True)
class Figures:
    """Copied from the profile; the names are the profile's own."""

    profile: Profile
    block_tokens: int
    block_bytes: int
    state_bytes: int
    rows_block_bytes: int
    rows_overlap_block_bytes: int
    layer_count: int
    window_rows: int
    overlap_tokens: int
    exact_replay_tokens: int
    bounded_replay_tokens: int
    scans: tuple[Scan, ...]
    replays: dict[int, Replay] = field(default_factory=dict, compare=False, repr=False)
    """What was worked out for edges; see `kvstore.plan.work.replay_to`."""


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
            profile.rows_block_bytes,
            profile.rows_overlap_block_bytes,
            profile.layer_count,
            profile.window_rows,
            profile.overlap_tokens,
            profile.exact_replay_tokens,
            profile.bounded_replay_tokens,
            _scans(profile),
        )
    return found


def _scans(profile: Profile) -> tuple[Scan, ...]:
    """A layer with index keys scans them for its own selection; who reads another layer's entries reads its selection."""
    last = profile.layer_count - 1
    found: dict[int, list[int]] = {}
    for index, layer in enumerate(profile.layers):
        if layer.kind.has_keys:
            found.setdefault(layer.ratio, []).append((last - index) * profile.window_rows)
    return tuple(
        Scan(ratio, len(reaches), tuple(sorted(reach for reach in reaches if reach)))
        for ratio, reaches in found.items()
    )
