"""A service that listens on TCP: who may call, what is served there, and how long a session lasts."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvstore.v1 import cache_pb2 as pb
from tests.e2e.service_raw import Chain, Raw, error_of
from tests.support.cable import Cable
from tests.support.http2 import status_of
from tests.support.remote import TOKENS, Remote, Secrets, make_secrets, port_of
from tests.support.service import ServiceProcess, running_service


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Secrets:
    return make_secrets(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def service(files: Secrets) -> Iterator[ServiceProcess]:
    with running_service(sessions=10, **files.options) as process:
        yield process


@pytest.fixture
def raw(service: ServiceProcess) -> Iterator[Raw]:
    with Raw(service.directory) as made:
        yield made


@pytest.fixture
def remote(service: ServiceProcess, files: Secrets) -> Iterator[Remote]:
    with Remote(port_of(service), issuer=files.issuer, token=TOKENS[0]) as made:
        yield made


def within(seconds: float, is_so: Callable[[], bool]) -> float:
    """Seconds until it is so."""
    begin = time.monotonic()
    while not is_so():
        assert time.monotonic() < begin + seconds, f"not within {seconds:g} s"
    return time.monotonic() - begin


# ---- who may call ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("token", TOKENS)
def test_each_token_of_the_file_is_good(service: ServiceProcess, files: Secrets, token: str) -> None:
    with Remote(port_of(service), issuer=files.issuer, token=token) as made:
        assert len(bytes.fromhex(made.hello.session)) == 16
        assert made.hello.protocol == 1


@pytest.mark.parametrize("token", ["", TOKENS[0][:-1], TOKENS[0] + "x", "not-a-token-at-all"])
def test_without_a_good_token_every_call_is_refused_by_name_and_counted(
    service: ServiceProcess, raw: Raw, files: Secrets, token: str
) -> None:
    before = raw.stats()["unauthenticated_total"]
    with pytest.raises(grpc.RpcError) as caught:
        Remote(port_of(service), issuer=files.issuer, token=token)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert error_of(caught.value) == "UNAUTHENTICATED"
    assert raw.stats()["unauthenticated_total"] == before + 1


def test_a_good_token_in_other_words_is_refused(remote: Remote) -> None:
    good = f"Bearer {TOKENS[0]}"
    for metadata in (
        (("authorization", TOKENS[0]),),
        (("authorization", good), ("authorization", good)),
        (("authorization", "Basic " + TOKENS[0]),),
        (("authorization-bin", good.encode()),),
    ):
        for call, request in (
            (remote.cache.Release, pb.ReleaseRequest(lease_id=1)),
            (remote.cache.Write, iter([pb.WriteFrame()])),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call(request, metadata=metadata, timeout=10)
            assert error_of(caught.value) == "UNAUTHENTICATED"


def test_a_call_that_sends_nothing_is_refused_at_once(remote: Remote) -> None:
    call = remote.cache.Session(remote._stream, timeout=10)
    with pytest.raises(grpc.RpcError) as caught:
        next(call)
    assert error_of(caught.value) == "UNAUTHENTICATED"


def test_the_log_says_little_of_refusals_and_nothing_of_tokens(
    service: ServiceProcess, remote: Remote
) -> None:
    for _ in range(50):
        with pytest.raises(grpc.RpcError):
            remote.cache.Release(
                pb.ReleaseRequest(), metadata=(("authorization", "Bearer some-secret-word"),)
            )
    assert service.log.count("without a good token") <= 3
    assert "secret-word" not in service.log
    assert not any(token in service.log for token in TOKENS)


def test_health_may_be_asked_without_a_token_and_nothing_else_of_it(remote: Remote) -> None:
    health = health_pb2_grpc.HealthStub(remote.channel)
    asked = health_pb2.HealthCheckRequest()
    assert health.Check(asked, timeout=10).status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as caught:
        next(health.Watch(asked, timeout=10))
    assert error_of(caught.value) == "UNAUTHENTICATED"


def test_admin_is_not_served_on_tcp_and_not_listed_there(remote: Remote, raw: Raw) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        remote.admin.Stats(pb.StatsRequest(), timeout=10, metadata=remote.metadata)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    wanted = reflection_pb2.ServerReflectionRequest(list_services="")

    def listed(channel: grpc.Channel, metadata: object) -> set[str]:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        [answer] = stub.ServerReflectionInfo(iter([wanted]), timeout=10, metadata=metadata)
        return {each.name for each in answer.list_services_response.service}

    assert "kvstore.v1.Cache" in listed(remote.channel, remote.authorization)
    assert "kvstore.v1.Admin" not in listed(remote.channel, remote.authorization)
    assert "kvstore.v1.Admin" in listed(raw.channel, ())


def test_a_client_that_does_not_know_the_issuer_gets_no_connection(
    service: ServiceProcess, tmp_path: Path
) -> None:
    other = make_secrets(tmp_path / "other")
    with pytest.raises(grpc.RpcError) as caught:
        Remote(port_of(service), issuer=other.issuer, token=TOKENS[0])
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_plaintext_does_not_get_in_where_tls_is_spoken(service: ServiceProcess) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        Remote(port_of(service), token=TOKENS[0])
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


# ---- sessions -------------------------------------------------------------------------------------------------------


def test_bytes_written_over_tcp_are_fetched_over_tcp(remote: Remote) -> None:
    chain = Chain(remote.open("round"), 5, seed=1)
    remote.store(chain, states=[4])
    lease = remote.lookup(chain)
    items = remote.fetch(lease.lease_id, count=4, state=False)
    assert len(items) == 4
    assert all(chain.is_right(*item) for item in items)


def test_a_session_ends_with_its_stream_and_gives_all_back(
    service: ServiceProcess, raw: Raw, files: Secrets
) -> None:
    before = raw.stats()
    with Remote(port_of(service), issuer=files.issuer, token=TOKENS[0]) as made:
        chain = Chain(made.open("ends"), 3, seed=2)
        made.store(chain, last=2)
        lease = made.lookup(chain)
        made.reserve(chain.namespace, [chain.block(2)])
        now = raw.stats()
        assert (now["sessions"], now["leases"], now["reservations"]) == (before["sessions"] + 1, 1, 1)
        made.end()
        assert list(made.session) == []
        now = raw.stats()
        assert (now["sessions"], now["leases"], now["reservations"]) == (before["sessions"], 0, 0)
        with pytest.raises(grpc.RpcError) as caught:
            made.fetch(lease.lease_id, count=1)
        assert error_of(caught.value) == "UNKNOWN_SESSION"


def test_a_session_whose_client_goes_without_a_word_gives_all_back(
    service: ServiceProcess, raw: Raw, files: Secrets
) -> None:
    with Remote(port_of(service), issuer=files.issuer, token=TOKENS[0]) as made:
        chain = Chain(made.open("goes"), 2, seed=3)
        made.store(chain)
        made.lookup(chain)
        assert raw.stats()["leases"] == 1
    within(10, lambda: raw.stats()["leases"] == 0 and raw.stats()["sessions"] == 1)


# As shipped it takes 13 s, which test_across_hosts.py waits for.
SOON = """
from kvstore.service import listening
listening.PING_AFTER_SECONDS = listening.PING_SECONDS_MAX = 1.0
"""


def test_a_cut_cable_ends_the_session_and_gives_its_leases_back(files: Secrets) -> None:
    with (
        running_service(before=SOON, **files.options) as service,
        Raw(service.directory) as raw,
        Cable(port_of(service)) as cable,
        Remote(cable.port, issuer=files.issuer, token=TOKENS[0]) as made,
    ):
        chain = Chain(made.open("cut"), 2, seed=4)
        made.store(chain)
        made.lookup(chain)
        assert (raw.stats()["leases"], raw.stats()["sessions"]) == (1, 2)
        cable.cut()
        within(10.0, lambda: (raw.stats()["leases"], raw.stats()["sessions"]) == (0, 1))


def test_what_a_client_says_on_its_session_ends_it(service: ServiceProcess, raw: Raw, remote: Remote) -> None:
    call = remote.cache.Session(iter([pb.SessionRequest()]), timeout=10, metadata=remote.authorization)
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    assert error_of(caught.value) == "INVALID_ARGUMENT"
    assert raw.stats()["sessions"] == 2


def test_both_kinds_of_sessions_count_against_one_limit(
    service: ServiceProcess, raw: Raw, remote: Remote
) -> None:
    made = [remote.cache.Session(remote._stream, metadata=remote.authorization) for _ in range(8)]
    for call in made:
        next(call)
    with pytest.raises(grpc.RpcError) as caught:
        next(remote.cache.Session(remote._stream, metadata=remote.authorization))
    assert error_of(caught.value) == "LIMIT_EXCEEDED"
    with Raw(service.directory) as refused:
        assert refused.hello["error"] == "LIMIT_EXCEEDED"
    for call in made:
        call.cancel()
    within(10, lambda: raw.stats()["sessions"] == 2)


def test_no_memory_is_shared_over_a_session_call_whichever_way_it_came(raw: Raw, remote: Remote) -> None:
    chain = Chain(raw.open("unshared"), 2, seed=5)
    raw.store(chain)
    local = raw.cache.Session(remote._stream)
    number = next(local).session
    for cache, metadata in (
        (remote.cache, remote.metadata),
        (raw.cache, (("kvstore-session", number),)),
    ):
        lookup = pb.LookupRequest(
            namespace=chain.namespace.digest,
            keys=b"".join(chain.keys),
            prompt_tokens=65,
            costs=pb.Costs(seconds_per_layer_token=1.0),
            lease=True,
        )
        lease = cache.Lookup(lookup, metadata=metadata, timeout=10).lease_id
        with pytest.raises(grpc.RpcError) as caught:
            list(cache.Map(pb.MapRequest(lease_id=lease, block_count=1), metadata=metadata, timeout=10))
        assert error_of(caught.value) == "MEMORY_UNAVAILABLE"
    local.cancel()


def test_a_stop_ends_sessions_over_calls_without_waiting_for_them(files: Secrets) -> None:
    with running_service(**files.options) as service:
        with Remote(port_of(service), issuer=files.issuer, token=TOKENS[0]) as made:
            begin = time.monotonic()
            assert service.stop() == 0
            assert time.monotonic() - begin < 5
            with pytest.raises(grpc.RpcError) as caught:
                next(made.session)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "0 leases, reservations and takes still open" in service.log


def test_a_service_that_drains_takes_no_new_sessions_over_calls(files: Secrets) -> None:
    with running_service(**files.options) as service, Raw(service.directory) as raw:
        raw.admin.Drain(pb.DrainRequest(seconds=0), timeout=10)
        with pytest.raises(grpc.RpcError) as caught:
            Remote(port_of(service), issuer=files.issuer, token=TOKENS[0])
        assert error_of(caught.value) == "DRAINING"


# ---- options --------------------------------------------------------------------------------------------------------


def test_plaintext_and_no_token_are_served_where_they_were_asked_for_by_name() -> None:
    options = {"listen": "[::1]:0", "unsafe_plaintext_tcp": True, "unsafe_no_token": True}
    with running_service(**options) as service, Remote(port_of(service), host="[::1]") as made:
        assert made.hello.session
        assert "WARNING" in next(line for line in service.log.splitlines() if "PLAINTEXT, NO TOKEN" in line)


def test_metadata_that_is_not_text_is_refused_and_not_logged(files: Secrets) -> None:
    options = {
        "listen": "127.0.0.1:0",
        "token_file": files.options["token_file"],
        "unsafe_plaintext_tcp": True,
    }
    method = "/kvstore.v1.Cache/OpenNamespace"
    with running_service(**options) as service:
        port = port_of(service)
        for shown in (b"Bearer " + TOKENS[0].encode() + b"\xff", b"\xff\xfe"):
            status = status_of(port, method, (b"authorization", shown))
            assert status == grpc.StatusCode.UNAUTHENTICATED.value[0]
        assert status_of(port, method, (b"other", b"\xff")) == grpc.StatusCode.UNAUTHENTICATED.value[0]
        assert TOKENS[0] not in service.log
        assert "Traceback" not in service.log


def test_a_port_that_another_has_is_refused(service: ServiceProcess, files: Secrets, tmp_path: Path) -> None:
    done = serve(tmp_path, files, "--listen", f"127.0.0.1:{port_of(service)}")
    assert done.returncode == 1
    assert f"listen=127.0.0.1:{port_of(service)}" in done.stderr


def test_a_service_that_would_be_unsafe_does_not_start_and_says_what_to_do(
    files: Secrets, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "kvstore.cli.main", "serve", "--dir", str(tmp_path / "s")]
    done = subprocess.run(
        [*command, "--listen", "127.0.0.1:0"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "--tls-cert" in done.stderr
    assert "--unsafe-plaintext-tcp" in done.stderr
    done = subprocess.run(
        [*command, "--listen", "127.0.0.1:0", "--unsafe-plaintext-tcp"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "--token-file" in done.stderr
    assert not (tmp_path / "s").exists()


def serve(tmp_path: Path, files: Secrets, *changed: str) -> subprocess.CompletedProcess[str]:
    options = files.options
    del options["listen"]
    flags = [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", value)]
    command = [
        sys.executable,
        "-m",
        "kvstore.cli.main",
        "serve",
        "--dir",
        str(tmp_path / "s"),
        "--disk",
        "1GiB",
    ]
    return subprocess.run(
        [*command, *flags, *changed], capture_output=True, text=True, timeout=60, check=False
    )
