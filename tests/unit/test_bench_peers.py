"""The comparison with other stores: what its table says, what is like for like, and that who is missing is named."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.peers import environments, run
from benchmarks.peers.base import BLOCK_TOKENS, Prompt
from benchmarks.peers.environments import Environment, NotInstalled, Rivals
from benchmarks.peers.payloads import Payloads
from benchmarks.peers.report import text_of
from benchmarks.peers.rules import CONTENDERS, LINES, OURS, RAW, Contender, Line, Turn, compare, order
from benchmarks.peers.turn import prompts
from kvstore.errors import InvalidArgument

MEMORY_GET = next(line for line in LINES if line.phase == "get_verified" and line.tier == "memory")
DISK_GET = next(line for line in LINES if line.phase == "get_verified" and line.tier == "disk")
MOONCAKE, AIBRIX = "Mooncake, TCP", "AIBrix"


def turns(line: Line, rates: dict[str, Sequence[float]]) -> list[Turn]:
    """A turn for each rate, MB/s, in rounds 0, 1, ..."""
    return [
        Turn(name, line.tier, number, {line.phase: rate * 1e6})
        for name, values in rates.items()
        for number, rate in enumerate(values)
    ]


def row(table: dict, name: str) -> dict:
    return next(each for each in table["rows"] if each["name"] == name)


# ---- rules ----------------------------------------------------------------------------------------------------------


def test_the_best_is_the_one_with_the_highest_median() -> None:
    seen = turns(
        MEMORY_GET, {OURS: [2500, 2600, 2700], MOONCAKE: [900, 5000, 1000], "LMCache, by socket": [1200] * 3}
    )
    found = compare(MEMORY_GET, CONTENDERS, seen)
    assert found["best"] == "LMCache, by socket"
    assert found["times_best"] == pytest.approx(2600 / 1200)
    assert found["met"] is True


def test_ratios_are_of_the_same_round() -> None:
    # Medians alone would say 1.0: the machine was half as fast in two rounds, for both.
    seen = turns(MEMORY_GET, {OURS: [3000, 1500, 1500], MOONCAKE: [1500, 750, 750]})
    assert row(compare(MEMORY_GET, CONTENDERS, seen), MOONCAKE)["kvstore_times"] == pytest.approx(2.0)


def test_a_round_that_one_of_both_missed_makes_no_ratio() -> None:
    seen = [
        *turns(MEMORY_GET, {OURS: [3000, 3000], MOONCAKE: [1000]}),
        Turn(MOONCAKE, "memory", 1, {}, "it took more than 600 s"),
    ]
    found = row(compare(MEMORY_GET, CONTENDERS, seen), MOONCAKE)
    assert found["kvstore_times"] == pytest.approx(3.0)
    assert (found["rounds"], found["failed"]) == (1, "it took more than 600 s")


def test_who_is_in_the_clients_process_does_not_count_in_memory_and_the_row_says_why() -> None:
    seen = turns(MEMORY_GET, {OURS: [2000], MOONCAKE: [900], AIBRIX: [8000]})
    found = compare(MEMORY_GET, CONTENDERS, seen)
    assert found["best"] == MOONCAKE
    assert found["met"] is True
    assert row(found, AIBRIX)["kvstore_times"] == pytest.approx(0.25)
    assert "process" in row(found, AIBRIX)["why_not"]


def test_on_disk_it_counts() -> None:
    seen = turns(DISK_GET, {OURS: [2000], RAW: [4000], AIBRIX: [1500]})
    assert compare(DISK_GET, CONTENDERS, seen)["best"] == AIBRIX


@pytest.mark.parametrize(
    ("ours", "best", "raw", "met"),
    [
        (2000, 1000, 4000, True),
        (1900, 1000, 2000, True),
        (1900, 1000, 2100, False),
        (1999, 1000, 4000, False),
    ],
)
def test_on_disk_either_bar_is_enough(ours: float, best: float, raw: float, met: bool) -> None:
    seen = turns(DISK_GET, {OURS: [ours], RAW: [raw], MOONCAKE: [best]})
    assert compare(DISK_GET, CONTENDERS, seen)["met"] is met


def test_the_raw_disk_is_no_rival() -> None:
    found = compare(DISK_GET, CONTENDERS, turns(DISK_GET, {OURS: [2000], RAW: [2000]}))
    assert (found["best"], found["met"]) == (None, None)
    assert found["of_raw"] == pytest.approx(1.0)


def test_without_ours_nothing_is_met() -> None:
    assert compare(DISK_GET, CONTENDERS, turns(DISK_GET, {RAW: [2000], MOONCAKE: [1000]}))["met"] is None


def test_every_line_that_is_not_like_for_like_says_so() -> None:
    for line in LINES:
        if line.phase == "put":
            assert any("DURABLE" in note or "acknowledges" in note for note in line.notes), line.name
        if line.phase == "get_verified":
            assert any("checksums" in note for note in line.notes), line.name
        if line.phase == "put_durable":
            assert any("syncfs" in note for note in line.notes), line.name
    assert all(each.why_not for each in CONTENDERS if each.uncounted)


def test_rounds_go_there_and_back() -> None:
    there, back = order(CONTENDERS, "disk", 0), order(CONTENDERS, "disk", 1)
    assert there == back[::-1]
    assert there[0].name == OURS
    assert RAW not in [each.name for each in order(CONTENDERS, "memory", 0)]


# ---- what is missing ------------------------------------------------------------------------------------------------


def no_tool(command: Sequence[str], folder: Path, seconds: float) -> None:
    raise NotInstalled(f"{command[0]} is not there")


def test_a_rival_that_cannot_be_installed_is_a_row_with_the_reason(tmp_path: Path) -> None:
    contenders = [each for each in CONTENDERS if each.rival]
    task = run.Task(2, {"memory": 64 << 20, "disk": 64 << 20}, 1, 60.0, tmp_path)
    told: list[str] = []
    taken = run.Runner(task, Rivals(tmp_path / "home", run=no_tool), told.append).run(contenders, ("memory",))
    assert len(taken) == len(told) == 2 * len(contenders)
    answer = run.report(task, contenders, taken, {"load_before": 0.0, "load_after": 0.0})
    json.dumps(answer)
    assert len(answer["lines"]) == 3
    for line in answer["lines"]:
        assert [each["name"] for each in line["rows"]] == [each.name for each in contenders]
        assert all(
            "not installed: " in each["failed"] and "is not there" in each["failed"] for each in line["rows"]
        )
        assert line["met"] is None
    text = text_of(answer)
    assert text.count("is not there") == 3 * len(contenders)
    assert "nothing to compare with" in text
    assert list(tmp_path.glob("kvstore-bench-*")) == []


def test_a_failed_installation_is_not_tried_again(tmp_path: Path) -> None:
    calls: list[Sequence[str]] = []

    def failing(command: Sequence[str], folder: Path, seconds: float) -> None:
        calls.append(command)
        raise NotInstalled("no route")

    rivals = Rivals(tmp_path, run=failing)
    for _ in range(3):
        with pytest.raises(NotInstalled, match="no route"):
            rivals.environment("lmcache")
    assert len(calls) == 1


def test_what_is_installed_is_not_installed_again_until_its_pins_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pins = tmp_path / "pins"
    pins.mkdir()
    for name in environments.NEEDED["aibrix"]:
        (pins / f"{name}.txt").write_text(f"{name}==1\n")
    monkeypatch.setattr(environments, "REQUIREMENTS", pins)
    asked: list[str] = []

    def working(command: Sequence[str], folder: Path, seconds: float) -> None:
        asked.append(Path(command[-1]).name)
        if command[1:3] == ["-m", "venv"]:
            (Path(command[-1]) / "bin").mkdir(parents=True)
            (Path(command[-1]) / "bin" / "python").touch()

    home = tmp_path / "home"
    for _ in range(2):
        found = Rivals(home, run=working).environment("aibrix")
        assert found.python == home / "tensors" / "bin" / "python"
    assert asked == ["tensors", "common.txt", "torch.txt", "aibrix.txt"]
    (pins / "aibrix.txt").write_text("aibrix==2\n")
    Rivals(home, run=working).environment("aibrix")
    assert asked[4:] == ["aibrix.txt"]


def test_every_rival_has_pins_and_each_is_exact() -> None:
    rivals = {each.rival for each in CONTENDERS if each.rival}
    assert rivals == environments.NEEDED.keys()
    for name in {name for rival in rivals for name in environments.NEEDED[rival]}:
        lines = (environments.REQUIREMENTS / f"{name}.txt").read_text().splitlines()
        pins = [line for line in lines if not line.startswith("#")]
        assert pins
        assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", pin) for pin in pins), name


# ---- turns ----------------------------------------------------------------------------------------------------------


def test_a_store_that_does_not_start_is_a_row_with_the_reason(tmp_path: Path) -> None:
    broken = Contender("broken", "no_such_store", tiers=("memory",))
    task = run.Task(1, {"memory": 64 << 20, "disk": 64 << 20}, 1, 60.0, tmp_path)
    (taken,) = run.Runner(task, Rivals(tmp_path / "home"), lambda line: None).run([broken], ("memory",))
    assert taken.rates == {}
    assert "no_such_store" in taken.failed
    assert list(tmp_path.iterdir()) == []


def test_a_turn_that_takes_too_long_ends_and_says_so(tmp_path: Path) -> None:
    spec = {"module": "benchmarks.peers.store_raw"}
    found = run.run_turn(spec, Environment(Path(sys.executable), {}), 0.001)
    assert found == {"failed": "it took more than 0.001 s"}


def test_the_answer_is_the_last_object_whatever_a_client_prints() -> None:
    assert run.answer_of('{"noise": 1}\n{"rates": {}}\nbye\n', "", 0) == {"rates": {}}
    assert run.answer_of("bye\n", "Error: a\n\n", 3) == {"failed": "it ended with 3: Error: a"}


def test_prompts_cover_the_set_once_and_passes_share_no_block() -> None:
    first, second = prompts(0, 10, 4), prompts(1, 10, 4)
    assert [number for _, numbers in first for number in numbers] == list(range(10))
    assert [prompt.blocks for prompt, _ in second] == [4, 4, 2]
    named = [prompt.number for prompt, _ in [*first, *second]]
    assert len(set(named)) == len(named)
    heads = {tuple(Prompt(number, 1).tokens()) for number in named}
    assert len(heads) == len(named)
    assert all(len(head) == BLOCK_TOKENS for head in heads)


def test_what_did_not_come_back_is_noticed() -> None:
    payloads = Payloads(3, 5000, seed=1)
    payloads.blank()
    assert payloads.wrong() == 3
    for room, block in zip(payloads.rooms, payloads.blocks, strict=True):
        room[:] = block
    assert payloads.wrong() == 0
    payloads.rooms[1][4999] ^= 1
    assert payloads.wrong() == 1
    payloads.check(0)
    with pytest.raises(ValueError, match="block 1"):
        payloads.check(1)


# ---- arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [["--rounds", "0"], ["--size", "1MiB"], ["--disk-size", "1TiB"]])
def test_what_cannot_be_measured_is_refused_by_name(flags: list[str], tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=flags[0]):
        run.task_of(run._parser().parse_args(flags), tmp_path)


def test_quick_is_one_small_round_and_flags_go_before_it(tmp_path: Path) -> None:
    task = run.task_of(run._parser().parse_args(["--quick", "--size", "128MiB"]), tmp_path)
    assert (task.rounds, task.sizes["memory"], task.sizes["disk"]) == (1, 128 << 20, run.QUICK_DISK_BYTES)
