"""The benches of speed, on a small scale: what they say of their own, and that their files are gone afterwards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvstore.bench.pairs import Pair, interleaved, spread
from kvstore.bench.raw import RawReads, RawWrites, Threads, device_written_bytes
from kvstore.cli.main import main
from kvstore.errors import KvstoreError
from kvstore.store.buffers import aligned
from kvstore.store.device import why_not_direct


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    reason = why_not_direct(tmp_path / "probe")
    if reason:
        pytest.skip(f"a file system with O_DIRECT is needed: {reason}")
    return tmp_path


def test_pairs_go_first_in_turns_and_the_ratio_is_of_what_was_near() -> None:
    calls: list[str] = []

    def side(name: str, rate: float) -> float:
        calls.append(name)
        return rate

    pairs = list(interleaved(4, ours=lambda: side("A", 3.0), theirs=lambda: side("B", 4.0)))
    assert "".join(calls) == "ABBAABBA"
    assert pairs == [Pair(3.0, 4.0)] * 4
    assert {pair.ratio for pair in pairs} == {0.75}


def test_the_interval_lies_around_the_median_and_shrinks_where_values_agree() -> None:
    found = spread([1.0, 2.0, 3.0, 4.0, 100.0])
    assert found.low <= found.median == 3.0 <= found.high
    assert (found.low, found.high) == (1.0, 100.0)
    same = spread([2.0] * 15)
    assert (same.low, same.median, same.high, same.count) == (2.0, 2.0, 2.0, 15)


def test_raw_passes_write_and_read_every_page_once(disk: Path) -> None:
    pages = []
    for number in range(3):
        page = aligned(8192)
        page[:] = bytes([number + 1]) * 8192
        pages.append(page)
    threads = Threads(4)
    paths = [disk / "raw0", disk / "raw1"]
    for path in paths:
        path.write_bytes(bytes(4 * 8192))
    raw = RawWrites(paths, pages=pages, file_bytes=4 * 8192)
    assert raw.write(threads, 7, sync_slots=3) > 0
    raw.close()
    written = paths[0].read_bytes() + paths[1].read_bytes()
    assert written == b"".join(bytes([n % 3 + 1]) * 8192 for n in range(7)) + bytes(8192)
    reads = RawReads([(paths[n // 4], 8192 * (n % 4), 8192) for n in range(7)])
    assert reads.read(threads, [6, 0, 5, 1, 4, 2, 3], depth=4, held=8) > 0
    reads.close()
    short = RawReads([(paths[1], 8192 * 4, 8192)])
    with pytest.raises(KvstoreError, match="read 0"):
        short.read(threads, [0], depth=1, held=1)
    short.close()
    threads.close()


def test_a_disk_that_is_not_there_counts_nothing() -> None:
    assert device_written_bytes(Path("/proc")) is None


def test_storage_answers_with_one_object_and_leaves_nothing(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                "bench",
                "storage",
                "--dir",
                str(disk),
                "--size",
                "64MiB",
                "--pairs",
                "2",
                "--seed",
                "5",
                "--json",
            ]
        )
        == 0
    )
    answer = json.loads(capsys.readouterr().out)
    assert set(answer) == {"write", "read", "device_bytes_per_payload_byte", "detail"}
    for what in ("write", "read"):
        assert set(answer[what]) == {"ratio", "interval", "raw"}
        assert answer[what]["interval"][0] <= answer[what]["ratio"] <= answer[what]["interval"][1]
        assert answer[what]["raw"] > 0
    assert answer["device_bytes_per_payload_byte"] >= 1.0
    assert 1.0 <= answer["detail"]["device_bytes_counted_by_log_per_payload_byte"] <= 1.05
    assert answer["detail"]["seed"] == 5
    assert list(disk.iterdir()) == []


def test_small_answers_with_one_object_and_leaves_nothing(
    disk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise it writes gigabytes before it measures.
    monkeypatch.setattr("kvstore.bench.blocks.SEGMENT_BYTES", 16 << 20)
    monkeypatch.setattr("kvstore.bench.small.SEGMENT_BYTES", 16 << 20)
    code = main(["bench", "small", "--dir", str(disk), "--blocks", "512", "--passes", "1", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert code == (1 if answer["missed"] else 0)
    assert answer["written_per_second"]["median"] > 0
    assert answer["read_per_second"]["median"] > 0
    assert 1.0 <= answer["detail"]["device_bytes_counted_by_log_per_payload_byte"] <= 1.5
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize(
    "asked",
    [
        ["storage", "--size", "1MiB"],
        ["storage", "--pairs", "0"],
        ["small", "--blocks", "0"],
        ["small", "--passes", "0"],
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(
    asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *asked]) != 0
    assert asked[1] in capsys.readouterr().err
