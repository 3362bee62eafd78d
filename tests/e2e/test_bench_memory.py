"""`kvstore bench memory` on a small store."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from kvstore.bench.memory import Readings, report
from kvstore.bench.pairs import Pair
from kvstore.cli.main import main
from kvstore.memory import why_not_mapped
from tests.support.service import short_directory


def test_it_measures_a_service_of_its_own_and_leaves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    if reason := why_not_mapped():
        pytest.skip(f"shared memory is needed: {reason}")
    with short_directory() as folder:
        folder.mkdir()
        arguments = [
            "bench",
            "memory",
            "--size",
            "64MiB",
            "--pairs",
            "3",
            "--seed",
            "7",
            "--dir",
            str(folder),
        ]
        code = main([*arguments, "--json"])
        assert list(folder.iterdir()) == []
    answer = json.loads(capsys.readouterr().out)
    detail = answer["detail"]
    assert code == (1 if answer["missed"] else 0)
    assert (detail["pairs"], detail["seed"]) == (3, 7)
    assert detail["size_bytes"] == detail["blocks"] * detail["block_bytes"] <= 64 << 20
    for name in ("descriptors_ms", "verified_ratio"):
        assert len(detail[name]["samples"]) == 3
        assert answer[name] == statistics.median(detail[name]["samples"]) > 0
        low, high = detail[name]["interval"]
        assert low <= answer[name] <= high
        assert (name in answer["missed"]) is (answer[name] > answer["bars"][name])
        assert name in detail["what"]


def test_a_ratio_is_of_seconds_and_the_bars_are_held_against_medians() -> None:
    fast, slow = Pair(ours=100.0, theirs=125.0), Pair(ours=100.0, theirs=200.0)
    found = Readings(10, 1000, descriptors=[9.0, 9.9, 50.0], copies=[fast, fast, slow])
    answer = report(found, seed=1)
    assert (answer["descriptors_ms"], answer["verified_ratio"]) == (9.9, 1.25)
    assert answer["missed"] == []
    found = Readings(10, 1000, descriptors=[9.0, 10.1, 50.0], copies=[fast, slow, slow])
    assert report(found, seed=1)["missed"] == ["descriptors_ms", "verified_ratio"]


@pytest.mark.parametrize(("flag", "value"), [("--size", "1MiB"), ("--size", "1TiB"), ("--pairs", "0")])
def test_what_cannot_be_measured_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, value: str
) -> None:
    assert main(["bench", "memory", flag, value, "--dir", str(tmp_path)]) == 1
    assert flag in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_too_long_a_path_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    assert main(["bench", "memory", "--size", "64MiB", "--dir", str(deep)]) == 1
    assert "shorter path" in capsys.readouterr().err
    assert list(deep.iterdir()) == []
