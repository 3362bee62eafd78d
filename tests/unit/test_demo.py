"""The demo's pure parts: what happens in which turn, the tokenizer, the material, and the verdict."""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from kvstore.cli.main import main
from kvstore.errors import ConfigError
from kvstore_workers.demo.material import choose_files, excerpts
from kvstore_workers.demo.processes import Cluster
from kvstore_workers.demo.report import failures
from kvstore_workers.demo.script import Before, aim, plan_turns
from kvstore_workers.demo.tokenizer import VOCABULARY, Mark, decode, encode


@pytest.mark.parametrize("count", [9, 10, 20])
def test_every_session_has_both_kills_empty_pools_dropped_states_and_a_policy_of_rows(count: int) -> None:
    turns = plan_turns(count)
    assert [t.number for t in turns] == list(range(1, count + 1))
    assert sum(t.kill_during_store for t in turns) == 1
    assert [t.before for t in turns if t.before] == [
        Before.KILL,
        Before.EMPTY_POOL,
        Before.DROP_STATES,
        Before.FULL_POLICY,
        Before.EMPTY_POOL,
    ]


def test_a_kill_that_missed_the_store_is_tried_again_in_the_next_turn() -> None:
    ordinary = plan_turns(9)[3]
    assert aim(ordinary, missed=True).kill_during_store
    assert aim(ordinary, missed=False) == ordinary


def test_while_no_turn_has_resumed_from_rows_the_pool_is_emptied_again() -> None:
    last = plan_turns(10)[9]
    assert aim(last, missed=False, lacking=True).before is Before.EMPTY_POOL
    assert aim(last, missed=False, lacking=False) == last


@pytest.mark.parametrize("count", [0, 8, 65])
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
    assert [next(pieces) for _ in range(4)] == [
        ("a:0", b"abc"),
        ("a:3", b"de"),
        ("b:0", b"xy"),
        ("a:0", b"abc"),
    ]


def test_any_content_and_any_name_become_as_many_tokens_as_they_have_bytes(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/odd\xff name\n"))
    path.write_bytes(bytes(range(256)))
    name, content = next(excerpts(choose_files([str(path)]), length=1000))
    assert content == bytes(range(256))
    assert bytes(encode(name)) == b"odd\xff name\n:0"


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/null", "/dev", "nul\0byte"])
def test_what_is_no_regular_file_is_refused_and_not_read(path: str) -> None:
    with pytest.raises(ConfigError, match="--files"):
        choose_files([path])


def test_of_a_huge_file_no_more_is_read_than_a_session_can_use(tmp_path: Path) -> None:
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(1 << 40)
    name, content = next(excerpts(choose_files([str(tmp_path / "huge")]), length=1 << 30))
    assert (name, len(content)) == ("huge:0", 1 << 20)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--turns", "64", "--turn-tokens", "65536"], "the session becomes too long"),
        (["--turn-tokens", ""], "--turn-tokens"),
        (["--profile", "deepseek-v4-pro"], "--profile=deepseek-v4-pro; allowed: tiny, flash-slim"),
    ],
)
def test_what_can_t_end_well_is_refused_before_anything_is_started(
    capsys: pytest.CaptureFixture[str], args: list[str], words: str
) -> None:
    assert main(["demo", *args]) == 1
    assert words in capsys.readouterr().err


def test_sockets_find_a_short_place_where_temporary_files_have_long_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with Cluster(profile="tiny", seed=1, threads=1) as cluster:
        assert len(os.fsencode(cluster.root / "cache" / "session.sock")) <= 107
        assert cluster.root.stat().st_mode & 0o777 == 0o700
        root = cluster.root
    assert not root.exists()
    assert list(deep.iterdir()) == []


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
        "sources_seen": ["POOL", "CHECKPOINT", "ROWS", "REPLAY"],
        "sources_planned": ["POOL", "CHECKPOINT", "ROWS", "REPLAY"],
    }
    return {
        "turns": [
            {
                "turn": 1,
                "identical": checks.get("all_identical", True),
                "max_logit_difference": checks.get("max_logit_difference", 0.0),
            }
        ],
        "checks": {**good, **checks},
    }


def test_the_verdict_is_passed_only_when_everything_planned_happened() -> None:
    assert failures(_report()) == []
    for change, words in (
        ({"all_identical": False}, "turns [1]"),
        ({"sources_seen": ["POOL", "CHECKPOINT", "ROWS"]}, "REPLAY"),
        ({"killed_during_store": 0}, "did not fall into a store"),
        ({"kills": 1}, "killed 1 times"),
        ({"max_logit_difference": math.inf}, "logits are missing"),
        ({"max_logit_difference": 1e-9}, "logits differ from the run without a store in turns [1]"),
    ):
        found = failures(_report(**change))
        assert len(found) == 1
        assert words in found[0]
