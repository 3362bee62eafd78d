"""`kvstore bench restart` on a small store."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def bench(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvstore.cli.main", "bench", "restart", "--dir", str(folder), *flags],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_every_start_finds_every_block_and_leaves_nothing_behind(tmp_path: Path) -> None:
    result = bench(tmp_path, "--blocks", "1500", "3000", "--seed", "7", "--json")
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    starts = answer["starts"]
    ways = ["killed", "clean", "catalogue lost", "footers lost"]
    assert [(start["what"], start["blocks"]) for start in starts] == [
        (way, blocks) for blocks in (1500, 3000) for way in ways
    ]
    assert [start["rebuilt"] for start in starts] == 2 * [False, False, True, True]
    assert all(start["within_bar"] is None for start in starts)
    assert all(
        0 < start["load_seconds"] + start["open_seconds"] <= start["seconds"] + 1e-6 for start in starts
    )
    assert set(answer["extrapolated"]["starts"]) == set(ways)
    assert list(tmp_path.iterdir()) == []


def test_sizes_that_nobody_can_build_are_refused(tmp_path: Path) -> None:
    result = bench(tmp_path, "--blocks", "0")
    assert result.returncode == 1
    assert "--blocks" in result.stderr
    assert len(result.stderr.splitlines()) == 1
