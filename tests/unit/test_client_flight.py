"""Lookups that announce and wait, as they go out and as their answers are taken; flights that outlive their service."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from kvstore.errors import InvalidArgument, Unavailable
from kvstore.types import Exactness
from kvstore.v1 import cache_pb2 as pb
from kvstore_client import CacheClient, Costs, Coverage, Deadlines
from tests.support.double import no_plan, service_double
from tests.support.service import short_directory

NAMESPACE = b"n" * 32
QUICK = Deadlines(connect=0.5, lookup=0.5, probe=0.2, release=0.2)


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_directory() as directory:
        directory.mkdir()
        yield directory


def announced(request: pb.LookupRequest, context: grpc.ServicerContext) -> pb.LookupReply:
    reply = no_plan(request.prompt_tokens)
    reply.flight_id = 9
    reply.blocks_in_flight = 3
    reply.in_flight_seconds = 0.5
    reply.waited_seconds = 0.25
    reply.blocks_held = 7
    reply.coverage.CopyFrom(
        pb.Coverage(
            blocks=7, pool_states=[32], checkpoints=[64, 96], rows=[128], rows_overlap=[160], branch_at=192
        )
    )
    reply.costs.CopyFrom(pb.Costs(seconds_per_layer_token=0.5, seconds_per_index_entry=0.125))
    return reply


def test_all_that_is_asked_goes_out_and_all_that_is_answered_comes_back(folder: Path) -> None:
    seen: list[pb.LookupRequest] = []

    def answer(request: pb.LookupRequest, context: grpc.ServicerContext) -> pb.LookupReply:
        seen.append(request)
        return announced(request, context)

    with service_double(folder, answers={"Lookup": answer}), CacheClient(folder, owner="t") as client:
        found = client.lookup(
            NAMESPACE,
            [b"k" * 32],
            prompt_tokens=40,
            exactness=Exactness.BOUNDED,
            announce=True,
            wait_seconds=1.5,
        )
        client.lookup(NAMESPACE, [], prompt_tokens=4)
        client.lookup(NAMESPACE, [], prompt_tokens=4, exactness=Exactness.EXACT)
    asked = [(each.exactness, each.announce, each.wait_seconds) for each in seen]
    assert asked == [
        (pb.BOUNDED, True, 1.5),
        (pb.EXACTNESS_UNSPECIFIED, False, 0.0),
        (pb.EXACT, False, 0.0),
    ]
    assert (found.blocks_held, found.blocks_in_flight) == (7, 3)
    assert (found.in_flight_seconds, found.waited_seconds) == (0.5, 0.25)
    assert found.coverage == Coverage(
        blocks=7, pool_states=(32,), checkpoints=(64, 96), rows=(128,), rows_overlap=(160,), branch_at=192
    )
    assert found.costs == Costs(seconds_per_layer_token=0.5, seconds_per_index_entry=0.125)
    assert found.flight is not None
    assert found.flight.id == 9


def test_a_lookup_may_take_as_much_longer_as_it_may_wait(folder: Path) -> None:
    left: list[float] = []

    def answer(request: pb.LookupRequest, context: grpc.ServicerContext) -> pb.LookupReply:
        left.append(context.time_remaining())
        return no_plan(request.prompt_tokens)

    with (
        service_double(folder, answers={"Lookup": answer}),
        CacheClient(folder, owner="t", deadlines=QUICK) as client,
    ):
        client.lookup(NAMESPACE, [], prompt_tokens=4)
        client.lookup(NAMESPACE, [], prompt_tokens=4, wait_seconds=100)
    assert left[0] < 1.0
    assert 100 - 5 < left[1] <= 103, "gRPC rounds long ones"


@pytest.mark.parametrize("seconds", [-0.1, float("nan"), float("inf"), 3601])
def test_a_wait_that_is_no_wait_is_refused_before_anything_is_sent(folder: Path, seconds: float) -> None:
    client = CacheClient(folder, owner="t")
    with pytest.raises(InvalidArgument, match="wait_seconds"):
        client.lookup(NAMESPACE, [], prompt_tokens=4, wait_seconds=seconds)


def test_a_flight_is_ended_once_by_its_context_or_by_hand(folder: Path) -> None:
    ended: list[int] = []

    def end(request: pb.EndFlightRequest, context: grpc.ServicerContext) -> pb.EndFlightReply:
        ended.append(request.flight_id)
        return pb.EndFlightReply(was_open=True)

    answers = {"Lookup": announced, "EndFlight": end}
    with service_double(folder, answers=answers), CacheClient(folder, owner="t") as client:
        first, second = (client.lookup(NAMESPACE, [], prompt_tokens=4).flight for _ in range(2))
        assert first is not None
        assert second is not None
        assert first.end()
        assert not first.end()
        with pytest.raises(KeyError), second:
            raise KeyError
    assert ended == [9, 9]


def test_ending_a_flight_of_a_service_that_has_gone_or_hangs_does_nothing(folder: Path) -> None:
    hang = threading.Event()

    def end(request: pb.EndFlightRequest, context: grpc.ServicerContext) -> pb.EndFlightReply:
        hang.wait(10)
        return pb.EndFlightReply()

    answers = {"Lookup": announced, "EndFlight": end}
    with (
        CacheClient(folder, owner="t", deadlines=QUICK) as client,
        service_double(folder, answers=answers) as double,
    ):
        hung = client.lookup(NAMESPACE, [], prompt_tokens=4).flight
        gone = client.lookup(NAMESPACE, [], prompt_tokens=4).flight
        assert hung is not None
        assert gone is not None
        assert not hung.end()
        hang.set()
        double.end_sessions()
        calls = len(double.calls)
        assert not gone.end()
        assert len(double.calls) == calls, "never quoted to another session"
    with pytest.raises(Unavailable):
        client.lookup(NAMESPACE, [], prompt_tokens=4)


def test_a_hint_that_is_answered_late_makes_no_other_call_fail(folder: Path) -> None:
    let_go = threading.Event()

    def slow(request: pb.EndFlightRequest, context: grpc.ServicerContext) -> pb.EndFlightReply:
        assert let_go.wait(20.0)
        return pb.EndFlightReply(was_open=True)

    def answer(request: pb.LookupRequest, context: grpc.ServicerContext) -> pb.LookupReply:
        reply = no_plan(request.prompt_tokens)
        reply.flight_id = 9
        return reply

    deadlines = Deadlines(release=0.1, pause_first=5.0, pause_most=5.0)
    with (
        service_double(folder, answers={"Lookup": answer, "EndFlight": slow}),
        CacheClient(folder, owner="t", deadlines=deadlines) as client,
    ):
        found = client.lookup(NAMESPACE, [], prompt_tokens=4, announce=True)
        assert found.flight is not None
        assert not found.flight.end()
        assert client.lookup(NAMESPACE, [], prompt_tokens=4).flight is not None
        let_go.set()
