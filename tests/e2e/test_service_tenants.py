"""Tenants of one service: what each may name and take, how it is let in, and who administers."""

from __future__ import annotations

import datetime as dt
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import trustme

from kvstore.errors import (
    Forbidden,
    InvalidArgument,
    LimitExceeded,
    Unauthenticated,
    Unavailable,
    UnknownNamespace,
)
from kvstore.v1 import cache_pb2 as pb
from kvstore_client import CacheClient, Deadlines, OpenedNamespace
from kvstore_client.address import parse_address
from tests.e2e.service_raw import Chain, Raw, error_of
from tests.support import chains
from tests.support.chains import identity_of
from tests.support.polling import wait_for
from tests.support.remote import TOKENS, Remote, Secrets, make_secrets, port_of, write_private
from tests.support.service import ServiceProcess, running_service

ACME, OTHER, ADMIN = "a-token-of-acme-alone", "a-token-of-other-alone", "a-token-of-who-administers"
BLOCK = 3328


def tenants_text(**acme: object) -> str:
    more = "".join(f"{key} = {json.dumps(value)}\n" for key, value in acme.items())
    return f'[tenant.acme]\ntokens = ["{ACME}"]\n{more}[tenant.other]\ntokens = ["{OTHER}"]\n'


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Secrets:
    made = make_secrets(tmp_path_factory.mktemp("tls"))
    write_private(made.folder / "tenants.toml", tenants_text().encode())
    write_private(made.folder / "admin", ADMIN.encode())
    return made


@pytest.fixture(scope="module")
def service(files: Secrets) -> Iterator[ServiceProcess]:
    with running_service(
        **files.options,
        tenants=str(files.folder / "tenants.toml"),
        admin_token_file=str(files.folder / "admin"),
    ) as process:
        yield process


def client_of(service: ServiceProcess, files: Secrets, token: str | None, **more: object) -> CacheClient:
    patient = Deadlines(connect=10.0)
    options = {
        "owner": "tenant",
        "token": token,
        "ca": files.folder / "issuer.pem",
        "deadlines": patient,
        **more,
    }
    return CacheClient(f"tcp://localhost:{port_of(service)}", **options)  # type: ignore[arg-type]


# ---- whose namespaces -----------------------------------------------------------------------------------------------


def test_a_tenants_token_is_good_for_its_own_namespaces_and_no_others(
    service: ServiceProcess, files: Secrets
) -> None:
    with client_of(service, files, ACME) as acme, client_of(service, files, OTHER) as other:
        opened = acme.open_namespace(identity_of("tiny", salt="acme"), name="acme's")
        with pytest.raises(Forbidden, match="not good for the tenant"):
            other.open_namespace(identity_of("tiny", salt="acme"), name="acme's")
        with pytest.raises(Forbidden):
            other.open_namespace(identity_of("tiny"), name="nobody's")
        own = other.open_namespace(identity_of("tiny", salt="other"), name="other's")
        assert own.digest != opened.digest


