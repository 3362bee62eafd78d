from __future__ import annotations

import pytest

from kvstore.cli.main import main
from kvstore.cli.simulate_live import values
from kvstore.profile.registry import get_profile
from kvstore.simulate.case import Case, Outcome
from kvstore.simulate.formats import load_log
from kvstore.simulate.live import (
    Figures,
    LiveOutcome,
    Moment,
    Simulated,
    asked_by,
    chain_keys,
    differing,
    hit_tokens,
    payload_of,
)
from kvstore.simulate.log import LogRequest, read_log
from kvstore.simulate.run import Course, Simulation
from kvstore.simulate.study import POLICIES
from tests.support.request_logs import GOLDEN

ROOT = bytes(32)
REFUSED = [
    (
        ("--live", "x", "--policy", "lru"),
        "with --live the service decides, and there is one case; --policy=lru",
    ),
    (("--live", "x", "--admit", "second-sight"), "--admit=second-sight; allowed: none beside --live"),
    (("--live", "x", "--ttl-from", "insertion"), "--ttl-from=insertion"),
    (("--live", "tcp://host:1"), "on the service's own machine only; --live=tcp://host:1"),
    (("--live", "x", "--warp", "0"), "not a speed; --warp=0"),
    (("--live", "x", "--warp", "fast"), "not a speed; --warp=fast"),
    (("--warp", "2"), "time passes in a running service only; --warp=2"),
]


@pytest.mark.parametrize(("arguments", "words"), REFUSED, ids=[" ".join(each[0]) for each in REFUSED])
def test_what_does_not_go_with_a_running_service_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    assert main(["simulate", str(GOLDEN), *arguments]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert words in line


def test_blocks_have_one_key_each_below_their_parents_and_another_in_each_run() -> None:
    log = read_log([LogRequest(0, 12, 0, [1, 2, 3]), LogRequest(1, 12, 0, [1, 2, 4])], id_tokens=4)
    keys = chain_keys(log, ROOT, block_tokens=32, seed=1)
    assert len(set(keys)) == 4
    assert keys == chain_keys(log, ROOT, block_tokens=32, seed=1)
    assert not set(keys) & set(chain_keys(log, ROOT, block_tokens=32, seed=1 << 63))
    assert not set(keys) & set(chain_keys(log, bytes(31) + b"1", block_tokens=32, seed=1))


def test_as_served_whole_blocks_count_and_a_last_one_not_where_nothing_comes_after_it() -> None:
    log = read_log([LogRequest(0, 10, 0, [1, 2, 3]), LogRequest(1, 8, 0, [1, 2])], id_tokens=4)
    assert [asked_by(log, each, as_served=False) for each in (0, 1)] == [([0, 1, 2], False), ([0, 1], False)]
    assert [asked_by(log, each, as_served=True) for each in (0, 1)] == [([0, 1], False), ([0, 1], True)]
    assert [hit_tokens(log, 0, held, as_served=False) for held in range(4)] == [0, 4, 8, 10]
    assert [hit_tokens(log, 0, held, as_served=True) for held in range(3)] == [0, 4, 8]
    assert [hit_tokens(log, 1, held, as_served=True) for held in range(3)] == [0, 4, 4]


def test_every_wrong_missing_and_further_byte_counts() -> None:
    whole = payload_of(b"key", 100)
    assert whole != payload_of(b"other", 100)
    assert differing(whole, whole) == 0
    assert differing(bytes([whole[0] ^ 1]) + whole[1:], whole) == 1
    assert differing(whole[:97], whole) == differing(whole + b"abc", whole) == 3


def told(blocks: int, stored: int) -> Figures:
    return Figures(blocks=blocks, stored=stored, evicted=0, expired=0, damaged=0, cleared=0)


def test_what_leaves_is_taken_to_be_others_blocks_first() -> None:
    live = LiveOutcome(policy="lru", before=told(10, 10), blocks_stored=30, blocks_held=26)
    live.moments = [
        Moment(0, 0, 10, told(20, 20)),
        Moment(0, 0, 20, told(20, 30)),
        Moment(0, 0, 30, told(26, 40)),
    ]
    # 14 left in all and 4 of them here: the first 10 were theirs.
    assert (live.blocks_left, live.others_left, live.others_stored) == (4, 10, 0)
    assert live.held_after() == [10, 20, 26]


def test_a_course_with_the_same_room_all_the_time_is_that_capacity() -> None:
    policy = "sieve"
    log = load_log([GOLDEN]).log
    times = log.seconds.tolist()
    steady = Simulation(log, Case(policy=policy, capacity=200), ranks=POLICIES[policy]()).run()
    course = Course(times, times, [200] * len(log))
    alike = Simulation(log, Case(policy=policy), ranks=POLICIES[policy](), course=course).run()
    assert (alike.hit_tokens, alike.blocks_stored) == (steady.hit_tokens, steady.blocks_stored)


def test_room_that_shrinks_evicts_what_is_held_though_nothing_is_stored() -> None:
    log = read_log([LogRequest(each, 16, 0, [1, 2, 3, 4]) for each in range(3)], id_tokens=4)
    times = [0.0, 1.0, 2.0]
    # What the request in between reads is leased, and stays.
    simulation = Simulation(
        log, Case(policy="lru"), ranks=POLICIES["lru"](), course=Course(times, times, [3, 1, 1])
    )
    outcome = simulation.run()
    simulation.check_integrity()
    assert (outcome.blocks_stored, outcome.hit_tokens) == (3, 24)


@pytest.mark.parametrize(
    ("hits", "wrong", "missing", "failed"),
    [
        (502, 0, 0, []),
        (498, 0, 0, []),
        (503, 0, 0, ["difference"]),
        (497, 0, 0, ["difference"]),
        (500, 1, 0, ["wrong_bytes"]),
        (500, 0, 1, ["missing_blocks"]),
    ],
)
def test_more_than_a_fifth_of_a_point_or_a_wrong_byte_fails(
    hits: int, wrong: int, missing: int, failed: list[str]
) -> None:
    live = LiveOutcome(
        policy="lru",
        before=told(0, 0),
        input_tokens=1000,
        hit_tokens=hits,
        wrong_bytes=wrong,
        missing_blocks=missing,
    )
    # Not the edge itself, on which rounding decides.
    simulated = Outcome(input_tokens=1000, hit_tokens=500 + (hits - 500) / 100)
    assert values(live, Simulated(simulated, simulated), get_profile("tiny"))["failed"] == failed
