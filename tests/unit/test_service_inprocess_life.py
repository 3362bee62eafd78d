"""A service in its caller's process: its start and its end, beside no other one, whose threads would come and go meanwhile."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstore.config import ServiceConfig
from kvstore.errors import ConfigError, DirectoryInUse, InvalidArgument, KvstoreError, Unavailable
from kvstore.service.inprocess import InProcessService
from kvstore.service.writer import Writer
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1.cache_pb2_grpc import AdminStub, CacheStub
from kvstore_client import CacheClient, InProcessAddress
from tests.support.calls import look
from tests.support.chains import Chain, identity_of
from tests.support.inprocess import ServiceHere
from tests.support.polling import wait_for
from tests.support.remote import Held


def test_it_stops_with_its_threads_and_starts_again_with_what_was_stored(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    service = ServiceHere(tmp_path / "s")
    with CacheClient(InProcessAddress(service), owner="t") as client:
        with pytest.raises(Unavailable):
            client.stats()
        for grace in (True, False):
            service.start()
            with pytest.raises(InvalidArgument, match="service=running"):
                service.start()
            namespace = None
            deadline = time.monotonic() + 10
            while namespace is None:
                try:
                    namespace = client.open_namespace(identity_of(), name="n")
                except Unavailable:
                    assert time.monotonic() < deadline
            chain = Chain.of(namespace, 2, seed=1)
            if grace:
                chain.store(client)
            assert look(client, chain).blocks_held == 2
            service.stop(grace=grace)
            service.stop()
            with pytest.raises(Unavailable):
                look(client, chain)
            assert client.boot is None
    assert set(threading.enumerate()) <= before


def test_calls_under_way_end_when_it_stops_at_once(tmp_path: Path) -> None:
    silent = Held()
    with ServiceHere(tmp_path / "s") as service:
        channel = service.channel()
        call = CacheStub(channel).Session(silent, timeout=60)
        assert next(call).boot
        verifying = AdminStub(channel).Verify(pb.VerifyRequest(), timeout=60)
        service.stop(grace=False)
        with pytest.raises(grpc.RpcError) as caught:
            next(call)
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        wait_for(lambda: verifying.done() or next(verifying).done)
    silent.end()


def test_one_that_cannot_start_says_why(tmp_path: Path) -> None:
    with ServiceHere(tmp_path / "s"):
        with pytest.raises(KvstoreError) as caught:
            ServiceHere(tmp_path / "s").start()
        assert type(caught.value) is DirectoryInUse
    for field in ("listen", "health", "sockets", "otlp"):
        with pytest.raises(ConfigError, match=f"{field}="):
            InProcessService(ServiceConfig(dir=str(tmp_path), disk=1 << 30, **{field: "127.0.0.1:0"}))


def test_a_service_whose_writer_has_ended_stops_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def breaks(writer: Writer, *given: object) -> None:
        raise RuntimeError("a fault of the program")

    service = InProcessService(ServiceConfig(dir=str(tmp_path / "d"), disk=64 << 20)).start()
    client = CacheClient(InProcessAddress(service), owner="t")
    chain = Chain.of(client.open_namespace(identity_of(), name="n"), 2, seed=1)
    monkeypatch.setattr(Writer, "_run_commits", breaks)
    with pytest.raises(KvstoreError):
        chain.store(client)
    wait_for(lambda: client.boot is None)
    with pytest.raises(RuntimeError, match="a fault of the program"):
        service.stop()