def test_another_tenants_namespace_is_refused_in_every_call_as_one_that_is_not_there(
    service: ServiceProcess, files: Secrets
) -> None:
    with (
        Remote(port_of(service), issuer=files.issuer, token=ACME) as acme,
        Remote(port_of(service), issuer=files.issuer, token=OTHER) as other,
    ):
        chain = Chain(acme.open("held", tenant_salt="acme"), 3, seed=1)
        acme.store(chain, states=[1])
        lease = acme.lookup(chain)
        assert lease.lease_id
        absent = pb.Namespace(digest=bytes(range(32)), block_tokens=chain.namespace.block_tokens)

        def said(namespace: pb.Namespace) -> list[tuple[grpc.StatusCode, str]]:
            digest = namespace.digest
            calls = {
                "Lookup": pb.LookupRequest(
                    namespace=digest, keys=b"".join(chain.keys), prompt_tokens=97, lease=True
                ),
                "Contains": pb.ContainsRequest(namespace=digest, keys=chain.keys[0]),
                "Reserve": pb.ReserveRequest(namespace=digest, items=[chain.block(0)]),
                "TakeHandoff": pb.TakeHandoffRequest(namespace=digest, ticket=bytes(16)),
                "DropHandoff": pb.DropHandoffRequest(namespace=digest, ticket=bytes(16)),
                "PutHandoff": iter([pb.HandoffFrame(header=pb.HandoffHeader(namespace=digest, position=45))]),
            }
            found = []
            for name, request in calls.items():
                with pytest.raises(grpc.RpcError) as caught:
                    # Of a stream the first message tells; of one answer nothing is iterated.
                    list(other.call(name, request))
                assert error_of(caught.value) == "UNKNOWN_NAMESPACE", name
                found.append(
                    (caught.value.code(), str(caught.value.details()).replace(digest.hex()[:60], ""))
                )
            return found

        assert [code for code, _ in said(chain.namespace)] == [code for code, _ in said(absent)]
        for words, others in zip(said(chain.namespace), said(absent), strict=True):
            assert words[1].partition("namespace=")[0] == others[1].partition("namespace=")[0]
        with pytest.raises(grpc.RpcError) as caught:
            other.fetch(lease.lease_id, count=3)
        assert error_of(caught.value) == "UNKNOWN_LEASE"


def test_a_session_is_of_no_use_to_another_tenants_token(service: ServiceProcess, files: Secrets) -> None:
    with (
        Remote(port_of(service), issuer=files.issuer, token=ACME) as acme,
        Remote(port_of(service), issuer=files.issuer, token=OTHER) as other,
    ):
        chain = Chain(acme.open("session", tenant_salt="acme"), 2, seed=2)
        acme.store(chain)
        lease = acme.lookup(chain)
        other.metadata = (*other.authorization, ("kvstore-session", acme.hello.session))
        with pytest.raises(grpc.RpcError) as caught:
            other.fetch(lease.lease_id, count=2)
        assert error_of(caught.value) == "UNKNOWN_SESSION"
        assert len(acme.fetch(lease.lease_id, count=2)) == 2


def test_what_another_tenant_opened_under_a_name_is_not_told_and_keeps_nobody_from_it(
    service: ServiceProcess, files: Secrets
) -> None:
    with client_of(service, files, ACME) as acme, client_of(service, files, OTHER) as other:
        first = acme.open_namespace(identity_of("tiny", salt="acme"), name="a-name")
        second = other.open_namespace(identity_of("flash-slim", salt="other"), name="a-name")
        assert first.digest != second.digest
        again = acme.open_namespace(identity_of("tiny", salt="acme"), name="a-name")
        assert again.digest == first.digest


def test_a_token_of_the_token_file_is_good_for_all_tenants(service: ServiceProcess, files: Secrets) -> None:
    with client_of(service, files, TOKENS[0]) as client:
        for tenant in ("acme", "other", "somebody", ""):
            assert client.open_namespace(identity_of("tiny", salt=tenant), name=f"all-{tenant}").block_tokens


def test_calls_side_by_side_are_never_taken_for_each_other(service: ServiceProcess, files: Secrets) -> None:
    def refused(token: str, own: str, others: str) -> int:
        count = 0
        with client_of(service, files, token) as client:
            for _ in range(100):
                client.open_namespace(identity_of("tiny", salt=own), name=f"beside-{own}")
                try:
                    client.open_namespace(identity_of("tiny", salt=others), name=f"beside-{others}")
                except Forbidden:
                    count += 1
        return count

    with ThreadPoolExecutor(2) as threads:
        jobs = [
            threads.submit(refused, ACME, "acme", "other"),
            threads.submit(refused, OTHER, "other", "acme"),
        ]
        assert [job.result() for job in jobs] == [100, 100]


# ---- limits ---------------------------------------------------------------------------------------------------------


