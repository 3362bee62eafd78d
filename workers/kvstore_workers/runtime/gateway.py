"""One prompt through a prefill worker and a decode worker, as one stream of events in which no token comes twice."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

import grpc

from kvstore.clock import Clock
from kvstore.errors import Unavailable
from kvstore.service.status import ERROR_METADATA, MAX_MESSAGE_CHARS
from kvstore.v1 import worker_pb2 as pb
from kvstore.v1 import worker_pb2_grpc
from kvstore_workers.runtime.answering import refuse
from kvstore_workers.runtime.room import Room
from kvstore_workers.runtime.stop import Stopped
from kvstore_workers.runtime.values import StoreReport, check_request
from kvstore_workers.runtime.wire import from_request, from_stored, to_stored

log = logging.getLogger(__name__)

REQUEST_SECONDS = 3600.0
"""How long a request may take where its caller sets no deadline."""

DECODE_TRIES = 2

RECONNECT_SECONDS = 1.0
"""How long a decode worker that went away may take to be there again before it is asked once more."""

_Event = pb.GenerateEvent


class TokensDiffer(Exception):
    """A second decode worker gave another token than the one that was sent already."""


class Relay:
    """What has been sent to one caller, and with it what an event that comes now becomes."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began = clock.monotonic()
        self._has_prefix = False
        self.tokens: list[int] = []
        self._replayed = 0
        self._before = StoreReport()
        self._latest = StoreReport()
        self.ticket = b""
        self.model = b""

    def begin_worker(self) -> None:
        """A further worker's events come from here on: its counts add to those before, its tokens start again."""
        self._before = self._before.plus(self._latest)
        self._latest = StoreReport()
        self._replayed = 0

    def prefill(self, event: _Event) -> _Event | None:
        """What the caller gets of a prefill worker's event; None: nothing."""
        if event.kind == _Event.DONE:
            self.ticket = event.ticket
            self._latest = from_stored(event.stored)
            return self._made(_Event.STORED)
        return self._passed(event)

    def decode(self, event: _Event, *, has_first: bool) -> _Event | None:
        """What the caller gets of a decode worker's event. `has_first`: the worker was given the first token."""
        if event.kind in (_Event.FIRST_TOKEN, _Event.TOKEN):
            place = self._replayed + has_first
            self._replayed += 1
            if place < len(self.tokens):
                if self.tokens[place] != event.token:
                    raise TokensDiffer(
                        f"token {place} was sent as {self.tokens[place]}, and is {event.token} from the second decode worker"
                    )
                return None
        return self._passed(event)

    def done(self) -> _Event:
        return self._made(_Event.DONE)

    def _passed(self, event: _Event) -> _Event | None:
        if event.kind == _Event.PREFIX:
            if not self.tokens:
                # Whoever picks the first token decides which model the others must have.
                self.model = event.model
            if self._has_prefix:
                return None
            self._has_prefix = True
        elif event.kind in (_Event.STORED, _Event.DONE):
            self._latest = from_stored(event.stored)
            return self._made(event.kind)
        else:
            self.tokens.append(event.token)
        passed = _Event()
        passed.CopyFrom(event)
        passed.at_seconds = self._clock.monotonic() - self._began
        return passed

    def _made(self, kind: _Event.Kind) -> _Event:
        at_seconds = self._clock.monotonic() - self._began
        return _Event(kind=kind, at_seconds=at_seconds, stored=to_stored(self._before.plus(self._latest)))


class Caller:
    """The call under way to a worker, ended when our own caller goes."""

    def __init__(self, context: grpc.ServicerContext, clock: Clock) -> None:
        self._clock = clock
        left = context.time_remaining()
        self._deadline = clock.monotonic() + (REQUEST_SECONDS if left is None else min(left, REQUEST_SECONDS))
        self._lock = threading.Lock()
        self._gone = False
        self._call: grpc.Call | None = None
        if not context.add_callback(self._leave):
            self._leave()

    def events(self, open_call: Callable[..., Iterator[_Event]], request: object) -> Iterator[_Event]:
        """The events of `open_call(request)`; raises grpc.RpcError as the call does, Stopped when our caller has gone."""
        with self._lock:
            if self._gone:
                raise Stopped
            call = open_call(request, timeout=max(self._deadline - self._clock.monotonic(), 0.0))
            assert isinstance(call, grpc.Call)
            self._call = call
        try:
            yield from call
        except grpc.RpcError:
            if self._gone:
                raise Stopped from None
            raise
        finally:
            call.cancel()

    def _leave(self) -> None:
        with self._lock:
            self._gone = True
            if self._call is not None:
                self._call.cancel()


