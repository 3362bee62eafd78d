from __future__ import annotations

import json
from itertools import pairwise

import pytest

from kvstore.policy import EvictionPolicy
from kvstore.simulate.belady import BeladyPolicy
from kvstore.simulate.case import Case, Outcome, TtlFrom
from kvstore.simulate.formats import load_log
from kvstore.simulate.log import LogRequest, RequestLog, read_log
from kvstore.simulate.run import Simulation
from kvstore.simulate.study import POLICIES, Question, Study, row_values
from tests.support.long import seeds
from tests.support.request_logs import (
    BLOCK,
    GOLDEN,
    GOLDEN_POLICIES,
    GOLDEN_RATES,
    GOLDEN_SEED,
    GOLDEN_SIZES,
    Asked,
    as_lines,
    footprint,
    golden_rates,
    made_requests,
    rate,
    tree_hits,
    ttl_hits,
    window_hits,
)


def log_of(requests: list[Asked]) -> RequestLog:
    return read_log(
        (LogRequest(each.milliseconds / 1000, each.tokens, 0, each.ids) for each in requests), id_tokens=BLOCK
    )


def simulated(log: RequestLog, case: Case) -> Outcome:
    simulation = Simulation(log, case, ranks=POLICIES[case.policy]())
    outcome = simulation.run()
    simulation.check_integrity()
    return outcome


def test_the_golden_log_and_its_rates_are_what_their_seed_and_the_plain_reference_give() -> None:
    requests = made_requests(GOLDEN_SEED, 400)
    assert GOLDEN.read_text() == as_lines(requests)
    assert json.loads(GOLDEN_RATES.read_text()) == golden_rates(requests)


def test_the_golden_log_has_the_golden_rates_in_the_order_asked() -> None:
    study = Study(load_log([GOLDEN]), Question(policies=GOLDEN_POLICIES, sizes=GOLDEN_SIZES))
    rows = list(study.rows())
    assert [(row.case.policy, row.size) for row in rows] == [
        (policy, size) for policy in GOLDEN_POLICIES for size in GOLDEN_SIZES
    ]
    expected = json.loads(GOLDEN_RATES.read_text())
    for row in rows:
        values = row_values(row, study)
        assert values["token_hit_rate"] == pytest.approx(expected[row.case.policy][row.size], abs=1e-6)


