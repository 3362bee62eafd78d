"""What is simulated, and what came of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from kvstore.policy.admission import Admission
from kvstore.profile.base import Layer, LayerKind, Profile
from kvstore.profile.formats import RowFormat
from kvstore.types import StateSource


class Replay(StrEnum):
    """What a resume may rebuild: nothing (a hit ends at a state), or what the planner finds cheapest."""

    NONE = "none"
    EXACT = "exact"
    BOUNDED = "bounded"


class TtlFrom(StrEnum):
    """Since when the retention of a block counts."""

    USE = "use"
    INSERTION = "insertion"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One simulation. capacity: blocks that are held at most, None for no limit; retention_seconds since `ttl_from`, None
    for no end; windows: the states that are kept, None for one at every block, or with a replay for none; as_served: whole blocks only and at most
    n - 1 tokens, as the service answers, and not what the log's ids allow; segment_bytes: of a disk with room for `capacity` blocks in
    segments of this size, None where blocks are counted and take no other room."""

    policy: str
    capacity: int | None = None
    retention_seconds: float | None = None
    ttl_from: TtlFrom = TtlFrom.USE
    windows: str | None = None
    replay: Replay = Replay.NONE
    as_served: bool = False
    admission: Admission = Admission.ALWAYS
    segment_bytes: int | None = None


@dataclass(slots=True, kw_only=True)
class Outcome:
    """`hit_tokens` of `input_tokens`, those that were not computed: without what replays computed, in tokens through all
    layers. `restored_tokens` were restored, `replayed_tokens` touched again. `sources`: how many requests had their window
    state from where. Blocks and states as counts, written ones; `held_blocks_mean` is over the log's time."""

    requests: int = 0
    input_tokens: int = 0
    hit_tokens: float = 0
    restored_tokens: int = 0
    replayed_tokens: int = 0
    replay_layer_tokens: int = 0
    sources: Counter[StateSource] = field(default_factory=Counter)
    blocks_asked: int = 0
    blocks_hit: int = 0
    blocks_stored: int = 0
    blocks_refused: int = 0
    blocks_not_admitted: int = 0
    blocks_evicted: int = 0
    blocks_expired: int = 0
    blocks_held: int = 0
    blocks_held_most: int = 0
    held_blocks_mean: float = 0.0
    states_stored: int = 0
    state_bytes: int = 0
    index_bytes_per_block: float = 0.0
    device_bytes: int = 0
    """With segments: what a device would have been written for `appended_bytes` of payload, `copied_bytes` of it by the cleaner."""
    appended_bytes: int = 0
    copied_bytes: int = 0

    @property
    def token_hit_rate(self) -> float:
        """Percent."""
        return self._percent(self.hit_tokens)

    @property
    def restored_rate(self) -> float:
        """Percent."""
        return self._percent(self.restored_tokens)

    def _percent(self, tokens: float) -> float:
        return 100.0 * tokens / self.input_tokens if self.input_tokens else 0.0


def counting_profile(block_tokens: int) -> Profile:
    """A model of which only the block's length matters: no byte of it means anything."""
    return Profile(
        name="counting",
        layers=(Layer(LayerKind.HCA, block_tokens),),
        block_tokens=block_tokens,
        window_tokens=2,
        head_dim=1,
        rope_dim=0,
        index_head_dim=1,
        entry_format=RowFormat.F32,
        key_format=RowFormat.F32,
        row_format=RowFormat.F32,
    )
