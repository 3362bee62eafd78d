"""Callers that do what no honest client does: they cost the service nothing that lasts, and nobody waits for them."""

from __future__ import annotations

import queue
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.profile.layout import state_layout
from kvstore.profile.registry import get_profile
from kvstore.v1 import cache_pb2 as pb
from tests.e2e.service_raw import Chain, Raw, error_of, payload_of
from tests.support.service import ServiceProcess, running_service

BLOCKS = 6


class Slowly:
    """A client's stream that says what it is told to, when it is told."""

    def __init__(self) -> None:
        self._frames: queue.Queue[Any] = queue.Queue()

    def say(self, frame: Any) -> None:
        self._frames.put(frame)

    def end(self) -> None:
        self._frames.put(None)

    def __iter__(self) -> Iterator[Any]:
        while (frame := self._frames.get()) is not None:
            yield frame


def _abort(raw: Raw, namespace: pb.Namespace, reservation_id: int) -> None:
    assert raw.call("Abort", pb.AbortRequest(reservation_id=reservation_id)).was_open


def _commit(raw: Raw, namespace: pb.Namespace, reservation_id: int) -> None:
    raw.commit(reservation_id)


def _clear(raw: Raw, namespace: pb.Namespace, reservation_id: int) -> None:
    raw.admin.Clear(pb.ClearRequest(namespace=namespace.digest), timeout=10)


def _end_session(raw: Raw, namespace: pb.Namespace, reservation_id: int) -> None:
    raw.socket.close()


@pytest.mark.parametrize("end", [_abort, _commit, _clear, _end_session])
def test_bytes_sent_after_a_reservation_has_ended_stay_in_no_ones_account(
    service: ServiceProcess,
    namespace: pb.Namespace,
    raw: Raw,
    end: Callable[[Raw, pb.Namespace, int], None],
) -> None:
    chain = Chain(namespace, BLOCKS, seed=1)
    payloads = [payload_of(key, namespace.block_bytes) for key in chain.keys]
    with Raw(service.directory) as writer:
        number = writer.reserve(namespace, [chain.block(i) for i in range(BLOCKS)]).reservation_id
        frames = Slowly()
        writing = writer.cache.Write.future(iter(frames), metadata=writer.metadata, timeout=20)
        for index, payload in enumerate(payloads):
            item = pb.WriteItem(item=index, length=len(payload), crc32=zlib.crc32(payload))
            frames.say(pb.WriteFrame(reservation_id=0 if index else number, items=[item], data=payload))
            if index == 0:
                _wait_for(lambda: raw.stats()["staged_bytes"] >= namespace.block_bytes)
                end(writer, namespace, number)
        frames.end()
        with pytest.raises(grpc.RpcError) as refused:
            writing.result()
        assert error_of(refused.value) in ("UNKNOWN_RESERVATION", "UNKNOWN_SESSION")
    _wait_for(lambda: not any(raw.stats()[name] for name in ("staged_bytes", "uploads", "reservations")))


