"""Room that is held for the moment when the file system has none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore.clock import ManualClock
from kvstore.errors import NoSpace
from kvstore.store import RecordLog, open_log
from kvstore.store.ballast import (
    AGAIN_AFTER_RELEASE_SECONDS,
    BALLAST_BYTES_MAX,
    BALLAST_NAME,
    BUDGET_BYTES_MIN,
    ballast_bytes_for,
)
from kvstore.testing.sim_device import SimDevice
from kvstore.testing.store_suite import MIB, make_records, read_back

BUDGET = BUDGET_BYTES_MIN
SIZE = BUDGET // 64


def fill(device: SimDevice) -> None:
    """Others take what is left."""
    device.taken += device.free_bytes()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def device() -> SimDevice:
    return SimDevice(3)


@pytest.fixture
def log(device: SimDevice, clock: ManualClock) -> Iterator[RecordLog]:
    log, _ = open_log("sim", budget_bytes=BUDGET, segment_bytes=MIB, clock=clock, device=device)
    log.reclaim()
    yield log
    log.close()


@pytest.mark.parametrize(
    ("budget", "size"),
    [(1 << 20, 0), ((1 << 30) - 1, 0), (1 << 30, 16 << 20), (64 << 30, BALLAST_BYTES_MAX)],
)
def test_it_is_a_small_part_of_the_budget(budget: int, size: int) -> None:
    assert ballast_bytes_for(budget) == size


def test_it_is_counted_and_survives_a_restart(log: RecordLog, device: SimDevice, clock: ManualClock) -> None:
    assert device.allocated(BALLAST_NAME) == SIZE
    assert log.space().other >= SIZE
    log.check_integrity()
    log.close()
    calls = device.calls
    again, _ = open_log("sim", budget_bytes=BUDGET, segment_bytes=MIB, clock=clock, device=device)
    again.reclaim()
    assert device.allocated(BALLAST_NAME) == SIZE
    assert device.calls > calls
    again.close()


def test_a_smaller_budget_has_none(log: RecordLog, device: SimDevice, clock: ManualClock) -> None:
    log.close()
    again, _ = open_log("sim", budget_bytes=64 * MIB, segment_bytes=MIB, clock=clock, device=device)
    again.reclaim()
    assert device.allocated(BALLAST_NAME) == 0
    again.close()


def test_it_goes_when_a_segment_finds_no_room_and_comes_back_when_there_is_some(
    log: RecordLog, device: SimDevice, clock: ManualClock
) -> None:
    device.capacity = 1 << 30
    fill(device)
    records = make_records(0, 30, size=100_000)
    places = [place for each in records for place in log.append([each])]
    assert device.allocated(BALLAST_NAME) == 0
    assert read_back(log, records, places) == [record.payload for record in records]
    log.reclaim()
    assert device.allocated(BALLAST_NAME) == 0
    device.taken = 0
    log.reclaim()
    assert device.allocated(BALLAST_NAME) == 0
    clock.advance(AGAIN_AFTER_RELEASE_SECONDS + 1)
    log.reclaim()
    assert device.allocated(BALLAST_NAME) == SIZE
    log.check_integrity()


def test_it_is_not_made_where_it_would_fill_the_file_system(device: SimDevice, clock: ManualClock) -> None:
    device.capacity = 3 * SIZE
    log, _ = open_log("sim", budget_bytes=BUDGET, segment_bytes=MIB, clock=clock, device=device)
    log.reclaim()
    assert device.allocated(BALLAST_NAME) == 0
    log.close()


def test_when_both_are_used_up_the_refusal_is_the_file_systems(log: RecordLog, device: SimDevice) -> None:
    device.capacity = 1 << 30
    fill(device)
    kept = make_records(0, 5, size=100_000)
    places = log.append(kept)

    def go_on() -> None:
        for number in range(100, 400):
            log.append(make_records(number, 1, size=100_000))
            fill(device)

    with pytest.raises(NoSpace, match="ENOSPC"):
        go_on()
    assert read_back(log, kept, places) == [record.payload for record in kept]
    log.check_integrity()
