"""The helper process, blows inside of calls, missing tools, and the command itself."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvstore.chaos import bitflip, calls, tools
from kvstore.chaos.base import ChaosFailed, MissingTool, Outcome
from kvstore.chaos.inspect import inspect
from kvstore.chaos.journal import Word, read_journal
from kvstore.chaos.ledger import Ledger, Sight
from kvstore.chaos.load import MIB, write_until_killed
from kvstore.chaos.nursery import Nursery
from kvstore.chaos.starving import try_start
from kvstore.store.base import Place

BUDGET = 12 * MIB


def load_arguments(folder: Path, **more: object) -> dict[str, object]:
    return {
        "directory": str(folder / "store"),
        "journal": str(folder / "journal"),
        "seed": 1,
        "first": 0,
        "budget": BUDGET,
        **more,
    }


def test_a_child_is_killed_when_its_time_has_come_and_the_helper_goes_on(tmp_path: Path) -> None:
    with Nursery() as nursery:
        killed = nursery.run(write_until_killed, load_arguments(tmp_path), kill_after=0.05)
        assert (killed.status, killed.killed, killed.trouble) == (-signal.SIGKILL, True, "")
        failed = nursery.run(write_until_killed, {})
        assert failed.trouble == "ended with status 1: KeyError: 'seed'"
        assert nursery.run(try_start, {"directory": str(tmp_path / "fresh")}).result == ""


def test_a_child_dies_in_the_call_that_was_named(tmp_path: Path) -> None:
    with Nursery() as nursery:
        ended = nursery.run(
            write_until_killed, load_arguments(tmp_path, die_in_call=5, share=0.5), dies_by_itself=True
        )
        assert (ended.status, ended.trouble) == (-signal.SIGKILL, "")
        events = read_journal(tmp_path / "journal")
        assert events[0].word is Word.FOUND
        ledger = Ledger()
        ledger.apply(events)
        assert inspect(nursery, tmp_path / "store", budget=BUDGET).violations(ledger) == []


def test_an_acknowledgement_that_came_too_early_is_found_out(tmp_path: Path) -> None:
    with Nursery() as nursery:
        nursery.run(write_until_killed, load_arguments(tmp_path), kill_after=0.1)
        ledger = Ledger()
        ledger.apply(read_journal(tmp_path / "journal"))
        ledger.owed.add(ledger.next_number)
        found = inspect(nursery, tmp_path / "store", budget=BUDGET)
    assert f"acknowledged and not found again: 1 ({ledger.next_number})" in found.violations(ledger)
    assert Sight.RIGHT in found.seen.values()


@pytest.mark.parametrize(("share", "kept"), [(0.1, 0), (0.5, 8192), (0.75, 12288), (1.0, 16384)])
def test_a_write_is_cut_where_a_page_ends(share: float, kept: int) -> None:
    parts = [bytes(4096), bytes(range(256)) * 40, bytes(2048)]
    assert b"".join(calls.first_bytes(parts, share)) == b"".join(parts)[:kept]


def test_a_flip_changes_one_bit_and_twice_is_never(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(8))
    bitflip.flip(path, 19)
    assert path.read_bytes() == bytes([0, 0, 8, 0, 0, 0, 0, 0])
    bitflip.flip(path, 19)
    assert path.read_bytes() == bytes(8)


def test_records_share_out_the_bytes_of_their_segment(tmp_path: Path) -> None:
    (tmp_path / "segment-000000000000000a.log").touch()
    places = {7: Place(10, 5000, 100), 5: Place(10, 4352, 300)}
    name = "segment-000000000000000a.log"
    assert bitflip.record_regions(tmp_path, places) == {5: (name, 0, 4652), 7: (name, 4652, 5100)}


def test_a_missing_program_is_an_error_that_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "_EVERYWHERE", "")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MissingTool, match="install the Debian package xfsprogs"):
        tools.program("mkfs.xfs")
    monkeypatch.undo()
    with pytest.raises(ChaosFailed, match="losetup failed"):
        tools.run("losetup", "--no-such-option")


def test_a_violation_says_how_to_repeat_it() -> None:
    outcome = Outcome("kill", 7, "kills", rounds=3)
    outcome.blame("kill 2", ["acknowledged and not found again: 1 (8)"])
    assert outcome.violations == ["seed 7, kill 2: acknowledged and not found again: 1 (8)"]
    assert outcome.summary.startswith("kill: 3 kills, 0 acknowledged, 0 checked, 1 violations (seed 7,")


def chaos(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvstore.cli.main", "chaos", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=dict(os.environ),
    )


@pytest.mark.slow
def test_the_command_sums_up_in_its_last_line_and_in_its_json(tmp_path: Path) -> None:
    done = chaos("bitflip", "--flips", "20", "--seed", "5", "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr
    summary = done.stdout.splitlines()[-1]
    assert summary.startswith("bitflip: 20 flips, ")
    assert ", 0 violations (seed 5, " in summary
    report = json.loads((tmp_path / "out.json").read_text())
    assert (report["seed"], report["rounds"], report["violations"]) == (5, 20, [])
    assert report["summary"] == summary


def test_a_job_that_nobody_waits_for_any_more_ends_with_its_children(tmp_path: Path) -> None:
    """What it would have gone on to write is not written: the folder can be removed at once."""

    class StoppedError(Exception):
        pass

    def stop() -> None:
        if (tmp_path / "store").exists():
            raise StoppedError

    begun = time.monotonic()
    with pytest.raises(StoppedError), Nursery(stop) as nursery:
        nursery.run(write_until_killed, load_arguments(tmp_path))
    assert time.monotonic() - begun < 5.0
    assert nursery._process.returncode == 0, "it ended in order, and so after its child"
    shutil.rmtree(tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_a_folder_whose_path_is_too_long_for_a_services_sockets_is_refused(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 80)
    deep.mkdir()
    done = chaos("kill", "--target", "service", "--rounds", "1", "--dir", str(deep))
    assert done.returncode == 1
    assert "a folder with a shorter path" in done.stderr
    assert list(deep.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("kill", "--rounds", "0"), "that many are not possible; N=0; allowed: 1 to 100,000,000"),
        (("kill", "--dir", "/nowhere"), "no such folder; --dir=/nowhere; allowed: an existing folder"),
    ],
)
def test_the_command_refuses_by_name(arguments: tuple[str, ...], complaint: str) -> None:
    done = chaos(*arguments)
    assert done.returncode == 1
    assert complaint in done.stderr
    assert len(done.stderr.splitlines()) == 1
