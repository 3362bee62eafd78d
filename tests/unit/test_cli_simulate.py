from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstore.cli.main import main
from tests.support.request_logs import GOLDEN, GOLDEN_RATES, as_lines, made_requests


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main(["simulate", str(GOLDEN), *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_rows_come_in_the_order_asked_with_sizes_as_given(capsys: pytest.CaptureFixture[str]) -> None:
    answered = answer(capsys, "--policy", "belady,lru", "--size", "30%,3%,all")
    rows = answered["rows"]
    assert [(row["policy"], row["size"]) for row in rows] == [
        (policy, size) for policy in ("belady", "lru") for size in ("30%", "3%", "all")
    ]
    expected = json.loads(GOLDEN_RATES.read_text())
    for row in rows:
        size = "1%" if row["size"] == "all" else row["size"]
        policy = "infinite" if row["size"] == "all" else row["policy"]
        assert row["token_hit_rate"] == pytest.approx(expected[policy][size], abs=1e-6)
        assert row["token_hit_rate"] == pytest.approx(100 * row["hit_tokens"] / row["input_tokens"])
    log = answered["log"]
    assert (log["format"], log["block_tokens"], log["group"], log["rekeyed_by_parent"]) == (
        "mooncake",
        512,
        1,
        False,
    )
    assert (log["warm_up_share"], log["outputs_count"]) == (0, "when they come back as input")


def test_without_a_policy_or_a_size_the_table_is_lru_at_four_sizes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    answered = answer(capsys)
    rows = answered["rows"]
    assert answered["recommendation"] is None
    assert [(row["policy"], row["size"]) for row in rows] == [
        ("lru", each) for each in ("1%", "3%", "10%", "30%")
    ]


def test_of_a_small_log_sizes_that_hold_nothing_are_not_asked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl"

    def sizes(blocks: int) -> list[str]:
        request = {
            "timestamp": 0,
            "input_length": 512 * blocks,
            "output_length": 1,
            "hash_ids": [*range(blocks)],
        }
        log.write_text(json.dumps(request) + "\n")
        assert main(["simulate", str(log), "--json"]) == 0
        return [row["size"] for row in json.loads(capsys.readouterr().out)["rows"]]

    assert sizes(100) == ["1%", "3%", "10%", "30%"]
    assert sizes(12) == ["10%", "30%"]
    assert sizes(3) == ["all"]


def test_retentions_and_window_states_are_without_a_limit_unless_one_is_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = answer(capsys, "--ttl", "1m,1h", "--windows", "endpoints,full")["rows"]
    assert [(row["policy"], row["size"], row["ttl"], row["windows"]) for row in rows] == [
        ("infinite", "all", ttl, windows) for ttl in ("1m", "1h") for windows in ("endpoints", "full")
    ]
    rates = [row["token_hit_rate"] for row in rows]
    assert rates[0] < rates[1] < rates[3]
    assert rates[0] < rates[2] < rates[3]


def test_what_a_replay_costs_is_taken_from_the_hits(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--policy", "infinite", "--profile", "deepseek-v4-flash")
    none, exact, bounded = (
        answer(capsys, *flags, "--replay", each)["rows"][0]["token_hit_rate"]
        for each in ("none", "exact", "bounded")
    )
    assert 0 < exact < bounded < none
    kept = answer(capsys, *flags, "--replay", "exact", "--windows", "full+overlap")["rows"][0][
        "token_hit_rate"
    ]
    assert kept == pytest.approx(none)


def test_rows_say_where_states_come_from_and_what_they_weigh(capsys: pytest.CaptureFixture[str]) -> None:
    answered = answer(capsys, "--windows", "zero,endpoints,full", "--replay", "exact")
    assert answered["log"]["profile"] == "deepseek-v4-flash"
    zero, endpoints, full = answered["rows"]
    for row in (zero, endpoints, full):
        assert sum(row["state_sources"].values()) == pytest.approx(100)
        assert row["tokens_saved_rate"] == row["token_hit_rate"] <= row["restored_rate"]
        stored = row["blocks_stored"] * 512
        assert row["state_bytes_per_token"] == pytest.approx(row["state_bytes"] / stored)
    assert zero["state_bytes"] == zero["states_per_request"] == 0
    assert zero["state_sources"]["REPLAY"] > 90
    assert endpoints["state_sources"]["CHECKPOINT"] > full["state_sources"]["CHECKPOINT"] == 0
    assert full["state_sources"]["ROWS"] > 90
    # 3,214,336 B of rows for 128 tokens.
    assert full["state_bytes_per_token"] == pytest.approx(3_214_336 / 128)
    assert zero["tokens_saved_rate"] < endpoints["tokens_saved_rate"] < full["tokens_saved_rate"]


def test_one_window_policy_is_recommended_with_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    answered = answer(capsys, "--windows", "endpoints,full")
    advice = answered["recommendation"]
    assert advice["windows"] == advice["chosen"]["windows"] == "endpoints"
    assert advice["where"] == "infinite, all"
    assert advice["chosen"]["tokens_saved_rate"] == answered["rows"][0]["tokens_saved_rate"]
    assert advice["line"].startswith("endpoints saves 74.83 % of input tokens with 3,965 B of states")
    zero = advice["zero_with_exact_replay"]
    assert (zero["replay"], zero["state_bytes_per_token"]) == ("exact", 0)
    assert 0 < zero["tokens_saved_rate"] < advice["chosen"]["tokens_saved_rate"]


def test_a_size_in_bytes_is_one_in_blocks_of_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    [row] = answer(capsys, "--size", "64MiB", "--profile", "deepseek-v4-flash")["rows"]
    assert row["size"] == "64MiB"
    assert row["capacity_blocks"] == (64 << 20) // (4 * 449_824)


def test_people_get_a_table_that_says_how_the_log_was_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(GOLDEN), "--size", "10%"]) == 0
    text = capsys.readouterr().out
    assert "mooncake log: 400 requests" in text
    assert "blocks of 512 tokens; rule: ids; no warm-up; outputs count when they come back as input" in text
    assert f"{json.loads(GOLDEN_RATES.read_text())['lru']['10%']:.2f} %" in text


REFUSED = [
    (
        ("--policy", "lru,clock"),
        "--policy=clock; allowed: lru, fifo, s3fifo, sieve, slru, arc, lfu, gdsf, 2q, density, belady, infinite",
    ),
    (("--policy", "lru,,fifo"), "an empty name in a list"),
    (("--size", "0%"), "no block fits; --size=0%"),
    (("--size", "0.0001%"), "no block fits"),
    (("--size", "101%"), "more than the log asks for"),
    (("--size=-1%",), "not a size"),
    (("--size", "ten"), "not a size"),
    (("--size", "1GiB"), "a size in bytes needs a model's block"),
    (("--size", "1EiB", "--profile", "deepseek-v4-flash"), "not a size"),
    (("--size", "1TiB", "--profile", "deepseek-v4-flash"), "more than the log asks for"),
    (("--size", "1KiB", "--profile", "deepseek-v4-flash"), "no block fits"),
    (("--ttl", "0s"), "not a retention"),
    (("--ttl", "soon"), "not a time"),
    (("--windows", "sometimes"), "unknown window-state policy"),
    (("--windows", "periodic:700"), "unknown window-state policy"),
    (("--replay", "exact", "--profile", "tiny", "--block", "512", "--group", "300"), "not a size of a block"),
    (("--usd-storage=-1",), "not a price; --usd-storage=-1.0"),
    (("--usd-tokens=nan",), "not a price"),
    (("--html", "/dev/null/x.html"), "cannot write the HTML file"),
    (("--block", "64"), "line 1: 2796 tokens have another number of blocks of 64"),
    (("--block", "x"), "not a count"),
    (("--group", "0"), "not a size of a block"),
    (("--group", "129"), "not a size of a block"),
    (("--size", ",".join(["1%"] * 1001)), "too many cases"),
]


@pytest.mark.parametrize(("arguments", "words"), REFUSED, ids=[" ".join(each[0])[:40] for each in REFUSED])
def test_what_is_not_allowed_is_one_line_and_nothing_is_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    target = tmp_path / "rates.json"
    assert main(["simulate", str(GOLDEN), *arguments, "--json", str(target)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    [line] = printed.err.splitlines()
    assert words in line
    assert list(tmp_path.iterdir()) == []


def test_blocks_that_no_model_could_have_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"timestamp": 0, "input_length": 640, "output_length": 1, "hash_runs": [[1, 10]]}\n')
    flags = ["--size", "50%", "--profile", "deepseek-v4-flash"]
    assert main(["simulate", str(log), *flags]) == 1
    assert "blocks of the log do not fit the model" in capsys.readouterr().err
    assert main(["simulate", str(log), *flags, "--group", "2"]) == 0


def test_skipped_lines_are_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = as_lines(made_requests(1, 30)).splitlines(keepends=True)
    log = tmp_path / "log.jsonl"
    log.write_text("".join([*lines[:10], "{\n", "nonsense\n", *lines[10:], lines[0]]))
    assert main(["simulate", str(log), "--size", "all"]) == 1
    assert f"{log}, line 11: not JSON" in capsys.readouterr().err
    assert main(["simulate", str(log), "--size", "all", "--on-bad-line", "skip"]) == 0
    assert "skipped 3 lines (broken lines: 2, times backwards: 1)" in capsys.readouterr().out


def test_a_log_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["simulate", str(tmp_path / "none.jsonl")]) == 1
    assert "No such file" in capsys.readouterr().err


def test_what_is_written_only_when_asked_for_again_costs_hits_and_saves_writes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    always, second = answer(capsys, "--size", "all", "--admit", "always,second-sight", "--endurance", "1TiB")[
        "rows"
    ]
    assert (always["admission"], second["admission"]) == ("always", "second-sight")
    assert always["blocks_not_admitted"] == 0
    # With room for everything: what was turned away the first time is every block once.
    assert second["blocks_not_admitted"] >= always["blocks_stored"]
    assert second["blocks_stored"] < always["blocks_stored"]
    assert second["token_hit_rate"] < always["token_hit_rate"]
    for row in (always, second):
        assert row["drive_years"] == pytest.approx((1 << 40) / row["device_bytes_per_day"] / 365.25)
    assert second["drive_years"] > always["drive_years"]


def test_a_disk_of_segments_holds_less_than_its_blocks_and_writes_more_than_their_payload(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ("--policy", "lru,belady,infinite", "--size", "30%", "--profile", "deepseek-v4-flash")
    counted = answer(capsys, *flags)["rows"]
    lru, belady, infinite = answer(capsys, *flags, "--segment", "16MiB")["rows"]
    assert (lru["segment_bytes"], belady["segment_bytes"]) == (16 << 20, None)
    assert lru["token_hit_rate"] < counted[0]["token_hit_rate"]
    assert infinite["token_hit_rate"] == counted[2]["token_hit_rate"]
    assert 1.1 < lru["write_amplification"] < 1.25
    assert 1.0 < infinite["write_amplification"] < 1.05
    assert lru["copied_bytes"] > infinite["copied_bytes"] == 0
    stored = lru["blocks_stored"] * 4 * 449_824
    assert lru["device_bytes_written"] == pytest.approx(lru["write_amplification"] * stored)
    assert belady["device_bytes_written"] is None
    assert counted[0]["write_amplification"] is None


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ("--segment", "1MiB", "--size", "30%"),
            "a segment of 1,048,576 bytes holds no block of 1,799,296 bytes",
        ),
        (("--segment", "3000", "--size", "30%"), "the segment size is out of range"),
        (("--segment", "256MiB", "--size", "10%"), "fewer than 4 segments"),
        (("--segment", "x", "--size", "30%"), "--segment=x"),
        (("--segment", "auto", "--ttl", "1m", "--ttl-from", "insertion"), "is not simulated in segments"),
    ],
)
def test_segments_that_no_store_has_are_refused_before_anything_is_simulated(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], said: str
) -> None:
    assert main(["simulate", str(GOLDEN), *flags]) == 1
    assert said in capsys.readouterr().err


def test_an_unknown_admission_lists_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(GOLDEN), "--admit", "sometimes"]) == 1
    assert "--admit=sometimes; allowed: always, second-sight" in capsys.readouterr().err


def test_a_page_tells_admissions_apart_and_what_they_write(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    rows = answer(
        capsys, "--size", "10%", "--admit", "always,second-sight", "--endurance", "14TiB", "--html", str(page)
    )["rows"]
    text = page.read_text()
    for row in rows:
        assert f"{row['token_hit_rate']:.2f} %" in text
        assert f"{row['drive_years']:.1f}" in text
    assert "GB written a day" in text


def test_an_endurance_of_nothing_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(GOLDEN), "--endurance", "0"]) == 1
    assert "--endurance=0; allowed: 1B or more" in capsys.readouterr().err
