from __future__ import annotations

import importlib.util
import json
import re
import sys
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from kvstore.cli.main import main
from kvstore.simulate.pictures.base import Bar, Bars, Line, Lines, nice_step, spread, steps
from kvstore.simulate.pictures.svg import drawn
from tests.support.request_logs import as_lines, made_requests


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A short one, by a name that a page must not run."""
    path = tmp_path / "<script>alert('1')&.jsonl"
    path.write_text(as_lines(made_requests(3, 60, sessions=6)))
    return path


def page_of(log: Path, *arguments: str) -> tuple[str, ET.Element, dict]:
    """The page as text and as a tree, and the rows that JSON has."""
    page, rows = log.with_name("page.html"), log.with_name("rows.json")
    assert main(["simulate", str(log), *arguments, "--html", str(page), "--json", str(rows)]) == 0
    text = page.read_text()
    head, tree = text.split("\n", 1)
    assert head == "<!DOCTYPE html>"
    return text, ET.fromstring(tree), json.loads(rows.read_text())


def tables(tree: ET.Element) -> list[list[list[str]]]:
    return [
        [["".join(cell.itertext()) for cell in row] for row in table.iter("tr")]
        for table in tree.iter("table")
    ]


def test_a_page_has_the_numbers_of_the_rows(log: Path) -> None:
    _, tree, answer = page_of(log, "--policy", "lru,fifo,infinite", "--size", "10%,30%")
    sizes, _ = tables(tree)
    rate = {(row["policy"], row["size"]): f"{row['token_hit_rate']:.2f} %" for row in answer["rows"]}
    assert sizes == [
        ["policy", "10%", "30%"],
        *([policy, rate[policy, "10%"], rate[policy, "30%"]] for policy in ("lru", "fifo", "infinite")),
    ]


def test_retentions_and_window_states_have_tables_with_the_numbers_of_the_rows(log: Path) -> None:
    flags = ("--ttl", "1m,5m", "--windows", "endpoints,full", "--replay", "exact")
    text, tree, answer = page_of(log, *flags)
    assert [each.get("id") for each in tree.iter("section")] == ["reuse", "ttl", "windows-1", "windows-2"]
    _, ttl, *windows = tables(tree)
    assert [[row[0], row[3], row[4], row[5]] for row in ttl[1:]] == [
        [row["ttl"], row["windows"], f"{row['token_hit_rate']:.2f} %", f"{row['held_share']:.2f} %"]
        for row in answer["rows"]
    ]
    shown = [row[:4] for table in windows for row in table[1:]]
    assert shown == [
        [
            row["windows"],
            f"{row['tokens_saved_rate']:.2f} %",
            f"{row['state_bytes_per_token']:,.0f}",
            f"{row['states_per_request']:.2f}",
        ]
        for row in answer["rows"]
    ]
    zero = answer["recommendation"]["zero_with_exact_replay"]["tokens_saved_rate"]
    assert f"{zero:.2f} %, 0 B/token" in text
    assert answer["recommendation"]["line"] in "".join(tree.itertext()).replace("\u00a0", " ")


def test_what_cannot_serve_is_not_what_states_are_recommended_for(log: Path) -> None:
    _, _, answer = page_of(log, "--policy", "belady,lru", "--size", "10%,30%", "--windows", "endpoints")
    assert answer["recommendation"]["where"] == "lru, 30%"


def test_what_was_not_simulated_is_not_drawn(log: Path) -> None:
    _, tree, _ = page_of(log, "--size", "10%")
    assert [each.get("id") for each in tree.iter("section")] == ["sizes", "reuse"]
    _, tree, _ = page_of(log, "--ttl", "1m")
    assert [each.get("id") for each in tree.iter("section")] == ["reuse", "ttl"]


def test_a_page_needs_nothing_from_outside_and_runs_nothing(log: Path) -> None:
    text, tree, _ = page_of(log, "--size", "10%,30%")
    assert not re.search(r"https?:|\bsrc=|\bhref=|url\(|@import", text)
    assert not {"script", "link", "img", "iframe"} & {each.tag for each in tree.iter()}
    assert tree.find("body/h1").text == "Request log <script>alert('1')&.jsonl"
    assert "<script" not in text


def test_a_page_says_how_the_log_was_read_and_how_to_ask_again(log: Path) -> None:
    _, tree, answer = page_of(log, "--size", "10%", "--as-served")
    names = [each.text for each in tree.iter("dt")]
    facts = dict(zip(names, [each.text for each in tree.iter("dd")], strict=True))
    assert facts["log"] == log.name
    assert facts["requests"].startswith("60 in ")
    assert facts["block"] == "512 tokens"
    assert facts["rule"].startswith("whole blocks only")
    assert facts["different blocks"].startswith(f"{answer['log']['footprint_blocks']:,},")
    assert facts["warm-up"].startswith("none")
    command = tree.find("body/pre").text
    assert command.startswith("kvstore simulate '")
    assert "--size 10% --as-served --html" in command


def test_a_page_replaces_the_one_before_it_whole(log: Path) -> None:
    page = log.with_name("page.html")
    page.write_text("before")
    assert main(["simulate", str(log), "--size", "101%", "--html", str(page)]) == 1
    assert page.read_text() == "before"
    before = set(log.parent.iterdir())
    assert main(["simulate", str(log), "--size", "10%", "--html", str(page)]) == 0
    assert page.read_text().endswith("</html>\n")
    assert set(log.parent.iterdir()) == before


def test_images_need_an_extra_and_say_so_before_work(
    log: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # What an import finds that is not installed.
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["simulate", str(log), "--png", str(log.with_name("all.png"))]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "PNG needs matplotlib, which is not installed; --png=" in line
    assert "pip install 'kvstore[pictures]'" in line


def test_images_are_one_file_or_one_for_each_picture(require, log: Path) -> None:
    require("matplotlib", importlib.util.find_spec("matplotlib") is not None, "kvstore[pictures]")
    single, folder = log.with_name("all.png"), log.with_name("images")
    flags = ["--windows", "zero,endpoints", "--size", "10%"]
    for target in (single, folder):
        assert main(["simulate", str(log), *flags, "--png", str(target)]) == 0
    images = [single, *folder.iterdir()]
    assert sorted(each.name for each in images) == ["all.png", "reuse.png", "sizes.png", "windows-1.png"]
    assert all(each.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") for each in images)


def test_labels_keep_apart_in_order_and_inside() -> None:
    for wanted in ([50, 50, 50, 50], [0, 1, 2, 99], [99, 98, 97, 10], [5]):
        places = spread(wanted, 10, 0, 100)
        order = sorted(range(len(wanted)), key=lambda each: wanted[each])
        assert all(places[b] - places[a] >= 10 for a, b in pairwise(order))
        assert 0 <= min(places) <= max(places) <= 100


@pytest.mark.parametrize("span", [0.004, 0.7, 3, 22, 76, 96, 100, 12345])
def test_scales_have_a_few_round_steps(span: float) -> None:
    step = nice_step(span)
    assert 2.4 <= span / step <= 6
    assert f"{step:e}"[0] in "125"
    ticks = steps(0, step * 5)
    assert ticks[0] == 0
    assert ticks[-1] == pytest.approx(step * 5)
    assert len(ticks) <= 7


AWKWARD = [
    Lines("x", "y", ((1.0, "1"),), (Line("one", ((1.0, 0.0),)),)),
    Lines(
        "x",
        "y",
        (),
        (Line("flat", ((1.0, 96.0), (2.0, 96.0))), Line("<b>", ((1.0, 96.1),))),
        (("all", 96.2),),
    ),
    Lines("x", "y", (), tuple(Line(f"a name of some length {n}", ((1.0, 5.0), (9.0, n))) for n in range(30))),
    Bars("x", (Bar("none", 0.0, "0"), Bar("a long name for a bar, really", 100.0, "with many words to it"))),
    Bars("x", ()),
]


@pytest.mark.parametrize("picture", AWKWARD)
@pytest.mark.parametrize("width", [324, 760])
def test_whatever_is_drawn_lies_inside_its_picture(picture: Lines | Bars, width: int) -> None:
    svg = ET.fromstring(drawn(picture, width=width, title="<t>"))
    _, _, wide, high = map(float, svg.get("viewBox").split())
    assert wide == width
    for each in svg.iter():
        places = [float(each.get(name)) for name in ("x", "x1", "x2") if each.get(name)]
        assert all(0 <= place <= wide for place in places), each.attrib
        places = [float(each.get(name)) for name in ("y", "y1", "y2") if each.get(name)]
        assert all(0 <= place <= high for place in places), each.attrib
