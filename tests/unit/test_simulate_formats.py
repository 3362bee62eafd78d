from __future__ import annotations

import gzip
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from kvstore.errors import InvalidArgument
from kvstore.simulate.formats import FORMATS, load_log
from kvstore.simulate.log import ID_COLUMN_MAX, ROOT, BadLine, LogRequest, OnBadLine, RequestLog, read_log


def mooncake(at: float, tokens: int, ids: list[int]) -> dict[str, object]:
    return {"timestamp": at, "input_length": tokens, "output_length": 3, "hash_ids": ids}


def write(path: Path, lines: list[object]) -> Path:
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines))
    return path


def blocks(log: RequestLog) -> list[list[int]]:
    return [log.blocks(request).tolist() for request in range(len(log))]


GOOD = [mooncake(0, 1000, [7, 8]), mooncake(3000, 1500, [7, 8, 9]), mooncake(3000, 600, [7, 4])]


def test_a_mooncake_log_plain_or_packed(tmp_path: Path) -> None:
    plain = write(tmp_path / "log.jsonl", GOOD)
    packed = tmp_path / "log.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    for path in (plain, packed):
        loaded = load_log([path])
        log = loaded.log
        assert (loaded.format.name, log.id_tokens, log.block_tokens) == ("mooncake", 512, 512)
        assert blocks(log) == [[0, 1], [0, 1, 2], [0, 3]]
        assert log.parents.tolist() == [ROOT, 0, 1, 0]
        assert log.seconds.tolist() == [0, 3, 3]
        assert log.input_tokens.tolist() == [1000, 1500, 600]
        assert (log.footprint, log.accesses, log.span_seconds) == (4, 7, 3)


def test_a_log_in_several_files_is_one_log(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a.jsonl", GOOD[:2]), write(tmp_path / "b.jsonl", GOOD[2:])]
    assert blocks(load_log(paths).log) == [[0, 1], [0, 1, 2], [0, 3]]


def test_runs_of_ids_are_grouped_from_the_start_and_a_short_group_is_a_block_of_its_own(
    tmp_path: Path,
) -> None:
    lines = [
        {"timestamp": 10, "input_length": 330, "output_length": 5, "hash_runs": [[100, 3], [7, 2]]},
        {"timestamp": 20, "input_length": 390, "output_length": 5, "hash_runs": [[100, 3], [7, 3]]},
        {"timestamp": 30, "input_length": 100, "output_length": 5, "hash_runs": [[100, 1]]},
    ]
    path = write(tmp_path / "log.jsonl", lines)
    loaded = load_log([path])
    assert (loaded.format.name, loaded.log.block_tokens) == ("runs", 64)
    assert blocks(loaded.log) == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5], [0]]
    log = load_log([path], group=2).log
    assert log.block_tokens == 128
    assert blocks(log) == [[0, 1, 2], [0, 1, 3], [4]]
    assert log.parents.tolist() == [ROOT, 0, 1, 1, ROOT]


def test_ids_that_hash_one_block_alone_are_named_by_their_parents_too(tmp_path: Path) -> None:
    lines = [
        {**mooncake(0.5, 48, [1, 2, 3]), "chat_id": 1, "parent_chat_id": -1},
        {**mooncake(1.5, 48, [9, 2, 3]), "chat_id": 2, "parent_chat_id": -1},
        {**mooncake(2.5, 64, [1, 2, 3, 3]), "chat_id": 3, "parent_chat_id": 1},
    ]
    path = write(tmp_path / "qwen.jsonl", lines)
    loaded = load_log([path])
    assert (loaded.format.name, loaded.log.id_tokens, loaded.log.rekeyed) == ("bailian", 16, True)
    assert loaded.log.seconds.tolist() == [0.5, 1.5, 2.5]
    assert blocks(loaded.log) == [[0, 1, 2], [3, 4, 5], [0, 1, 2, 6]]
    assert loaded.log.parents.tolist() == [ROOT, 0, 1, ROOT, 3, 4, 2]
    grouped = load_log([path], group=2).log
    assert blocks(grouped) == [[0, 1], [2, 3], [0, 4]]