@pytest.mark.parametrize("policy", ["lru", "fifo", "belady"])
@pytest.mark.parametrize("seed", seeds(1, of=8))
def test_policies_hit_what_the_plain_reference_hits(policy: str, seed: int) -> None:
    requests = made_requests(seed, 150, sessions=12)
    log = log_of(requests)
    assert log.footprint == footprint(requests)
    for share in (2, 7, 25, 60):
        capacity = max(log.footprint * share // 100, 1)
        outcome = simulated(log, Case(policy=policy, capacity=capacity))
        hits = tree_hits(requests, policy, capacity)
        assert outcome.blocks_hit == sum(hits), f"seed {seed}, {capacity} blocks"
        assert outcome.token_hit_rate == pytest.approx(rate(hits, requests))
        assert outcome.blocks_held_most <= capacity
        assert outcome.blocks_stored - outcome.blocks_evicted == outcome.blocks_held


def test_a_request_longer_than_the_store_keeps_its_beginning() -> None:
    requests = [Asked(1000, 5 * BLOCK, (1, 2, 3, 4, 5)), Asked(2000, 5 * BLOCK, (1, 2, 3, 4, 5))]
    outcome = simulated(log_of(requests), Case(policy="lru", capacity=3))
    assert (outcome.blocks_hit, outcome.blocks_refused, outcome.blocks_evicted) == (3, 4, 0)


def test_a_whole_prompt_that_is_held_is_hit_to_its_last_token_unless_as_served() -> None:
    requests = [Asked(1000, 1000, (1, 2)), Asked(2000, 1000, (1, 2)), Asked(3000, 512, (1,))]
    log = log_of(requests)
    assert simulated(log, Case(policy="infinite")).hit_tokens == 1000 + 512
    # The last block is not whole, and the last token of a prompt is always computed.
    assert simulated(log, Case(policy="infinite", as_served=True)).hit_tokens == 512 + 0


@pytest.mark.parametrize("slides", [True, False])
@pytest.mark.parametrize("seconds", [20, 90, 600])
@pytest.mark.parametrize("seed", seeds(1, of=3))
def test_retention_keeps_what_the_plain_reference_keeps(seed: int, seconds: int, slides: bool) -> None:
    requests = made_requests(seed, 250, sessions=12)
    start = TtlFrom.USE if slides else TtlFrom.INSERTION
    outcome = simulated(log_of(requests), Case(policy="infinite", retention_seconds=seconds, ttl_from=start))
    hits = ttl_hits(requests, seconds, slides=slides)
    assert outcome.token_hit_rate == pytest.approx(rate(hits, requests))
    if slides:
        assert outcome.blocks_stored == outcome.blocks_held + outcome.blocks_expired


def test_what_is_held_is_a_mean_over_the_time_of_the_log() -> None:
    requests = [Asked(0, BLOCK, (1,)), Asked(100_000, 2 * BLOCK, (2, 3)), Asked(200_000, BLOCK, (4,))]
    outcome = simulated(log_of(requests), Case(policy="infinite", retention_seconds=50))
    # One block for half of the first 100 s, two for half of the others.
    assert outcome.held_blocks_mean == pytest.approx((50 + 2 * 50) / 200, abs=0.02)


WINDOWS = [
    ("endpoints-only", True, False, 0),
    ("endpoints", True, True, 0),
    (f"periodic:{4 * BLOCK}", False, False, 4),
    (f"endpoints+periodic:{6 * BLOCK}", True, True, 6),
]


@pytest.mark.parametrize("seed", seeds(1, of=3))
@pytest.mark.parametrize(("windows", "ends", "branches", "every"), WINDOWS)
def test_a_hit_ends_where_a_state_is_kept(
    windows: str, ends: bool, branches: bool, every: int, seed: int
) -> None:
    requests = made_requests(seed, 250, sessions=12)
    outcome = simulated(log_of(requests), Case(policy="infinite", windows=windows))
    hits, states = window_hits(requests, ends=ends, branches=branches, every=every)
    assert outcome.token_hit_rate == pytest.approx(rate(hits, requests))
    assert outcome.states_stored == states


def test_with_rows_for_every_block_a_hit_ends_anywhere() -> None:
    requests = made_requests(5, 150, sessions=12)
    log = log_of(requests)
    everything = simulated(log, Case(policy="infinite", windows="full"))
    assert everything.hit_tokens == simulated(log, Case(policy="infinite")).hit_tokens
    assert everything.states_stored == log.footprint


def flat(accesses: list[int]) -> RequestLog:
    """Each block by itself, in a second of its own."""
    return read_log(
        (LogRequest(float(second), BLOCK, 0, [block]) for second, block in enumerate(accesses)),
        id_tokens=BLOCK,
    )


FLAT = {"lru": "LRU", "fifo": "FIFO", "sieve": "Sieve", "belady": "Belady"}


@pytest.mark.parametrize("policy", FLAT)
def test_without_a_tree_hit_rates_are_those_of_libcachesim(policy: str, require) -> None:
    try:
        import libcachesim
    except ImportError as error:
        require("libcachesim", False, str(error))
    requests = made_requests(11, 200, sessions=20)
    accesses = [block for each in requests for block in each.ids]
    later = {}
    upcoming = [2**62] * len(accesses)
    for at in range(len(accesses) - 1, -1, -1):
        upcoming[at] = later.get(accesses[at], 2**62)
        later[accesses[at]] = at
    for share in (3, 10, 30):
        capacity = len(set(accesses)) * share // 100
        cache = getattr(libcachesim, FLAT[policy])(cache_size=capacity)
        hits = 0
        for at, block in enumerate(accesses):
            asked = libcachesim.Request()
            asked.obj_id, asked.obj_size, asked.next_access_vtime = block, 1, upcoming[at]
            hits += cache.get(asked)
        ranks = BeladyPolicy(refuses=False) if policy == "belady" else POLICIES[policy]()
        outcome = Simulation(flat(accesses), Case(policy=policy, capacity=capacity), ranks=ranks).run()
        ours, theirs = outcome.blocks_hit / len(accesses), hits / len(accesses)
        assert round(ours, 4) == round(theirs, 4), f"{capacity} blocks"


@pytest.mark.parametrize("policy", POLICIES)
def test_more_room_never_hits_less_by_much_and_never_more_than_all(policy: str) -> None:
    log = log_of(made_requests(3, 200, sessions=12))
    most = simulated(log, Case(policy="infinite")).hit_tokens
    hits = [
        simulated(log, Case(policy=policy, capacity=max(log.footprint * share // 100, 1))).hit_tokens
        for share in (5, 20, 60, 100)
    ]
    assert hits[-1] == most
    assert all(before <= after for before, after in pairwise(hits))


def test_every_policy_offers_all_that_have_no_child() -> None:
    for name, make in POLICIES.items():
        policy: EvictionPolicy = make()
        expect = getattr(policy, "expect", None)
        if expect is not None:
            import numpy as np

            expect(np.arange(10, 14))
        for handle, below in ((0, -1), (1, 0), (2, 0), (3, 2)):
            policy.on_insert(handle, below=below)
        policy.check_integrity()
        gone = []
        children = {0: {1, 2}, 2: {3}}
        for handle in policy.victims():
            if not children.get(handle):
                policy.on_remove(handle)
                gone.append(handle)
                for inner in children.values():
                    inner.discard(handle)
        assert sorted(gone) == [0, 1, 2, 3], name
        assert gone[-1] == 0
        assert len(policy) == 0
