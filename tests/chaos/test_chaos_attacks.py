"""Short versions of every attack, and that what watches them has teeth."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.chaos.base import Outcome
from kvstore.chaos.bitflip import bit_flips
from kvstore.chaos.eio import failing_device
from kvstore.chaos.kill import kill_rounds
from kvstore.chaos.kill_service import kill_service_rounds
from kvstore.chaos.mounts import scratch_folder
from kvstore.chaos.nospace import cases, run_out
from kvstore.chaos.powercut import power_cuts
from kvstore.chaos.tools import what_block_devices_lack, what_mounts_lack
from tests.support.long import long

Require = Callable[[str, bool, str], None]


@pytest.fixture
def seed() -> int:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    return seed


@pytest.fixture
def scratch() -> Iterator[Path]:
    with scratch_folder(None) as folder:
        yield folder


@pytest.fixture
def mount(require: Require) -> None:
    lack = what_mounts_lack()
    require("mount", not lack, lack)


@pytest.fixture
def nbdkit(mount: None, require: Require) -> None:
    lack = what_block_devices_lack()
    require("nbdkit", not lack, lack)


def quiet(line: str) -> None:
    """Nobody watches."""


def assert_clean(outcome: Outcome, rounds: int) -> None:
    print(outcome.summary)
    assert outcome.violations == []
    assert outcome.rounds == rounds
    assert outcome.acknowledged > 0
    assert outcome.checked > 0


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [12, long(120)])
def test_nothing_acknowledged_is_lost_by_kills(scratch: Path, seed: int, rounds: int) -> None:
    outcome = kill_rounds(rounds, seed=seed, scratch=scratch, progress=quiet)
    assert_clean(outcome, rounds)
    assert outcome.acknowledged > 5 * rounds


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [2, long(20)])
def test_nothing_acknowledged_is_lost_by_kills_of_the_service(scratch: Path, seed: int, rounds: int) -> None:
    seen: set[str] = set()

    def look() -> None:
        seen.update(path.name for path in scratch.glob("kv-*/s/*"))

    outcome = kill_service_rounds(rounds, seed=seed, scratch=scratch, progress=quiet, check=look)
    assert_clean(outcome, rounds)
    assert {"identity", "kvstore.sock"} <= seen, "the services work below the scratch folder"
    assert list(scratch.iterdir()) == []


@pytest.mark.slow
@pytest.mark.usefixtures("nbdkit")
@pytest.mark.parametrize("states", [20, long(160)])
def test_nothing_acknowledged_is_lost_by_power_cuts_on_two_file_systems(
    scratch: Path, seed: int, states: int
) -> None:
    outcome = power_cuts(states, seed=seed, scratch=scratch, progress=quiet)
    assert_clean(outcome, states)
    assert outcome.figures["states on ext4"] == outcome.figures["states on xfs"] == states // 2


@pytest.mark.slow
@pytest.mark.usefixtures("nbdkit")
def test_a_store_whose_syncs_do_nothing_is_found_out(scratch: Path, seed: int) -> None:
    outcome = power_cuts(16, seed=seed, scratch=scratch, progress=quiet, no_sync=True)
    assert [line for line in outcome.violations if "acknowledged and not" in line], outcome.violations


@pytest.mark.slow
@pytest.mark.usefixtures("mount")
def test_a_file_system_that_takes_no_more_refuses_by_name_and_comes_back(scratch: Path, seed: int) -> None:
    outcome = run_out(seed=seed, scratch=scratch, progress=quiet)
    assert outcome.violations == []
    tried = [case.name for case in cases() if isinstance(outcome.figures[case.name], dict)]
    assert len(tried) == outcome.rounds >= 6
    for name in tried:
        assert outcome.figures[name]["refusals"] > 0
        assert set(outcome.figures[name]) <= set(outcome.legend), "each figure is explained"


@pytest.mark.slow
@pytest.mark.usefixtures("nbdkit")
def test_a_device_that_fails_loses_nothing_and_erases_nothing(scratch: Path, seed: int) -> None:
    outcome = failing_device(seed=seed, scratch=scratch, progress=quiet)
    assert_clean(outcome, 6)
    assert {name for figures in outcome.figures.values() for name in figures} <= set(outcome.legend)


@pytest.mark.slow
@pytest.mark.parametrize("flips", [500, long(10_000)])
def test_flipped_bits_are_misses(scratch: Path, seed: int, flips: int) -> None:
    outcome = bit_flips(flips, seed=seed, scratch=scratch, progress=quiet)
    assert_clean(outcome, flips)
    assert outcome.figures["below an open log"]["missed"] > flips // 5
