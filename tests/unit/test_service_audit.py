"""The audit log: a line a call, files that do not grow for ever, and nobody who waits for it."""

from __future__ import annotations

import json
import logging
import resource
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.errors import InvalidArgument
from kvstore.service.audit import ASKING_EVERY_SECONDS, TEXT_CHARS_MAX, AuditLog, arguments_of, bytes_for
from kvstore.service.session import Sessions
from kvstore.types import BootId
from kvstore.v1 import cache_pb2 as pb


class Rig:
    def __init__(self, file: Path, bytes_max: int = 1 << 20) -> None:
        self.file = file
        self.now = 1_000_000.0
        self.counts: Counter[str] = Counter()
        sessions = Sessions(boot=BootId(bytes(16)), limit=1, on_end=lambda session: None)
        self.log = AuditLog(
            file, bytes_max=bytes_max, wall=lambda: self.now, sessions=sessions, counts=self.counts
        )
        self.context: Any = SimpleNamespace(invocation_metadata=lambda: (), peer=lambda: "unix:")

    async def call(self, name: str, request: Any, error: Exception | None = None) -> None:
        async def answer(request: Any, context: Any) -> str:
            if error is not None:
                raise error
            return "answer"

        assert await self.log.around(name, answer)(request, self.context) == "answer"

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.file.read_text().splitlines()]


async def test_a_line_says_who_what_and_how_it_ended(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "audit.log")
    await rig.call("Clear", pb.ClearRequest(namespace=b"\1\2"))
    with pytest.raises(InvalidArgument):
        await rig.call("SetEviction", pb.SetEvictionRequest(policy="x" * 1000), InvalidArgument("no"))
    await rig.log.close()
    first, second = rig.lines()
    assert (first["call"], first["arguments"], first["outcome"]) == ("Clear", {"namespace": "0102"}, "ok")
    assert first["time"] == "1970-01-12T13:46:40.000+00:00"
    assert second["outcome"] == "INTERNAL"
    assert second["arguments"] == {"policy": "x" * TEXT_CHARS_MAX}
    assert rig.file.stat().st_mode & 0o777 == 0o600


async def test_who_asks_for_figures_again_and_again_gets_a_line_a_minute(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "audit.log")
    for _ in range(int(ASKING_EVERY_SECONDS) + 1):
        await rig.call("Stats", pb.StatsRequest())
        rig.now += 1.0
    await rig.call("Clear", pb.ClearRequest())
    await rig.log.close()
    assert [(line["call"], line.get("calls", 1)) for line in rig.lines()] == [
        ("Stats", 1),
        ("Stats", 60),
        ("Clear", 1),
    ]


async def test_the_file_and_the_one_before_it_are_bounded(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "audit.log", bytes_max=4096)
    for number in range(100):
        await rig.call("SetPolicy", pb.SetPolicyRequest(policy=f"periodic:{number}"))
    await rig.log.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["audit.log", "audit.log.1"]
    assert all(0 < file.stat().st_size <= 4096 for file in files)
    assert rig.lines()[-1]["arguments"] == {"policy": "periodic:99"}


async def test_a_line_that_cannot_be_written_is_counted_and_told_elsewhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = Rig(tmp_path / "gone" / "audit.log")
    with caplog.at_level(logging.ERROR):
        await rig.call("Drain", pb.DrainRequest(seconds=1))
        await rig.log.close()
    assert rig.counts["audit_failed_total"] == 1
    assert "the audit log lacks a line" in caplog.text
    assert '"call": "Drain"' in caplog.text


def test_what_is_no_request_is_said_to_be_none() -> None:
    assert arguments_of(object()) == {"unreadable": True}


@pytest.mark.parametrize(("budget", "size"), [(4 << 20, 64 << 10), (64 << 20, 256 << 10), (1 << 40, 1 << 20)])
def test_a_small_disk_budget_has_a_small_log(budget: int, size: int) -> None:
    assert bytes_for(budget) == size


@contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """No file of this process grows past `size` bytes, as on a disk that is full there."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_disk_that_is_full_in_the_middle_of_a_line_spoils_no_other_line(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "audit.log")
    await rig.call("Clear", pb.ClearRequest())
    rig.log._thread.submit(lambda: None).result()
    with files_end_at(rig.file.stat().st_size + 20):
        await rig.call("Drain", pb.DrainRequest())
        rig.log._thread.submit(lambda: None).result()
    await rig.call("SetPolicy", pb.SetPolicyRequest(policy="zero"))
    await rig.log.close()
    assert [line["call"] for line in rig.lines()] == ["Clear", "SetPolicy"]
    assert rig.counts["audit_failed_total"] == 1