def _wait_for(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 5.0
    while not holds():
        assert time.monotonic() < end, "it did not come to be"


def _patience(service: ServiceProcess) -> float:
    """Seconds until health has answered."""
    begin = time.monotonic()
    with grpc.insecure_channel(service.target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        stub.Check(health_pb2.HealthCheckRequest(), timeout=30, wait_for_ready=True)
    return time.monotonic() - begin


MANY_EMPTY = b"\x12\x00" * (30 << 20)
"""A repeated field 2 of thirty million empty messages, in 60 MiB."""

LONG_GEOMETRY = b'{"layers":[' + b",".join([b'["window",0]'] * 100_000) + b"]}"


@pytest.mark.parametrize(
    ("method", "request_bytes", "code"),
    [
        ("Reserve", MANY_EMPTY, grpc.StatusCode.RESOURCE_EXHAUSTED),
        ("Lookup", pb.LookupRequest(keys=bytes(60 << 20)).SerializeToString(), None),
        (
            "OpenNamespace",
            pb.OpenNamespaceRequest(
                name="long", profile=pb.Profile(name="long", geometry=LONG_GEOMETRY)
            ).SerializeToString(),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
    ],
    ids=["thirty million items", "two million keys", "a hundred thousand layers"],
)
def test_a_huge_message_is_refused_before_it_is_made_anything_of(
    service: ServiceProcess, raw: Raw, method: str, request_bytes: bytes, code: grpc.StatusCode | None
) -> None:
    call = raw.channel.unary_unary(f"/kvstore.v1.Cache/{method}").future(
        request_bytes, metadata=raw.metadata, timeout=30
    )
    worst = 0.0
    while not call.done():
        worst = max(worst, _patience(service))
    with pytest.raises(grpc.RpcError) as refused:
        call.result()
    assert refused.value.code() is (code or grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert max(worst, _patience(service)) < 1.0


def test_the_largest_reservation_that_is_allowed_is_not_too_large_a_message(raw: Raw) -> None:
    namespace = raw.open("largest")
    chain = Chain(namespace, 1, seed=3)
    item = chain.block(0)
    with pytest.raises(grpc.RpcError) as refused:
        raw.reserve(namespace, [item] * 10_000)
    assert error_of(refused.value) == "INVALID_ARGUMENT"
    with pytest.raises(grpc.RpcError) as refused:
        raw.reserve(namespace, [item] * 10_001)
    assert error_of(refused.value) == "LIMIT_EXCEEDED"


UNARY = (
    "Lookup",
    "OpenNamespace",
    "Reserve",
    "Release",
    "Commit",
    "Abort",
    "EndFlight",
    "WriteArena",
    "OpenDock",
    "TakeDock",
    "WriteDock",
    "DropHandoff",
)


@pytest.mark.parametrize("service_name", ["Cache", "Admin"])
def test_a_request_that_is_no_message_is_the_senders_mistake(raw: Raw, service_name: str) -> None:
    names = UNARY if service_name == "Cache" else ("Stats", "Clear", "SetPolicy", "DropStates", "SetMemory")
    for name in names:
        call = raw.channel.unary_unary(f"/kvstore.v1.{service_name}/{name}")
        with pytest.raises(grpc.RpcError, match="not a message of this call") as refused:
            call(b"\x0a\xff\xff", metadata=raw.metadata, timeout=10)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT, name
        assert error_of(refused.value) == "INVALID_ARGUMENT", name


def test_a_request_for_a_stream_that_is_no_message_is_the_senders_mistake(raw: Raw) -> None:
    for name in ("Fetch", "Map", "FetchDock", "TakeHandoff"):
        call = raw.channel.unary_stream(f"/kvstore.v1.Cache/{name}")
        with pytest.raises(grpc.RpcError) as refused:
            list(call(b"\x0a\xff\xff", metadata=raw.metadata, timeout=10))
        assert error_of(refused.value) == "INVALID_ARGUMENT", name


def test_a_frame_that_is_no_message_is_the_senders_mistake(raw: Raw) -> None:
    for name in ("Write", "PutHandoff"):
        call = raw.channel.stream_unary(f"/kvstore.v1.Cache/{name}")
        with pytest.raises(grpc.RpcError) as refused:
            call(iter([b"\x00\xff\xff"]), metadata=raw.metadata, timeout=10)
        assert error_of(refused.value) == "INVALID_ARGUMENT", name


def test_a_handoff_that_trickles_in_ends_with_its_time() -> None:
    size = state_layout(get_profile("tiny"), 45).total_bytes
    with running_service(lease=0.5) as service, Raw(service.directory) as raw:
        namespace = raw.open("trickle")
        end = time.monotonic() + 10.0
        never = threading.Event()

        def trickle() -> Iterator[pb.HandoffFrame]:
            header = pb.HandoffHeader(
                namespace=namespace.digest, position=45, length=size, lineage=pb.LINEAGE_EXACT
            )
            yield pb.HandoffFrame(header=header)
            while time.monotonic() < end:
                never.wait(0.05)
                yield pb.HandoffFrame()

        with pytest.raises(grpc.RpcError) as refused:
            raw.call("PutHandoff", trickle())
        assert time.monotonic() < end - 5.0
        assert error_of(refused.value) == "INVALID_ARGUMENT"
        assert raw.stats()["staged_bytes"] == 0
