"""Which worker gets a request, who waits for one and for how long, and how workers that are away are passed over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.clock import ManualClock
from kvstore.errors import Draining, LimitExceeded, Unavailable
from kvstore_workers.runtime.address import open_channel
from kvstore_workers.runtime.caller import Caller
from kvstore_workers.runtime.dispatch import Errand, Limits, Member, Pool
from kvstore_workers.runtime.peer import Ending, Peer, WorkerAway
from kvstore_workers.runtime.pool import (
    AWAY_SECONDS_FIRST,
    AWAY_SECONDS_MAX,
    EDGE_TOKENS,
    EDGES_MAX,
    Familiar,
    Load,
    Rule,
    away_seconds,
    choose,
    edges,
)
from kvstore_workers.runtime.room import Room
from kvstore_workers.runtime.stop import Stopped

SECONDS = 30.0
FOUR = Rule(per_worker=4)

# ---- the choice ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("in_flight", "turn", "familiar", "slack", "chosen"),
    [
        ([0, 0, 0], 0, None, 0, 0),
        ([0, 0, 0], 2, None, 0, 2),
        ([1, 0, 0], 0, None, 0, 1),
        ([1, 0, 0], 2, None, 0, 2),
        ([2, 1, 3], 0, None, 0, 1),
        ([0, 0, 0], 0, 2, 0, 2),
        ([0, 0, 1], 0, 2, 0, 0),
        ([0, 0, 1], 0, 2, 1, 2),
        ([0, 0, 2], 0, 2, 1, 0),
        ([4, 3, 4], 0, 0, 9, 1),
        ([4, 4, 4], 0, 0, 9, None),
    ],
)
def test_the_familiar_worker_unless_it_is_too_busy_else_the_least_loaded_in_turn(
    in_flight: list[int], turn: int, familiar: int | None, slack: int, chosen: int | None
) -> None:
    rule = Rule(per_worker=4, slack=slack)
    loads = [Load(count) for count in in_flight]
    assert choose(loads, rule, now=1.0, turn=turn, familiar=familiar) == chosen


def test_a_worker_that_is_away_is_passed_over_until_its_time_is_over() -> None:
    loads = [Load(0, away_until=2.0), Load(3)]
    assert choose(loads, FOUR, now=1.9, turn=0, familiar=0) == 1
    assert choose(loads, FOUR, now=2.0, turn=0) == 0
    assert choose([Load(0, away_until=2.0)], FOUR, now=1.0, turn=0) is None


@given(
    loads=st.lists(st.builds(Load, st.integers(0, 5), st.floats(0.0, 3.0)), min_size=1, max_size=6),
    slack=st.integers(0, 3),
    turn=st.integers(0, 5),
    familiar=st.none() | st.integers(0, 5),
)
def test_whoever_is_chosen_is_there_has_room_and_is_least_loaded_or_familiar(
    loads: list[Load], slack: int, turn: int, familiar: int | None
) -> None:
    free = [i for i, load in enumerate(loads) if load.away_until <= 1.0 and load.in_flight < 4]
    chosen = choose(loads, Rule(per_worker=4, slack=slack), now=1.0, turn=turn, familiar=familiar)
    if not free:
        assert chosen is None
        return
    assert chosen in free
    spread = loads[chosen].in_flight - min(loads[i].in_flight for i in free)
    assert spread <= (slack if chosen == familiar else 0)


def test_equal_workers_get_requests_in_turn() -> None:
    turns, turn = [], 0
    for _ in range(6):
        chosen = choose([Load()] * 3, FOUR, now=0.0, turn=turn)
        assert chosen is not None
        turns.append(chosen)
        turn = (chosen + 1) % 3
    assert turns == [0, 1, 2, 0, 1, 2]


def test_a_worker_is_passed_over_longer_each_time_and_never_for_long() -> None:
    times = [away_seconds(failures) for failures in range(1, 2000)]
    assert times[0] == AWAY_SECONDS_FIRST
    assert times[1] == 2 * times[0]
    assert times == sorted(times)
    assert times[-1] == AWAY_SECONDS_MAX


# ---- prefixes -----------------------------------------------------------------------------------------------------


def test_prompts_share_the_edges_of_their_common_prefix_and_no_more() -> None:
    one = edges([1] * 1000)
    other = edges([1] * 500 + [2] * 500)
    assert len(one) == len(other) == 1000 // EDGE_TOKENS
    same = [a == b for a, b in zip(one, other, strict=True)]
    assert same == [(index + 1) * EDGE_TOKENS <= 500 for index in range(len(same))]
    assert edges([1] * (EDGE_TOKENS - 1)) == []
    assert edges([1] * 1000 + [7]) == one


def test_a_very_long_prompt_has_a_bounded_number_of_edges() -> None:
    assert len(edges(range(EDGE_TOKENS * EDGES_MAX + 5 * EDGE_TOKENS))) == EDGES_MAX


def test_the_worker_with_the_longest_common_prefix_is_the_familiar_one() -> None:
    familiar = Familiar()
    short, long = edges([1] * 256), edges([1] * 256 + [2] * 512)
    familiar.note(long, 1)
    familiar.note(short, 0)
    assert familiar.worker(long) == 1
    assert familiar.worker(edges([1] * 256 + [3] * 512)) == 0
    assert familiar.worker(edges([4] * 512)) is None
    assert familiar.worker([]) is None


def test_prefixes_that_nobody_asks_for_are_forgotten_first() -> None:
    familiar = Familiar(limit=4)
    old, kept = edges([1] * 256), edges([2] * 256)
    familiar.note(old, 0)
    familiar.note(kept, 1)
    familiar.note(edges([3] * 256), 2)
    assert len(familiar) == 4
    assert familiar.worker(old) is None
    assert familiar.worker(kept) == 1


# ---- the line -----------------------------------------------------------------------------------------------------


class Context:
    """A call's context, as far as a Caller asks it."""

    def __init__(self) -> None:
        self.told: list[Callable[[], None]] = []

    def time_remaining(self) -> float:
        return SECONDS

    def add_callback(self, callback: Callable[[], None]) -> bool:
        self.told.append(callback)
        return True


