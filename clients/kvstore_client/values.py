"""Frozen values that go into and come out of the client. Positions are tokens from the start of the prompt."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import NamedTuple

from kvstore.errors import InvalidArgument
from kvstore.types import Durability, Exactness, ItemKind, Lineage, StateSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """How long each kind of call may take, in seconds. Every call has one; past it the call raises Unavailable.

    connect: reaching the service and getting a session. lookup: beside the time that it is told to wait. fetch (of a map
    too) and write grow with what they move: by fetch_per_item for each block, state or block's rows asked for, by
    write_per_mib for each MiB given. release: also for aborting, confirming and ending flights, which are only hints, since the service gives
    everything back by itself. probe: how long a service that failed may take to show that it lives. pause_first,
    pause_most: after a failure to reach the service, calls are refused at once for pause_first, doubling with each
    further failure up to pause_most; 0 for both switches that off.
    """

    connect: float = 1.0
    lookup: float = 2.0
    control: float = 5.0
    release: float = 0.25
    fetch: float = 10.0
    fetch_per_item: float = 0.02
    write: float = 10.0
    write_per_mib: float = 0.1
    commit: float = 30.0
    handoff: float = 10.0
    admin: float = 10.0
    probe: float = 0.1
    pause_first: float = 0.05
    pause_most: float = 0.2

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            low = (
                0.0
                if each.name in ("pause_first", "pause_most", "fetch_per_item", "write_per_mib")
                else 0.001
            )
            if not low <= value <= 86_400.0:
                raise InvalidArgument(
                    "not a deadline", field=each.name, value=value, allowed=f"{low:g} to 86400 seconds"
                )
        if self.pause_first > self.pause_most:
            raise InvalidArgument(
                "the first pause is the shortest",
                field="pause_first",
                value=self.pause_first,
                allowed=f"at most pause_most = {self.pause_most:g}",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Rates of the caller. 0: not known, the service uses what it knows. Tokens are computed in tiles of `tile_tokens`: a
    prompt's last tile costs as much as a whole one. `assumed`: not measured; such rates price one plan and are not
    remembered for others."""

    seconds_per_layer_token: float = 0.0
    seconds_per_ssd_byte: float = 0.0
    seconds_per_memory_byte: float = 0.0
    seconds_per_fetch: float = 0.0
    seconds_per_index_entry: float = 0.0
    tile_tokens: int = 0
    assumed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedNamespace:
    """`digest` is what all other calls name the namespace by, and the parent of its first blocks. `geometry` is the
    profile's, as kvstore.profile.keyed.profile_of reads it. `states_share_tokens`: of how many tokens the states' share of the disk
    holds the states under this policy, 0 where none are kept."""

    digest: bytes
    name: str
    profile_name: str
    policy: str
    block_tokens: int
    block_bytes: int
    state_bytes: int
    states_share_tokens: int = 0
    states_share_states: int = 0
    policy_too_large: bool = False
    geometry: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """What is held for one prompt. Edges are tokens, ascending, the deepest of each kind only.

    blocks: held without a gap from the start. pool_states, checkpoints: edges with a whole state in that tier. rows,
    rows_overlap: edges that a resume from window rows reaches, without the overlap and with it. branch_at: where the
    prompt leaves what is held although that goes on in another way, 0 if nowhere.
    """

    blocks: int = 0
    pool_states: tuple[int, ...] = ()
    checkpoints: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    rows_overlap: tuple[int, ...] = ()
    branch_at: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """One way to resume, with its price: seconds until the first token."""

    compute_from: int
    state_source: StateSource
    state_at: int
    replay_from: int
    replay_layer_tokens: int
    bytes_ssd: int
    bytes_memory: int
    seconds: float
    index_entries: int = 0
    read_seconds: float = 0.0
    replay_seconds: float = 0.0
    compute_seconds: float = 0.0

    @property
    def replay_tokens(self) -> int:
        return self.compute_from - self.replay_from


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStates:
    """Which states the worker is to keep: edges inside the prompt per tier, whether the output's last edge goes to a
    tier, every how many tokens (0: none) of the output a state goes to SSD, and whether the window rows of every token
    computed go there, block by block, without or with the overlap at each block's end."""

    pool: tuple[int, ...] = ()
    ssd: tuple[int, ...] = ()
    output_edge_pool: bool = False
    output_edge_ssd: bool = False
    every_tokens: int = 0
    rows: bool = False
    rows_overlap: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to resume a prompt. Blocks [0, compute_from) are read, positions >= compute_from are computed and written.

    replay_from <= compute_from <= max(prompt_tokens - 1, 0); state_at == replay_from unless the source is REPLAY or
    NONE; NONE has compute_from == 0.
    """

    prompt_tokens: int
    chosen: Alternative
    runner_up: Alternative | None
    exactness: Exactness
    save_states: SaveStates
    blocks_missing: int

    @property
    def compute_from(self) -> int:
        return self.chosen.compute_from

    @property
    def state_source(self) -> StateSource:
        return self.chosen.state_source

    @property
    def state_at(self) -> int:
        return self.chosen.state_at

    @property
    def replay_from(self) -> int:
        return self.chosen.replay_from

    @property
    def replay_tokens(self) -> int:
        return self.chosen.replay_tokens


NOTHING_PLANNED = Plan(
    prompt_tokens=0,
    chosen=Alternative(
        compute_from=0,
        state_source=StateSource.NONE,
        state_at=0,
        replay_from=0,
        replay_layer_tokens=0,
        bytes_ssd=0,
        bytes_memory=0,
        seconds=0.0,
    ),
    runner_up=None,
    exactness=Exactness.EXACT,
    save_states=SaveStates(),
    blocks_missing=0,
)
"""Of a lease that no plan came with: it covers blocks and no state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedItem:
    """`index`: the block's place in the prompt, for its window rows too; the position in tokens of a state. `payload`
    None: it turned out missing, and then `lineage` is None too."""

    kind: ItemKind
    index: int
    payload: bytes | None
    lineage: Lineage | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedSlice:
    """Some layers of a block: slice number `slice` of kvstore.profile.layout.layer_slices. `index`, `payload` and
    `lineage` as in FetchedItem."""

    slice: int
    index: int
    payload: bytes | None
    lineage: Lineage | None


