"""Between the wire's messages and an engine's values."""

from __future__ import annotations

from array import array

from kvstore.errors import InvalidArgument
from kvstore.types import Exactness, StateSource
from kvstore.v1 import cache_pb2
from kvstore.v1 import worker_pb2 as pb
from kvstore_workers.runtime.values import (
    Done,
    Picked,
    Prefixed,
    PrefixReport,
    Request,
    Span,
    Stored,
    StoreReport,
)

_EXACTNESS: dict[int, Exactness | None] = {
    cache_pb2.EXACTNESS_UNSPECIFIED: None,
    cache_pb2.EXACT: Exactness.EXACT,
    cache_pb2.BOUNDED: Exactness.BOUNDED,
}


def from_request(message: pb.GenerateRequest, *, sample: int = 0) -> Request:
    """The request that `message` asks for; `sample`: which of its samples a decode worker makes. InvalidArgument for an
    exactness that has no name; all else is for `check_request`."""
    if message.exactness not in _EXACTNESS:
        raise InvalidArgument(
            "unknown exactness",
            field="exactness",
            value=message.exactness,
            allowed="unspecified, EXACT, BOUNDED",
        )
    sampling = message.sampling
    return Request(
        tokens=array("I", message.tokens),
        max_new_tokens=message.max_new_tokens,
        temperature=sampling.temperature,
        seed=sampling.seed if sampling.HasField("seed") else None,
        return_logits=message.return_logits,
        bypass_store=message.bypass_store,
        samples=message.samples or 1,
        sample=sample,
        exactness=_EXACTNESS[message.exactness],
        trace=message.trace,
    )


def to_event(
    event: Prefixed | Stored | Picked | Done, *, at_seconds: float, model: bytes = b""
) -> pb.GenerateEvent:
    kinds = pb.GenerateEvent
    if isinstance(event, Prefixed):
        return pb.GenerateEvent(
            kind=kinds.PREFIX,
            at_seconds=at_seconds,
            prefix=to_prefix(event.report),
            model=model,
            spans=[to_span(span) for span in event.spans],
        )
    if isinstance(event, Stored):
        return pb.GenerateEvent(kind=kinds.STORED, at_seconds=at_seconds, stored=to_stored(event.report))
    if isinstance(event, Picked):
        kind = kinds.FIRST_TOKEN if event.first else kinds.TOKEN
        return pb.GenerateEvent(
            kind=kind, at_seconds=at_seconds, token=event.token, logits=event.logits, sample=event.sample
        )
    assert isinstance(event, Done)
    return pb.GenerateEvent(
        kind=kinds.DONE,
        at_seconds=at_seconds,
        stored=to_stored(event.report),
        ticket=event.ticket,
        spans=[to_span(span) for span in event.spans],
    )


def to_span(span: Span) -> pb.Span:
    return pb.Span(
        name=span.name,
        track=span.track,
        start_seconds=span.start_seconds,
        seconds=span.seconds,
        detail=dict(span.detail),
    )


def to_prefix(report: PrefixReport) -> pb.PrefixReport:
    return pb.PrefixReport(
        prompt_tokens=report.prompt_tokens,
        restored_tokens=report.restored_tokens,
        replayed_tokens=report.replayed_tokens,
        computed_tokens=report.computed_tokens,
        state_source=_to_source(report.state_source),
        exactness=report.exactness.value,
        bytes_ssd=report.bytes_ssd,
        bytes_memory=report.bytes_memory,
        lookup_seconds=report.lookup_seconds,
        fetch_seconds=report.fetch_seconds,
        replay_seconds=report.replay_seconds,
        expected_seconds=report.expected_seconds,
        replay_layer_tokens=report.replay_layer_tokens,
        miss_reason=report.miss_reason,
        handoff=report.handoff,
        waited_seconds=report.waited_seconds,
    )


def to_stored(report: StoreReport) -> pb.StoreReport:
    return pb.StoreReport(
        blocks_stored=report.blocks_stored,
        blocks_held_already=report.blocks_held_already,
        blocks_failed=report.blocks_failed,
        blocks_pending=report.blocks_pending,
        states_stored=report.states_stored,
        states_failed=report.states_failed,
        rows_stored=report.rows_stored,
        bytes_stored=report.bytes_stored,
        failure=report.failure,
    )


def from_stored(message: pb.StoreReport) -> StoreReport:
    return StoreReport(
        blocks_stored=message.blocks_stored,
        blocks_held_already=message.blocks_held_already,
        blocks_failed=message.blocks_failed,
        blocks_pending=message.blocks_pending,
        states_stored=message.states_stored,
        states_failed=message.states_failed,
        rows_stored=message.rows_stored,
        bytes_stored=message.bytes_stored,
        failure=message.failure,
    )


def _to_source(source: StateSource | None) -> str:
    return "STATE_SOURCE_UNSPECIFIED" if source is None else source.value
