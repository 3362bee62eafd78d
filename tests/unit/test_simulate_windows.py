from __future__ import annotations

import pytest

from kvstore.plan import Coverage
from kvstore.plan.planner import replay_layer_tokens
from kvstore.profile.registry import get_profile
from kvstore.simulate.case import Case, Replay
from kvstore.simulate.log import LogRequest, RequestLog, read_log
from kvstore.simulate.recommend import Prices, Weighed, recommend
from kvstore.simulate.resume import within
from kvstore.simulate.reuse import reuse_of
from kvstore.simulate.run import Simulation
from kvstore.simulate.study import POLICIES
from kvstore.types import StateSource
from tests.support.request_logs import BLOCK, made_requests

FLASH = get_profile("deepseek-v4-flash")


def log_of(*prompts: tuple[int, list[int]]) -> RequestLog:
    """(Input tokens, ids), a second apart."""
    return read_log(
        (LogRequest(float(second), tokens, 0, ids) for second, (tokens, ids) in enumerate(prompts)),
        id_tokens=BLOCK,
    )


def simulated(log: RequestLog, replay: Replay, windows: str) -> Simulation:
    case = Case(policy="infinite", replay=replay, windows=windows)
    simulation = Simulation(log, case, ranks=POLICIES["infinite"](), profile=FLASH)
    simulation.run()
    simulation.check_integrity()
    return simulation


@pytest.mark.parametrize("blocks", [1, 4, 40])
def test_an_exact_replay_costs_its_triangle(blocks: int) -> None:
    ids = list(range(blocks))
    outcome = simulated(log_of((blocks * BLOCK, ids), (blocks * BLOCK, ids)), Replay.EXACT, "zero").outcome
    start = max(blocks * BLOCK - FLASH.exact_replay_tokens, 0)
    spent = replay_layer_tokens(FLASH, start, blocks * BLOCK)
    assert outcome.hit_tokens == pytest.approx(blocks * BLOCK - spent / FLASH.layer_count)
    assert (outcome.restored_tokens, outcome.replay_layer_tokens) == (blocks * BLOCK, spent)
    assert outcome.replayed_tokens == blocks * BLOCK - start
    assert outcome.sources == {StateSource.NONE: 1, StateSource.REPLAY: 1}


def test_a_bounded_replay_costs_one_window() -> None:
    ids = list(range(40))
    outcome = simulated(log_of((40 * BLOCK, ids), (40 * BLOCK, ids)), Replay.BOUNDED, "zero").outcome
    assert outcome.hit_tokens == 40 * BLOCK - FLASH.bounded_replay_tokens


def test_a_state_that_a_replay_rebuilt_where_prompts_part_is_kept_for_the_next() -> None:
    shared = list(range(40))
    log = log_of(*((43 * BLOCK, [*shared, *range(100 * n, 100 * n + 3)]) for n in range(1, 4)))
    outcome = simulated(log, Replay.EXACT, "endpoints").outcome
    # The second leaves the first at block 40 and replays; the third finds what that left there.
    assert outcome.sources == {StateSource.NONE: 1, StateSource.REPLAY: 1, StateSource.CHECKPOINT: 1}
    assert outcome.state_bytes == outcome.states_stored * FLASH.state_bytes
    assert outcome.states_stored == 3 * 2 + 1


@pytest.mark.parametrize("replay", [Replay.EXACT, Replay.BOUNDED])
def test_nothing_saves_more_than_what_is_held(replay: Replay) -> None:
    requests = made_requests(4, 60, sessions=8)
    log = log_of(*((each.tokens, list(each.ids)) for each in requests))
    most = simulated(log, Replay.NONE, "full+overlap").outcome
    for windows in ("zero", "endpoints", f"periodic:{4 * BLOCK}", "full"):
        outcome = simulated(log, replay, windows).outcome
        assert 0 < outcome.hit_tokens <= outcome.restored_tokens <= most.hit_tokens
        assert outcome.sources.total() == len(requests)


def test_of_a_coverage_only_what_ends_within_is_left() -> None:
    held = Coverage(4, (128, 512), (256, 384), (512,), (), 384)
    assert within(held, 3, 128) == Coverage(3, (128,), (256, 384), (), (), 384)
    assert within(held, 2, 128) == Coverage(2, (128,), (256,), (), (), 0)


def weighed(windows: str, saved: float, state_bytes: float) -> Weighed:
    return Weighed(
        windows=windows,
        replay=Replay.EXACT,
        saved_rate=saved,
        state_bytes_per_token=state_bytes,
        state_bytes_per_input_token=state_bytes,
    )


ZERO, ENDS, FULL = weighed("zero", 30.0, 0), weighed("endpoints", 60.0, 1000), weighed("full", 61.0, 25_000)


@pytest.mark.parametrize(("storage", "chosen"), [(0.0, "full"), (0.001, "endpoints"), (10.0, "zero")])
def test_states_are_kept_while_they_save_more_than_they_cost(storage: float, chosen: str) -> None:
    prices = Prices(usd_per_million_tokens=0.1, usd_per_gb_month=storage)
    found = recommend(
        [ZERO, ENDS, FULL], ZERO, where="lru, 1%", prices=prices, kept_hours=73.0, block_bytes_per_token=3514
    )
    assert (found.chosen.windows, found.best.windows) == (chosen, "full")
    assert found.line.startswith(f"{chosen} saves ")
    even = found.even_usd_per_gb_month
    if chosen == "endpoints":
        # A hundredth of 0.1 $ for 24 GB over a tenth of a month.
        assert even == pytest.approx(0.001 / 2.4)
    assert (even is None) == (chosen == "full")


def test_reuse_intervals_are_those_between_uses_of_a_block() -> None:
    requests = made_requests(2, 200, sessions=12)
    log = read_log(
        (LogRequest(each.milliseconds / 1000, each.tokens, 0, each.ids) for each in requests), id_tokens=BLOCK
    )
    last: dict[int, int] = {}
    waits, uses = [], 0
    for each in requests:
        for block in each.ids:
            uses += 1
            if block in last:
                waits.append((each.milliseconds - last[block]) / 1000)
            last[block] = each.milliseconds
    found = reuse_of(log)
    assert found.reuses == len(waits)
    assert found.reuse_rate == pytest.approx(100 * len(waits) / uses)
    assert found.longest_seconds == max(waits)
    for seconds, share in (*found.within, *found.curve[1:-1]):
        assert share == pytest.approx(100 * sum(each <= seconds for each in waits) / len(waits), abs=0.5)
    assert found.curve[-1][1] == 100


def test_a_log_without_reuse_has_no_intervals() -> None:
    found = reuse_of(log_of((BLOCK, [1]), (BLOCK, [2])))
    assert (found.reuses, found.curve, found.once_rate) == (0, (), 100.0)