class ReserveOutcome(IntEnum):
    """GRANTED: write it. HELD: nothing to do. IN_FLIGHT: another reservation has it, or it was accepted and is not durable yet.
    PARENT_MISSING: its parent is neither held nor reserved by this client."""

    GRANTED = 1
    HELD = 2
    IN_FLIGHT = 3
    PARENT_MISSING = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveItem:
    """An item that the caller wants to store. `parent`: the key of the block before, the namespace's digest for the
    first block, empty for a state and for rows. `position`: tokens from the start of the prompt to the item's end. `length`: bytes.
    `to_pool` and `to_ssd` say where a state goes."""

    kind: ItemKind
    key: bytes
    position: int
    length: int
    parent: bytes = b""
    to_pool: bool = False
    to_ssd: bool = False
    lineage: Lineage = Lineage.EXACT


@dataclass(frozen=True, slots=True)
class Committed:
    """Items and bytes that are visible now, and `durability` says what else; `left_out`: places in the reserve call of those that
    were written and are not, since their block or parent was lost meanwhile, or is leased as approximate."""

    items: int
    bytes: int
    left_out: tuple[int, ...] = ()
    durability: Durability = Durability.DURABLE


class Cleared(NamedTuple):
    blocks: int
    states: int


class DroppedStates(NamedTuple):
    """`kept`: leased, and so left alone."""

    dropped: int
    kept: int


class Eviction(NamedTuple):
    """Which policy decides what goes first, and the names of all that there are."""

    policy: str
    policies: tuple[str, ...]


class MemoryBudgets(NamedTuple):
    """Bytes. `cache_allocated` may be more than its budget while sessions map what the cache has shrunk by."""

    cache_budget: int
    cache_allocated: int
    pool_budget: int
    pool_held: int


class Tenant(NamedTuple):
    """`tenant`: the tenant salt of its namespaces. Bytes; `quota`, `in_flight` None: no limit. `erasing`: what it had is being
    overwritten."""

    tenant: str
    namespaces: int
    held_bytes: int
    promised_bytes: int
    quota: int | None
    in_flight_bytes: int
    in_flight: int | None
    erasing: bool


class Erased(NamedTuple):
    """How far it is: what was forgotten, the files that may hold some of it still, and the bytes that were overwritten."""

    blocks: int
    states: int
    files_left: int
    overwritten_bytes: int
    done: bool