class Bench:
    """A pool of decode workers that are never dialled, on a clock that stands."""

    def __init__(
        self, folder: Path, stack: ExitStack, workers: int, *, per_worker: int = 1, **limits: float
    ) -> None:
        self.clock = ManualClock()
        peers = [
            Peer("decode", f"unix:{name}", stack.enter_context(open_channel(folder / name)))
            for name in [f"d{place}" for place in range(workers)]
        ]
        self.pool = Pool(
            "decode",
            peers,
            rule=Rule(per_worker=per_worker),
            limits=Limits(**limits),  # type: ignore[arg-type]
            clock=self.clock,
        )
        self._threads = stack.enter_context(ThreadPoolExecutor(16))

    def caller(self) -> Caller:
        return Caller(Context(), self.clock)  # type: ignore[arg-type]

    def errand(self, *, is_new: bool = True, patience: float = 5.0, tokens: int = 0) -> Errand:
        return self.pool.errand(is_new=is_new, patience=patience, prefixes=edges([tokens] * 256))

    @contextmanager
    def worker(self, errand: Errand | None = None) -> Iterator[Member]:
        with self.pool.worker(errand or self.errand(), self.caller()) as member:
            yield member

    def away(self, member: Member, ending: Ending, errand: Errand | None = None) -> None:
        self.pool.away(errand or self.errand(), member, WorkerAway(ending, "as the test says"))

    def waits(self, errand: Errand, caller: Caller, then: Callable[[Member], object]) -> Future[None]:
        """In a thread of its own, `then` with the worker that the errand gets; returns once it stands in the line."""

        def wait() -> None:
            with self.pool.worker(errand, caller) as member:
                then(member)

        before = self.pool.waiting()
        future = self._threads.submit(wait)
        with self.pool._changed:
            assert self.pool._changed.wait_for(lambda: len(self.pool._line) > before, SECONDS)
        return future

    def look(self) -> None:
        """Let those who wait look at the clock."""
        with self.pool._changed:
            self.pool._changed.notify_all()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    with ExitStack() as stack:
        yield lambda workers, **options: Bench(tmp_path, stack, workers, **options)


def test_requests_spread_over_the_workers_and_leave_no_count_behind(make: Callable[..., Bench]) -> None:
    bench = make(3, per_worker=2)
    with ExitStack() as running:
        for _ in range(6):
            running.enter_context(bench.worker())
        assert bench.pool.in_flight() == [2, 2, 2]
    assert bench.pool.in_flight() == [0, 0, 0]