def stored(client: CacheClient, namespace: OpenedNamespace, blocks: int, *, seed: int) -> chains.Chain:
    chain = chains.Chain.of(namespace, blocks, seed=seed)
    chain.store(client)
    return chain


@pytest.fixture
def limited(tmp_path: Path) -> Iterator[tuple[ServiceProcess, Path]]:
    """A service without TCP, whose tenants' file the test may change."""
    file = tmp_path / "tenants.toml"
    write_private(file, tenants_text(quota=20 * BLOCK).encode())
    with running_service(tenants=str(file)) as process:
        yield process, file


def changed(service: ServiceProcess, file: Path, text: str) -> None:
    """The service has taken in, or refused, what is in the file now."""
    with CacheClient(service.directory, owner="watch") as client:
        before = client.stats()
        file.write_text(text)
        os.kill(service.pid, signal.SIGHUP)
        names = ("reloads_total", "reloads_failed_total")
        wait_for(lambda: any(client.stats()[name] > before[name] for name in names))


def test_a_tenant_past_its_quota_lets_go_of_its_own_oldest_and_of_nobody_elses(
    limited: tuple[ServiceProcess, Path],
) -> None:
    service, _ = limited
    with CacheClient(service.directory, owner="quota") as client:
        acme = client.open_namespace(identity_of("tiny", salt="acme"), name="acme")
        another = replace(identity_of("tiny", salt="acme"), adapter="x")
        more = client.open_namespace(another, name="acme-x")
        other = client.open_namespace(identity_of("tiny", salt="other"), name="other")
        kept = stored(client, other, 40, seed=9)
        for seed in range(10):
            stored(client, (acme, more)[seed % 2], 8, seed=seed)
            [own] = [each for each in client.tenants() if each.tenant == "acme"]
            assert own.held_bytes <= 20 * BLOCK == own.quota
        assert own.held_bytes > 10 * BLOCK
        figures = client.stats()
        assert figures["quota_evicted_blocks_total"] >= 60
        assert (
            client.lookup(
                other.digest, kept.keys, prompt_tokens=len(kept.keys) * 32 + 1, lease=False
            ).blocks_held
            == 40
        )


def test_writers_of_one_tenant_side_by_side_stay_within_its_quota(
    limited: tuple[ServiceProcess, Path],
) -> None:
    service, _ = limited
    quota = 20 * BLOCK

    def write(number: int) -> tuple[int, int]:
        done = refused = 0
        with CacheClient(service.directory, owner=f"writer-{number}") as client:
            acme = client.open_namespace(identity_of("tiny", salt="acme"), name="acme")
            for seed in range(12):
                try:
                    stored(client, acme, 7, seed=100 * number + seed)
                    done += 1
                except LimitExceeded:
                    refused += 1
        return done, refused

    with CacheClient(service.directory, owner="watch") as client, ThreadPoolExecutor(3) as threads:
        jobs = [threads.submit(write, number) for number in range(3)]
        while not all(job.done() for job in jobs):
            assert all(each.held_bytes <= quota for each in client.tenants())
        results = [job.result() for job in jobs]
        assert sum(done for done, _ in results) >= 12, results
        [own] = client.tenants()
        assert (own.promised_bytes, own.in_flight_bytes) == (0, 0)
        assert 0 < own.held_bytes <= quota


def test_what_a_quota_cannot_hold_is_refused_by_name_and_changes_nothing(
    limited: tuple[ServiceProcess, Path],
) -> None:
    service, file = limited
    with CacheClient(service.directory, owner="quota") as client:
        acme = client.open_namespace(identity_of("tiny", salt="acme"), name="acme")
        first = stored(client, acme, 8, seed=1)
        with pytest.raises(LimitExceeded, match=r"tenant\.quota=.*allowed: 66560 bytes"):
            stored(client, acme, 21, seed=2)
        asked = {"prompt_tokens": 8 * 32 + 1, "lease": False}
        assert client.lookup(acme.digest, first.keys, **asked).blocks_held == 8
        changed(service, file, tenants_text(quota=0))
        with pytest.raises(LimitExceeded, match="no quota"):
            stored(client, acme, 1, seed=3)
        wait_for(lambda: client.lookup(acme.digest, first.keys, **asked).blocks_held == 0)
        figures = client.stats()
        assert (figures["tenant_quota_refused_total"], figures["reservations"]) == (2, 0)


