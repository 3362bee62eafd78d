"""A gateway in front of workers that go away in the middle of a request and are there again when asked again."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import grpc
import pytest

from kvstore.profile.registry import get_profile
from kvstore.v1 import worker_pb2 as pb
from kvstore_workers.model.config import ModelConfig
from kvstore_workers.model.model import Model
from tests.support.gateway import SECONDS, Bench, Event, Worker, bench
from tests.support.workers import cold, tokens_of

NEW = 6


class Setup:
    """One worker of each role and a gateway for two requests."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.prefill: Worker = bench.workers["p0"]
        self.decode: Worker = bench.workers["d0"]
        self.stub = bench.stub

    def ask(self, prompt: list[int]) -> list[Event]:
        return self.bench.ask(prompt, NEW)


@pytest.fixture
def setup() -> Iterator[Setup]:
    with bench(requests=2) as inside:
        yield Setup(inside)
        inside.wait_until_idle()


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
    setup.prefill.after = [(after, code)]
    _assert_whole(setup.ask(prompt), prompt)
    request = setup.decode.calls[0]
    assert isinstance(request, pb.DecodeRequest)
    # PREFIX, then the first token: from then on the decode worker goes on from it.
    assert request.HasField("first_token") == (after >= 2)


@pytest.mark.parametrize("after", range(NEW + 1))
def test_a_decode_worker_that_breaks_off_after_any_event_is_asked_again_and_no_token_comes_twice(
    setup: Setup, after: int
) -> None:
    prompt = tokens_of(200, seed=62)
    setup.decode.after = [(after, grpc.StatusCode.UNAVAILABLE)]
    _assert_whole(setup.ask(prompt), prompt)
    # When only DONE was missing there is nothing left to ask for.
    assert len(setup.decode.calls) == (1 if after == NEW else 2)
    assert all(isinstance(call, pb.DecodeRequest) and call.ticket == b"" for call in setup.decode.calls[1:])


@pytest.mark.parametrize("after", range(NEW + 2))
def test_both_workers_may_break_off(setup: Setup, after: int) -> None:
    prompt = tokens_of(200, seed=63)
    setup.prefill.after = [(0, grpc.StatusCode.UNAVAILABLE)]
    setup.decode.after = [(after, grpc.StatusCode.UNAVAILABLE)]
    _assert_whole(setup.ask(prompt), prompt)


def test_a_decode_worker_that_breaks_off_twice_is_a_refusal_by_name(setup: Setup) -> None:
    setup.decode.after = [(1, grpc.StatusCode.UNAVAILABLE)] * 2
    with pytest.raises(
        grpc.RpcError, match=r"no decode worker could do it; tried unix:\S+/d0 went away"
    ) as refused:
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
    asked = setup.prefill if worker == "prefill" else setup.decode
    asked.after = [(0, code)]
    with pytest.raises(grpc.RpcError, match="broken by the test") as refused:
        setup.ask(tokens_of(100, seed=65))
    assert isinstance(refused.value, grpc.Call)
    assert refused.value.code() is code
    assert len(asked.calls) == 1


def test_a_second_decode_worker_that_computes_other_tokens_is_found_out(setup: Setup) -> None:
    setup.decode.after = [(4, grpc.StatusCode.UNAVAILABLE)]
    setup.decode.lie = 1
    with pytest.raises(grpc.RpcError, match="was sent as") as refused:
        setup.ask(tokens_of(100, seed=66))
    assert isinstance(refused.value, grpc.Call)
    assert refused.value.code() is grpc.StatusCode.ABORTED


@pytest.fixture
def mixed() -> Iterator[Setup]:
    """A decode worker with other weights than the prefill worker's."""
    other = Model.random(ModelConfig.for_profile(get_profile("tiny")), seed=12)
    with bench(requests=2, models={"d0": other}) as inside:
        yield Setup(inside)
        inside.wait_until_idle()


def test_workers_with_different_models_give_no_answer_together(mixed: Setup) -> None:
    with pytest.raises(
        grpc.RpcError,
        match=r"workers have different models; decode worker unix:.* with weights .* as the prefill worker unix",
    ) as refused:
        mixed.ask(tokens_of(100, seed=69))
    assert isinstance(refused.value, grpc.Call)
    assert ("kvstore-error", "GEOMETRY_MISMATCH") in [
        tuple(entry) for entry in refused.value.trailing_metadata()
    ]


def test_a_decode_worker_answers_alone_where_a_prefill_worker_with_another_model_gave_no_token(
    mixed: Setup,
) -> None:
    prompt = tokens_of(100, seed=69)
    mixed.prefill.after = [(1, grpc.StatusCode.UNAVAILABLE)]
    tokens = [event.token for event in mixed.ask(prompt) if event.logits]
    request = pb.GenerateRequest(tokens=prompt, max_new_tokens=NEW, return_logits=True)
    alone = mixed.bench.stub_of("d0").Run(pb.DecodeRequest(request=request), timeout=SECONDS)
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
    stub = setup.bench.stub_of("d0")
    calls = [stub.Run(request, timeout=SECONDS) for _ in range(5)]
    # One of five runs, three wait, and one has an end.
    ended: queue.Queue[grpc.Future] = queue.Queue()
    for call in calls:
        call.add_done_callback(ended.put)
    first = ended.get(timeout=SECONDS)
    for call in calls:
        call.cancel()
    assert first.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "this worker is busy; requests_running=4; allowed: at most 4" in first.details()
