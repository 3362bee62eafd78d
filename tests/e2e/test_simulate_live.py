"""A request log against a real service and simulated: the same hits, real bytes, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.bench.serving import Chain, opened
from kvstore.cli.main import main
from kvstore.clock import SystemClock
from kvstore.profile.registry import get_profile
from kvstore.simulate.formats import load_log
from kvstore.simulate.live import Drive
from kvstore_client import CacheClient
from tests.support.polling import wait_for
from tests.support.request_logs import GOLDEN
from tests.support.service import ServiceProcess, running_service

REQUESTS = 40
LARGE = "deepseek-v4.1-flash"
"""113,920 B a block: nine in a segment of 1 MiB."""
TIGHT = {"disk": 4 << 20, "segment": 1 << 20}


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceProcess]:
    """With room for all."""
    with running_service() as running:
        yield running


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return cut(tmp_path, REQUESTS)


def cut(folder: Path, requests: int) -> Path:
    path = folder / "log.jsonl"
    path.write_text("".join(GOLDEN.read_text().splitlines(keepends=True)[:requests]))
    return path


def answer(
    capsys: pytest.CaptureFixture[str], service: ServiceProcess, log: Path, *flags: str
) -> dict[str, object]:
    code = main(["simulate", str(log), "--live", str(service.directory), *flags, "--json"])
    live = json.loads(capsys.readouterr().out)["live"]
    assert code == (1 if live["failed"] else 0)
    return live


def blocks_of(service: ServiceProcess) -> int:
    with CacheClient(service.directory, owner="test") as client:
        return int(client.stats()["blocks"])


def test_with_room_for_all_live_and_simulated_are_the_same_and_others_keep_their_blocks(
    capsys: pytest.CaptureFixture[str], service: ServiceProcess, log: Path
) -> None:
    with CacheClient(service.directory, owner="test") as client:
        chain = Chain(opened(client, get_profile("tiny"), lambda: None), 5, seed=1)
        chain.store(client, lambda: None)
        for flags in ((), ("--as-served",)):
            live = answer(capsys, service, log, *flags)
            assert live["difference"] == 0
            assert live["token_hit_rate"] > 30
            assert (live["requests"], live["evicted_blocks"], live["blocks_refused"]) == (REQUESTS, 0, 0)
            assert live["blocks_stored"] == live["blocks_held"] == live["simulated_blocks_stored"] > 100
            assert live["fetched_blocks"] > REQUESTS / 2
            assert live["wrong_bytes"] == live["missing_blocks"] == 0
            assert (live["others_blocks"], live["others_stored_blocks"]) == (5, 0)
        assert client.clear(chain.namespace.digest).blocks == 5
    assert blocks_of(service) == 0


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_a_service_that_evicts_hits_what_is_simulated_in_its_room(
    capsys: pytest.CaptureFixture[str], log: Path, policy: str
) -> None:
    with running_service(**TIGHT, eviction=policy) as service:
        live = answer(capsys, service, log, "--profile", LARGE)
        assert live["policy"] == policy
        assert live["evicted_blocks"] > live["blocks_held_most"]
        assert abs(live["difference"]) <= 0.2
        assert live["wrong_bytes"] == live["missing_blocks"] == 0
        # Whole segments come back: there is less than the most that is held, most of the time.
        assert live["token_hit_rate"] < live["steady_token_hit_rate"]
        assert blocks_of(service) == 0


def test_people_see_both_rates_beside_each_other(
    capsys: pytest.CaptureFixture[str], service: ServiceProcess, tmp_path: Path
) -> None:
    socket = service.directory / "kvstore.sock"
    assert main(["simulate", str(cut(tmp_path, 20)), "--live", str(socket)]) == 0
    text = capsys.readouterr().out
    assert "mooncake log: 20 requests" in text
    assert f"service at {socket}: lru, 20 requests in " in text
    assert "difference +0.00 points (at most 0.2 allowed)" in text
    assert "0 wrong bytes, 0 missing" in text


def test_requests_come_at_the_pace_asked_for(service: ServiceProcess, tmp_path: Path) -> None:
    log = load_log([cut(tmp_path, 4)]).log
    warp = log.span_seconds / 0.4
    with CacheClient(service.directory, owner="test") as client:
        drive = Drive(
            client, log, get_profile("tiny"), as_served=False, seed=1, clock=SystemClock(), warp=warp
        )
        live = drive.run()
    seconds = live.moments[-1].asked - live.moments[0].asked
    assert seconds > 0.39 - live.late_seconds_most


def test_an_interrupted_run_leaves_no_block(service: ServiceProcess, log: Path) -> None:
    before = blocks_of(service)
    arguments = [str(log), "--live", str(service.directory), "--warp", "1"]
    with subprocess.Popen(
        [sys.executable, "-m", "kvstore.cli.main", "simulate", *arguments],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        wait_for(lambda: blocks_of(service) > before, 20)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(10) == 130
        assert process.stderr is not None
        assert process.stderr.read() == "kvstore: interrupted\n"
    assert blocks_of(service) == before


def test_without_a_service_there_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, log: Path
) -> None:
    assert main(["simulate", str(log), "--live", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    [line] = printed.err.splitlines()
    assert "no service to be reached" in line
