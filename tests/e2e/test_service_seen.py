"""A running service as operators see it: probes, the pages of its metrics port, log lines, `kvstore top`."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import termios
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.cli.main import main
from kvstore.cli.top import END_OF_LINE, END_OF_SCREEN, ENTER, LEAVE, TOP
from tests.e2e.service_raw import Chain, Raw
from tests.support.deployment import ONLY_AFTER_BLOCKS_LEFT, metrics_asked_for
from tests.support.service import ServiceProcess, short_directory

NAME = "a-tenant"


@dataclass
class Seen:
    service: ServiceProcess
    raw: Raw
    chain: Chain
    metrics: str
    health: str


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture(scope="module")
def seen() -> Iterator[Seen]:
    """A service with sockets of their own place, that has stored and found a prefix."""
    metrics, health = free_address(), free_address()
    with ExitStack() as stack:
        directory = stack.enter_context(short_directory())
        options = {"sockets": str(directory.parent / "run"), "log_format": "json", "wear": 8 << 30}
        service = stack.enter_context(ServiceProcess(directory, metrics=metrics, health=health, **options))
        raw = stack.enter_context(Raw(service.sockets))
        chain = Chain(raw.open(NAME), 3, seed=1)
        raw.store(chain)
        raw.lookup(chain)
        yield Seen(service, raw, chain, metrics, health)


def get(seen: Seen, path: str) -> str:
    with urllib.request.urlopen(f"http://{seen.metrics}{path}", timeout=10) as answer:
        body: str = answer.read().decode()
        return body


def status(seen: Seen) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(get(seen, "/status.json"))
    return found


def health_says(seen: Seen, name: str = "") -> str:
    with grpc.insecure_channel(seen.health) as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service=name), timeout=10
        )
    return health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)


def test_sockets_lie_where_they_were_asked_for_and_nowhere_else(seen: Seen) -> None:
    assert {each.name for each in seen.service.sockets.iterdir()} == {"kvstore.sock", "session.sock"}
    assert not [each for each in seen.service.directory.iterdir() if each.suffix == ".sock"]
    assert seen.service.sockets.stat().st_mode & 0o777 == 0o700


def test_every_metric_of_dashboard_and_alerts_is_one_of_the_service(seen: Seen) -> None:
    shown = set(re.findall(r"^(kvstore_\w+) ", get(seen, "/metrics"), re.M))
    assert metrics_asked_for() - shown == ONLY_AFTER_BLOCKS_LEFT


def test_the_status_has_figures_plans_with_their_runners_up_and_slow_calls(seen: Seen) -> None:
    found = status(seen)
    assert found["figures"]["blocks"] == 3
    assert found["figures"].keys() == seen.raw.stats().keys()
    [plan] = found["plans"]
    assert plan["chosen"]["state_source"] == "REPLAY"
    assert plan["runner_up"]["state_source"] == "NONE"
    assert plan["runner_up"]["seconds"] > plan["chosen"]["seconds"]
    assert {"Commit", "Lookup"} <= {call["call"] for call in found["slowest_calls"]}
    seconds = [call["seconds"] for call in found["slowest_calls"]]
    assert seconds == sorted(seconds, reverse=True)


def test_a_port_that_asks_nobody_who_they_are_tells_no_names_and_no_keys(seen: Seen) -> None:
    for path in ("/", "/status.json", "/metrics"):
        body = get(seen, path)
        assert NAME not in body
        assert not [key for key in seen.chain.keys if key.hex() in body]


def test_the_page_is_whole_and_may_load_nothing_from_elsewhere(seen: Seen) -> None:
    with urllib.request.urlopen(f"http://{seen.metrics}/", timeout=10) as answer:
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
        page = answer.read().decode()
    assert not re.search(
        r"https?://|//[a-z]|@import|<script src|<link rel=.stylesheet", page.split("<script>")[0]
    )
    assert 'fetch("/status.json"' in page


def test_what_the_page_shows_is_there(seen: Seen) -> None:
    """Figures by name in its script; one that only some services have may be missing."""
    used = set(re.findall(r"\bf\.(\w+)", get(seen, "/"))) | set(re.findall(r'per\("(\w+)"', get(seen, "/")))
    missing = used - status(seen)["figures"].keys()
    assert missing == {"retention_attained_share"}


def test_top_prints_once_where_nobody_watches(seen: Seen, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--dir", str(seen.service.sockets), "--every", "100ms"]) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    for words in (
        "kvstore ready",
        "block cache",
        "REPLAY",
        "retention attained: nothing has left yet",
        "a second: ",
    ):
        assert words in text


def test_top_of_the_metrics_port_knows_plans_and_slow_calls(
    seen: Seen, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert (
        main(["top", "--metrics", seen.metrics, "--every", "100ms", "--json", str(tmp_path / "t.json")]) == 0
    )
    text = capsys.readouterr().out
    assert "not NONE: " in text
    assert "Commit" in text
    document = json.loads((tmp_path / "t.json").read_text())
    assert document["rates"]["lookups"] == 0
    assert document["figures"]["blocks"] == 3


def test_top_on_a_terminal_draws_again_and_again_and_leaves_it_as_it_was(seen: Seen) -> None:
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (12, 40))
    command = [sys.executable, "-m", "kvstore.cli.main", "top", "--metrics", seen.metrics, "--every", "100ms"]
    with subprocess.Popen(command, stdout=theirs, stderr=theirs) as top:
        os.close(theirs)
        shown = b""
        while shown.count(TOP.encode()) < 3:
            shown += os.read(ours, 1 << 16)
        top.send_signal(signal.SIGINT)
        assert top.wait(20) == 0
        shown += os.read(ours, 1 << 16)
    os.close(ours)
    screen = shown.decode().split(TOP)[1].split(END_OF_SCREEN)[0].replace(END_OF_LINE, "").splitlines()
    assert shown.decode().startswith(ENTER)
    assert shown.decode().endswith(LEAVE)
    assert screen[0].startswith("kvstore ready, up ")
    assert len(screen) == 11
    assert max(len(line) for line in screen) == 40


def test_a_service_manager_hears_when_calls_are_served_and_not_before(tmp_path: Path) -> None:
    with ExitStack() as stack:
        directory = stack.enter_context(short_directory())
        manager = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        manager.bind(str(directory.with_name("notify")))
        manager.settimeout(30)
        words = ["serve", "--dir", str(directory), "--disk", "64MiB", "--memory", "128MiB"]
        service = subprocess.Popen(
            [sys.executable, "-m", "kvstore.cli.main", *words],
            env={**os.environ, "NOTIFY_SOCKET": str(directory.with_name("notify"))},
            stderr=subprocess.DEVNULL,
        )
        stack.callback(service.wait, 30)
        stack.callback(service.terminate)
        assert manager.recv(64) == b"READY=1"
        assert main(["stats", "ready", "--dir", str(directory), "--json", str(tmp_path / "s.json")]) == 0
    assert json.loads((tmp_path / "s.json").read_text())["ready"] == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--every", "0"], "--every=0; allowed: 0.1 s to 3600 s"),
        (["--metrics", "127.0.0.1:1"], "the HOST:PORT that `kvstore serve --metrics` has"),
    ],
)
def test_top_says_what_is_wrong(
    seen: Seen, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", "--dir", str(seen.service.sockets), "--every", "100ms", *words]) == 1
    assert said in capsys.readouterr().err


def test_every_line_of_the_log_is_json(seen: Seen) -> None:
    lines = [json.loads(line) for line in seen.service.log.splitlines()]
    [ready] = [line for line in lines if line["message"].startswith("ready: ")]
    assert ready["level"] == "INFO"
    assert str(seen.service.sockets) in ready["message"]


def test_probes_hear_that_a_service_drains_and_that_it_lives(seen: Seen) -> None:
    """Last: nothing is stored afterwards."""
    assert [health_says(seen, name) for name in ("", "liveness")] == ["SERVING", "SERVING"]
    with grpc.insecure_channel(seen.health) as channel:
        call = channel.unary_unary("/kvstore.v1.Admin/Clear")
        with pytest.raises(grpc.RpcError) as refused:
            call(b"", timeout=10)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        # Who watches takes a place of the few for as long as it wants.
        with pytest.raises(grpc.RpcError) as refused:
            next(health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=10))
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert main(["drain", "--dir", str(seen.service.sockets), "--timeout", "0s"]) == 1
    assert [health_says(seen, name) for name in ("", "liveness")] == ["NOT_SERVING", "SERVING"]
    assert status(seen)["figures"]["draining"] == 1