def test_a_tenants_rate_and_bytes_on_their_way_are_refused_by_name_and_counted(
    limited: tuple[ServiceProcess, Path],
) -> None:
    service, file = limited
    with CacheClient(service.directory, owner="rate") as client:
        acme = client.open_namespace(identity_of("tiny", salt="acme"), name="acme")
        other = client.open_namespace(identity_of("tiny", salt="other"), name="other")
        chain = stored(client, acme, 4, seed=1)
        changed(service, file, tenants_text(calls_per_second=0.01))
        asked = {"prompt_tokens": 129, "lease": False}
        client.lookup(acme.digest, chain.keys, **asked)
        with pytest.raises(LimitExceeded, match=r"come back in .* s; tenant\.calls_per_second=1"):
            client.lookup(acme.digest, chain.keys, **asked)
        client.lookup(other.digest, chain.keys, **asked)
        changed(service, file, tenants_text(in_flight=BLOCK))
        with pytest.raises(LimitExceeded, match=r"tenant\.in_flight="):
            stored(client, acme, 4, seed=2)
        changed(service, file, tenants_text(bytes_per_second="1KiB"))
        stored(client, acme, 4, seed=3)
        with pytest.raises(LimitExceeded, match=r"tenant\.bytes_per_second="):
            stored(client, acme, 4, seed=4)
        figures = client.stats()
        assert figures["tenant_rate_refused_total"] == 2
        assert figures["tenant_in_flight_refused_total"] >= 1
        changed(service, file, tenants_text(namespaces=1))
        stored(client, acme, 4, seed=5)
        with pytest.raises(LimitExceeded, match=r"tenant\.namespaces=2; allowed: 1"):
            client.open_namespace(replace(identity_of("tiny", salt="acme"), adapter="x"), name="more")


# ---- certificates ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def issued(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with cert.pem and key.pem, by what they are: of acme, for two tenants, expired, of a foreign issuer."""
    folder = tmp_path_factory.mktemp("clients")
    ours, foreign = trustme.CA(), trustme.CA()
    ours.cert_pem.write_to_path(folder / "clients.pem")
    past = dt.datetime.now(dt.UTC) - dt.timedelta(days=2)
    made = {
        "acme": ours.issue_cert("acme.example"),
        "both": ours.issue_cert("x.example", common_name="both"),
        "unknown": ours.issue_cert("stranger.example"),
        "expired": ours.issue_cert("acme.example", not_before=past - dt.timedelta(days=1), not_after=past),
        "foreign": foreign.issue_cert("acme.example"),
    }
    for name, cert in made.items():
        (folder / name).mkdir()
        (folder / name / "cert.pem").write_bytes(b"".join(part.bytes() for part in cert.cert_chain_pems))
        write_private(folder / name / "key.pem", cert.private_key_pem.bytes())
    text = '[tenant.acme]\ncertificates = ["acme.example", "both"]\n[tenant.other]\ncertificates = ["both"]\n'
    write_private(folder / "tenants.toml", text.encode())
    return {"folder": folder, **{name: folder / name for name in made}}


@pytest.fixture(scope="module")
def mutual(files: Secrets, issued: dict[str, Path]) -> Iterator[ServiceProcess]:
    options = {key: value for key, value in files.options.items() if key != "token_file"}
    with running_service(
        **options,
        tls_client_ca=str(issued["folder"] / "clients.pem"),
        tenants=str(issued["folder"] / "tenants.toml"),
    ) as process:
        yield process


def shown(folder: Path) -> dict[str, Path]:
    return {"cert": folder / "cert.pem", "key": folder / "key.pem"}


