"""A gateway with several workers of each role: who replaces whom, who waits for whom, and what is refused by name."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from kvstore.profile.registry import get_profile
from kvstore.v1 import worker_pb2 as pb
from kvstore_workers.model.config import ModelConfig
from kvstore_workers.model.model import Model
from kvstore_workers.runtime.dispatch import Limits, Pool
from tests.support.gateway import SECONDS, Bench, Event, bench
from tests.support.workers import cold, tokens_of

NEW = 6
LONG = 20_000
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


@pytest.fixture
def four() -> Iterator[Bench]:
    """Two workers of each role."""
    with bench(prefill=2, decode=2) as inside:
        yield inside
        inside.wait_until_idle()


def _assert_whole(events: list[Event], prompt: list[int]) -> None:
    steps = [event for event in events if event.kind != Event.STORED]
    kinds = [Event.PREFIX, Event.FIRST_TOKEN, *[Event.TOKEN] * (NEW - 1), Event.DONE]
    assert [event.kind for event in steps] == kinds
    tokens = [event.token for event in steps[1:-1]], [event.logits for event in steps[1:-1]]
    assert tokens == cold(prompt, NEW).same


def _refusal(events: Iterator[Event], words: str) -> grpc.Call:
    with pytest.raises(grpc.RpcError, match=words) as refused:
        list(events)
    assert isinstance(refused.value, grpc.Call)
    return refused.value


def _name(error: grpc.Call) -> str:
    return dict(tuple(entry) for entry in error.trailing_metadata())["kvstore-error"]


def _wait_for_line(pool: Pool, count: int) -> None:
    with pool._changed:
        assert pool._changed.wait_for(lambda: len(pool._line) == count, SECONDS)


def _wait_for_calls(pool: Pool, count: int) -> None:
    with pool._changed:
        assert pool._changed.wait_for(
            lambda: sum(member.in_flight for member in pool._members) == count, SECONDS
        )


# ---- replacements -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", range(3))
def test_a_prefill_worker_that_breaks_off_is_replaced_by_the_other_one(four: Bench, after: int) -> None:
    prompt = tokens_of(200, seed=801)
    four.workers["p0"].after = [(after, UNAVAILABLE)]
    _assert_whole(four.ask(prompt, NEW), prompt)
    assert [len(worker.calls) for worker in four.workers.values()][:2] == [1, 1]
    (asked,) = [*four.workers["d0"].calls, *four.workers["d1"].calls]
    assert isinstance(asked, pb.DecodeRequest)
    assert asked.HasField("first_token")


def test_when_both_prefill_workers_break_off_a_decode_worker_does_all(four: Bench) -> None:
    prompt = tokens_of(200, seed=802)
    for name in ("p0", "p1"):
        four.workers[name].after = [(0, UNAVAILABLE)]
    _assert_whole(four.ask(prompt, NEW), prompt)
    (asked,) = [*four.workers["d0"].calls, *four.workers["d1"].calls]
    assert isinstance(asked, pb.DecodeRequest)
    assert not asked.HasField("first_token")


@pytest.mark.parametrize("after", range(NEW))
def test_a_decode_worker_that_breaks_off_is_replaced_by_the_other_one_with_the_same_ticket(
    four: Bench, after: int
) -> None:
    prompt = tokens_of(200, seed=803)
    four.workers["d0"].after = [(after, UNAVAILABLE)]
    _assert_whole(four.ask(prompt, NEW), prompt)
    first, second = four.workers["d0"].calls, four.workers["d1"].calls
    assert first == second


def test_a_request_that_ends_two_decode_workers_ends_no_third(four: Bench) -> None:
    for name in ("d0", "d1"):
        four.workers[name].after = [(0, UNAVAILABLE)] * 2
    error = _refusal(four.call(tokens_of(100, seed=804), NEW), "d1 went away")
    assert (error.code(), _name(error)) == (UNAVAILABLE, "UNAVAILABLE")
    assert "d0 went away" in error.details()
    assert len(four.workers["d0"].calls) + len(four.workers["d1"].calls) == 2


def test_a_worker_that_is_shutting_down_is_no_failure_and_the_next_one_is_asked(four: Bench) -> None:
    prompt = tokens_of(200, seed=805)
    for name in ("p0", "d0"):
        four.workers[name].room.drain()
    four.workers["p1"].after = [(1, UNAVAILABLE)]
    four.workers["d1"].after = [(1, UNAVAILABLE)]
    _assert_whole(four.ask(prompt, NEW), prompt)
    # The one that is left broke off, and was asked again.
    assert len(four.workers["d1"].calls) == 2


def test_when_all_decode_workers_are_shutting_down_the_refusal_says_so(four: Bench) -> None:
    for name in ("d0", "d1"):
        four.workers[name].room.drain()
    error = _refusal(four.call(tokens_of(100, seed=806), NEW), "d0 shutting down: UNAVAILABLE: this worker")
    assert _name(error) == "UNAVAILABLE"
    assert "d1 shutting down" in error.details()


def test_a_worker_that_others_keep_busy_is_passed_over(four: Bench) -> None:
    prompt = tokens_of(200, seed=807)
    # No room for a single one more.
    four.workers["d0"].room._limit = 0
    for _ in range(3):
        _assert_whole(four.ask(prompt, NEW), prompt)
    assert len(four.workers["d1"].calls) == 3


@pytest.mark.parametrize("later", [("d0",), ("p0", "d0")])
def test_a_request_waits_for_a_decode_worker_to_come_and_goes_on_when_it_is_there(
    later: tuple[str, ...],
) -> None:
    prompt = tokens_of(200, seed=808)
    with bench(later=later, away_seconds=20.0) as inside:
        call = inside.call(prompt, NEW)
        _wait_for_line(inside.decode, 1)
        inside.start(inside.workers["d0"])
        _assert_whole(list(call), prompt)
        assert inside.workers["d0"].calls
        inside.wait_until_idle()


# ---- what workers are ---------------------------------------------------------------------------------------------


def test_an_address_of_a_worker_with_another_role_is_refused_by_name() -> None:
    prompt = tokens_of(100, seed=809)
    with bench(decode=2, says={"d0": "prefill"}) as inside:
        error = _refusal(inside.call(prompt, NEW), "not a decode worker; --decode=unix:.*, a prefill worker")
        assert (error.code(), _name(error)) == (grpc.StatusCode.FAILED_PRECONDITION, "CONFIG")
        # It is passed over from then on, where there is another one.
        _assert_whole(inside.ask(prompt, NEW), prompt)
        inside.wait_until_idle()


def test_workers_of_one_role_with_different_models_do_not_replace_each_other() -> None:
    other = Model.random(ModelConfig.for_profile(get_profile("tiny")), seed=12)
    with bench(decode=2, models={"d1": other}) as inside:
        inside.workers["d0"].after = [(2, UNAVAILABLE)]
        error = _refusal(
            inside.call(tokens_of(100, seed=810), NEW),
            r"workers have different models; decode worker unix:\S+d1=",
        )
        assert _name(error) == "GEOMETRY_MISMATCH"
        assert "p0 has" in error.details()
        inside.wait_until_idle()


# ---- limits -------------------------------------------------------------------------------------------------------


def test_requests_past_the_workers_wait_in_the_queue_and_those_past_the_queue_are_refused() -> None:
    prompts = [tokens_of(100, seed=820 + number) for number in range(3)]
    with bench(per_worker=1, limits=Limits(queue=1)) as inside:
        first = inside.call(prompts[0], LONG, bypass_store=True)
        _wait_for_calls(inside.decode, 1)
        second = inside.call(prompts[1], NEW, bypass_store=True)
        _wait_for_line(inside.decode, 1)
        error = _refusal(
            inside.call(prompts[2], NEW, bypass_store=True),
            "every decode worker is busy and the queue is full; queue=1; allowed: at most 1 waiting, with 1 on each",
        )
        assert (error.code(), _name(error)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "LIMIT_EXCEEDED")
        first.cancel()  # type: ignore[attr-defined]
        _assert_whole(list(second), prompts[1])
        inside.wait_until_idle()


def test_a_request_that_waits_too_long_is_refused_by_name() -> None:
    with bench(per_worker=1, limits=Limits(queue_seconds=0.2)) as inside:
        first = inside.call(tokens_of(100, seed=823), LONG, bypass_store=True)
        _wait_for_calls(inside.decode, 1)
        error = _refusal(
            inside.call(tokens_of(100, seed=824), NEW, bypass_store=True),
            r"queue_seconds=\S+; allowed: 0\.2",
        )
        assert _name(error) == "LIMIT_EXCEEDED"
        first.cancel()  # type: ignore[attr-defined]
        inside.wait_until_idle()


def test_a_caller_that_goes_while_it_waits_leaves_the_queue() -> None:
    prompt = tokens_of(100, seed=825)
    with bench(per_worker=1) as inside:
        first = inside.call(prompt, LONG, bypass_store=True)
        _wait_for_calls(inside.decode, 1)
        second = inside.call(prompt, NEW, bypass_store=True)
        _wait_for_line(inside.decode, 1)
        second.cancel()  # type: ignore[attr-defined]
        _wait_for_line(inside.decode, 0)
        assert inside.decode.in_flight() == [1]
        first.cancel()  # type: ignore[attr-defined]
        inside.wait_until_idle()
        _assert_whole(inside.ask(prompt, NEW), prompt)


# ---- samples ------------------------------------------------------------------------------------------------------


def test_samples_go_to_several_workers_and_each_is_that_of_its_seed(four: Bench) -> None:
    prompt = tokens_of(100, seed=830)
    events = four.ask(prompt, NEW, samples=4, sampling=pb.Sampling(temperature=1.0, seed=3))
    for sample in range(4):
        tokens = [
            e.token for e in events if e.kind in (Event.FIRST_TOKEN, Event.TOKEN) and e.sample == sample
        ]
        assert tokens == cold(prompt, NEW, temperature=1.0, seed=3 + sample).tokens
    assert [len(four.workers[name].calls) for name in ("d0", "d1")] == [2, 2]


def test_a_sample_that_fails_by_name_fails_the_request_and_ends_the_others(four: Bench) -> None:
    four.workers["d0"].after = [(3, grpc.StatusCode.INTERNAL)]
    error = _refusal(four.call(tokens_of(100, seed=831), LONG, samples=4), "broken by the test")
    assert error.code() is grpc.StatusCode.INTERNAL
    four.wait_until_idle()


def test_more_samples_than_workers_may_have_run_one_after_another() -> None:
    prompt = tokens_of(100, seed=832)
    with bench(per_worker=1, decode=2, limits=Limits(queue=0)) as inside:
        events = inside.ask(prompt, NEW, samples=7)
        assert sum(event.kind in (Event.FIRST_TOKEN, Event.TOKEN) for event in events) == 7 * NEW
        inside.wait_until_idle()


@pytest.mark.parametrize("until", [Event.PREFIX, Event.FIRST_TOKEN, Event.TOKEN])
def test_a_caller_that_goes_ends_the_calls_of_all_samples(four: Bench, until: int) -> None:
    call = four.call(tokens_of(400, seed=833), LONG, samples=5)
    for event in call:
        if event.kind == until:
            break
    call.cancel()  # type: ignore[attr-defined]
    four.wait_until_idle()


# ---- spans --------------------------------------------------------------------------------------------------------


def test_a_traced_request_tells_what_it_waited_for_and_which_workers_it_had(four: Bench) -> None:
    prompt = tokens_of(100, seed=840)
    four.workers["d0"].after = [(2, UNAVAILABLE)]
    events = four.ask(prompt, NEW, trace=True)
    spans = [span for event in events for span in event.spans if span.track == "gateway"]
    assert [(span.name, span.detail["worker"].rpartition("/")[2]) for span in spans] == [
        ("wait for a prefill worker", "p0"),
        ("prefill", "p0"),
        ("wait for a decode worker", "d0"),
        ("decode", "d0"),
        ("wait for a decode worker", "d1"),
        ("decode", "d1"),
    ]
    assert all(span.seconds >= 0.0 and span.start_seconds > 1e9 for span in spans)
    assert not [span for event in four.ask(prompt, NEW) for span in event.spans]
