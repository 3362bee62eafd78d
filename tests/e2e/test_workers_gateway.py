"""A gateway in front of workers that go away in the middle of a request and are there again when asked again."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import pytest

from kvstore.clock import SystemClock
from kvstore.profile.registry import get_profile
from kvstore.v1 import worker_pb2 as pb
from kvstore.v1 import worker_pb2_grpc
from kvstore_workers.model.config import ModelConfig
from kvstore_workers.model.model import Model
from kvstore_workers.runtime.address import open_channel
from kvstore_workers.runtime.engine import Engine
from kvstore_workers.runtime.gateway import GatewayServicer
from kvstore_workers.runtime.lane import Lane
from kvstore_workers.runtime.room import Room
from kvstore_workers.runtime.server import Server
from kvstore_workers.runtime.servicers import DecodeServicer, Desk, PrefillServicer
from tests.support.workers import cold, tiny_model, tokens_of

SECONDS = 60.0
Event = pb.GenerateEvent
NEW = 6


class Breaks:
    """Ends the first calls with a status, each after a number of events; later calls run through."""

    def __init__(self) -> None:
        self.after: list[tuple[int, grpc.StatusCode]] = []
        self.calls: list[pb.DecodeRequest | pb.GenerateRequest] = []

    def watch(
        self,
        request: pb.DecodeRequest | pb.GenerateRequest,
        events: Iterator[Event],
        context: grpc.ServicerContext,
    ) -> Iterator[Event]:
        self.calls.append(request)
        left, code = self.after.pop(0) if self.after else (1 << 30, grpc.StatusCode.OK)
        for event in events:
            if left == 0:
                context.abort(code, "broken by the test")
            left -= 1
            yield event


class BreakingPrefill(PrefillServicer):
    def __init__(self, engine: Engine, desk: Desk, breaks: Breaks) -> None:
        super().__init__(engine, desk)
        self._breaks = breaks

    def Run(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[Event]:  # noqa: N802 -- gRPC's name
        return self._breaks.watch(request, super().Run(request, context), context)


class BreakingDecode(DecodeServicer):
    def __init__(self, engine: Engine, desk: Desk, breaks: Breaks) -> None:
        super().__init__(engine, desk)
        self._breaks = breaks
        self.lie = 0

    def Run(self, request: pb.DecodeRequest, context: grpc.ServicerContext) -> Iterator[Event]:  # noqa: N802 -- gRPC's name
        for event in self._breaks.watch(request, super().Run(request, context), context):
            if event.kind == Event.TOKEN and len(self._breaks.calls) > 1:
                event.token += self.lie
            yield event


class Setup:
    """Both workers and the gateway in this process, on sockets in `folder`; one engine without a store behind both."""

    def __init__(self, folder: Path, stack: ExitStack, *, decode_model: Model | None = None) -> None:
        engine = Engine(tiny_model(), store=None, writer=None, clock=SystemClock())
        decode_engine = Engine(decode_model or tiny_model(), store=None, writer=None, clock=SystemClock())
        lane = Lane()
        stack.callback(lane.close)
        desk = Desk(Room(4, what="worker"), lane, SystemClock())
        self.prefill_breaks, self.decode_breaks = Breaks(), Breaks()
        self.decode = BreakingDecode(decode_engine, desk, self.decode_breaks)
        prefill_server = Server(folder / "p", requests=4, name="--listen")
        worker_pb2_grpc.add_PrefillServicer_to_server(
            BreakingPrefill(engine, desk, self.prefill_breaks), prefill_server.grpc
        )
        decode_server = Server(folder / "d", requests=4, name="--listen")
        worker_pb2_grpc.add_DecodeServicer_to_server(self.decode, decode_server.grpc)
        gateway_server = Server(folder / "g", requests=4, name="--listen")
        channels = [stack.enter_context(open_channel(folder / name)) for name in ("p", "d")]
        gateway = GatewayServicer(channels[0], channels[1], limit=2, clock=SystemClock())
        worker_pb2_grpc.add_GatewayServicer_to_server(gateway, gateway_server.grpc)
        for server in (prefill_server, decode_server, gateway_server):
            server.start([])
            stack.callback(server.stop, seconds=1.0)
        self.decode_stub = worker_pb2_grpc.DecodeStub(channels[1])
        self.stub = worker_pb2_grpc.GatewayStub(stack.enter_context(open_channel(folder / "g")))

    def ask(self, prompt: list[int]) -> list[Event]:
        return list(
            self.stub.Generate(
                pb.GenerateRequest(tokens=prompt, max_new_tokens=NEW, return_logits=True), timeout=SECONDS
            )
        )


@pytest.fixture
def setup() -> Iterator[Setup]:
    with TemporaryDirectory(prefix="kv-") as folder, ExitStack() as stack:
        yield Setup(Path(folder), stack)


def _assert_whole(events: list[Event], prompt: list[int]) -> None:
    """Each event once and in order, with the tokens and logits of a cold run."""
    steps = [event for event in events if event.kind != Event.STORED]
    assert [event.kind for event in steps] == [
        Event.PREFIX,
        Event.FIRST_TOKEN,
        *[Event.TOKEN] * (NEW - 1),
        Event.DONE,
    ]
    assert ([event.token for event in steps[1:-1]], [event.logits for event in steps[1:-1]]) == cold(
        prompt, NEW
    ).same


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED])
@pytest.mark.parametrize("after", range(4))
def test_a_prefill_worker_that_breaks_off_after_any_event_leaves_the_rest_to_the_decode_worker(
    setup: Setup, after: int, code: grpc.StatusCode
) -> None:
    prompt = tokens_of(200, seed=61)
    setup.prefill_breaks.after = [(after, code)]
    _assert_whole(setup.ask(prompt), prompt)
    request = setup.decode_breaks.calls[0]
    assert isinstance(request, pb.DecodeRequest)
    # PREFIX, then the first token: from then on the decode worker goes on from it.
    assert request.HasField("first_token") == (after >= 2)


@pytest.mark.parametrize("after", range(NEW + 1))
def test_a_decode_worker_that_breaks_off_after_any_event_is_asked_again_and_no_token_comes_twice(
    setup: Setup, after: int
) -> None:
    prompt = tokens_of(200, seed=62)
    setup.decode_breaks.after = [(after, grpc.StatusCode.UNAVAILABLE)]
    _assert_whole(setup.ask(prompt), prompt)
    # When only DONE was missing there is nothing left to ask for.
    assert len(setup.decode_breaks.calls) == (1 if after == NEW else 2)
    assert all(
        isinstance(call, pb.DecodeRequest) and call.ticket == b"" for call in setup.decode_breaks.calls[1:]
    )


@pytest.mark.parametrize("after", range(NEW + 2))
def test_both_workers_may_break_off(setup: Setup, after: int) -> None:
    prompt = tokens_of(200, seed=63)
    setup.prefill_breaks.after = [(0, grpc.StatusCode.UNAVAILABLE)]
    setup.decode_breaks.after = [(after, grpc.StatusCode.UNAVAILABLE)]
    _assert_whole(setup.ask(prompt), prompt)


def test_a_decode_worker_that_breaks_off_twice_is_a_refusal_by_name(setup: Setup) -> None:
    setup.decode_breaks.after = [(1, grpc.StatusCode.UNAVAILABLE)] * 2
    with pytest.raises(grpc.RpcError, match="the decode worker could not be reached, 2 times") as refused:
        setup.ask(tokens_of(100, seed=64))
    assert isinstance(refused.value, grpc.Call)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    "code", [grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INTERNAL, grpc.StatusCode.INVALID_ARGUMENT]
)
@pytest.mark.parametrize("worker", ["prefill", "decode"])
def test_what_a_worker_refuses_by_name_is_passed_on_and_not_asked_again(
    setup: Setup, code: grpc.StatusCode, worker: str
) -> None:
    breaks = setup.prefill_breaks if worker == "prefill" else setup.decode_breaks
    breaks.after = [(0, code)]
    with pytest.raises(grpc.RpcError, match="broken by the test") as refused:
        setup.ask(tokens_of(100, seed=65))
    assert isinstance(refused.value, grpc.Call)
    assert refused.value.code() is code
    assert len(breaks.calls) == 1


def test_a_second_decode_worker_that_computes_other_tokens_is_found_out(setup: Setup) -> None:
    setup.decode_breaks.after = [(4, grpc.StatusCode.UNAVAILABLE)]
    setup.decode.lie = 1
    with pytest.raises(grpc.RpcError, match="was sent as") as refused:
        setup.ask(tokens_of(100, seed=66))
    assert isinstance(refused.value, grpc.Call)
    assert refused.value.code() is grpc.StatusCode.ABORTED


@pytest.fixture
def mixed() -> Iterator[Setup]:
    """A decode worker with other weights than the prefill worker's."""
    other = Model.random(ModelConfig.for_profile(get_profile("tiny")), seed=12)
    with TemporaryDirectory(prefix="kv-") as folder, ExitStack() as stack:
        yield Setup(Path(folder), stack, decode_model=other)