def test_a_prefix_goes_to_the_worker_that_had_it_while_no_other_is_less_loaded(
    make: Callable[..., Bench],
) -> None:
    bench = make(3, per_worker=4)
    with bench.worker(bench.errand(tokens=1)) as first:
        pass
    for _ in range(3):
        with bench.worker(bench.errand(tokens=1)) as again:
            assert again is first
    with bench.worker(bench.errand(tokens=1)), bench.worker(bench.errand(tokens=1)) as second:
        assert second is not first


def test_requests_that_wait_are_served_in_order_of_arrival(make: Callable[..., Bench]) -> None:
    bench = make(1)
    order: list[int] = []
    with bench.worker():
        futures = [
            bench.waits(bench.errand(), bench.caller(), lambda _, number=number: order.append(number))
            for number in range(5)
        ]
    for future in futures:
        future.result(SECONDS)
    assert order == [0, 1, 2, 3, 4]
    assert (bench.pool.waiting(), bench.pool.in_flight()) == (0, [0])


def test_a_request_past_the_queue_is_refused_by_its_limit_and_one_that_was_let_in_is_not(
    make: Callable[..., Bench],
) -> None:
    bench = make(1, queue=1)
    with bench.worker():
        waiting = bench.waits(bench.errand(), bench.caller(), lambda _: None)
        with pytest.raises(
            LimitExceeded, match=r"queue=1; allowed: at most 1 waiting, with 1 on each worker"
        ):
            bench.worker().__enter__()
        carried = bench.waits(bench.errand(is_new=False), bench.caller(), lambda _: None)
    waiting.result(SECONDS)
    carried.result(SECONDS)


def test_without_a_queue_a_request_runs_at_once_or_is_refused(make: Callable[..., Bench]) -> None:
    bench = make(2, queue=0)
    with bench.worker(), bench.worker(), pytest.raises(LimitExceeded, match="queue=0"):
        bench.worker().__enter__()
    with bench.worker():
        pass


def test_a_new_request_that_waited_too_long_is_refused_by_its_limit(make: Callable[..., Bench]) -> None:
    bench = make(1, queue_seconds=3.0)
    with bench.worker():
        waiting = bench.waits(bench.errand(), bench.caller(), lambda _: None)
        carried = bench.waits(bench.errand(is_new=False), bench.caller(), lambda _: None)
        bench.clock.advance(3.5)
        bench.look()
        with pytest.raises(LimitExceeded, match=r"queue_seconds=3\.5; allowed: 3, with 1 requests on each"):
            waiting.result(SECONDS)
        assert bench.pool.waiting() == 1
    carried.result(SECONDS)


def test_a_caller_that_goes_leaves_the_line_at_once_and_the_next_one_moves_up(
    make: Callable[..., Bench],
) -> None:
    bench = make(1)
    gone = bench.caller()
    served = threading.Event()
    with bench.worker():
        first = bench.waits(bench.errand(), gone, lambda _: None)
        second = bench.waits(bench.errand(), bench.caller(), lambda _: served.set())
        gone.leave()
        with pytest.raises(Stopped):
            first.result(SECONDS)
        assert bench.pool.waiting() == 1
        assert not served.is_set()
    second.result(SECONDS)
    with pytest.raises(Stopped), bench.pool.worker(bench.errand(), gone):
        pass


# ---- workers that are away ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", list(Ending))
def test_a_worker_that_did_not_do_it_is_passed_over_for_a_while(
    make: Callable[..., Bench], ending: Ending
) -> None:
    bench = make(2, per_worker=4)
    with bench.worker() as first:
        bench.away(first, ending)
    for _ in range(3):
        with bench.worker() as other:
            assert other is not first
    bench.clock.advance(AWAY_SECONDS_FIRST)
    with bench.worker(), bench.worker():
        assert bench.pool.in_flight() == [1, 1]


def test_failures_at_one_time_are_one_failure_and_a_worker_that_is_well_starts_anew(
    make: Callable[..., Bench],
) -> None:
    bench = make(1)
    with bench.worker() as member:
        for _ in range(5):
            bench.away(member, Ending.ABSENT)
    assert member.failures == 1
    bench.clock.advance(AWAY_SECONDS_FIRST)
    bench.away(member, Ending.ABSENT)
    assert member.failures == 2
    bench.pool.well(member)
    assert (member.failures, member.away_until) == (0, 0.0)


