"""The services of a worker: thin, from messages to the engine in its lane and back."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

import grpc

from kvstore.clock import Clock
from kvstore.errors import GeometryMismatch, InvalidArgument
from kvstore.prefix.identity import NamespaceIdentity
from kvstore.v1 import cache_pb2, worker_pb2, worker_pb2_grpc
from kvstore_client.messages import to_costs
from kvstore_workers.runtime.answering import refuse
from kvstore_workers.runtime.engine import Engine
from kvstore_workers.runtime.lane import Lane
from kvstore_workers.runtime.peer import TAKEN_METADATA
from kvstore_workers.runtime.room import Room
from kvstore_workers.runtime.stop import Stop, Stopped
from kvstore_workers.runtime.store import PrefixStore
from kvstore_workers.runtime.values import Computed, Done, Event
from kvstore_workers.runtime.wire import from_request, to_event

Work = Callable[[Stop], Generator[Event, None, None]]


@dataclass(frozen=True, slots=True)
class Desk:
    """Where requests are taken: the room that limits them, the lane that runs them, the clock that times them."""

    room: Room
    lane: Lane
    clock: Clock


def model_digest(engine: Engine) -> bytes:
    """What two workers must have in common for one to go on from the other's tokens."""
    model = engine.model
    return NamespaceIdentity(model.profile, weights_revision=model.weights_revision, numerics="").digest()


class PrefillServicer(worker_pb2_grpc.PrefillServicer):
    def __init__(self, engine: Engine, desk: Desk) -> None:
        self._engine, self._desk = engine, desk
        self._model = model_digest(engine)

    def Run(  # noqa: N802 -- gRPC's name
        self, request: worker_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[worker_pb2.GenerateEvent]:
        def work() -> Work:
            job = from_request(request)
            self._engine.check(job)
            return lambda stop: self._engine.prefill(job, stop=stop)

        called = Called(context, "Prefill.Run", self._model)
        return stream(work, self._desk, called, store=self._engine.store)


class DecodeServicer(worker_pb2_grpc.DecodeServicer):
    def __init__(self, engine: Engine, desk: Desk) -> None:
        self._engine, self._desk = engine, desk
        self._model = model_digest(engine)

    def Run(  # noqa: N802 -- gRPC's name
        self, request: worker_pb2.DecodeRequest, context: grpc.ServicerContext
    ) -> Iterator[worker_pb2.GenerateEvent]:
        def work() -> Work:
            if not request.HasField("request"):
                raise InvalidArgument(
                    "nothing to decode", field="request", value="none", allowed="a GenerateRequest"
                )
            if request.model not in (b"", self._model):
                raise GeometryMismatch(
                    "the first token is from a worker with another model",
                    field="model",
                    value=request.model,
                    allowed=self._model.hex(),
                )
            job = from_request(request.request, sample=request.sample)
            first = request.first_token if request.HasField("first_token") else None
            self._engine.check(job, ticket=request.ticket, first_token=first)
            return lambda stop: self._engine.decode(job, stop=stop, ticket=request.ticket, first_token=first)

        called = Called(context, "Decode.Run", self._model)
        return stream(work, self._desk, called, store=self._engine.store)


@dataclass(frozen=True, slots=True)
class Identity:
    """What a worker says of itself; `bit_equal` False: its self-check failed, and it promises no equal bits."""

    role: str
    numerics: str
    bit_equal: bool


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    def __init__(self, identity: Identity, engine: Engine, room: Room) -> None:
        self._identity, self._engine, self._room = identity, engine, room

    def Discard(  # noqa: N802 -- gRPC's name
        self, request: worker_pb2.DiscardRequest, context: grpc.ServicerContext
    ) -> worker_pb2.DiscardReply:
        store = self._engine.store
        return worker_pb2.DiscardReply(was_here=store is not None and store.drop(request.ticket))

    def Describe(  # noqa: N802 -- gRPC's name
        self, request: worker_pb2.DescribeRequest, context: grpc.ServicerContext
    ) -> worker_pb2.WorkerDescription:
        model = self._engine.model
        return worker_pb2.WorkerDescription(
            role=self._identity.role,
            profile=cache_pb2.Profile(name=model.profile.name, geometry=model.profile.geometry()),
            weights_revision=model.weights_revision,
            numerics=self._identity.numerics,
            bit_equal=self._identity.bit_equal,
            vocabulary=model.config.vocab_size,
            requests_running=self._room.inside,
            draining=self._room.draining,
            namespace=self._engine.namespace,
            costs=to_costs(None if self._engine.store is None else self._engine.store.rates.costs()),
        )


@dataclass(frozen=True, slots=True)
class Called:
    """The call that is answered, and the model that answers it."""

    context: grpc.ServicerContext
    method: str
    model: bytes


def stream(
    make: Callable[[], Work], desk: Desk, called: Called, *, store: PrefixStore | None
) -> Iterator[worker_pb2.GenerateEvent]:
    """Run what `make` gives in the lane and yield its events; `make` raises what is wrong with the request. A handoff that
    its caller has not waited for is dropped from `store`."""
    clock, context = desk.clock, called.context
    began = clock.monotonic()
    try:
        work = make()
        with desk.room:
            events = desk.lane.run(work)
            if not context.add_callback(events.cancel):
                # The call ended before anyone could be told.
                events.cancel()
                raise Stopped
            try:
                context.send_initial_metadata(((TAKEN_METADATA, "1"),))
            except grpc.RpcError as error:
                # gRPC says so, without a code, when the call has ended meanwhile.
                raise Stopped from error
            for event in events:
                # Here and not in the lane, where the next request computes while this one waits for the store.
                last = event.done() if isinstance(event, Computed) else event
                was_sent = False
                try:
                    yield to_event(last, at_seconds=clock.monotonic() - began, model=called.model)
                    was_sent = True
                finally:
                    # gRPC asks for no more events of a call that has ended.
                    if not was_sent and isinstance(last, Done) and last.ticket and store is not None:
                        store.drop(last.ticket)
    except Exception as error:  # noqa: BLE001 -- becomes a status, and is logged where it is unexpected
        refuse(context, error, method=called.method)
