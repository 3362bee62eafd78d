"""The service's small parts: time, staging, the read gate, status codes, addresses."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from kvstore.clock import ManualClock
from kvstore.errors import ALL_ERRORS, ConfigError, LimitExceeded, UnknownSession
from kvstore.service.activity import Activity
from kvstore.service.gate import ReadGate
from kvstore.service.metrics import split_address
from kvstore.service.process import Places
from kvstore.service.session import Session, Sessions
from kvstore.service.staging import Staging
from kvstore.service.status import CODES
from kvstore.service.timekeeping import ServiceTime
from kvstore.types import BootId


def test_wall_time_does_not_follow_a_clock_that_is_set() -> None:
    clock = ManualClock(wall=1_000_000.0)
    time = ServiceTime(clock)
    for jump in (3600.0, -7200.0):
        clock.jump_wall(jump)
        assert time.wall() == 1_000_000.0
    clock.advance(5.0)
    assert (time.wall(), time.uptime()) == (1_000_005.0, 5.0)


def test_wall_time_starts_no_earlier_than_what_was_used_last() -> None:
    clock = ManualClock(wall=1_000.0)
    assert ServiceTime(clock, not_before=5_000.0).wall() == 5_000.0
    assert ServiceTime(clock, not_before=500.0).wall() == 1_000.0


def test_wall_time_can_be_started_later_and_never_leaves_what_the_index_can_count() -> None:
    clock = ManualClock(wall=1_000.0)
    time = ServiceTime(clock)
    time.start_no_earlier(900.0)
    assert time.wall() == 1_000.0
    time.start_no_earlier(1e12)
    clock.advance(365 * 86_400.0)
    assert 2**31 < time.wall() < 2**32
    assert ServiceTime(ManualClock(wall=-5.0)).wall() == 0.0


def test_staging_refuses_past_its_bound_and_takes_nothing_then() -> None:
    staging = Staging(100)
    staging.take(60)
    with pytest.raises(LimitExceeded, match="staging=110; allowed: 100"):
        staging.take(50)
    assert (staging.held_bytes, staging.refused_total) == (60, 1)
    staging.give_back(60)
    staging.take(100)
    with pytest.raises(AssertionError):
        staging.give_back(101)


async def test_the_gate_lets_in_by_turns_and_what_is_too_large_alone() -> None:
    gate = ReadGate(10)
    await gate.enter(6)
    entered: list[str] = []

    async def enter(name: str, length: int) -> None:
        await gate.enter(length)
        entered.append(name)

    waiting = [asyncio.ensure_future(enter("large", 50)), asyncio.ensure_future(enter("small", 1))]
    for _ in range(3):
        await asyncio.sleep(0)
    assert entered == []  # the small one fits, but it is not its turn
    gate.leave(6)
    await waiting[0]
    assert (entered, gate.held_bytes) == (["large"], 50)
    gate.leave(50)
    await waiting[1]
    assert (entered, gate.held_bytes) == (["large", "small"], 1)


async def test_at_the_gate_an_owner_past_its_share_waits_for_itself_and_holds_up_nobody() -> None:
    gate = ReadGate(24)
    await gate.enter(9, "slow")
    more = asyncio.ensure_future(gate.enter(4, "slow"))
    little = asyncio.ensure_future(gate.enter(2, "slow"))
    await little
    assert not more.done()
    # Others pass it by, and each may hold one thing that is larger than a share.
    await gate.enter(13, "large")
    assert gate.held_bytes == 24
    last = asyncio.ensure_future(gate.enter(1, "last"))
    gate.leave(9, "slow")
    await asyncio.gather(more, last)
    assert gate.held_bytes == 20
    for length, owner in ((2, "slow"), (4, "slow"), (13, "large"), (1, "last")):
        gate.leave(length, owner)
    assert (gate.held_bytes, gate.refused_total) == (0, 0)
    # Who has given everything back may hold as much as at first.
    await gate.enter(13, "slow")


async def test_who_stops_waiting_at_the_gate_holds_nothing_and_blocks_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = ReadGate(10)
    await gate.enter(6)
    first, second = asyncio.ensure_future(gate.enter(9)), asyncio.ensure_future(gate.enter(4))
    await asyncio.sleep(0)
    first.cancel()
    await second
    assert (first.cancelled(), gate.held_bytes) == (True, 10)
    monkeypatch.setattr("kvstore.service.gate.WAIT_SECONDS_MAX", 0.01)
    with pytest.raises(LimitExceeded, match="fetch_bytes=11; allowed: 10"):
        await gate.enter(1)
    gate.leave(10)
    assert (gate.held_bytes, gate.refused_total) == (0, 1)
    await gate.enter(10)


async def test_sessions_end_once_and_are_bounded() -> None:
    ended: list[Session] = []
    sessions = Sessions(boot=BootId(bytes(16)), limit=2, on_end=ended.append)
    one = sessions.begin(1, lambda: None)
    sessions.begin(2, lambda: None)
    with pytest.raises(LimitExceeded, match="sessions=3; allowed: 2"):
        sessions.begin(3, lambda: None)
    assert sessions.get(one.id) is one
    sessions.end(one)
    sessions.end(one)
    assert (ended, one.ended.done(), len(sessions)) == ([one], True, 1)
    with pytest.raises(UnknownSession):
        sessions.get(one.id)
    assert sessions.begin(4, lambda: None).id != one.id


async def test_idle_is_waited_for_while_something_moves_and_no_longer() -> None:
    left = [3]
    activity = Activity(lambda: left[0])
    waiting = asyncio.ensure_future(activity.wait_idle(30.0))
    for count in (2, 1, 0):
        await asyncio.sleep(0)
        assert not waiting.done()
        left[0] = count
        activity.note()
    assert await waiting == 0
    left[0] = 2
    assert await activity.wait_idle(30.0, quiet_seconds=0.01) == 2
    assert await activity.wait_idle(0.01) == 2
    left[0] = 0
    with activity.transfer():
        assert await activity.wait_idle(0.02, quiet_seconds=0.001) == 0


def test_every_error_has_a_status_and_only_failures_of_ours_are_internal() -> None:
    assert CODES.keys() == ALL_ERRORS.keys()
    assert {name for name, code in CODES.items() if code is grpc.StatusCode.INTERNAL} == {
        "INTERNAL",
        "DEVICE_ERROR",
    }


@pytest.mark.parametrize(
    ("text", "address"),
    [("127.0.0.1:9464", ("127.0.0.1", 9464)), ("[::1]:0", ("::1", 0)), ("host:65535", ("host", 65535))],
)
def test_addresses_are_read(text: str, address: tuple[str, int]) -> None:
    assert split_address(text) == address


@pytest.mark.parametrize("text", ["", "9464", ":9464", "host", "host:", "host:x", "host:65536", "host:-1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        split_address(text)


def test_a_path_too_long_for_a_socket_is_refused_by_name() -> None:
    fits, too_long = Path("/" + "d" * 93), Path("/" + "d" * 94)
    Places(too_long, fits).check()
    with pytest.raises(ConfigError, match=r"kvstore.sock is 108 bytes.*dir=.*at most 107"):
        Places(too_long, too_long).check()
    with pytest.raises(ConfigError, match="sockets=/ddd"):
        Places(fits, too_long).check()


def test_a_session_stages_no_more_than_its_share_but_one_item_alone() -> None:
    staging = Staging(100)
    staging.take(40, "a")
    with pytest.raises(LimitExceeded, match="staging_per_session=60; allowed: 50"):
        staging.take(20, "a")
    staging.take(50, "b")
    staging.give_back(40, "a")
    staging.give_back(50, "b")
    staging.take(90, "a")
    with pytest.raises(LimitExceeded, match="staging_per_session"):
        staging.take(1, "a")
    staging.give_back(90, "a")
    assert staging.held_bytes == 0


async def test_a_session_that_holds_its_share_of_the_gate_stands_aside_and_gets_all_of_it_turns() -> None:
    gate = ReadGate(10)
    await gate.enter(5, "greedy")
    more = [asyncio.ensure_future(gate.enter(3, "greedy")) for _ in range(20)]
    await asyncio.sleep(0)
    assert not any(each.done() for each in more)
    await gate.enter(4, "other")
    gate.leave(4, "other")
    gate.leave(5, "greedy")
    for each in more:
        await each
        gate.leave(3, "greedy")
    assert gate.held_bytes == 0
