"""`kvstore bench tenants` runs, and a small number of calls tells nothing apart. The recorded one has 10,000 of each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstore.cli.main import main


def test_no_tenant_sees_in_the_time_of_its_calls_what_another_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A chance of one in a hundred million that samples of one distribution look so different, on a busy machine too.
    monkeypatch.setattr("kvstore.bench.tenants.P_LEAST", 1e-8)
    assert main(["bench", "tenants", "--calls", "300", "--dir", "/tmp", "--seed", "3", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["missed"] == []
    assert answer["questions"].keys() == {"prompt", "keys", "namespace"}
    assert all(each["calls"] == 300 for each in answer["questions"].values())


def test_too_few_calls_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "tenants", "--calls", "5"]) == 1
    assert "--calls=5" in capsys.readouterr().err
