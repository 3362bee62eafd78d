"""The whole thing once: the demo's own processes, kills and comparison, at its smallest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


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
            "8",
            "--turn-tokens",
            "400",
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
    assert checks["kills"] == 2
    assert {"POOL", "CHECKPOINT", "REPLAY"} <= set(checks["sources_seen"])
    assert len(turns) == 8
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
