"""What a plan's window state is made of: the items to fetch beside the blocks."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.errors import InvalidArgument
from kvstore.profile.base import Profile
from kvstore.profile.layout import rows_edge, rows_needed
from kvstore.types import Exactness, ItemKind, StateSource
from kvstore_client.values import Plan


@dataclass(frozen=True, slots=True)
class WantedItem:
    """`index`: the block's place in the prompt, or a state's position in tokens. `length` in bytes."""

    kind: ItemKind
    index: int
    length: int

    def __str__(self) -> str:
        return f"{self.kind.name.lower()} {self.index}"


@dataclass(frozen=True, slots=True)
class RowsAt:
    """Window rows that end at block edge `edge`, with the overlap there or without."""

    edge: int
    overlap: bool


def rows_of(plan: Plan, profile: Profile) -> RowsAt | None:
    """What a ROWS plan resumes from; None for other sources."""
    if plan.state_source is not StateSource.ROWS:
        return None
    edge, overlap = rows_edge(profile, plan.state_at)
    return RowsAt(edge, overlap)


def state_items(plan: Plan, profile: Profile) -> tuple[WantedItem, ...]:
    """The items that give the plan's window state, in the order in which a fetch sends them; none for REPLAY and NONE."""
    if plan.state_source in (StateSource.POOL, StateSource.CHECKPOINT):
        return (WantedItem(ItemKind.STATE, plan.state_at, profile.state_bytes),)
    rows = rows_of(plan, profile)
    if rows is None:
        return ()
    needed = rows_needed(profile, rows.edge, overlap=rows.overlap)
    length = profile.rows_overlap_block_bytes if rows.overlap else profile.rows_block_bytes
    return tuple(
        WantedItem(ItemKind.ROWS, index, length)
        for index in range(needed.first_block, needed.first_block + needed.blocks)
    )


def block_items(profile: Profile, blocks: int) -> tuple[WantedItem, ...]:
    return tuple(WantedItem(ItemKind.BLOCK, index, profile.block_bytes) for index in range(blocks))


def check_plan(plan: Plan, *, prompt_tokens: int, keys: int, profile: Profile, bounded: bool) -> None:
    """InvalidArgument for a plan that this worker can't follow, or that would give a wrong state. `bounded`: an
    approximate one is allowed."""
    chosen, block_tokens = plan.chosen, profile.block_tokens
    if plan.exactness is not Exactness.EXACT and not bounded:
        raise InvalidArgument(
            "not asked for", field="exactness", value=plan.exactness, allowed=Exactness.EXACT
        )
    if plan.state_source is StateSource.NONE:
        return
    position, replay_from = chosen.compute_from, chosen.replay_from
    if not 0 < position <= min(prompt_tokens - 1, keys * block_tokens) or position % block_tokens:
        raise InvalidArgument(
            "a plan ends where no block does",
            field="compute_from",
            value=position,
            allowed=f"a multiple of {block_tokens} below {prompt_tokens}",
        )
    if plan.state_source is StateSource.REPLAY:
        needed = profile.exact_replay_tokens
        if bounded:
            needed = min(needed, profile.bounded_replay_tokens)
        latest, unit = max(0, position - needed), 1
    elif plan.state_source is StateSource.ROWS:
        # Rows are no states: they may lead to a position inside a block.
        latest, unit = position, 1
        if rows_edge(profile, replay_from)[0] > position:
            latest = position - block_tokens
    else:
        latest, unit = position, block_tokens
    if not 0 <= replay_from <= latest or replay_from % unit:
        raise InvalidArgument(
            "a replay that is not exact",
            field="replay_from",
            value=replay_from,
            allowed=f"a multiple of {unit} up to {latest}",
        )
