"""One prompt through a prefill worker and decode workers, as one stream of events; workers that fail are replaced."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import grpc

from kvstore.clock import Clock
from kvstore.errors import ConfigError, GeometryMismatch, Unavailable
from kvstore.service.status import ERROR_METADATA, MAX_MESSAGE_CHARS
from kvstore.v1 import worker_pb2 as pb
from kvstore.v1 import worker_pb2_grpc
from kvstore_workers.runtime.answering import refuse
from kvstore_workers.runtime.caller import Caller
from kvstore_workers.runtime.dispatch import Errand, Member, Pool
from kvstore_workers.runtime.lane import EventStream
from kvstore_workers.runtime.peer import Described, Ending, Peer, WorkerAway, error_name
from kvstore_workers.runtime.pool import edges
from kvstore_workers.runtime.relay import Leg, Relay, TokensDiffer
from kvstore_workers.runtime.room import Room
from kvstore_workers.runtime.values import Request, Span, check_request
from kvstore_workers.runtime.wire import from_request, to_span

log = logging.getLogger(__name__)

TRIES = 2
"""Workers that may be lost in the middle of a request, of each role: a request that ends its workers ends no more."""

AWAY_SECONDS = 5.0
"""How long a request waits for a decode worker to come back when all of them are away. For a prefill worker it does not
wait: a decode worker can do all of it."""

TRACK = "gateway"

_Event = pb.GenerateEvent
_Events = Generator[tuple[Leg, _Event], None, None]


class GatewayServicer(worker_pb2_grpc.GatewayServicer):
    """In front of two pools of workers. `room` limits the requests inside, those that wait included."""

    def __init__(
        self, prefill: Pool, decode: Pool, *, room: Room, clock: Clock, away_seconds: float = AWAY_SECONDS
    ) -> None:
        self._prefill = prefill
        self._decode = decode
        self._clock = clock
        self._room = room
        self._away_seconds = away_seconds

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[_Event]:  # noqa: N802 -- gRPC's name
        try:
            job = from_request(request)
            check_request(job, vocabulary=None)
            with self._room:
                yield from Generation(
                    job,
                    request,
                    Caller(context, self._clock),
                    prefill=self._prefill,
                    decode=self._decode,
                    clock=self._clock,
                    away_seconds=self._away_seconds,
                ).events()
        except grpc.RpcError as error:
            _pass_on(context, error)
        except TokensDiffer as error:
            context.abort(grpc.StatusCode.ABORTED, str(error))
        except Exception as error:  # noqa: BLE001 -- becomes a status, and is logged where it is unexpected
            refuse(context, error, method="Gateway.Generate")


class Generation:
    """One request on its way through the workers."""

    def __init__(
        self,
        job: Request,
        request: pb.GenerateRequest,
        caller: Caller,
        *,
        prefill: Pool,
        decode: Pool,
        clock: Clock,
        away_seconds: float,
    ) -> None:
        self._job = job
        self._request = request
        self._caller = caller
        self._prefill_pool = prefill
        self._decode_pool = decode
        self._clock = clock
        self._away_seconds = away_seconds
        self._relay = Relay(clock, samples=job.samples, new_tokens=job.max_new_tokens)
        self._choosing = threading.Lock()
        self._model: tuple[Peer, Described] | None = None
        # The prefill worker whose handoff decode workers are to take.
        self._left_by: Peer | None = None
        self._lost = False

    def events(self) -> Iterator[_Event]:
        """All that the caller gets."""
        is_whole = False
        try:
            # Without a store there is no handoff, and two workers would compute the same prompt.
            if not self._job.bypass_store:
                yield from self._passed(self._prefill())
            lacking = self._relay.lacking
            if len(lacking) == 1:
                yield from self._passed(self._decode(lacking[0], is_first=True))
            elif lacking:
                yield from self._decode_each(lacking)
            is_whole = True
            yield self._relay.done()
        finally:
            # Where a worker was lost, the one that replaced it may have come by a lookup and left the handoff.
            if (self._lost or not is_whole) and self._relay.ticket and self._left_by is not None:
                self._left_by.discard(self._relay.ticket)

    # ---- steps -------------------------------------------------------------------------------------------------

    def _prefill(self) -> _Events:
        """A prefill worker's events, as far as any comes; the rest is left to decode workers."""
        pool = self._prefill_pool
        errand = pool.errand(is_new=True, patience=0.0, prefixes=edges(self._job.tokens))
        try:
            yield from self._ask(
                pool,
                errand,
                lambda: (self._relay.prefill(), self._request),
                lambda: bool(self._relay.lacking),
            )
        except Unavailable as error:
            log.info("decode workers do what is left: %s", error)

    def _decode(self, sample: int, *, is_first: bool) -> _Events:
        """A decode worker's events for one sample. `is_first`: of this request's, which may be its first work at all."""
        pool, relay = self._decode_pool, self._relay

        def begin() -> tuple[Leg, pb.DecodeRequest]:
            asked = pb.DecodeRequest(request=self._request, sample=sample)
            leg = relay.decode(sample)
            if leg.has_first:
                asked.first_token = relay.tokens_of(sample)[0]
                asked.model = relay.model
                # Also the second time: the take of a worker that died goes back, and where it does not, a lookup does.
                asked.ticket = relay.ticket
            return leg, asked

        is_new = is_first and not relay.has_tokens
        errand = pool.errand(is_new=is_new, patience=self._away_seconds)
        yield from self._ask(pool, errand, begin, lambda: relay.lacks(sample), sample=sample)

    def _decode_each(self, samples: list[int]) -> Iterator[_Event]:
        """All the samples at once, each by a worker of its own choice, their events as they come."""
        stream: EventStream[_Event] = EventStream()
        # An event is taken and put in one step: otherwise another sample's token might overtake PREFIX.
        order = threading.Lock()
        running = set(samples)

        def work(sample: int) -> None:
            error: BaseException | None = None
            try:
                with closing(self._decode(sample, is_first=sample == samples[0])) as events:
                    for leg, event in events:
                        with order:
                            passed = self._relay.take(leg, event)
                            if passed is not None:
                                stream.put(passed)
            except BaseException as raised:  # noqa: BLE001 -- handed to the reader, who raises it
                error = raised
            with order:
                running.discard(sample)
                if error is not None or not running:
                    stream.end(error)

        threads = ThreadPoolExecutor(
            min(len(samples), self._decode_pool.capacity), thread_name_prefix="sample"
        )
        try:
            with self._caller.waking(stream.cancel):
                for sample in samples:
                    threads.submit(work, sample)
                yield from stream
        finally:
            # No sample goes on when one has failed; when all have ended this ends nothing.
            stream.cancel()
            self._caller.leave()
            threads.shutdown(wait=True, cancel_futures=True)

    def _ask(
        self,
        pool: Pool,
        errand: Errand,
        begin: Callable[[], tuple[Leg, pb.GenerateRequest | pb.DecodeRequest]],
        is_wanted: Callable[[], bool],
        *,
        sample: int | None = None,
    ) -> _Events:
        """One worker's events, and those of the one that replaces it; UNAVAILABLE where none does it to the end.

        `begin` makes what a worker is asked, from what the caller has by then; nobody is asked when that is all.
        """
        lost = 0
        while is_wanted():
            waited = self._begin_span()
            with pool.worker(errand, self._caller) as member:
                waited(f"wait for a {pool.role} worker", member.peer, sample)
                worked = self._begin_span()
                try:
                    if pool is self._prefill_pool:
                        self._left_by = member.peer
                    yield from self._ask_one(pool, member, begin)
                    return
                except WorkerAway as away:
                    pool.away(errand, member, away)
                    lost += away.ending is Ending.LOST
                    self._lost |= away.ending is Ending.LOST
                except ConfigError as error:
                    pool.away(errand, member, WorkerAway(Ending.WRONG, str(error)))
                    raise
                finally:
                    worked(pool.role, member.peer, sample)
            if not self._relay.has_tokens:
                self._model = None
            if lost == TRIES:
                raise pool.unreachable(errand)

    def _ask_one(
        self,
        pool: Pool,
        member: Member,
        begin: Callable[[], tuple[Leg, pb.GenerateRequest | pb.DecodeRequest]],
    ) -> _Events:
        self._check_model(member.peer)
        leg, message = begin()
        is_well = False
        with closing(member.peer.events(message, self._caller)) as events:
            for event in events:
                if not is_well:
                    is_well = True
                    pool.well(member)
                yield leg, event

    # ---- small things ------------------------------------------------------------------------------------------

    def _passed(self, events: _Events) -> Iterator[_Event]:
        with closing(events):
            for leg, event in events:
                passed = self._relay.take(leg, event)
                if passed is not None:
                    yield passed

    def _check_model(self, peer: Peer) -> None:
        """GEOMETRY_MISMATCH unless `peer` has the model of the worker that this request had before."""
        described = peer.described(self._caller)
        with self._choosing:
            if self._model is None:
                self._model = peer, described
            first, expected = self._model
        if described.model != expected.model:
            raise GeometryMismatch(
                "workers have different models",
                field=str(peer),
                value=described.name,
                allowed=f"{expected.name}, as the {first} has",
            )

    def _begin_span(self) -> Callable[[str, Peer, int | None], None]:
        """A span that begins now; what is returned ends it."""
        wall, began = self._clock.wall(), self._clock.monotonic()

        def end(name: str, peer: Peer, sample: int | None) -> None:
            if not self._job.trace:
                return
            # Samples run beside each other, so each has its own line.
            track = TRACK if sample is None or self._job.samples == 1 else f"{TRACK}: sample {sample}"
            seconds = self._clock.monotonic() - began
            self._relay.add_span(to_span(Span(name, track, wall, seconds, (("worker", peer.address),))))

        return end


def _pass_on(context: grpc.ServicerContext, error: grpc.RpcError) -> None:
    """A worker's refusal is ours, under the same name."""
    assert isinstance(error, grpc.Call), "every RpcError of a call is also a Call"
    name = error_name(error)
    if name is not None:
        context.set_trailing_metadata(((ERROR_METADATA, name),))
    context.abort(error.code(), (error.details() or "no details")[:MAX_MESSAGE_CHARS])
