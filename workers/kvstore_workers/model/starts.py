"""What a restored sequence's window rows start from, other than nothing."""

from __future__ import annotations

import collections.abc
from dataclasses import dataclass

from kvstore.errors import InvalidArgument
from kvstore.profile.base import Profile
from kvstore.profile.layout import rows_needed
from kvstore.types import BytesLike


@dataclass(frozen=True, slots=True)
class StateStart:
    """A whole state at `position`, in `state_layout`; at a block edge where a replay follows. `open_rows`: see
    Sequence.open_rows."""

    payload: BytesLike
    position: int
    open_rows: BytesLike = b""

    def state_at(self, profile: Profile) -> int:
        """The position that the state belongs to."""
        return self.position


@dataclass(frozen=True, slots=True)
class RowsStart:
    """Stored window rows, in `rows_layout`, of the blocks that `rows_needed(profile, edge, overlap=overlap)` names.

    `overlap`: the last of them carries the overlap at `edge`, and it is used. Without it the state is that at `edge` -
    `profile.overlap_tokens`, and the tokens from there on are replayed.
    """

    payloads: collections.abc.Sequence[BytesLike]
    edge: int
    overlap: bool

    def state_at(self, profile: Profile) -> int:
        """The position from which the rest is replayed."""
        return rows_needed(profile, self.edge, overlap=self.overlap).state_at


Start = StateStart | RowsStart


def check_span(profile: Profile, start: Start | None, *, position: int, tokens: int, exact: bool) -> None:
    """InvalidArgument unless `tokens` tokens lead from `start` to `position` in a way that gives the state there."""
    block_tokens, replay_from = profile.block_tokens, position - tokens
    if position < 0:
        raise InvalidArgument("a state has a position", field="position", value=position, allowed=">= 0")
    if position % block_tokens and (tokens or not isinstance(start, StateStart)):
        raise InvalidArgument(
            "a replay ends at a block edge",
            field="position",
            value=position,
            allowed=f"a multiple of {block_tokens}",
        )
    if isinstance(start, RowsStart) and not (0 < start.edge <= position and start.edge % block_tokens == 0):
        raise InvalidArgument(
            "window rows are those before a block edge",
            field="edge",
            value=start.edge,
            allowed=f"a multiple of {block_tokens} up to {position}",
        )
    expected = max(replay_from, 0) if start is None else start.state_at(profile)
    if replay_from != expected:
        raise InvalidArgument(
            "tokens must be those of [replay_from, position)",
            field="tokens",
            value=tokens,
            allowed=f"{position} - replay_from {expected}",
        )
    latest = max(0, position - profile.exact_replay_tokens)
    if start is None and exact and replay_from > latest:
        raise InvalidArgument(
            "too few tokens for an exact replay",
            field="replay_from",
            value=replay_from,
            allowed=f"0 to {latest}",
        )
    if isinstance(start, StateStart) and tokens and replay_from % block_tokens:
        raise InvalidArgument(
            "a replay starts from a state at a block edge",
            field="replay_from",
            value=replay_from,
            allowed=f"a multiple of {block_tokens}",
        )
