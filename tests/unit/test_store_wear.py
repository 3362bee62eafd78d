"""The drive's daily budget for writes, and what copies for the hit rate may take."""

from __future__ import annotations

import random
from collections import deque

import pytest

from kvstore.errors import ConfigError
from kvstore.store.wear import (
    BYTES_PER_DAY_MIN,
    COPIED_SHARE,
    CopyAllowance,
    WearBudget,
    check_bytes_per_day,
    refill_of,
)

TIB = 1 << 40
HOUR, DAY = 3600.0, 86_400.0


@pytest.mark.parametrize("seed", range(5))
def test_no_day_takes_more_than_its_budget_whenever_it_begins(seed: int) -> None:
    chance = random.Random(seed)
    now, written, limit = 500.0, 0, TIB
    budget = WearBudget(limit, now=now, written=written)
    window: deque[tuple[float, int]] = deque()
    total = most = 0
    for _ in range(40_000):
        now += chance.choice([0.0, 1.0, 20.0, 20.0, chance.random() * HOUR * 3 * (chance.random() < 0.01)])
        size = chance.choice([4 << 20, 32 << 20, 512 << 20])
        budget.note(written, now)
        if budget.seconds_until(size) > 0:
            continue
        # What is counted afterwards is more than was asked for: headers, padding, footers.
        taken = size + size // 50 + 65_536
        written += taken
        window.append((now, taken))
        total += taken
        while window[0][0] <= now - DAY:
            total -= window.popleft()[1]
        most = max(most, total)
        budget.note(written, now)
    assert most <= limit, f"seed {seed}"
    assert most > limit * 0.6, f"seed {seed}"


def test_a_refusal_says_when_there_is_room_and_then_there_is() -> None:
    budget = WearBudget(TIB, now=0.0, written=0)
    budget.note(10 << 30, 0.0)
    wait = budget.seconds_until(1 << 30)
    assert wait > HOUR / 10
    budget.note(10 << 30, wait * 0.99)
    assert budget.seconds_until(1 << 30) > 0
    budget.note(10 << 30, wait * 1.001)
    assert budget.seconds_until(1 << 30) == 0


def test_no_more_than_an_hour_is_saved() -> None:
    budget = WearBudget(TIB, now=0.0, written=0)
    budget.note(0, 100 * DAY)
    assert budget.left_bytes == budget.most_bytes <= TIB / 24


def test_a_clock_that_stands_still_or_runs_back_earns_nothing() -> None:
    budget = WearBudget(TIB, now=1000.0, written=0)
    left = budget.left_bytes
    budget.note(0, 500.0)
    budget.note(0, 1000.0)
    assert budget.left_bytes == left


def test_copies_that_nobody_is_owed_end_before_writes_do() -> None:
    budget = WearBudget(TIB, now=0.0, written=0)
    budget.note(0, HOUR)
    budget.note(int(refill_of(TIB).most * 0.6), HOUR)
    assert not budget.spares(1)
    assert budget.seconds_until(1 << 20) == 0


def test_without_a_limit_nothing_waits() -> None:
    budget = WearBudget(0, now=0.0, written=0)
    budget.note(1 << 60, 1.0)
    assert not budget.limited
    assert budget.seconds_until(1 << 40) == 0
    assert budget.spares(1 << 40)


@pytest.mark.parametrize("size", [1, BYTES_PER_DAY_MIN - 1])
def test_a_budget_that_no_sync_fits_into_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match="wear="):
        check_bytes_per_day(size)


@pytest.mark.parametrize("size", [0, BYTES_PER_DAY_MIN, TIB])
def test_budgets_of_use_are_taken(size: int) -> None:
    check_bytes_per_day(size)


def test_copies_are_earned_by_appends_and_saved_up_to_a_segment() -> None:
    allowance = CopyAllowance(1000)
    assert allowance.bytes == 0
    allowance.appended(1000)
    assert allowance.bytes == int(1000 * COPIED_SHARE)
    allowance.appended(10**6)
    assert allowance.bytes == 1000
    allowance.copied(1200)
    assert allowance.bytes == -200