class GatewayServicer(worker_pb2_grpc.GatewayServicer):
    """One prefill and one decode worker. At most `limit` requests at once; the next is refused with LIMIT_EXCEEDED."""

    def __init__(self, prefill: grpc.Channel, decode: grpc.Channel, *, limit: int, clock: Clock) -> None:
        self._prefill = worker_pb2_grpc.PrefillStub(prefill)
        self._decode = worker_pb2_grpc.DecodeStub(decode)
        self._decode_channel = decode
        self._clock = clock
        self._room = Room(limit, what="gateway")

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[_Event]:  # noqa: N802 -- gRPC's name
        try:
            check_request(from_request(request), vocabulary=None)
            with self._room:
                yield from self._run(request, Relay(self._clock), Caller(context, self._clock))
        except grpc.RpcError as error:
            _pass_on(context, error)
        except TokensDiffer as error:
            context.abort(grpc.StatusCode.ABORTED, str(error))
        except Exception as error:  # noqa: BLE001 -- becomes a status, and is logged where it is unexpected
            refuse(context, error, method="Gateway.Generate")

    def _run(self, request: pb.GenerateRequest, relay: Relay, caller: Caller) -> Iterator[_Event]:
        # Without a store there is no handoff, and two workers would compute the same prompt.
        if not request.bypass_store:
            yield from self._run_prefill(request, relay, caller)
        for attempt in range(DECODE_TRIES):
            relay.begin_worker()
            if len(relay.tokens) == request.max_new_tokens:
                yield relay.done()
                return
            try:
                yield from self._run_decode(request, relay, caller, use_ticket=attempt == 0)
            except grpc.RpcError as error:
                if not _is_away(error):
                    raise
                if attempt == DECODE_TRIES - 1:
                    raise Unavailable(
                        f"the decode worker could not be reached, {DECODE_TRIES} times: {_words(error)}"
                    ) from error
                log.warning("the decode worker went away, asking again: %s", _words(error))
                _wait_until_there(self._decode_channel)
            else:
                return

    def _run_prefill(self, request: pb.GenerateRequest, relay: Relay, caller: Caller) -> Iterator[_Event]:
        """The prefill worker's events, as far as it comes: one that goes away leaves the rest to the decode worker."""
        try:
            for event in caller.events(self._prefill.Run, request):
                passed = relay.prefill(event)
                if passed is not None:
                    yield passed
        except grpc.RpcError as error:
            if not _is_away(error):
                raise
            log.warning("the prefill worker went away, the decode worker does the rest: %s", _words(error))

    def _run_decode(
        self, request: pb.GenerateRequest, relay: Relay, caller: Caller, *, use_ticket: bool
    ) -> Iterator[_Event]:
        asked = pb.DecodeRequest(request=request)
        has_first = bool(relay.tokens)
        if has_first:
            asked.first_token = relay.tokens[0]
            asked.model = relay.model
            asked.ticket = relay.ticket if use_ticket else b""
        for event in caller.events(self._decode.Run, asked):
            passed = relay.decode(event, has_first=has_first)
            if passed is not None:
                yield passed


def _is_away(error: grpc.RpcError) -> bool:
    """A worker that is not there, is shutting down, or died half-way; what it refuses by name it would refuse again.

    CANCELLED is a worker's too, since a call that our own caller gave up ends as Stopped.
    """
    return isinstance(error, grpc.Call) and error.code() in (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
    )


def _wait_until_there(channel: grpc.Channel) -> None:
    """Return when the channel is connected, or after RECONNECT_SECONDS. A channel that has just failed goes on failing
    for a moment after its worker is back."""
    there = grpc.channel_ready_future(channel)
    try:
        there.result(timeout=RECONNECT_SECONDS)
    except grpc.FutureTimeoutError:
        there.cancel()


def _words(error: grpc.RpcError) -> str:
    assert isinstance(error, grpc.Call), "every RpcError of a call is also a Call"
    return f"{error.code().name}: {error.details()}"[:MAX_MESSAGE_CHARS]


def _pass_on(context: grpc.ServicerContext, error: grpc.RpcError) -> None:
    """A worker's refusal is ours, under the same name."""
    assert isinstance(error, grpc.Call), "every RpcError of a call is also a Call"
    name = next((value for key, value in error.trailing_metadata() or () if key == ERROR_METADATA), None)
    if name is not None:
        context.set_trailing_metadata(((ERROR_METADATA, name),))
    context.abort(error.code(), (error.details() or "no details")[:MAX_MESSAGE_CHARS])
