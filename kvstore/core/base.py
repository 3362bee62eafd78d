"""Values that go into and come out of the core. Nothing here has behaviour beyond its own fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from kvstore.plan.base import Costs, Coverage, RestorePlan
from kvstore.pool.states import PoolStatistics
from kvstore.store.base import Place
from kvstore.types import BlockKey, BytesLike, Checks, Durability, ItemId, ItemKind, Lineage, NamespaceDigest


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one caller, or all together, may ask for. Past a limit: LimitExceeded with its name."""

    keys: int = 65_536
    contained_keys: int = 256
    prompt_tokens: int = 8_388_608
    namespaces: int = 4_096
    leases: int = 10_000
    leases_per_session: int = 4_096
    leased_blocks: int = 1 << 25
    leased_blocks_per_session: int = 1 << 23
    reservations: int = 10_000
    reservations_per_session: int = 1_024
    reserved_items: int = 65_536
    reserved_items_in_all: int = 1 << 20
    reserved_items_per_session: int = 1 << 18


class LookupResult(NamedTuple):
    """`lease_id` is None for a probe and where the plan reads nothing. `coverage` and `costs` are what the plan was made
    from."""

    plan: RestorePlan
    lease_id: int | None
    coverage: Coverage
    costs: Costs


class Contained(NamedTuple):
    """Of each key asked for, a 1 where it is held, else a 0. `lease_id` is None where none was asked for and where nothing is
    held; else the lease's blocks are those of the keys that are, in their order."""

    held: bytes
    lease_id: int | None


class FetchItem(NamedTuple):
    """One item to hand over: on SSD at `place`, or in the pool as `payload`; the other one is None."""

    item: ItemId
    position: int
    lineage: Lineage
    checks: Checks
    place: Place | None = None
    payload: BytesLike | None = None


class ReserveItem(NamedTuple):
    """One item to write. `position` is the token count at its end; `parent` the key of the block before it, or the
    namespace digest for a first block; states and rows leave it empty. The two tiers are for states: the rest goes to SSD."""

    key: BlockKey
    kind: ItemKind
    parent: bytes
    position: int
    length: int
    to_pool: bool = False
    to_ssd: bool = True
    lineage: Lineage = Lineage.EXACT

    @property
    def item_id(self) -> ItemId:
        return ItemId(self.key, self.kind)


class ReserveOutcome(IntEnum):
    """GRANTED to the caller; HELD already in every tier asked for; IN_FLIGHT in another reservation (of any session);
    PARENT_MISSING: neither held nor on its way in this session. Values are part of the wire."""

    GRANTED = 1
    HELD = 2
    IN_FLIGHT = 3
    PARENT_MISSING = 4


@dataclass(frozen=True, slots=True)
class Outcome:
    """`owner_age_seconds`: since the owner of an IN_FLIGHT item claimed it; else 0."""

    outcome: ReserveOutcome
    owner_age_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class ReserveResult:
    """`outcomes`: one per item asked for. `reservation_id` is None when nothing was granted."""

    reservation_id: int | None
    outcomes: Sequence[Outcome]


@dataclass(frozen=True, slots=True)
class Granted:
    """An item of a reservation. `index` is its place in the Reserve call; of a state's tiers only those that lacked it
    are left."""

    index: int
    item: ReserveItem


class Written(NamedTuple):
    """What became of one granted item: its durable place where it goes to SSD, its payload where it goes to the pool."""

    checks: Checks
    place: Place | None = None
    payload: BytesLike | None = None


@dataclass(frozen=True, slots=True)
class CommitReport:
    """`visible` are found from now on; `left_out`, places in the Reserve call, are what was written and is not. `discard`
    are places that nothing refers to: what was replaced, what came too late, and what lost its parent. `durability`: of what
    is visible."""

    visible: Sequence[ItemId]
    discard: Sequence[Place]
    bytes: int
    left_out: Sequence[int] = ()
    durability: Durability = Durability.DURABLE


class Gone(NamedTuple):
    """An item that has left the index; its place is to be discarded."""

    namespace: NamespaceDigest
    item: ItemId
    place: Place


class GivenBack(NamedTuple):
    """A key whose reservation ended without a commit: whoever waits for it may claim it."""

    namespace: NamespaceDigest
    item: ItemId


@dataclass(frozen=True, slots=True)
class Ended:
    """What a session held when it ended. Reservations whose bytes are being written end with their commit instead."""

    leases: int
    reservations: int
    given_back: Sequence[GivenBack]


@dataclass(frozen=True, slots=True)
class Dropped:
    """States dropped, and those left alone because they are leased. `kept_in`: where some of these are on SSD."""

    dropped: int
    kept: int
    gone: Sequence[Gone]
    kept_in: frozenset[NamespaceDigest] = frozenset()


@dataclass(frozen=True, slots=True)
class Cleared:
    blocks: int
    states: int
    gone: Sequence[Gone]


@dataclass(frozen=True, slots=True)
class Relocated:
    """`lost`: items that were not carried along and are forgotten as damaged. `discard`: new places of what had left
    the index while it was being copied."""

    moved: int
    lost: Sequence[Gone]
    discard: Sequence[Place]


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a start found. `discard`: places of records that belong to nothing: no namespace, no parent, no block,
    or not of the namespace's geometry."""

    namespaces: int
    blocks: int
    states: int
    discard: Sequence[Place]


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreStatistics:
    """Sizes now, then counts since the start (names ending in `_total`). States on SSD are whole states and rows together;
    `rows` and `rows_bytes` are the rows among them. What was accepted and is not durable yet counts apart from all of these.
    `retention_attained` is None until a block has left by expiry or eviction."""

    namespaces: int
    blocks: int
    block_bytes: int
    bounded_blocks: int
    ssd_states: int
    ssd_state_bytes: int
    rows: int
    rows_bytes: int
    accepted_blocks: int
    accepted_states: int
    accepted_bytes: int
    leases: int
    reservations: int
    in_flight: int
    index_bytes: int
    index_bytes_per_block: float
    pool: PoolStatistics
    totals: dict[str, int] = field(default_factory=dict)

    @property
    def retention_attained(self) -> float | None:
        expired, early = self.totals["expired_blocks_total"], self.totals["retention_shortfall_total"]
        return expired / (expired + early) if expired + early else None