def test_workers_with_different_models_give_no_answer_together(mixed: Setup) -> None:
    with pytest.raises(grpc.RpcError, match="another model") as refused:
        mixed.ask(tokens_of(100, seed=69))
    assert isinstance(refused.value, grpc.Call)
    assert ("kvstore-error", "GEOMETRY_MISMATCH") in [
        tuple(entry) for entry in refused.value.trailing_metadata()
    ]


def test_a_decode_worker_answers_alone_where_a_prefill_worker_with_another_model_gave_no_token(
    mixed: Setup,
) -> None:
    prompt = tokens_of(100, seed=69)
    mixed.prefill_breaks.after = [(1, grpc.StatusCode.UNAVAILABLE)]
    tokens = [event.token for event in mixed.ask(prompt) if event.logits]
    request = pb.GenerateRequest(tokens=prompt, max_new_tokens=NEW, return_logits=True)
    alone = mixed.decode_stub.Run(pb.DecodeRequest(request=request), timeout=SECONDS)
    assert tokens == [event.token for event in alone if event.logits]
    assert tokens != cold(prompt, NEW).tokens


def test_requests_past_the_gateway_s_limit_are_refused_by_name(setup: Setup) -> None:
    request = pb.GenerateRequest(tokens=tokens_of(40, seed=67), max_new_tokens=20_000)
    calls = [setup.stub.Generate(request, timeout=SECONDS) for _ in range(3)]
    # One of three runs, one waits in the workers' lane, and one has an end.
    ended: queue.Queue[grpc.Future] = queue.Queue()
    for call in calls:
        call.add_done_callback(ended.put)
    first = ended.get(timeout=SECONDS)
    for call in calls:
        call.cancel()
    assert first.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "this gateway is busy; requests_running=2; allowed: at most 2" in first.details()


def test_requests_past_a_worker_s_limit_are_refused_by_name(setup: Setup) -> None:
    request = pb.DecodeRequest(
        request=pb.GenerateRequest(tokens=tokens_of(40, seed=68), max_new_tokens=20_000)
    )
    calls = [setup.decode_stub.Run(request, timeout=SECONDS) for _ in range(5)]
    # One of five runs, three wait, and one has an end.
    ended: queue.Queue[grpc.Future] = queue.Queue()
    for call in calls:
        call.add_done_callback(ended.put)
    first = ended.get(timeout=SECONDS)
    for call in calls:
        call.cancel()
    assert first.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "this worker is busy; requests_running=4; allowed: at most 4" in first.details()
