"""`kvstore bench storage --through client` on a small store: a service, two client processes, and nothing left of them."""

from __future__ import annotations

import json
import statistics

import pytest

from kvstore.cli.main import main
from kvstore.memory import why_not_mapped
from kvstore.store.device import why_not_direct
from tests.support.service import short_directory


def test_it_measures_commits_and_mapped_reads_and_leaves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    if reason := why_not_mapped():
        pytest.skip(f"shared memory is needed: {reason}")
    with short_directory() as folder:
        folder.mkdir()
        if reason := why_not_direct(folder / "probe"):
            pytest.skip(f"a file system with O_DIRECT is needed: {reason}")
        arguments = ["--size", "64MiB", "--pairs", "2", "--seed", "7", "--dir", str(folder)]
        assert main(["bench", "storage", "--through", "client", *arguments, "--json"]) == 0
        assert list(folder.iterdir()) == []
    answer = json.loads(capsys.readouterr().out)
    assert set(answer) == {"write", "read", "device_bytes_per_payload_byte", "detail"}
    detail = answer["detail"]
    assert (detail["through"], detail["pairs"], detail["seed"]) == ("client", 2, 7)
    assert detail["commits_at_once"] == 8
    assert 1.0 <= detail["device_bytes_counted_by_log_per_payload_byte"] < 1.1
    for name in ("write", "read"):
        assert set(answer[name]) == {"ratio", "interval", "raw"}
        ratios = [pair["ratio"] for pair in detail[f"{name}_pairs"]]
        assert len(ratios) == 2
        assert answer[name]["ratio"] == pytest.approx(statistics.median(ratios))
        assert min(ratios) > 0


def test_another_way_through_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["bench", "storage", "--through", "wall"])
    assert refused.value.code == 2
    assert "--through" in capsys.readouterr().err
