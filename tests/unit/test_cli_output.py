"""Where the JSON of a command goes, and that nothing is lost on the way; exit codes and legends."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.bench import small
from kvstore.bench.restart import BAR_BLOCKS, Start
from kvstore.chaos.base import Outcome
from kvstore.cli import bench, bench_speed, chaos
from kvstore.cli.main import build_parser, main
from kvstore.cli.output import table

COMMAND = (sys.executable, "-m", "kvstore.cli.main")


def _shell(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """`$KVSTORE` is the command."""
    return subprocess.run(
        ["bash", "-c", script.replace("$KVSTORE", " ".join(COMMAND))],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize("command", [("stats",), ("top",), ("clear", "--all")])
def test_a_certificate_is_named_as_clients_name_it_and_as_the_release_before_did(
    command: tuple[str, ...],
) -> None:
    where = ("--address", "tcp://store:7700")
    for cert, key in (("--cert", "--key"), ("--tls-cert", "--tls-key")):
        args = build_parser().parse_args([*command, *where, cert, "c.pem", key, "k.pem"])
        assert (args.cert, args.key) == ("c.pem", "k.pem")


def test_no_cell_of_a_table_says_anything_to_a_terminal() -> None:
    text = table(
        [("x\x1b[2J\nroot  9", 1), ("\N{RIGHT-TO-LEFT OVERRIDE}y", 2), ("名", 3)], head=("tenant", "held")
    )
    lines = text.split("\n")
    assert len(lines) == 5
    assert all(line.isprintable() for line in lines)
    assert "名" in lines[4]


# ---- the file ----------------------------------------------------------------------------------------------


def test_a_name_behind_json_is_refused_and_no_file_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in (["stats", "--dir", "/nowhere", "--json", "blocks"], ["profiles", "--json", "tiny"]):
        with pytest.raises(SystemExit) as refused:
            main(command)
        assert refused.value.code == 2
        assert "names come before --json" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["out.json", "./out"])
def test_a_file_is_written_whole_and_nothing_lies_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["profiles", "--json", name]) == 0
    [written] = tmp_path.iterdir()
    assert written.name == Path(name).name
    assert "tiny" in written.read_text()
    assert json.loads(written.read_text())


def test_a_command_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    kept, new = tmp_path / "kept.json", tmp_path / "new.json"
    kept.write_text("precious")
    before = kept.stat()
    for path in (kept, new):
        assert main(["verify", "--dir", "/nowhere", "--json", str(path)]) == 1
    assert kept.read_text() == "precious"
    assert kept.stat().st_mtime_ns == before.st_mtime_ns
    assert list(tmp_path.iterdir()) == [kept]


def test_a_file_is_replaced_behind_its_link_with_the_rights_that_it_had(tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("a longer document than " * 10_000)
    target.chmod(0o640)
    link.symlink_to(target)
    with target.open() as reader:
        assert main(["profiles", "--json", str(link)]) == 0
        assert reader.read().startswith("a longer document"), "who reads the old one has it whole"
    assert link.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o640
    assert json.loads(target.read_text())


def test_a_file_for_which_there_is_no_room_stays_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "out.json").write_text("precious")
    done = _shell("ulimit -f 0; $KVSTORE profiles --json out.json", tmp_path)
    assert done.returncode == 1
    assert "--json=out.json" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
    assert (tmp_path / "out.json").read_text() == "precious"


def test_stdout_may_be_named_also_where_it_is_a_file(tmp_path: Path) -> None:
    for name in ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"):
        assert _shell(f"$KVSTORE profiles --json {name} > out", tmp_path).returncode == 0
        written = (tmp_path / "out").read_text()
        text, brace, document = written.partition("\n{")
        assert text.startswith("deepseek"), name
        assert json.loads(brace + document), name
    piped = _shell("$KVSTORE profiles --json /dev/stdout | cat", tmp_path)
    assert piped.stdout == written


@pytest.mark.parametrize("name", [".", "/nonexistent/x.json", "/dev/full"])
def test_what_cannot_be_written_is_refused_by_name(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    name = f"{tmp_path}/" if name == "." else name
    assert main(["profiles", "--json", name]) == 1
    error = capsys.readouterr().err
    assert error.startswith("kvstore: cannot write the JSON file: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", ["folder/", "/nonexistent/x.json"])
def test_what_cannot_be_written_is_refused_before_the_work(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    name = f"{tmp_path}/" if name == "folder/" else name
    assert main(["verify", "--dir", "/nowhere", "--json", name]) == 1
    assert "--json" in capsys.readouterr().err


# ---- exit codes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("$KVSTORE profiles", 0),
        ("$KVSTORE verify --dir /nowhere", 1),
        ("$KVSTORE profiles > /dev/full", 1),
        ("$KVSTORE", 2),
        ("$KVSTORE conquer", 2),
        ("$KVSTORE profiles --conquer", 2),
        ("set -o pipefail; $KVSTORE profiles --layout tiny | (exec <&-)", 141),
    ],
)
def test_exit_codes_are_those_that_the_help_names(script: str, code: int, tmp_path: Path) -> None:
    assert _shell(script, tmp_path).returncode == code


def test_the_help_and_the_readme_name_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    readme = " ".join((Path(__file__).parents[2] / "README.md").read_text().split())
    codes = (
        "Exit codes: 0 success; 1 failed or refused (a value that is not allowed, too), damage or violations found, "
        "a bar missed; 2 a command line that does not parse; 130 interrupted; 141"
    )
    assert codes in told
    assert codes in readme


# ---- legends -----------------------------------------------------------------------------------------------


def test_a_table_of_figures_says_below_what_those_that_it_shows_mean() -> None:
    outcome = Outcome("eio", 7, "cases", legend={"refusals": "what was refused", "other": "not shown here"})
    outcome.figures["writes fail"] = {"refusals": 6}
    *_, below, summary = chaos._text(outcome).splitlines()
    assert below == "refusals: what was refused"
    assert summary == outcome.summary
    assert outcome.as_json()["legend"]["refusals"] == "what was refused"


def _start(blocks: int) -> Start:
    return Start("clean", blocks, 1.0, 0.5, 0.5, 100.0, 90.0, 80.0, rebuilt=False)


def test_a_dash_in_the_table_of_starts_is_explained_where_there_is_one() -> None:
    assert "no bar for so many blocks" in bench._restart_text([_start(5_000)], {})
    extrapolated = {"clean": {"seconds": 9.0, "peak_bytes": 1e9}}
    assert "no bar for so many blocks" in bench._restart_text([_start(BAR_BLOCKS)], extrapolated)
    assert "\n-:" not in bench._restart_text([_start(BAR_BLOCKS)], {})


def test_a_bench_says_which_bar_was_missed() -> None:
    fast, slow = [2.0 * small.READ_BAR] * 3, [0.5 * small.WRITTEN_BAR] * 3
    good = small.report(small.Passes(fast, fast, 1.1, 1.1), blocks=512, seed=1)
    assert good["missed"] == []
    assert " NO" not in bench_speed._small_text(good)
    bad = small.report(small.Passes(slow, fast, None, 2.0), blocks=512, seed=1)
    assert bad["missed"] == ["written_per_second", "device_bytes_per_payload_byte"]
    assert bench_speed._small_text(bad).count(" NO") == 2


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from parsers(below)


@pytest.mark.parametrize("parser", list(parsers(build_parser())), ids=lambda parser: parser.prog)
def test_every_command_has_help_and_its_defaults_are_allowed(parser: argparse.ArgumentParser) -> None:
    assert "usage" in parser.format_help()
    for action in parser._actions:
        # argparse takes the text of a default for one of the command line's.
        if isinstance(action.default, str) and action.default is not argparse.SUPPRESS:
            parser._get_value(action, action.default)


def test_every_command_is_registered_by_the_module_that_is_named_for_it() -> None:
    everything = {parser.prog for parser in parsers(build_parser())}
    commands = {prog.split()[1] for prog in everything if " " in prog}
    assert "serve" in commands
    for command in commands:
        alone = {parser.prog for parser in parsers(build_parser(command))}
        assert {prog for prog in everything if prog.split()[1:2] == [command]} <= alone, command
