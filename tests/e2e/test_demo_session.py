"""The whole thing once: the demo's own processes, kills and comparison, at its smallest."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.support.long import long


@pytest.mark.slow
def test_the_demo_serves_every_planned_source_and_changes_no_answer(tmp_path: Path) -> None:
    file = tmp_path / "demo.json"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "kvstore.cli.main",
            "demo",
            "--turns",
            "9",
            "--trace",
            str(tmp_path / "trace.json"),
            "--turn-tokens",
            "400",
            "--answer-tokens",
            "8",
            "--json",
            str(file),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == "", "progress is for terminals"
    report = json.loads(file.read_text())
    checks, turns = report["checks"], report["turns"]
    assert checks["all_identical"]
    assert checks["max_logit_difference"] == 0
    assert checks["kills"] >= 2
    assert {"POOL", "CHECKPOINT", "ROWS", "REPLAY"} <= set(checks["sources_seen"])
    assert len(turns) == 9
    assert [t["prompt_tokens"] for t in turns] == sorted(t["prompt_tokens"] for t in turns)
    for turn in turns:
        assert turn["restored_tokens"] + turn["computed_tokens"] == turn["prompt_tokens"]
        assert turn["restored_tokens"] < turn["prompt_tokens"]
        assert set(turn) >= {
            "prompt_tokens",
            "restored_tokens",
            "replayed_tokens",
            "computed_tokens",
            "state_source",
            "exactness",
            "bytes_ssd",
            "bytes_memory",
            "ttft_s",
            "cold_ttft_s",
            "identical",
            "max_logit_difference",
        }
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    bars = [event for event in events if event["ph"] == "X"]
    assert {event["args"]["turn"] for event in bars} == set(range(1, 10))
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in bars)
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {"prefill", "decode"} <= {name.split()[0] for name in names}
    assert {"lookup", "restore", "store", "decode"} <= {event["name"] for event in bars}


def _children(demo: subprocess.Popen[bytes], count: int) -> list[int]:
    """The demo's child processes, as soon as it has `count`; fewer when it ends before or 30 s are over."""
    found: list[int] = []
    for _ in range(600):
        found = [int(pid) for pid in Path(f"/proc/{demo.pid}/task/{demo.pid}/children").read_text().split()]
        if len(found) == count:
            break
        with suppress(subprocess.TimeoutExpired):
            demo.wait(0.05)
            break
    return found


def _end(process: int, seconds: float) -> bool:
    """Whether the process behind the descriptor ends within `seconds`."""
    return bool(select.select([process], [], [], seconds)[0])


@pytest.mark.parametrize(
    ("number", "code"),
    # The other two go the way of SIGINT.
    [(signal.SIGINT, 130), (signal.SIGKILL, -9), long(signal.SIGTERM, 130), long(signal.SIGHUP, 130)],
)
def test_a_demo_that_is_ended_half_way_leaves_no_process_and_no_directory(
    number: signal.Signals, code: int
) -> None:
    with TemporaryDirectory(prefix="kv-") as folder:
        demo = subprocess.Popen(
            [sys.executable, "-m", "kvstore.cli.main", "demo"],
            env={**os.environ, "TMPDIR": folder},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        with ExitStack() as stack:
            stack.callback(demo.kill)
            processes = [os.pidfd_open(pid) for pid in _children(demo, 5)]
            for process in processes:
                stack.callback(os.close, process)
            assert len(processes) == 5
            demo.send_signal(number)
            _, words = demo.communicate(timeout=60)
            assert (demo.returncode, words) == (code, b"kvstore: interrupted\n" if code > 0 else b"")
            assert all(_end(process, 30.0) for process in processes)
        # Nobody is left to remove it after SIGKILL.
        assert bool(os.listdir(folder)) == (number is signal.SIGKILL)
