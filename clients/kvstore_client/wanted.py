"""Which items a fetch brings, in which order: known beforehand, so that another order is noticed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.profile.base import Profile
from kvstore.profile.layout import LayerSlice, rows_edge, rows_needed
from kvstore.types import ItemKind, StateSource
from kvstore_client.values import Plan


@dataclass(frozen=True, slots=True)
class Place:
    """One item of a fetch as its header names it. `length`: its bytes, None where the header alone says; `slice`: which
    part of a block it is, None for a whole item."""

    kind: ItemKind
    index: int
    slice: int | None = None
    length: int | None = None


@dataclass(frozen=True, slots=True)
class Whole:
    """Blocks [first_block, first_block + block_count) in order, then what the state is made of."""

    first_block: int
    block_count: int
    state: Sequence[Place] = ()

    def __len__(self) -> int:
        return self.block_count + len(self.state)

    def place(self, number: int) -> Place:
        """What comes as number `number`."""
        if number < self.block_count:
            return Place(ItemKind.BLOCK, self.first_block + number)
        return self.state[number - self.block_count]

    def columns(self, begin: int, end: int) -> tuple[list[ItemKind], list[int]]:
        """Kinds and indexes of what comes as numbers [begin, end), which are not too many."""
        last = min(end, self.block_count)
        state = self.state[max(begin - self.block_count, 0) : max(end - self.block_count, 0)]
        kinds = [ItemKind.BLOCK] * (last - begin) + [place.kind for place in state]
        indexes = [*range(self.first_block + begin, self.first_block + last), *(each.index for each in state)]
        return kinds, indexes


@dataclass(frozen=True, slots=True)
class Sliced:
    """What the state is made of, then slice 0 of every block in order, then slice 1 of every block, and so on."""

    first_block: int
    block_count: int
    slices: Sequence[LayerSlice]
    state: Sequence[Place] = ()

    def whole(self) -> Whole:
        """The same items, not cut."""
        return Whole(self.first_block, self.block_count, self.state)

    def __len__(self) -> int:
        return len(self.state) + self.block_count * len(self.slices)

    def place(self, number: int) -> Place:
        if number < len(self.state):
            return self.state[number]
        part, block = divmod(number - len(self.state), self.block_count)
        cut = self.slices[part]
        return Place(ItemKind.BLOCK, self.first_block + block, part, cut.end - cut.offset)


def state_places(plan: Plan, profile: Profile | None) -> tuple[Place, ...]:
    """What the window state of `plan` is made of: one STATE, the ROWS of some blocks, or nothing. `profile` may be None
    unless the source is ROWS."""
    if plan.state_source in (StateSource.POOL, StateSource.CHECKPOINT):
        return (Place(ItemKind.STATE, plan.state_at),)
    if plan.state_source is not StateSource.ROWS:
        return ()
    assert profile is not None, "rows are counted in the profile's blocks"
    edge, overlap = rows_edge(profile, plan.state_at)
    needed = rows_needed(profile, edge, overlap=overlap)
    return tuple(
        Place(ItemKind.ROWS, number)
        for number in range(needed.first_block, needed.first_block + needed.blocks)
    )