def session(name: str, *, block_size: int = 64, **more: object) -> dict[str, object]:
    def asked(at: float, tokens: int, ids: list[int]) -> dict[str, object]:
        return {"t": at, "type": "s", "in": tokens, "out": 4, "hash_ids": ids}

    inner = {"type": "subagent", "t": 2.0, "requests": [asked(2.5, 64, [1])]}
    return {
        "id": name,
        "block_size": block_size,
        "requests": [asked(0.0, 100, [1, 2]), inner, asked(4.0, 150, [1, 2, 3])],
        **more,
    }


def test_sessions_are_merged_by_time_and_share_nothing_unless_their_ids_are_global(tmp_path: Path) -> None:
    def load(**more: object) -> RequestLog:
        paths = [tmp_path / "a.json", tmp_path / "b.json"]
        for path in paths:
            path.write_text(json.dumps(session(path.stem, **more), indent=1))
        loaded = load_log(paths)
        assert (loaded.format.name, loaded.log.id_tokens) == ("weka", 64)
        return loaded.log

    log = load()
    assert log.seconds.tolist() == [0, 0, 2.5, 2.5, 4, 4]
    assert blocks(log) == [[0, 1], [2, 3], [4], [5], [0, 1, 6], [2, 3, 7]]
    shared = load(hash_id_scope="global")
    assert blocks(shared) == [[0, 1], [0, 1], [0], [0], [0, 1, 2], [0, 1, 2]]


def test_an_iterator_of_requests_is_a_log_too() -> None:
    requests = (LogRequest(second, 10, 0, [1, 2 + second]) for second in range(3))
    assert blocks(read_log(requests, id_tokens=8)) == [[0, 1], [0, 2], [0, 3]]


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_blocks_are_told_apart_whatever_their_ids_are(seed: int, group: int) -> None:
    """Small ones in a row, large ones, negative ones, and all of them in one log: names do not count, only which are the same."""
    print(f"seed {seed}")
    draw = random.Random(seed)
    chains = [
        list(range(30)),
        *(sorted(draw.sample(range(100 * each, 100 * each + 60), 30)) for each in range(1, 9)),
    ]
    asked = [draw.choice(chains)[: draw.randrange(1, 31)] for _ in range(60)]
    plain = [LogRequest(float(at), len(ids), 0, ids) for at, ids in enumerate(asked)]
    names = {
        each: draw.choice([each, -1 - each, ID_COLUMN_MAX - 500 + each, 2**62 + each, 20_000 + 7 * each])
        for each in range(1000)
    }
    renamed = [replace(each, ids=[names[name] for name in each.ids]) for each in plain]
    expected = blocks(read_log(plain, id_tokens=1, group=group))
    assert blocks(read_log(renamed, id_tokens=1, group=group)) == expected
    assert max(map(max, expected)) > 60


