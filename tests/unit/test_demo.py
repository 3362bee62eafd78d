"""The demo's pure parts: what happens in which turn, the tokenizer, the material, and the verdict."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import ConfigError
from kvstore_workers.demo.material import choose_files, excerpts
from kvstore_workers.demo.report import failures
from kvstore_workers.demo.script import Before, plan_turns
from kvstore_workers.demo.tokenizer import VOCABULARY, Mark, decode, encode


@pytest.mark.parametrize("count", [8, 9, 20])
def test_every_session_has_both_kills_an_empty_pool_and_dropped_states(count: int) -> None:
    turns = plan_turns(count)
    assert [t.number for t in turns] == list(range(1, count + 1))
    assert sum(t.kill_during_store for t in turns) == 1
    assert [t.before for t in turns if t.before] == [Before.KILL, Before.EMPTY_POOL, Before.DROP_STATES]


@pytest.mark.parametrize("count", [0, 7, 65])
def test_too_few_or_too_many_turns_are_refused(count: int) -> None:
    with pytest.raises(ConfigError, match=f"--turns={count}"):
        plan_turns(count)


def test_any_text_becomes_ids_of_the_vocabulary_and_back_to_printable_text() -> None:
    tokens = encode("naïve → \x00 text")
    assert all(0 <= t < Mark.SESSION < VOCABULARY for t in tokens)
    assert decode([*encode("ok"), Mark.END, 0, 255]) == "ok<260>\\x00\\xff"


def test_material_goes_round_all_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("abcde")
    (tmp_path / "b").write_text("xy")
    pieces = excerpts(choose_files([str(tmp_path / "a"), str(tmp_path / "b")]), length=3)
    assert [next(pieces) for _ in range(4)] == [("a:0", "abc"), ("a:3", "de"), ("b:0", "xy"), ("a:0", "abc")]


def test_the_default_material_is_there() -> None:
    assert len(choose_files([])) >= 5


@pytest.mark.parametrize("content", [None, ""])
def test_a_file_that_cannot_serve_is_named(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "f.txt"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"f\.txt"):
        choose_files([str(path)])


def _report(**checks: Any) -> dict[str, Any]:
    good = {
        "all_identical": True,
        "max_logit_difference": 0.0,
        "kills": 2,
        "killed_during_store": 1,
        "sources_seen": ["POOL", "CHECKPOINT", "REPLAY"],
        "sources_planned": ["POOL", "CHECKPOINT", "REPLAY"],
    }
    return {
        "turns": [{"turn": 1, "identical": checks.get("all_identical", True)}],
        "checks": {**good, **checks},
    }


def test_the_verdict_is_passed_only_when_everything_planned_happened() -> None:
    assert failures(_report()) == []
    for change, words in (
        ({"all_identical": False}, "turns [1]"),
        ({"sources_seen": ["POOL", "CHECKPOINT"]}, "REPLAY"),
        ({"killed_during_store": 0}, "did not fall into a store"),
        ({"kills": 1}, "killed 1 times"),
        ({"max_logit_difference": math.inf}, "logits"),
    ):
        found = failures(_report(**change))
        assert len(found) == 1
        assert words in found[0]
