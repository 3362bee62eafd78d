"""`kvstore bench stream` on a small store."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from kvstore.bench.pairs import Pair
from kvstore.bench.stream import Readings, report
from kvstore.cli.main import main
from tests.support.service import short_directory


def test_it_measures_two_services_of_its_own_and_leaves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with short_directory() as folder:
        folder.mkdir()
        arguments = ["--size", "64MiB", "--pairs", "3", "--seed", "7", "--dir", str(folder), "--json"]
        code = main(["bench", "stream", *arguments])
        assert list(folder.iterdir()) == []
    answer = json.loads(capsys.readouterr().out)
    detail = answer["detail"]
    assert code == (1 if answer["missed"] else 0)
    assert (detail["pairs"], detail["seed"]) == (3, 7)
    assert detail["size_bytes"] == detail["blocks"] * detail["block_bytes"] <= 64 << 20
    samples = detail["ratio"]["samples"]
    assert len(samples) == 3
    assert answer["ratio"] == statistics.median(samples) > 0
    low, high = detail["ratio"]["interval"]
    assert low <= answer["ratio"] <= high
    pairs = zip(detail["fetch_mb_per_second"], detail["bare_mb_per_second"], strict=True)
    assert [ours / theirs for ours, theirs in pairs] == pytest.approx(samples)


def test_the_bar_is_held_against_the_median() -> None:
    fast, slow = Pair(ours=80.0, theirs=100.0), Pair(ours=79.0, theirs=100.0)
    assert report(Readings(10, 1000, streams=[fast, fast, slow]), seed=1)["missed"] == []
    answer = report(Readings(10, 1000, streams=[fast, slow, slow]), seed=1)
    assert (answer["ratio"], answer["missed"]) == (0.79, ["ratio"])


@pytest.mark.parametrize(("flag", "value"), [("--size", "1MiB"), ("--size", "1TiB"), ("--pairs", "0")])
def test_what_cannot_be_measured_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str, value: str
) -> None:
    assert main(["bench", "stream", flag, value, "--dir", str(tmp_path)]) == 1
    assert flag in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