def test_a_certificates_names_say_which_tenants_it_may_use(
    mutual: ServiceProcess, files: Secrets, issued: dict[str, Path]
) -> None:
    with client_of(mutual, files, None, **shown(issued["acme"])) as acme:
        assert acme.open_namespace(identity_of("tiny", salt="acme"), name="acme").digest
        with pytest.raises(Forbidden):
            acme.open_namespace(identity_of("tiny", salt="other"), name="other")
    with client_of(mutual, files, None, **shown(issued["both"])) as both:
        for tenant in ("acme", "other"):
            assert both.open_namespace(identity_of("tiny", salt=tenant), name=tenant).digest
    with (
        client_of(mutual, files, None, **shown(issued["unknown"])) as unknown,
        pytest.raises(Unauthenticated),
    ):
        unknown.open_namespace(identity_of("tiny", salt="acme"), name="acme")


def test_certificates_that_are_not_good_get_no_connection_and_a_clear_word(
    mutual: ServiceProcess, files: Secrets, issued: dict[str, Path], tmp_path: Path
) -> None:
    for more in ({}, shown(issued["foreign"])):
        with client_of(mutual, files, None, **more) as client, pytest.raises(Unavailable) as caught:
            client.open_namespace(identity_of("tiny", salt="acme"), name="acme")
        assert ("this client's certificate" in str(caught.value)) == bool(more), str(caught.value)
    with pytest.raises(InvalidArgument, match="the client's certificate has expired; cert="):
        client_of(mutual, files, None, **shown(issued["expired"]))
    mixed = {"cert": issued["acme"] / "cert.pem", "key": issued["both"] / "key.pem"}
    with pytest.raises(InvalidArgument, match="the key is not the certificate's"):
        client_of(mutual, files, None, **mixed)
    with pytest.raises(InvalidArgument, match="goes with its key"):
        client_of(mutual, files, None, cert=issued["acme"] / "cert.pem")


# ---- reload ---------------------------------------------------------------------------------------------------------


def test_certificates_and_tokens_are_replaced_while_it_runs(tmp_path: Path) -> None:
    first = make_secrets(tmp_path / "first")
    with (
        running_service(**first.options) as service,
        Raw(service.directory) as raw,
        Remote(port_of(service), issuer=first.issuer, token=TOKENS[0]) as kept,
    ):
        second = make_secrets(tmp_path / "second")
        for name in ("cert.pem", "key.pem", "issuer.pem"):
            (second.folder / name).replace(first.folder / name)
        write_private(first.folder / "tokens", b"a-token-that-is-the-new-one")
        os.kill(service.pid, signal.SIGHUP)
        wait_for(lambda: raw.stats()["reloads_total"] >= 1)
        with Remote(port_of(service), issuer=first.issuer, token="a-token-that-is-the-new-one") as made:
            assert made.hello.session
        # What a session holds of others' room does not stay with a token that was taken away.
        wait_for(lambda: raw.stats()["sessions"] == 1)
        assert "ended 1 sessions of tokens" in service.log
        with pytest.raises(grpc.RpcError) as caught:
            kept.lookup(Chain(pb.Namespace(digest=bytes(32), block_tokens=32), 1, seed=1))
        assert error_of(caught.value) == "UNAUTHENTICATED"


def test_a_broken_file_changes_nothing_and_is_told(tmp_path: Path) -> None:
    secrets = make_secrets(tmp_path / "s")
    with running_service(**secrets.options) as service, Raw(service.directory) as raw:
        key = secrets.folder / "key.pem"
        good = key.read_bytes()
        key.write_bytes(b"-----BEGIN NOTHING-----\n")
        # Without a signal: it looks by itself.
        wait_for(lambda: raw.stats()["reload_failing"] == 1)
        assert raw.stats()["reloads_failed_total"] == 1
        assert "certificates, tokens and tenants stay as they were: not a certificate" in service.log
        with Remote(port_of(service), issuer=secrets.issuer, token=TOKENS[0]) as made:
            assert made.hello.session
        key.write_bytes(good)
        wait_for(lambda: raw.stats()["reload_failing"] == 0)


