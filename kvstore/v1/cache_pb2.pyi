from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StateSource(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STATE_SOURCE_UNSPECIFIED: _ClassVar[StateSource]
    POOL: _ClassVar[StateSource]
    CHECKPOINT: _ClassVar[StateSource]
    ROWS: _ClassVar[StateSource]
    REPLAY: _ClassVar[StateSource]
    NONE: _ClassVar[StateSource]

class Exactness(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXACTNESS_UNSPECIFIED: _ClassVar[Exactness]
    EXACT: _ClassVar[Exactness]
    BOUNDED: _ClassVar[Exactness]

class ItemKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ITEM_KIND_UNSPECIFIED: _ClassVar[ItemKind]
    BLOCK: _ClassVar[ItemKind]
    STATE: _ClassVar[ItemKind]
    WINDOW_ROWS: _ClassVar[ItemKind]

class Lineage(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LINEAGE_UNSPECIFIED: _ClassVar[Lineage]
    LINEAGE_EXACT: _ClassVar[Lineage]
    LINEAGE_BOUNDED: _ClassVar[Lineage]

class ReserveOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RESERVE_OUTCOME_UNSPECIFIED: _ClassVar[ReserveOutcome]
    GRANTED: _ClassVar[ReserveOutcome]
    HELD: _ClassVar[ReserveOutcome]
    IN_FLIGHT: _ClassVar[ReserveOutcome]
    PARENT_MISSING: _ClassVar[ReserveOutcome]

class Durability(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DURABILITY_UNSPECIFIED: _ClassVar[Durability]
    DURABLE: _ClassVar[Durability]
    ACCEPTED: _ClassVar[Durability]

class StateTier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STATE_TIER_UNSPECIFIED: _ClassVar[StateTier]
    STATE_TIER_POOL: _ClassVar[StateTier]
    STATE_TIER_SSD: _ClassVar[StateTier]
STATE_SOURCE_UNSPECIFIED: StateSource
POOL: StateSource
CHECKPOINT: StateSource
ROWS: StateSource
REPLAY: StateSource
NONE: StateSource
EXACTNESS_UNSPECIFIED: Exactness
EXACT: Exactness
BOUNDED: Exactness
ITEM_KIND_UNSPECIFIED: ItemKind
BLOCK: ItemKind
STATE: ItemKind
WINDOW_ROWS: ItemKind
LINEAGE_UNSPECIFIED: Lineage
LINEAGE_EXACT: Lineage
LINEAGE_BOUNDED: Lineage
RESERVE_OUTCOME_UNSPECIFIED: ReserveOutcome
GRANTED: ReserveOutcome
HELD: ReserveOutcome
IN_FLIGHT: ReserveOutcome
PARENT_MISSING: ReserveOutcome
DURABILITY_UNSPECIFIED: Durability
DURABLE: Durability
ACCEPTED: Durability
STATE_TIER_UNSPECIFIED: StateTier
STATE_TIER_POOL: StateTier
STATE_TIER_SSD: StateTier

class SessionRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionHello(_message.Message):
    __slots__ = ("protocol", "session", "boot", "newest")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    BOOT_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    session: str
    boot: str
    newest: int
    def __init__(self, protocol: _Optional[int] = ..., session: _Optional[str] = ..., boot: _Optional[str] = ..., newest: _Optional[int] = ...) -> None: ...

class Profile(_message.Message):
    __slots__ = ("name", "geometry")
    NAME_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    name: str
    geometry: bytes
    def __init__(self, name: _Optional[str] = ..., geometry: _Optional[bytes] = ...) -> None: ...

class OpenNamespaceRequest(_message.Message):
    __slots__ = ("name", "profile", "weights_revision", "numerics", "adapter", "tenant_salt", "policy")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_REVISION_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    TENANT_SALT_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    name: str
    profile: Profile
    weights_revision: str
    numerics: str
    adapter: str
    tenant_salt: str
    policy: str
    def __init__(self, name: _Optional[str] = ..., profile: _Optional[_Union[Profile, _Mapping]] = ..., weights_revision: _Optional[str] = ..., numerics: _Optional[str] = ..., adapter: _Optional[str] = ..., tenant_salt: _Optional[str] = ..., policy: _Optional[str] = ...) -> None: ...

class Namespace(_message.Message):
    __slots__ = ("name", "digest", "profile", "policy", "block_tokens", "block_bytes", "state_bytes", "states_share_tokens", "states_share_states", "policy_too_large")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATES_SHARE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STATES_SHARE_STATES_FIELD_NUMBER: _ClassVar[int]
    POLICY_TOO_LARGE_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: bytes
    profile: Profile
    policy: str
    block_tokens: int
    block_bytes: int
    state_bytes: int
    states_share_tokens: int
    states_share_states: int
    policy_too_large: bool
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[bytes] = ..., profile: _Optional[_Union[Profile, _Mapping]] = ..., policy: _Optional[str] = ..., block_tokens: _Optional[int] = ..., block_bytes: _Optional[int] = ..., state_bytes: _Optional[int] = ..., states_share_tokens: _Optional[int] = ..., states_share_states: _Optional[int] = ..., policy_too_large: bool = ...) -> None: ...

class Costs(_message.Message):
    __slots__ = ("seconds_per_layer_token", "seconds_per_ssd_byte", "seconds_per_memory_byte", "seconds_per_fetch", "seconds_per_index_entry", "tile_tokens")
    SECONDS_PER_LAYER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SECONDS_PER_SSD_BYTE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_PER_MEMORY_BYTE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_PER_FETCH_FIELD_NUMBER: _ClassVar[int]
    SECONDS_PER_INDEX_ENTRY_FIELD_NUMBER: _ClassVar[int]
    TILE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    seconds_per_layer_token: float
    seconds_per_ssd_byte: float
    seconds_per_memory_byte: float
    seconds_per_fetch: float
    seconds_per_index_entry: float
    tile_tokens: int
    def __init__(self, seconds_per_layer_token: _Optional[float] = ..., seconds_per_ssd_byte: _Optional[float] = ..., seconds_per_memory_byte: _Optional[float] = ..., seconds_per_fetch: _Optional[float] = ..., seconds_per_index_entry: _Optional[float] = ..., tile_tokens: _Optional[int] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("namespace", "keys", "prompt_tokens", "costs", "lease", "exactness", "announce", "wait_seconds", "assumed_costs")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    EXACTNESS_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCE_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ASSUMED_COSTS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    keys: bytes
    prompt_tokens: int
    costs: Costs
    lease: bool
    exactness: Exactness
    announce: bool
    wait_seconds: float
    assumed_costs: bool
    def __init__(self, namespace: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., prompt_tokens: _Optional[int] = ..., costs: _Optional[_Union[Costs, _Mapping]] = ..., lease: bool = ..., exactness: _Optional[_Union[Exactness, str]] = ..., announce: bool = ..., wait_seconds: _Optional[float] = ..., assumed_costs: bool = ...) -> None: ...

class Alternative(_message.Message):
    __slots__ = ("compute_from", "state_source", "state_at", "replay_from", "replay_layer_tokens", "bytes_ssd", "bytes_memory", "seconds", "index_entries", "read_seconds", "replay_seconds", "compute_seconds")
    COMPUTE_FROM_FIELD_NUMBER: _ClassVar[int]
    STATE_SOURCE_FIELD_NUMBER: _ClassVar[int]
    STATE_AT_FIELD_NUMBER: _ClassVar[int]
    REPLAY_FROM_FIELD_NUMBER: _ClassVar[int]
    REPLAY_LAYER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BYTES_SSD_FIELD_NUMBER: _ClassVar[int]
    BYTES_MEMORY_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    INDEX_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    READ_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REPLAY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    compute_from: int
    state_source: StateSource
    state_at: int
    replay_from: int
    replay_layer_tokens: int
    bytes_ssd: int
    bytes_memory: int
    seconds: float
    index_entries: int
    read_seconds: float
    replay_seconds: float
    compute_seconds: float
    def __init__(self, compute_from: _Optional[int] = ..., state_source: _Optional[_Union[StateSource, str]] = ..., state_at: _Optional[int] = ..., replay_from: _Optional[int] = ..., replay_layer_tokens: _Optional[int] = ..., bytes_ssd: _Optional[int] = ..., bytes_memory: _Optional[int] = ..., seconds: _Optional[float] = ..., index_entries: _Optional[int] = ..., read_seconds: _Optional[float] = ..., replay_seconds: _Optional[float] = ..., compute_seconds: _Optional[float] = ...) -> None: ...

class SaveStates(_message.Message):
    __slots__ = ("pool", "ssd", "output_edge_pool", "output_edge_ssd", "every_tokens", "rows", "rows_overlap")
    POOL_FIELD_NUMBER: _ClassVar[int]
    SSD_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_EDGE_POOL_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_EDGE_SSD_FIELD_NUMBER: _ClassVar[int]
    EVERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    ROWS_OVERLAP_FIELD_NUMBER: _ClassVar[int]
    pool: _containers.RepeatedScalarFieldContainer[int]
    ssd: _containers.RepeatedScalarFieldContainer[int]
    output_edge_pool: bool
    output_edge_ssd: bool
    every_tokens: int
    rows: bool
    rows_overlap: bool
    def __init__(self, pool: _Optional[_Iterable[int]] = ..., ssd: _Optional[_Iterable[int]] = ..., output_edge_pool: bool = ..., output_edge_ssd: bool = ..., every_tokens: _Optional[int] = ..., rows: bool = ..., rows_overlap: bool = ...) -> None: ...

class Coverage(_message.Message):
    __slots__ = ("blocks", "pool_states", "checkpoints", "rows", "rows_overlap", "branch_at")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    POOL_STATES_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    ROWS_OVERLAP_FIELD_NUMBER: _ClassVar[int]
    BRANCH_AT_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    pool_states: _containers.RepeatedScalarFieldContainer[int]
    checkpoints: _containers.RepeatedScalarFieldContainer[int]
    rows: _containers.RepeatedScalarFieldContainer[int]
    rows_overlap: _containers.RepeatedScalarFieldContainer[int]
    branch_at: int
    def __init__(self, blocks: _Optional[int] = ..., pool_states: _Optional[_Iterable[int]] = ..., checkpoints: _Optional[_Iterable[int]] = ..., rows: _Optional[_Iterable[int]] = ..., rows_overlap: _Optional[_Iterable[int]] = ..., branch_at: _Optional[int] = ...) -> None: ...

class RestorePlan(_message.Message):
    __slots__ = ("prompt_tokens", "chosen", "runner_up", "exactness", "save_states", "blocks_missing")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    RUNNER_UP_FIELD_NUMBER: _ClassVar[int]
    EXACTNESS_FIELD_NUMBER: _ClassVar[int]
    SAVE_STATES_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_MISSING_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    chosen: Alternative
    runner_up: Alternative
    exactness: Exactness
    save_states: SaveStates
    blocks_missing: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., chosen: _Optional[_Union[Alternative, _Mapping]] = ..., runner_up: _Optional[_Union[Alternative, _Mapping]] = ..., exactness: _Optional[_Union[Exactness, str]] = ..., save_states: _Optional[_Union[SaveStates, _Mapping]] = ..., blocks_missing: _Optional[int] = ...) -> None: ...

class LookupReply(_message.Message):
    __slots__ = ("plan", "lease_id", "lease_seconds", "blocks_held", "blocks_in_flight", "in_flight_seconds", "waited_seconds", "flight_id", "coverage", "costs")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_HELD_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAITED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FLIGHT_ID_FIELD_NUMBER: _ClassVar[int]
    COVERAGE_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    plan: RestorePlan
    lease_id: int
    lease_seconds: float
    blocks_held: int
    blocks_in_flight: int
    in_flight_seconds: float
    waited_seconds: float
    flight_id: int
    coverage: Coverage
    costs: Costs
    def __init__(self, plan: _Optional[_Union[RestorePlan, _Mapping]] = ..., lease_id: _Optional[int] = ..., lease_seconds: _Optional[float] = ..., blocks_held: _Optional[int] = ..., blocks_in_flight: _Optional[int] = ..., in_flight_seconds: _Optional[float] = ..., waited_seconds: _Optional[float] = ..., flight_id: _Optional[int] = ..., coverage: _Optional[_Union[Coverage, _Mapping]] = ..., costs: _Optional[_Union[Costs, _Mapping]] = ...) -> None: ...

class EndFlightRequest(_message.Message):
    __slots__ = ("flight_id",)
    FLIGHT_ID_FIELD_NUMBER: _ClassVar[int]
    flight_id: int
    def __init__(self, flight_id: _Optional[int] = ...) -> None: ...

class EndFlightReply(_message.Message):
    __slots__ = ("was_open",)
    WAS_OPEN_FIELD_NUMBER: _ClassVar[int]
    was_open: bool
    def __init__(self, was_open: bool = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("lease_id", "first_block", "block_count", "state", "slices", "offset")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    first_block: int
    block_count: int
    state: bool
    slices: int
    offset: int
    def __init__(self, lease_id: _Optional[int] = ..., first_block: _Optional[int] = ..., block_count: _Optional[int] = ..., state: bool = ..., slices: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class MapRequest(_message.Message):
    __slots__ = ("lease_id", "first_block", "block_count", "state")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    first_block: int
    block_count: int
    state: bool
    def __init__(self, lease_id: _Optional[int] = ..., first_block: _Optional[int] = ..., block_count: _Optional[int] = ..., state: bool = ...) -> None: ...

class MapReply(_message.Message):
    __slots__ = ("extent", "offset", "length", "slot", "generation", "crc32", "xxh3_64", "has_xxh3", "lineage", "kind", "index")
    EXTENT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    XXH3_64_FIELD_NUMBER: _ClassVar[int]
    HAS_XXH3_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    extent: _containers.RepeatedScalarFieldContainer[int]
    offset: _containers.RepeatedScalarFieldContainer[int]
    length: _containers.RepeatedScalarFieldContainer[int]
    slot: _containers.RepeatedScalarFieldContainer[int]
    generation: _containers.RepeatedScalarFieldContainer[int]
    crc32: _containers.RepeatedScalarFieldContainer[int]
    xxh3_64: _containers.RepeatedScalarFieldContainer[int]
    has_xxh3: _containers.RepeatedScalarFieldContainer[bool]
    lineage: _containers.RepeatedScalarFieldContainer[Lineage]
    kind: _containers.RepeatedScalarFieldContainer[ItemKind]
    index: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, extent: _Optional[_Iterable[int]] = ..., offset: _Optional[_Iterable[int]] = ..., length: _Optional[_Iterable[int]] = ..., slot: _Optional[_Iterable[int]] = ..., generation: _Optional[_Iterable[int]] = ..., crc32: _Optional[_Iterable[int]] = ..., xxh3_64: _Optional[_Iterable[int]] = ..., has_xxh3: _Optional[_Iterable[bool]] = ..., lineage: _Optional[_Iterable[_Union[Lineage, str]]] = ..., kind: _Optional[_Iterable[_Union[ItemKind, str]]] = ..., index: _Optional[_Iterable[int]] = ...) -> None: ...

class ItemHeader(_message.Message):
    __slots__ = ("kind", "index", "length", "crc32", "xxh3_64", "has_xxh3", "lineage", "missing", "slice", "offset")
    KIND_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    XXH3_64_FIELD_NUMBER: _ClassVar[int]
    HAS_XXH3_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    kind: ItemKind
    index: int
    length: int
    crc32: int
    xxh3_64: int
    has_xxh3: bool
    lineage: Lineage
    missing: bool
    slice: int
    offset: int
    def __init__(self, kind: _Optional[_Union[ItemKind, str]] = ..., index: _Optional[int] = ..., length: _Optional[int] = ..., crc32: _Optional[int] = ..., xxh3_64: _Optional[int] = ..., has_xxh3: bool = ..., lineage: _Optional[_Union[Lineage, str]] = ..., missing: bool = ..., slice: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...

class ItemFrame(_message.Message):
    __slots__ = ("items", "data")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[ItemHeader]
    data: bytes
    def __init__(self, items: _Optional[_Iterable[_Union[ItemHeader, _Mapping]]] = ..., data: _Optional[bytes] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    def __init__(self, lease_id: _Optional[int] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ("was_held",)
    WAS_HELD_FIELD_NUMBER: _ClassVar[int]
    was_held: bool
    def __init__(self, was_held: bool = ...) -> None: ...

class ReserveItem(_message.Message):
    __slots__ = ("kind", "key", "parent", "position", "length", "to_pool", "to_ssd", "lineage")
    KIND_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    TO_POOL_FIELD_NUMBER: _ClassVar[int]
    TO_SSD_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    kind: ItemKind
    key: bytes
    parent: bytes
    position: int
    length: int
    to_pool: bool
    to_ssd: bool
    lineage: Lineage
    def __init__(self, kind: _Optional[_Union[ItemKind, str]] = ..., key: _Optional[bytes] = ..., parent: _Optional[bytes] = ..., position: _Optional[int] = ..., length: _Optional[int] = ..., to_pool: bool = ..., to_ssd: bool = ..., lineage: _Optional[_Union[Lineage, str]] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("namespace", "items")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    items: _containers.RepeatedCompositeFieldContainer[ReserveItem]
    def __init__(self, namespace: _Optional[bytes] = ..., items: _Optional[_Iterable[_Union[ReserveItem, _Mapping]]] = ...) -> None: ...

class ReserveReply(_message.Message):
    __slots__ = ("reservation_id", "outcomes", "owner_age_seconds", "reservation_seconds")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    OWNER_AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_SECONDS_FIELD_NUMBER: _ClassVar[int]
    reservation_id: int
    outcomes: _containers.RepeatedScalarFieldContainer[ReserveOutcome]
    owner_age_seconds: _containers.RepeatedScalarFieldContainer[float]
    reservation_seconds: float
    def __init__(self, reservation_id: _Optional[int] = ..., outcomes: _Optional[_Iterable[_Union[ReserveOutcome, str]]] = ..., owner_age_seconds: _Optional[_Iterable[float]] = ..., reservation_seconds: _Optional[float] = ...) -> None: ...

class WriteItem(_message.Message):
    __slots__ = ("item", "length", "crc32", "xxh3_64", "has_xxh3")
    ITEM_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    XXH3_64_FIELD_NUMBER: _ClassVar[int]
    HAS_XXH3_FIELD_NUMBER: _ClassVar[int]
    item: int
    length: int
    crc32: int
    xxh3_64: int
    has_xxh3: bool
    def __init__(self, item: _Optional[int] = ..., length: _Optional[int] = ..., crc32: _Optional[int] = ..., xxh3_64: _Optional[int] = ..., has_xxh3: bool = ...) -> None: ...

class WriteFrame(_message.Message):
    __slots__ = ("reservation_id", "items", "data")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    reservation_id: int
    items: _containers.RepeatedCompositeFieldContainer[WriteItem]
    data: bytes
    def __init__(self, reservation_id: _Optional[int] = ..., items: _Optional[_Iterable[_Union[WriteItem, _Mapping]]] = ..., data: _Optional[bytes] = ...) -> None: ...

class OpenArenaRequest(_message.Message):
    __slots__ = ("bytes",)
    BYTES_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    def __init__(self, bytes: _Optional[int] = ...) -> None: ...

class OpenArenaReply(_message.Message):
    __slots__ = ("arena", "bytes")
    ARENA_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    arena: int
    bytes: int
    def __init__(self, arena: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class WriteArenaRequest(_message.Message):
    __slots__ = ("reservation_id", "items", "offset")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    reservation_id: int
    items: _containers.RepeatedCompositeFieldContainer[WriteItem]
    offset: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, reservation_id: _Optional[int] = ..., items: _Optional[_Iterable[_Union[WriteItem, _Mapping]]] = ..., offset: _Optional[_Iterable[int]] = ...) -> None: ...

class OpenDockRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OpenDockReply(_message.Message):
    __slots__ = ("dock",)
    DOCK_FIELD_NUMBER: _ClassVar[int]
    dock: int
    def __init__(self, dock: _Optional[int] = ...) -> None: ...

class TakeDockRequest(_message.Message):
    __slots__ = ("dock", "bytes", "lock")
    DOCK_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    LOCK_FIELD_NUMBER: _ClassVar[int]
    dock: int
    bytes: int
    lock: int
    def __init__(self, dock: _Optional[int] = ..., bytes: _Optional[int] = ..., lock: _Optional[int] = ...) -> None: ...

class TakeDockReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WriteDockRequest(_message.Message):
    __slots__ = ("reservation_id", "items", "offset")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    reservation_id: int
    items: _containers.RepeatedCompositeFieldContainer[WriteItem]
    offset: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, reservation_id: _Optional[int] = ..., items: _Optional[_Iterable[_Union[WriteItem, _Mapping]]] = ..., offset: _Optional[_Iterable[int]] = ...) -> None: ...

class FetchDockRequest(_message.Message):
    __slots__ = ("lease_id", "first_block", "offset")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    first_block: int
    offset: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lease_id: _Optional[int] = ..., first_block: _Optional[int] = ..., offset: _Optional[_Iterable[int]] = ...) -> None: ...

class FetchDockReply(_message.Message):
    __slots__ = ("length", "crc32", "xxh3_64", "has_xxh3")
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    XXH3_64_FIELD_NUMBER: _ClassVar[int]
    HAS_XXH3_FIELD_NUMBER: _ClassVar[int]
    length: _containers.RepeatedScalarFieldContainer[int]
    crc32: _containers.RepeatedScalarFieldContainer[int]
    xxh3_64: _containers.RepeatedScalarFieldContainer[int]
    has_xxh3: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, length: _Optional[_Iterable[int]] = ..., crc32: _Optional[_Iterable[int]] = ..., xxh3_64: _Optional[_Iterable[int]] = ..., has_xxh3: _Optional[_Iterable[bool]] = ...) -> None: ...

class WriteReply(_message.Message):
    __slots__ = ("items", "bytes")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    items: int
    bytes: int
    def __init__(self, items: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("reservation_id", "durability")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    reservation_id: int
    durability: Durability
    def __init__(self, reservation_id: _Optional[int] = ..., durability: _Optional[_Union[Durability, str]] = ...) -> None: ...

class CommitReply(_message.Message):
    __slots__ = ("items", "bytes", "left_out", "durability")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    DURABILITY_FIELD_NUMBER: _ClassVar[int]
    items: int
    bytes: int
    left_out: _containers.RepeatedScalarFieldContainer[int]
    durability: Durability
    def __init__(self, items: _Optional[int] = ..., bytes: _Optional[int] = ..., left_out: _Optional[_Iterable[int]] = ..., durability: _Optional[_Union[Durability, str]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("reservation_id",)
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    reservation_id: int
    def __init__(self, reservation_id: _Optional[int] = ...) -> None: ...

class AbortReply(_message.Message):
    __slots__ = ("was_open",)
    WAS_OPEN_FIELD_NUMBER: _ClassVar[int]
    was_open: bool
    def __init__(self, was_open: bool = ...) -> None: ...

class HandoffHeader(_message.Message):
    __slots__ = ("namespace", "position", "length", "crc32", "takes", "seconds", "take_id", "lineage", "note")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    TAKES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    TAKE_ID_FIELD_NUMBER: _ClassVar[int]
    LINEAGE_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    position: int
    length: int
    crc32: int
    takes: int
    seconds: float
    take_id: int
    lineage: Lineage
    note: bytes
    def __init__(self, namespace: _Optional[bytes] = ..., position: _Optional[int] = ..., length: _Optional[int] = ..., crc32: _Optional[int] = ..., takes: _Optional[int] = ..., seconds: _Optional[float] = ..., take_id: _Optional[int] = ..., lineage: _Optional[_Union[Lineage, str]] = ..., note: _Optional[bytes] = ...) -> None: ...

class HandoffFrame(_message.Message):
    __slots__ = ("header", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: HandoffHeader
    data: bytes
    def __init__(self, header: _Optional[_Union[HandoffHeader, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class HandoffTicket(_message.Message):
    __slots__ = ("ticket", "seconds")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    seconds: float
    def __init__(self, ticket: _Optional[bytes] = ..., seconds: _Optional[float] = ...) -> None: ...

class TakeHandoffRequest(_message.Message):
    __slots__ = ("namespace", "ticket")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    ticket: bytes
    def __init__(self, namespace: _Optional[bytes] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class ConfirmHandoffRequest(_message.Message):
    __slots__ = ("take_id",)
    TAKE_ID_FIELD_NUMBER: _ClassVar[int]
    take_id: int
    def __init__(self, take_id: _Optional[int] = ...) -> None: ...

class ConfirmHandoffReply(_message.Message):
    __slots__ = ("was_out",)
    WAS_OUT_FIELD_NUMBER: _ClassVar[int]
    was_out: bool
    def __init__(self, was_out: bool = ...) -> None: ...

class DropHandoffRequest(_message.Message):
    __slots__ = ("namespace", "ticket")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    ticket: bytes
    def __init__(self, namespace: _Optional[bytes] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class DropHandoffReply(_message.Message):
    __slots__ = ("was_here",)
    WAS_HERE_FIELD_NUMBER: _ClassVar[int]
    was_here: bool
    def __init__(self, was_here: bool = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsReply(_message.Message):
    __slots__ = ("values", "boot", "version", "buffered_because")
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VALUES_FIELD_NUMBER: _ClassVar[int]
    BOOT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BUFFERED_BECAUSE_FIELD_NUMBER: _ClassVar[int]
    values: _containers.ScalarMap[str, float]
    boot: str
    version: str
    buffered_because: str
    def __init__(self, values: _Optional[_Mapping[str, float]] = ..., boot: _Optional[str] = ..., version: _Optional[str] = ..., buffered_because: _Optional[str] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("bytes_per_second",)
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    bytes_per_second: int
    def __init__(self, bytes_per_second: _Optional[int] = ...) -> None: ...

class VerifyReply(_message.Message):
    __slots__ = ("records", "bytes", "bytes_total", "damages", "done")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    DAMAGES_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    records: int
    bytes: int
    bytes_total: int
    damages: _containers.RepeatedCompositeFieldContainer[Damage]
    done: bool
    def __init__(self, records: _Optional[int] = ..., bytes: _Optional[int] = ..., bytes_total: _Optional[int] = ..., damages: _Optional[_Iterable[_Union[Damage, _Mapping]]] = ..., done: bool = ...) -> None: ...

class Damage(_message.Message):
    __slots__ = ("segment", "offset", "length", "key", "what")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    segment: int
    offset: int
    length: int
    key: bytes
    what: str
    def __init__(self, segment: _Optional[int] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ..., key: _Optional[bytes] = ..., what: _Optional[str] = ...) -> None: ...

class ClearRequest(_message.Message):
    __slots__ = ("namespace",)
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    def __init__(self, namespace: _Optional[bytes] = ...) -> None: ...

class ClearReply(_message.Message):
    __slots__ = ("blocks", "states")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    states: int
    def __init__(self, blocks: _Optional[int] = ..., states: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("seconds",)
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    def __init__(self, seconds: _Optional[float] = ...) -> None: ...

class DrainReply(_message.Message):
    __slots__ = ("left_open",)
    LEFT_OPEN_FIELD_NUMBER: _ClassVar[int]
    left_open: int
    def __init__(self, left_open: _Optional[int] = ...) -> None: ...

class SetPolicyRequest(_message.Message):
    __slots__ = ("namespace", "policy")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    policy: str
    def __init__(self, namespace: _Optional[bytes] = ..., policy: _Optional[str] = ...) -> None: ...

class DropStatesRequest(_message.Message):
    __slots__ = ("namespace", "tier")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    tier: StateTier
    def __init__(self, namespace: _Optional[bytes] = ..., tier: _Optional[_Union[StateTier, str]] = ...) -> None: ...

class DropStatesReply(_message.Message):
    __slots__ = ("dropped", "kept")
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    dropped: int
    kept: int
    def __init__(self, dropped: _Optional[int] = ..., kept: _Optional[int] = ...) -> None: ...

class SetMemoryRequest(_message.Message):
    __slots__ = ("cache", "pool")
    CACHE_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    cache: int
    pool: int
    def __init__(self, cache: _Optional[int] = ..., pool: _Optional[int] = ...) -> None: ...

class Memory(_message.Message):
    __slots__ = ("cache_budget", "cache_allocated", "pool_budget", "pool_held")
    CACHE_BUDGET_FIELD_NUMBER: _ClassVar[int]
    CACHE_ALLOCATED_FIELD_NUMBER: _ClassVar[int]
    POOL_BUDGET_FIELD_NUMBER: _ClassVar[int]
    POOL_HELD_FIELD_NUMBER: _ClassVar[int]
    cache_budget: int
    cache_allocated: int
    pool_budget: int
    pool_held: int
    def __init__(self, cache_budget: _Optional[int] = ..., cache_allocated: _Optional[int] = ..., pool_budget: _Optional[int] = ..., pool_held: _Optional[int] = ...) -> None: ...

class SetEvictionRequest(_message.Message):
    __slots__ = ("policy",)
    POLICY_FIELD_NUMBER: _ClassVar[int]
    policy: str
    def __init__(self, policy: _Optional[str] = ...) -> None: ...

class Eviction(_message.Message):
    __slots__ = ("policy", "policies")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    POLICIES_FIELD_NUMBER: _ClassVar[int]
    policy: str
    policies: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, policy: _Optional[str] = ..., policies: _Optional[_Iterable[str]] = ...) -> None: ...

class ListTenantsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListTenantsReply(_message.Message):
    __slots__ = ("tenants",)
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    tenants: _containers.RepeatedCompositeFieldContainer[Tenant]
    def __init__(self, tenants: _Optional[_Iterable[_Union[Tenant, _Mapping]]] = ...) -> None: ...

class Tenant(_message.Message):
    __slots__ = ("tenant", "namespaces", "held_bytes", "promised_bytes", "quota", "in_flight_bytes", "in_flight", "erasing")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROMISED_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUOTA_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    ERASING_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    namespaces: int
    held_bytes: int
    promised_bytes: int
    quota: int
    in_flight_bytes: int
    in_flight: int
    erasing: bool
    def __init__(self, tenant: _Optional[str] = ..., namespaces: _Optional[int] = ..., held_bytes: _Optional[int] = ..., promised_bytes: _Optional[int] = ..., quota: _Optional[int] = ..., in_flight_bytes: _Optional[int] = ..., in_flight: _Optional[int] = ..., erasing: bool = ...) -> None: ...

class EraseTenantRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class EraseTenantReply(_message.Message):
    __slots__ = ("blocks", "states", "files_left", "overwritten_bytes", "done")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    FILES_LEFT_FIELD_NUMBER: _ClassVar[int]
    OVERWRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    states: int
    files_left: int
    overwritten_bytes: int
    done: bool
    def __init__(self, blocks: _Optional[int] = ..., states: _Optional[int] = ..., files_left: _Optional[int] = ..., overwritten_bytes: _Optional[int] = ..., done: bool = ...) -> None: ...

class ListNamespacesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListNamespacesReply(_message.Message):
    __slots__ = ("namespaces",)
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    namespaces: _containers.RepeatedCompositeFieldContainer[Namespace]
    def __init__(self, namespaces: _Optional[_Iterable[_Union[Namespace, _Mapping]]] = ...) -> None: ...

class ContainsRequest(_message.Message):
    __slots__ = ("namespace", "keys", "use", "lease")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    USE_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    keys: bytes
    use: bool
    lease: bool
    def __init__(self, namespace: _Optional[bytes] = ..., keys: _Optional[bytes] = ..., use: bool = ..., lease: bool = ...) -> None: ...

class ContainsReply(_message.Message):
    __slots__ = ("held", "lease_id", "lease_seconds")
    HELD_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    held: bytes
    lease_id: int
    lease_seconds: float
    def __init__(self, held: _Optional[bytes] = ..., lease_id: _Optional[int] = ..., lease_seconds: _Optional[float] = ...) -> None: ...