BROKEN = [
    ("{", "broken lines", "not JSON"),
    ("[1]", "broken lines", "not a JSON object"),
    ("\x00\xff", "broken lines", "not JSON"),
    ('{"timestamp": 4000, "input_length": 5}', "broken lines", "a field is missing; field=hash_ids"),
    (mooncake(4000, 600, ["a", "b"]), "broken lines", "not block ids"),
    (mooncake(4000, 600, [1, 2**70]), "broken lines", "not block ids"),
    ({**mooncake(4000, 600, [7]), "input_length": 1.5}, "broken lines", "not a count"),
    ({**mooncake(4000, 600, [7]), "timestamp": "now"}, "broken lines", "not a time"),
    ('{"timestamp": 1e999, "input_length": 5, "hash_ids": [7]}', "times", "not a time"),
    ('{"timestamp": NaN, "input_length": 5, "hash_ids": [7]}', "times", "not a time"),
    (mooncake(2999, 600, [7]), "times backwards", "time runs backwards"),
    (mooncake(4000, 0, []), "lengths", "not a length in tokens"),
    (mooncake(4000, -5, []), "lengths", "not a length in tokens"),
    (mooncake(4000, 1700, [7, 8]), "ids", "1700 tokens have another number of blocks of 512"),
    (mooncake(4000, 600, [7, 8, 9]), "ids", "600 tokens have another number of blocks of 512"),
    (mooncake(4000, 1024, [8, 7]), "ids contradict their parents", "block 0 was seen before"),
    (mooncake(4000, 1024, [7, 9]), "ids contradict their parents", "block 1 was seen before"),
    (mooncake(4000, 1500, [7, 50, 8]), "ids contradict their parents", "block 2 was seen before"),
    (mooncake(4000, 1500, [7, 50, 50]), "ids contradict their parents", "block 2 was seen before"),
]


@pytest.mark.parametrize(
    ("line", "kind", "words"), BROKEN, ids=[f"{n} {each[2]}" for n, each in enumerate(BROKEN)]
)
def test_a_line_that_cannot_be_used_stops_by_its_number_or_is_skipped_and_counted(
    tmp_path: Path, line: object, kind: str, words: str
) -> None:
    last = mooncake(5000, 1500, [7, 8, 9])
    path = write(tmp_path / "log.jsonl", [*GOOD, line, last])
    with pytest.raises(BadLine) as caught:
        load_log([path], format_name="mooncake")
    message, _, field = words.partition("; field=")
    assert str(caught.value).startswith(f"{path}, line 4: {message}")
    assert field in caught.value.field
    assert caught.value.allowed
    log = load_log([path], format_name="mooncake", on_bad_line=OnBadLine.SKIP).log
    assert dict(log.skipped) == {kind: 1}
    # Nothing of it is left.
    assert blocks(log) == [*blocks(load_log([write(tmp_path / "good.jsonl", [*GOOD, last])]).log)]


@pytest.mark.parametrize(
    "runs", [[[1]], [1, 2], [[1, 0]], [[1, -2]], [[1, 2**40]], [[1, 1.5]], {"a": 1}, "x", [["a", 1]], None]
)
def test_runs_that_are_no_runs_are_broken_lines(tmp_path: Path, runs: object) -> None:
    lines = [
        {"timestamp": 1, "input_length": 64, "hash_runs": [[1, 1]]},
        {"timestamp": 1, "input_length": 9999, "hash_runs": runs},
    ]
    with pytest.raises(BadLine, match=r"line 2: not runs of block ids"):
        load_log([write(tmp_path / "log.jsonl", lines)])


def test_an_unknown_format_is_refused_with_those_that_are_known(tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", GOOD)
    with pytest.raises(InvalidArgument) as caught:
        load_log([path], format_name="csv")
    assert all(name in caught.value.allowed for name in FORMATS)


@pytest.mark.parametrize("text", ["", "\n\n", "a,b\n1,2\n", '{"a": 1}\n', "[]", '{"requests": 5}'])
def test_what_is_no_log_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "log"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match="format of the log cannot be told"):
        load_log([path])


def test_a_packed_log_that_was_cut_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log.gz"
    whole = gzip.compress("".join(json.dumps(mooncake(n, 512, [n])) + "\n" for n in range(5000)).encode())
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InvalidArgument, match="compressed log is damaged"):
        load_log([path])


def test_a_log_without_a_request_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", [mooncake(0, 100, [])])
    with pytest.raises(InvalidArgument, match="no request with block ids"):
        load_log([path])


@pytest.mark.parametrize(("id_tokens", "group"), [(0, 1), (512, 0), (70_000, 1)])
def test_blocks_have_a_size(id_tokens: int, group: int) -> None:
    with pytest.raises(InvalidArgument, match="not a size of a block"):
        read_log([], id_tokens=id_tokens, group=group)
