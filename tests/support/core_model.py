"""What a core has to hold and to promise, as plain dictionaries: for the state machine that compares the two."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore.core.accepted import is_accepted
from kvstore.store.base import Place
from kvstore.types import BlockKey, ItemId, ItemKind, Lineage, Tier

KINDS = (ItemKind.STATE, ItemKind.ROWS)

Name = tuple[int, BlockKey]
Kept = tuple[Name, ItemKind]


@dataclass
class Block:
    parent: Name | None
    lineage: Lineage
    place: Place
    used: float


@dataclass
class LeaseModel:
    session: str
    space: int
    keys: list[BlockKey]
    deadline: float
    intact: int
    states: list[Kept]
    tier: Tier | None = None
    lost: set[Kept] = field(default_factory=set)


@dataclass
class ReservationModel:
    session: str
    space: int
    items: list[tuple[ItemId, Name | None, Lineage, bool, bool, int]]
    deadline: float
    builds_on: set[Name] = field(default_factory=set)
    is_writing: bool = False
    is_void: bool = False
    accepted: list[ItemId] = field(default_factory=list)


@dataclass
class Model:
    blocks: dict[Name, Block] = field(default_factory=dict)
    ssd: dict[Kept, tuple[Lineage, Place]] = field(default_factory=dict)
    pool: dict[Name, Lineage] = field(default_factory=dict)
    leases: dict[int, LeaseModel] = field(default_factory=dict)
    reservations: dict[int, ReservationModel] = field(default_factory=dict)

    def chain(self, name: Name | None) -> list[Name]:
        found = []
        while name is not None:
            found.append(name)
            name = self.blocks[name].parent
        return found[::-1]

    def is_leased(self, name: Name) -> bool:
        return any(
            name in [(lease.space, key) for key in lease.keys[: lease.intact]]
            for lease in self.leases.values()
        )

    def state_is_leased(self, kept: Kept, tier: Tier) -> bool:
        return any(
            lease.tier is tier and kept in lease.states and kept not in lease.lost
            for lease in self.leases.values()
        )

    def is_built_on(self, name: Name) -> bool:
        return any(name in made.builds_on for made in self.reservations.values())

    def in_flight(self, space: int, item: ItemId) -> ReservationModel | None:
        return next(
            (
                m
                for m in self.reservations.values()
                if m.space == space and any(i == item for i, *_ in m.items)
            ),
            None,
        )

    def is_accepted(self, name: Name) -> bool:
        """Whether the block is visible and not durable."""
        block = self.blocks.get(name)
        return block is not None and is_accepted(block.place.segment_id)

    def state_is_accepted(self, kept: Kept) -> bool:
        return kept in self.ssd and is_accepted(self.ssd[kept][1].segment_id)

    def use(self, name: Name, now: float) -> None:
        for each in self.chain(name):
            self.blocks[each].used = max(self.blocks[each].used, now)

    def lose_state(self, kept: Kept, tier: Tier) -> None:
        if tier is Tier.SSD:
            self.ssd.pop(kept, None)
        else:
            self.pool.pop(kept[0], None)
        for lease in self.leases.values():
            if lease.tier is tier and kept in lease.states:
                lease.lost.add(kept)

    def lose_block(self, name: Name) -> None:
        assert not any(block.parent == name for block in self.blocks.values()), (
            "a block left before its child"
        )
        assert not any((name, kind) in self.ssd for kind in KINDS), "a block left before its states"
        self.lose_state((name, ItemKind.STATE), Tier.POOL)
        del self.blocks[name]
        for lease in self.leases.values():
            if lease.space == name[0] and name[1] in lease.keys[: lease.intact]:
                lease.intact = lease.keys.index(name[1])

    def below(self, name: Name) -> set[Name]:
        return {each for each in self.blocks if name in self.chain(each)}
