from kvstore.v1 import cache_pb2 as _cache_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Sampling(_message.Message):
    __slots__ = ("temperature", "seed")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    seed: int
    def __init__(self, temperature: _Optional[float] = ..., seed: _Optional[int] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("tokens", "max_new_tokens", "sampling", "return_logits", "bypass_store", "samples", "exactness", "trace")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    RETURN_LOGITS_FIELD_NUMBER: _ClassVar[int]
    BYPASS_STORE_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    EXACTNESS_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    max_new_tokens: int
    sampling: Sampling
    return_logits: bool
    bypass_store: bool
    samples: int
    exactness: _cache_pb2.Exactness
    trace: bool
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., max_new_tokens: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., return_logits: bool = ..., bypass_store: bool = ..., samples: _Optional[int] = ..., exactness: _Optional[_Union[_cache_pb2.Exactness, str]] = ..., trace: bool = ...) -> None: ...

class DecodeRequest(_message.Message):
    __slots__ = ("request", "ticket", "first_token", "model", "sample")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    request: GenerateRequest
    ticket: bytes
    first_token: int
    model: bytes
    sample: int
    def __init__(self, request: _Optional[_Union[GenerateRequest, _Mapping]] = ..., ticket: _Optional[bytes] = ..., first_token: _Optional[int] = ..., model: _Optional[bytes] = ..., sample: _Optional[int] = ...) -> None: ...

class PrefixReport(_message.Message):
    __slots__ = ("prompt_tokens", "restored_tokens", "replayed_tokens", "computed_tokens", "state_source", "exactness", "bytes_ssd", "bytes_memory", "lookup_seconds", "fetch_seconds", "replay_seconds", "expected_seconds", "replay_layer_tokens", "miss_reason", "handoff", "waited_seconds")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESTORED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STATE_SOURCE_FIELD_NUMBER: _ClassVar[int]
    EXACTNESS_FIELD_NUMBER: _ClassVar[int]
    BYTES_SSD_FIELD_NUMBER: _ClassVar[int]
    BYTES_MEMORY_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FETCH_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REPLAY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REPLAY_LAYER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MISS_REASON_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    WAITED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    restored_tokens: int
    replayed_tokens: int
    computed_tokens: int
    state_source: _cache_pb2.StateSource
    exactness: _cache_pb2.Exactness
    bytes_ssd: int
    bytes_memory: int
    lookup_seconds: float
    fetch_seconds: float
    replay_seconds: float
    expected_seconds: float
    replay_layer_tokens: int
    miss_reason: str
    handoff: bool
    waited_seconds: float
    def __init__(self, prompt_tokens: _Optional[int] = ..., restored_tokens: _Optional[int] = ..., replayed_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., state_source: _Optional[_Union[_cache_pb2.StateSource, str]] = ..., exactness: _Optional[_Union[_cache_pb2.Exactness, str]] = ..., bytes_ssd: _Optional[int] = ..., bytes_memory: _Optional[int] = ..., lookup_seconds: _Optional[float] = ..., fetch_seconds: _Optional[float] = ..., replay_seconds: _Optional[float] = ..., expected_seconds: _Optional[float] = ..., replay_layer_tokens: _Optional[int] = ..., miss_reason: _Optional[str] = ..., handoff: bool = ..., waited_seconds: _Optional[float] = ...) -> None: ...