@pytest.mark.parametrize("ending", [Ending.ABSENT, Ending.DRAINING, Ending.LOST])
def test_an_errand_tries_each_worker_that_is_away_once_and_then_names_them_all(
    make: Callable[..., Bench], ending: Ending
) -> None:
    bench = make(2)
    for _ in range(2):
        # The second errand finds both away, and yet they may be back.
        errand = bench.errand(patience=0.0)
        tried = []
        for _ in range(2):
            with bench.worker(errand) as member:
                tried.append(member.place)
                bench.away(member, ending, errand)
        assert sorted(tried) == [0, 1]
        with pytest.raises(Unavailable, match=rf"d0 {ending.value}: as the test says; unix:d1") as refused:
            bench.worker(errand).__enter__()
        assert "no decode worker could do it" in str(refused.value)


def test_an_errand_waits_for_one_to_come_back_for_as_long_as_its_patience(make: Callable[..., Bench]) -> None:
    bench = make(1)
    errand = bench.errand(is_new=False, patience=5.0)
    with bench.worker(errand) as member:
        bench.away(member, Ending.ABSENT, errand)
    back = bench.waits(errand, bench.caller(), lambda _: None)
    bench.pool.well(member)
    back.result(SECONDS)
    for _ in range(8):
        bench.away(member, Ending.ABSENT, errand)
        bench.clock.advance(AWAY_SECONDS_MAX)
    bench.away(member, Ending.ABSENT, errand)
    with pytest.raises(Unavailable):
        bench.worker(errand).__enter__()


def test_workers_that_are_still_starting_are_waited_for_and_not_once_one_has_been_there(
    make: Callable[..., Bench],
) -> None:
    bench = make(2, start_seconds=20.0)

    def all_away(errand: Errand) -> list[Member]:
        members = []
        for _ in range(2):
            with bench.worker(errand) as member:
                bench.away(member, Ending.ABSENT, errand)
                members.append(member)
        return members

    errand = bench.errand(patience=0.0)
    _, second = all_away(errand)
    waiting = bench.waits(errand, bench.caller(), lambda member: None)
    bench.clock.advance(1.0)
    second.away_until = 0.0
    bench.look()
    waiting.result(SECONDS)
    bench.pool.well(second)
    errand = bench.errand(patience=0.0)
    all_away(errand)
    with pytest.raises(Unavailable, match="no decode worker could do it"):
        bench.worker(errand).__enter__()


def test_workers_that_never_come_are_a_refusal_once_they_should_have_started(
    make: Callable[..., Bench],
) -> None:
    bench = make(1, start_seconds=20.0)
    errand = bench.errand(patience=0.0)
    for _ in range(10):
        with bench.worker(errand) as member:
            bench.away(member, Ending.ABSENT, errand)
        bench.clock.advance(AWAY_SECONDS_MAX)
    with bench.worker(errand) as member:
        bench.away(member, Ending.ABSENT, errand)
    with pytest.raises(Unavailable, match="no decode worker could do it"):
        bench.worker(errand).__enter__()


def test_a_worker_that_is_only_busy_is_waited_for_and_not_given_up(make: Callable[..., Bench]) -> None:
    bench = make(2)
    errand = bench.errand(patience=0.0)
    for ending in (Ending.BUSY, Ending.ABSENT):
        with bench.worker(errand) as member:
            bench.away(member, ending, errand)
    waiting = bench.waits(errand, bench.caller(), lambda _: None)
    bench.clock.advance(AWAY_SECONDS_MAX)
    bench.look()
    waiting.result(SECONDS)


# ---- the room -----------------------------------------------------------------------------------------------------


def test_a_room_that_drains_lets_nobody_in_and_tells_when_it_is_empty() -> None:
    room = Room(2, what="worker")
    with room:
        room.drain()
        assert room.draining
        with pytest.raises(Draining, match="this worker is shutting down"), room:
            pass
        assert not room.wait_until_empty(seconds=0.0)
    assert room.wait_until_empty(seconds=0.0)
