"""`kvstore bench beside` on a small store."""

from __future__ import annotations

import json

import pytest

from kvstore.bench import beside
from kvstore.cli.main import main
from tests.support.service import short_directory


def test_it_measures_each_work_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("UPLOADED_ITEMS", 2048), ("FLIGHTS", 16), ("VERIFY_SECONDS", 1.0)):
        monkeypatch.setattr(beside, name, value)
    with short_directory() as folder:
        folder.mkdir()
        code = main(["bench", "beside", "--blocks", "2000", "--seed", "7", "--dir", str(folder), "--json"])
        assert list(folder.iterdir()) == []
    answer = json.loads(capsys.readouterr().out)
    works = answer["detail"]["works"]
    assert [each["what"] for each in works] == [
        "stats",
        "policy",
        "verify",
        "drop states",
        "end of a session with flights",
        "commit",
        "clear",
        "drain",
        "expiry",
    ]
    assert code == (1 if answer["missed"] else 0)
    assert (answer["detail"]["blocks"], answer["detail"]["seed"]) == (2000, 7)
    for each in works:
        waited = max(each["health"], each["lookup"], each["loop_gap"])
        assert (each["what"] in answer["missed"]) is (waited > answer["bars"]["loop_gap_ms"] / 1e3)
        assert 0 <= each["own_gap"] <= each["loop_gap"]
    assert answer["loop_gap_ms"] == 1e3 * max(each["loop_gap"] for each in works)