# ---- administration -------------------------------------------------------------------------------------------------


def admin_of(service: ServiceProcess, files: Secrets, token: str) -> CacheClient:
    address = parse_address(
        f"tcp://localhost:{port_of(service)}", token=token, ca=files.folder / "issuer.pem", admin=True
    )
    return CacheClient(address, owner="admin", deadlines=Deadlines(connect=10.0))


def test_administration_over_tcp_is_for_its_own_token_which_is_good_for_nothing_else(
    service: ServiceProcess, files: Secrets
) -> None:
    with admin_of(service, files, ADMIN) as admin:
        assert admin.stats()["ready"] == 1
        with pytest.raises(Unauthenticated):
            admin.open_namespace(identity_of("tiny", salt="acme"), name="acme")
        with pytest.raises(Unauthenticated):
            admin.lookup(bytes(32), [bytes(32)], prompt_tokens=33, lease=False)
    for token in (TOKENS[0], ACME):
        with admin_of(service, files, token) as client, pytest.raises(Unauthenticated):
            client.clear()
    wait_for(lambda: bool(lines_of(service, "Clear")))
    [refused] = lines_of(service, "Clear")
    assert (refused["caller"], refused["outcome"], refused["arguments"]) == ("unknown", "UNAUTHENTICATED", {})


def test_commands_administer_a_service_of_another_machine(service: ServiceProcess, files: Secrets) -> None:
    where = ["--address", f"tcp://localhost:{port_of(service)}", "--ca", str(files.folder / "issuer.pem")]

    def kvstore(*words: str, token: str) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            "-m",
            "kvstore.cli.main",
            *words,
            *where,
            "--token-file",
            str(files.folder / token),
        ]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    done = kvstore("stats", "ready", token="admin")
    assert (done.returncode, "ready" in done.stdout) == (0, True), done.stderr
    assert kvstore("tenants", "--json", token="admin").returncode == 0
    (files.folder / "wrong").write_text("a-token-that-nobody-knows")
    done = kvstore("stats", token="wrong")
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "no token, or certificate, that this service knows" in done.stderr


def lines_of(service: ServiceProcess, call: str) -> list[dict[str, object]]:
    file = service.directory / "audit.log"
    text = file.read_text() if file.exists() else ""
    return [line for line in map(json.loads, text.splitlines()) if line["call"] == call]


def test_each_admin_call_has_a_line_of_who_what_and_how_it_ended(
    service: ServiceProcess, files: Secrets
) -> None:
    with CacheClient(service.directory, owner="local") as local, admin_of(service, files, ADMIN) as admin:
        local.set_eviction("sieve")
        with pytest.raises(InvalidArgument):
            admin.set_eviction("none-such")
        with pytest.raises(UnknownNamespace):
            local.clear(bytes(range(32)))
        wait_for(lambda: lines_of(service, "Clear")[-1:] != [] and "uid" in lines_of(service, "Clear")[-1])
        own, refused = lines_of(service, "SetEviction")
        assert (own["uid"], own["pid"], own["outcome"]) == (os.geteuid(), os.getpid(), "ok")
        assert own["arguments"] == {"policy": "sieve"}
        assert refused["caller"] == "admin token 1"
        assert str(refused["address"]).startswith("ipv")
        assert refused["outcome"] == "INVALID_ARGUMENT"
        cleared = lines_of(service, "Clear")[-1]
        assert (cleared["arguments"], cleared["outcome"]) == (
            {"namespace": bytes(range(32)).hex()},
            "UNKNOWN_NAMESPACE",
        )
        assert dt.datetime.fromisoformat(str(own["time"])).tzinfo is not None
        local.set_eviction("lru")
    assert (service.directory / "audit.log").stat().st_mode & 0o777 == 0o600
    assert ADMIN not in (service.directory / "audit.log").read_text()
