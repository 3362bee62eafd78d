"""Health of a worker's server: every change to who watches, and no watcher that holds up another."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import pytest
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc

from kvstore_workers.runtime.address import open_channel
from kvstore_workers.runtime.health import WATCHERS_MAX
from kvstore_workers.runtime.server import Server
from tests.support.polling import wait_for

SECONDS = 30.0
SERVING, NOT_SERVING = pb.HealthCheckResponse.SERVING, pb.HealthCheckResponse.NOT_SERVING
UNKNOWN = pb.HealthCheckResponse.SERVICE_UNKNOWN
SERVICE = "kvstore.v1.Worker"


@pytest.fixture
def path() -> Iterator[Path]:
    with TemporaryDirectory(prefix="kv-") as folder:
        yield Path(folder) / "s"


@pytest.fixture
def server(path: Path) -> Iterator[Server]:
    made = Server(path, requests=1, name="--listen")
    made.start([SERVICE])
    yield made
    made.stop()


@pytest.fixture
def stub(server: Server, path: Path) -> Iterator[health_pb2_grpc.HealthStub]:
    with open_channel(path) as channel:
        yield health_pb2_grpc.HealthStub(channel)


def asked(service: str = "") -> pb.HealthCheckRequest:
    return pb.HealthCheckRequest(service=service)


@pytest.mark.parametrize("service", ["", SERVICE])
def test_who_watches_is_told_what_holds_and_each_change(
    server: Server, stub: health_pb2_grpc.HealthStub, service: str
) -> None:
    watch = stub.Watch(asked(service), timeout=SECONDS)
    assert next(watch).status == SERVING
    assert stub.Check(asked(service), timeout=SECONDS).status == SERVING
    server.drain()
    assert next(watch).status == NOT_SERVING
    assert stub.Check(asked(service), timeout=SECONDS).status == NOT_SERVING


def test_a_service_that_is_not_here_is_unknown(stub: health_pb2_grpc.HealthStub) -> None:
    assert next(stub.Watch(asked("other"), timeout=SECONDS)).status == UNKNOWN
    with pytest.raises(grpc.RpcError) as refused:
        stub.Check(asked("other"), timeout=SECONDS)
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND  # type: ignore[attr-defined]


def test_watchers_that_come_while_others_go_are_all_told(stub: health_pb2_grpc.HealthStub) -> None:
    told: list[int] = []

    def come_and_go() -> None:
        for _ in range(50):
            watch = stub.Watch(asked(), timeout=SECONDS)
            told.append(next(watch).status)
            watch.cancel()

    threads = [threading.Thread(target=come_and_go) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told == [SERVING] * 200


def test_a_watcher_past_the_limit_is_refused_until_one_has_gone(stub: health_pb2_grpc.HealthStub) -> None:
    watches = [stub.Watch(asked(), timeout=SECONDS) for _ in range(WATCHERS_MAX)]
    assert {next(watch).status for watch in watches} == {SERVING}
    with pytest.raises(grpc.RpcError) as refused:
        next(stub.Watch(asked(), timeout=SECONDS))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # type: ignore[attr-defined]
    watches.pop().cancel()

    def is_let_in() -> bool:
        try:
            return bool(next(stub.Watch(asked(), timeout=SECONDS)).status == SERVING)
        except grpc.RpcError:
            return False

    wait_for(is_let_in)
