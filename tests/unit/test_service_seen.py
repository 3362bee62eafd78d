"""What operators are told: log lines, readiness, slow calls, and who may read a secret."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvstore.clock import ManualClock
from kvstore.errors import ConfigError, DirectoryInUse
from kvstore.service.logs import JsonLines, log_to_stderr, naming
from kvstore.service.notify import notify_ready
from kvstore.service.process import Places, holding_sockets, is_open
from kvstore.service.slowcalls import KEPT, WINDOW_SECONDS, SlowCalls
from kvstore.store.device import PosixDevice


class Caller:
    """The context of a call that came with these entries of metadata."""

    def __init__(self, **entries: str) -> None:
        self._entries = tuple((name.replace("_", "-"), value) for name, value in entries.items())

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._entries


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("kvstore.x", logging.WARNING, "x.py", 1, "%s", (text,), None)


async def logged_in_a_call(caller: Caller) -> dict[str, Any]:
    """A line that a call's handler logs."""

    async def handler(request: str, context: Any) -> str:
        return JsonLines().format(record(request))

    # As gRPC does: each call is a task of its own.
    line = await asyncio.create_task(naming("Fetch", handler)("late ☂\n", caller))  # type: ignore[arg-type]
    found: dict[str, Any] = json.loads(line)
    assert "\n" not in line
    return found


async def test_a_json_line_names_the_call_by_the_callers_own_number() -> None:
    line = await logged_in_a_call(Caller(x_request_id="req-7"))
    assert (line["message"], line["level"], line["logger"]) == ("late ☂\n", "WARNING", "kvstore.x")
    assert (line["call"], line["request_id"]) == ("Fetch", "req-7")
    assert line["time"].endswith("Z")


async def test_a_json_line_names_the_callers_trace() -> None:
    traced = await logged_in_a_call(Caller(traceparent=f"00-{'ab' * 16}-{'cd' * 8}-01"))
    assert traced["trace_id"] == "ab" * 16
    assert "trace_id" not in await logged_in_a_call(Caller(traceparent="00-xyz"))


@pytest.mark.parametrize("sent", [{}, {"x_request_id": "has space"}, {"x_request_id": "x" * 129}])
async def test_a_call_without_a_number_that_can_be_shown_is_given_one(sent: dict[str, str]) -> None:
    first, second = [await logged_in_a_call(Caller(**sent)) for _ in range(2)]
    assert len(first["request_id"]) == 16
    assert first["request_id"] != second["request_id"]


def test_a_json_line_outside_of_calls_names_none_and_holds_its_traceback() -> None:
    try:
        raise ValueError("odd")
    except ValueError:
        failed = record("failed")
        failed.exc_info = sys.exc_info()
    line = json.loads(JsonLines().format(failed))
    assert "call" not in line
    assert "ValueError: odd" in line["error"]


def test_an_unknown_form_of_log_lines_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="log_format=xml; allowed: text or json"):
        log_to_stderr("xml")


async def test_the_slowest_calls_are_kept_for_two_windows_and_long_ones_by_nature_never() -> None:
    clock = ManualClock()
    calls = SlowCalls(clock.monotonic)

    async def lasting(seconds: float, context: object) -> None:
        clock.advance(seconds)

    for seconds in range(1, KEPT + 4):
        await calls.around(f"call{seconds}", lasting)(seconds, None)
    await calls.around("Session", lasting)(100, None)
    assert [each.seconds for each in calls.longest()] == list(range(KEPT + 3, 3, -1))
    clock.advance(WINDOW_SECONDS)
    await calls.around("late", lasting)(1, None)
    assert [each.name for each in calls.longest()][:2] == ["call11", "call10"]
    clock.advance(WINDOW_SECONDS)
    assert [each.name for each in calls.longest()] == ["late"]
    clock.advance(3 * WINDOW_SECONDS)
    assert calls.longest() == []


async def test_a_call_that_fails_is_timed_and_fails() -> None:
    clock = ManualClock()
    calls = SlowCalls(clock.monotonic)

    async def failing(request: object, context: object) -> None:
        clock.advance(2.0)
        raise ConfigError("no")

    with pytest.raises(ConfigError):
        await calls.around("Lookup", failing)(None, None)
    assert [(each.name, each.seconds) for each in calls.longest()] == [("Lookup", 2.0)]


def test_a_service_manager_that_asks_is_told_once_that_we_are_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify_ready()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "n"))
        manager.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "n"))
        notify_ready()
        assert manager.recv(64) == b"READY=1"
    assert not caplog.records
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    notify_ready()
    assert "could not tell the service manager" in caplog.text


@pytest.mark.parametrize(
    ("mode", "owner", "group", "is_refused"),
    [
        (0o600, 10001, 10001, False),
        (0o640, 10001, 10001, True),
        (0o440, 0, 10001, False),
        (0o460, 0, 10001, True),
        (0o444, 0, 10001, True),
        (0o440, 0, 7, True),
    ],
    ids=[
        "own",
        "own, a group's too",
        "a cluster's secret",
        "a group may write",
        "everybody",
        "another group's",
    ],
)
def test_who_may_read_a_secret(mode: int, owner: int, group: int, is_refused: bool) -> None:
    assert is_open(mode, owner, group, user=10001, groups={10001}) is is_refused
    assert is_open(0o440, 0, 0, user=0, groups={0})


def test_a_directory_of_sockets_is_made_for_one_user_and_held_by_one_service(tmp_path: Path) -> None:
    places = Places(tmp_path, tmp_path / "run" / "sockets")
    with holding_sockets(places):
        assert places.sockets.stat().st_mode & 0o777 == 0o700
        with (
            pytest.raises(DirectoryInUse, match="another service has its sockets there"),
            holding_sockets(places),
        ):
            pass
    with holding_sockets(places):
        pass


def test_the_stores_own_directory_by_another_name_is_not_held_twice(tmp_path: Path) -> None:
    store, link = tmp_path / "store", tmp_path / "link"
    store.mkdir()
    link.symlink_to(store)
    with closing(PosixDevice(store)) as device:
        device.lock()
        for sockets in (store, link, tmp_path / "." / "store" / ".." / "store"):
            with holding_sockets(Places(store, sockets)):
                pass
        with (
            pytest.raises(DirectoryInUse, match="another service has its sockets there"),
            holding_sockets(Places(tmp_path, store)),
        ):
            pass