class StoreReport(_message.Message):
    __slots__ = ("blocks_stored", "blocks_held_already", "blocks_failed", "states_stored", "bytes_stored", "failure", "states_failed", "blocks_pending", "rows_stored")
    BLOCKS_STORED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_HELD_ALREADY_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FAILED_FIELD_NUMBER: _ClassVar[int]
    STATES_STORED_FIELD_NUMBER: _ClassVar[int]
    BYTES_STORED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    STATES_FAILED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_PENDING_FIELD_NUMBER: _ClassVar[int]
    ROWS_STORED_FIELD_NUMBER: _ClassVar[int]
    blocks_stored: int
    blocks_held_already: int
    blocks_failed: int
    states_stored: int
    bytes_stored: int
    failure: str
    states_failed: int
    blocks_pending: int
    rows_stored: int
    def __init__(self, blocks_stored: _Optional[int] = ..., blocks_held_already: _Optional[int] = ..., blocks_failed: _Optional[int] = ..., states_stored: _Optional[int] = ..., bytes_stored: _Optional[int] = ..., failure: _Optional[str] = ..., states_failed: _Optional[int] = ..., blocks_pending: _Optional[int] = ..., rows_stored: _Optional[int] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("name", "track", "start_seconds", "seconds", "detail")
    class DetailEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    TRACK_FIELD_NUMBER: _ClassVar[int]
    START_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    name: str
    track: str
    start_seconds: float
    seconds: float
    detail: _containers.ScalarMap[str, str]
    def __init__(self, name: _Optional[str] = ..., track: _Optional[str] = ..., start_seconds: _Optional[float] = ..., seconds: _Optional[float] = ..., detail: _Optional[_Mapping[str, str]] = ...) -> None: ...

class GenerateEvent(_message.Message):
    __slots__ = ("kind", "token", "logits", "at_seconds", "prefix", "stored", "ticket", "model", "sample", "spans")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[GenerateEvent.Kind]
        PREFIX: _ClassVar[GenerateEvent.Kind]
        STORED: _ClassVar[GenerateEvent.Kind]
        FIRST_TOKEN: _ClassVar[GenerateEvent.Kind]
        TOKEN: _ClassVar[GenerateEvent.Kind]
        DONE: _ClassVar[GenerateEvent.Kind]
    KIND_UNSPECIFIED: GenerateEvent.Kind
    PREFIX: GenerateEvent.Kind
    STORED: GenerateEvent.Kind
    FIRST_TOKEN: GenerateEvent.Kind
    TOKEN: GenerateEvent.Kind
    DONE: GenerateEvent.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    LOGITS_FIELD_NUMBER: _ClassVar[int]
    AT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    kind: GenerateEvent.Kind
    token: int
    logits: bytes
    at_seconds: float
    prefix: PrefixReport
    stored: StoreReport
    ticket: bytes
    model: bytes
    sample: int
    spans: _containers.RepeatedCompositeFieldContainer[Span]
    def __init__(self, kind: _Optional[_Union[GenerateEvent.Kind, str]] = ..., token: _Optional[int] = ..., logits: _Optional[bytes] = ..., at_seconds: _Optional[float] = ..., prefix: _Optional[_Union[PrefixReport, _Mapping]] = ..., stored: _Optional[_Union[StoreReport, _Mapping]] = ..., ticket: _Optional[bytes] = ..., model: _Optional[bytes] = ..., sample: _Optional[int] = ..., spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ...) -> None: ...

class DiscardRequest(_message.Message):
    __slots__ = ("ticket",)
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    def __init__(self, ticket: _Optional[bytes] = ...) -> None: ...

class DiscardReply(_message.Message):
    __slots__ = ("was_here",)
    WAS_HERE_FIELD_NUMBER: _ClassVar[int]
    was_here: bool
    def __init__(self, was_here: bool = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerDescription(_message.Message):
    __slots__ = ("role", "profile", "weights_revision", "numerics", "bit_equal", "vocabulary", "requests_running", "namespace", "draining", "costs")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_REVISION_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    BIT_EQUAL_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    role: str
    profile: _cache_pb2.Profile
    weights_revision: str
    numerics: str
    bit_equal: bool
    vocabulary: int
    requests_running: int
    namespace: bytes
    draining: bool
    costs: _cache_pb2.Costs
    def __init__(self, role: _Optional[str] = ..., profile: _Optional[_Union[_cache_pb2.Profile, _Mapping]] = ..., weights_revision: _Optional[str] = ..., numerics: _Optional[str] = ..., bit_equal: bool = ..., vocabulary: _Optional[int] = ..., requests_running: _Optional[int] = ..., namespace: _Optional[bytes] = ..., draining: bool = ..., costs: _Optional[_Union[_cache_pb2.Costs, _Mapping]] = ...) -> None: ...
