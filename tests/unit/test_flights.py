"""Flights: who computes what, when it is worth waiting for, and who wakes when."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.core import LookupResult
from kvstore.core.flights import (
    KEYS_AT_ONCE,
    LEAST_PATIENCE_SECONDS,
    SLACK,
    STATES_SECONDS,
    Flight,
    FlightTable,
    patience,
)
from kvstore.core.steps import collected, whole
from kvstore.errors import UnknownSession
from kvstore.plan.base import Alternative, Costs, Coverage, RestorePlan, SaveStates
from kvstore.service.flights import WAITING_KEYS_MAX, Flights, Prompt, Waited, own_seconds
from kvstore.service.session import Session
from kvstore.types import BlockKey, Exactness, ItemId, ItemKind, NamespaceDigest, StateSource

SPACE = NamespaceDigest(b"n" * 32)
OTHER = NamespaceDigest(b"o" * 32)


def keys_of(name: str, count: int) -> list[BlockKey]:
    return [BlockKey(hashlib.sha256(f"{name}{i}".encode()).digest()) for i in range(count)]


def ended(table: FlightTable, numbers: Iterable[int]) -> list[Flight]:
    return collected(table.ending(numbers))[0]


A, B = keys_of("a", 10), keys_of("b", 10)


# ---- when to wait -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "flight", "wanted"),
    [
        # blocks, done, expected, progress_age, age, shared, saving
        ("equal prompts, just announced", (32, 0, 1.0, 0.0, 0.0, 32, 1.0), 2.0),
        ("rates that differ by noise", (32, 0, SLACK, 0.0, 0.0, 32, 1.0), 2 * SLACK),
        ("a dearer owner", (32, 0, SLACK + 0.01, 0.0, 0.0, 32, 1.0), 0.0),
        ("a dearer owner that is nearly through", (32, 0, 4.0, 0.0, 3.0, 32, 1.0), 5.0),
        ("only a part is shared, and costs its part", (32, 0, 4.0, 0.0, 0.0, 8, 1.0), 2.0),
        ("nothing visible, twice the time over", (32, 0, 1.0, 0.0, 2.0, 32, 1.0), 0.0),
        ("nothing visible, a little before that", (32, 0, 1.0, 0.0, 1.9, 32, 1.0), 0.1),
        ("on time, half done", (32, 16, 1.0, 0.5, 0.5, 16, 0.5), 1.0),
        ("the first block seen late, since others are under way", (32, 1, 1.0, 0.2, 0.2, 31, 1.0), 31 * 2.4 / 33),
        ("eight times slower than announced", (32, 16, 1.0, 4.0, 4.0, 16, 0.5), 0.0),
        ("half done, then quiet for too long", (32, 16, 1.0, 0.5, 1.5, 16, 0.5), 0.0),
        ("small work: storing takes its time too", (1, 0, 0.001, 0.0, 0.0, 1, 0.001), LEAST_PATIENCE_SECONDS),
        ("computing costs nothing", (32, 0, 1.0, 0.0, 0.0, 32, 0.0), 0.0),
    ],
)  # fmt: skip
def test_waiting_lasts_while_it_is_expected_to_be_sooner_than_computing(
    what: str, flight: tuple[int, int, float, float, float, int, float], wanted: float
) -> None:
    names = ("blocks", "done", "expected_seconds", "progress_age", "age", "shared", "saving_seconds")
    assert patience(**dict(zip(names, flight, strict=True))) == pytest.approx(wanted), what  # type: ignore[arg-type]


@given(
    blocks=st.integers(1, 100),
    done=st.integers(0, 99),
    expected=st.floats(0, 1e4),
    progress=st.floats(0, 1e4),
    quiet=st.floats(0, 1e4),
    shared=st.integers(1, 100),
    saving=st.floats(0, 1e4),
)
def test_patience_runs_out_and_is_never_more_than_twice_what_the_blocks_take(
    *, blocks: int, done: int, expected: float, progress: float, quiet: float, shared: int, saving: float
) -> None:
    done, shared = min(done, blocks), min(shared, blocks)

    def left(more: float) -> float:
        return patience(
            blocks=blocks,
            done=done,
            expected_seconds=expected,
            progress_age=progress,
            age=progress + quiet + more,
            shared=shared,
            saving_seconds=saving,
        )

    seconds = left(0.0)
    assert (
        0.0 <= seconds <= 2 * (expected + progress) * shared / (blocks + done) + LEAST_PATIENCE_SECONDS + 1e-6
    )
    # Whoever has waited so long without news finds nothing more to wait for.
    assert left(seconds) <= 1e-6 * max(seconds, 1.0) + 1e-9 * (progress + quiet)


# ---- the table ----------------------------------------------------------------------------------------------


def table(**limits: int) -> FlightTable:
    return FlightTable(seconds=60.0, **limits)


def test_two_sessions_never_own_one_key() -> None:
    flights = table()
    first = flights.announce("s1", SPACE, A[2:8], expected_seconds=6.0, now=1.0)
    assert first is not None
    assert (first.keys, first.done, first.deadline) == (A[2:8], 0, 61.0)
    # The first key is another's: none. Further on: up to there, at its part of the price.
    assert flights.announce("s2", SPACE, A[2:], expected_seconds=8.0, now=2.0) is None
    second = flights.announce("s2", SPACE, A[:6], expected_seconds=6.0, now=2.0)
    assert second is not None
    assert (second.keys, second.expected_seconds) == (A[:2], 2.0)
    # Its own session's are passed over.
    third = flights.announce("s1", SPACE, A[4:], expected_seconds=6.0, now=3.0)
    assert third is not None
    assert third.keys == A[8:]
    assert flights.announce("s3", OTHER, A, expected_seconds=1.0, now=3.0) is not None
    flights.check_integrity()


def test_what_is_ahead_ends_at_a_gap_at_the_own_session_and_at_what_is_visible() -> None:
    flights = table()
    one = flights.announce("s1", SPACE, A[:4], expected_seconds=1.0, now=0.0)
    flights.announce("s2", SPACE, A[4:7], expected_seconds=1.0, now=0.0)
    flights.announce("s3", SPACE, A[8:], expected_seconds=1.0, now=0.0)
    assert one is not None
    assert flights.ahead("s9", SPACE, A) == (7, one, 4)
    assert flights.ahead("s2", SPACE, A) == (4, one, 4)
    assert flights.ahead("s1", SPACE, A) == (0, None, 0)
    assert flights.ahead("s9", OTHER, A) == (0, None, 0)
    assert flights.ahead("s9", SPACE, B) == (0, None, 0)
    assert flights.visible(SPACE, [*A[:2], *B], 5.0) == [one]
    assert (one.done, one.progressed, one.deadline) == (2, 5.0, 65.0)
    assert flights.ahead("s9", SPACE, A[2:]) == (5, one, 2)
    assert flights.ahead("s9", SPACE, A) == (0, None, 0)
    assert flights.follows("s9", SPACE, A[1]) is one
    assert flights.follows("s1", SPACE, A[1]) is None
    assert flights.follows("s9", SPACE, A[2]) is None
    flights.check_integrity()


def test_a_flight_ends_by_its_owner_its_session_or_its_deadline_and_once() -> None:
    flights = table()
    made = [
        flights.announce(f"s{i}", SPACE, A[i : i + 1], expected_seconds=1.0, now=float(i)) for i in range(5)
    ]
    numbers = [each.flight_id for each in made if each is not None]
    assert len(set(numbers)) == 5
    assert flights.end(numbers[0], "s1") is None, "another session's"
    assert flights.end(numbers[0], "s0") is made[0]
    assert flights.end(numbers[0], "s0") is None
    assert ended(flights, flights.of_session("s1")) == [made[1]]
    assert ended(flights, flights.of_session("s1")) == []
    flights.visible(SPACE, [A[3]], 3.0)
    assert ended(flights, flights.due(61.9)) == [made[3]], "all visible: its states have a little longer"
    assert made[3] is not None
    assert made[3].deadline == 3.0 + STATES_SECONDS
    assert ended(flights, flights.due(62.0)) == [made[2]]
    assert (len(flights), flights.keys) == (1, 1)
    flights.check_integrity()


def test_many_flights_end_in_steps_between_which_all_is_in_order() -> None:
    flights = table()
    numbers = []
    for number in range(20):
        keys = keys_of(f"long{number}", KEYS_AT_ONCE // 4)
        made = flights.announce("s", SPACE, keys, expected_seconds=1.0, now=0.0)
        assert made is not None
        numbers.append(made.flight_id)
    steps = flights.ending(flights.of_session("s"))
    assert [each.flight_id for each in next(steps)] == numbers[:4]
    flights.check_integrity()
    # What ends meanwhile in another way is not ended twice.
    assert flights.end(numbers[4], "s") is not None
    assert [each.flight_id for step in steps for each in step] == numbers[5:]
    assert (len(flights), flights.keys) == (0, 0)


def test_past_a_limit_there_is_no_flight_and_that_is_counted() -> None:
    for limits, sessions in (
        ({"most": 2}, ["a", "b", "c"]),
        ({"most_per_session": 2}, ["a", "a", "a"]),
        ({"most_keys": 5}, ["a", "b", "c"]),
    ):
        flights = table(**limits)
        made = [
            flights.announce(name, SPACE, A[2 * i : 2 * i + 2], expected_seconds=1.0, now=0.0)
            for i, name in enumerate(sessions)
        ]
        assert [each is not None for each in made] == [True, True, False], limits
        assert (flights.announced_total, flights.unannounced_total) == (2, 1)
        flights.check_integrity()


@given(
    st.lists(
        st.tuples(st.sampled_from("aeesvd"), st.integers(0, 2), st.integers(0, 9), st.integers(1, 10)),
        max_size=40,
    )
)
def test_any_order_of_events_keeps_the_laws(events: list[tuple[str, int, int, int]]) -> None:
    flights, now, numbers = table(most=6, most_keys=14), 0.0, [0]
    for event, who, first, count in events:
        now += count
        session, keys = f"s{who}", A[first : first + count]
        if event == "a" and keys:
            made = flights.announce(session, SPACE, keys, expected_seconds=1.0, now=now)
            numbers += [] if made is None else [made.flight_id]
        elif event == "e":
            flights.end(numbers[first % len(numbers)], session)
        elif event == "s":
            ended(flights, flights.of_session(session))
        elif event == "v":
            flights.visible(SPACE, keys, now)
        else:
            ended(flights, flights.due(now))
        count_ahead, flight, shared = flights.ahead("nobody", SPACE, keys)
        assert 0 <= shared <= count_ahead <= len(keys)
        assert (flight is None) == (shared == 0) == (count_ahead == 0)
        flights.check_integrity()
    for who in range(3):
        ended(flights, flights.of_session(f"s{who}"))
    assert (len(flights), flights.keys) == (0, 0)
    flights.check_integrity()


# ---- waiting ------------------------------------------------------------------------------------------------

SIZE = 4


@dataclass
class Rig:
    """A service's flights with a prompt of ten blocks and one token, of which `held` are visible."""

    flights: Flights
    held: int = 0
    restored: int | None = None
    looks: int = 0
    block_seconds: float = 100.0
    sessions: dict[str, Session] = field(default_factory=dict)

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def session(self, name: str) -> Session:
        if name not in self.sessions:
            ended = asyncio.get_running_loop().create_future()
            self.sessions[name] = Session(name, 1, ended, lambda: None, lambda line, descriptor: False)
        return self.sessions[name]

    def prompt(self, name: str) -> Prompt:
        return Prompt(name, SPACE, A, 10 * SIZE + 1, SIZE)

    def look(self) -> LookupResult:
        self.looks += 1
        start = SIZE * (self.held if self.restored is None else self.restored)
        rest = 10 * SIZE + 1 - start
        seconds = rest / SIZE * self.block_seconds
        way = Alternative(
            compute_from=start,
            state_source=StateSource.POOL if start else StateSource.NONE,
            state_at=start,
            replay_from=start,
            replay_layer_tokens=0,
            bytes_ssd=0,
            bytes_memory=0,
            seconds=seconds,
            compute_seconds=seconds,
        )
        plan = RestorePlan(
            prompt_tokens=10 * SIZE + 1,
            chosen=way,
            runner_up=None,
            exactness=Exactness.EXACT,
            save_states=SaveStates(),
            blocks_missing=10 - self.held,
        )
        return LookupResult(plan, None, Coverage(self.held), Costs())

    def announce(self, name: str) -> int:
        flight = self.flights.announce(self.prompt(name), self.look(), inherits=False)
        return 0 if flight is None else flight.flight_id

    def show(self, keys: Sequence[BlockKey], kind: ItemKind = ItemKind.BLOCK) -> None:
        if kind is ItemKind.BLOCK:
            self.held += len(keys)
        self.flights.published(SPACE, [ItemId(key, kind) for key in keys])

    def wait(self, name: str, *, seconds: float = 60.0) -> asyncio.Task[Waited]:
        return asyncio.create_task(
            self.flights.wait(self.prompt(name), self.session(name), seconds=seconds, look=self.look)
        )


def rig(**options: float) -> Rig:
    now: Callable[[], float] = asyncio.get_running_loop().time
    return Rig(Flights(FlightTable(seconds=60.0), now), **options)  # type: ignore[arg-type]


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_waiter_wakes_when_all_that_it_shares_is_visible_and_not_before() -> None:
    made = rig()
    made.announce("owner")
    waiter = made.wait("other")
    await turns()
    assert made.flights.waiting == 1
    made.show(A[:9])
    await turns()
    assert not waiter.done()
    made.show(A[9:])
    waited = await asyncio.wait_for(waiter, 5)
    assert (waited.inherits, made.flights.waiting, made.flights.waited_total) == (False, 0, 1)
    assert made.looks == 3, "the owner's, one before and one after the wait"


async def test_the_first_that_wakes_inherits_and_the_others_wait_for_it() -> None:
    made = rig()
    number = made.announce("owner")
    order: list[str] = []

    async def ask(name: str) -> int:
        waited = await made.flights.wait(made.prompt(name), made.session(name), seconds=60.0, look=made.look)
        flight = made.flights.announce(made.prompt(name), made.look(), inherits=waited.inherits)
        order.append(name)
        return 0 if flight is None else flight.flight_id

    asked = [asyncio.create_task(ask(f"w{i}")) for i in range(8)]
    await turns()
    assert made.flights.waiting == 8
    made.show(A[:5])
    assert made.flights.end(number, "owner")
    await turns(20)
    assert (order, made.flights.waiting) == (["w0"], 7)
    assert made.flights.ahead(made.prompt("w3"), made.look())[0] == 5
    made.show(A[5:])
    assert made.flights.end(asked[0].result(), "w0")
    assert [bool(await asyncio.wait_for(each, 5)) for each in asked] == [True] + 7 * [False]
    assert (made.flights.inherited_total, len(made.flights.table)) == (1, 0)


async def test_what_ends_an_owner_wakes_its_waiters() -> None:
    for end in ("session", "deadline", "close"):
        made = rig()
        made.announce("owner")
        waiter = made.wait("other")
        await turns()
        if end == "session":
            whole(made.flights.ending_session("owner"))
        elif end == "deadline":
            _, flight, _ = made.flights.table.ahead("", SPACE, A)
            assert flight is not None
            made.flights._ended(ended(made.flights.table, made.flights.table.due(flight.deadline)))
        else:
            made.flights.close()
        waited = await asyncio.wait_for(waiter, 5)
        assert waited.inherits == (end != "close"), end


async def test_nobody_waits_for_its_own_session_without_others_or_for_what_is_not_worth_it() -> None:
    made = rig()
    assert await made.wait("alone") == Waited()
    assert made.looks == 0, "no look is needed where nobody flies"
    made.announce("owner")
    assert await made.wait("owner") == Waited()
    made.block_seconds = 1e-9
    assert await made.wait("cheap") == Waited()
    assert (made.flights.waited_total, made.flights.waiting) == (0, 0)


async def test_a_waiter_leaves_when_its_time_is_over_or_the_owner_is_late() -> None:
    made = rig()
    made.announce("owner")
    waited = await asyncio.wait_for(made.wait("hurried", seconds=0.03), 5)
    assert 0.02 < waited.seconds < 3
    late = rig(block_seconds=0.005)
    late.announce("owner")
    waited = await asyncio.wait_for(late.wait("other"), 5)
    assert 0.05 < waited.seconds < 3, "10 blocks of 5 ms, twice"
    assert late.flights.waiting == 0


async def test_a_waiter_that_is_cancelled_or_whose_session_ends_frees_its_place() -> None:
    made = rig()
    made.announce("owner")
    cancelled, ended = made.wait("one"), made.wait("two")
    await turns()
    assert made.flights.waiting == 2
    cancelled.cancel()
    made.session("two").ended.set_result(None)
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    with pytest.raises(UnknownSession):
        await ended
    assert made.flights.waiting == 0
    assert made.flights._waiters == {}


async def test_the_states_that_follow_the_last_block_are_waited_for_once() -> None:
    made = rig(block_seconds=0.4)
    made.announce("owner")
    waiter = made.wait("other")
    await turns()
    # All blocks are visible, and a resume can use none of them: the state comes a moment later.
    made.restored = 0
    made.show(A)
    await turns()
    assert not waiter.done()
    made.restored = None
    made.show(A[9:], ItemKind.STATE)
    waited = await asyncio.wait_for(waiter, 5)
    assert waited.seconds < 0.4
    # Where it never comes, the wait is no longer than computing all.
    without = rig(block_seconds=0.02)
    without.announce("owner")
    waiter = without.wait("other")
    await turns()
    without.restored = 0
    without.show(A)
    waited = await asyncio.wait_for(waiter, 5)
    assert 0.2 <= waited.seconds < 2
    assert without.looks == 4
    # An owner that goes on computing owes nobody a state here: a block's time, twice at most.
    longer = rig(block_seconds=0.001)
    longer.flights.table.announce("owner", SPACE, [*A, *B], expected_seconds=0.02, now=longer.now())
    longer.held, longer.restored = 10, 0
    longer.flights.published(SPACE, [ItemId(key, ItemKind.BLOCK) for key in A])
    waited = await asyncio.wait_for(longer.wait("other"), 5)
    assert 0.04 < waited.seconds < 2
    assert longer.flights.table.has_others(SPACE, "other")


def test_the_price_of_a_part_is_its_part_of_the_computing_and_all_of_the_restoring() -> None:
    way = Alternative(
        compute_from=40,
        state_source=StateSource.POOL,
        state_at=40,
        replay_from=40,
        replay_layer_tokens=0,
        bytes_ssd=0,
        bytes_memory=0,
        seconds=8.0,
        read_seconds=1.0,
        replay_seconds=2.0,
        compute_seconds=5.0,
    )
    plan = RestorePlan(
        prompt_tokens=90,
        chosen=way,
        runner_up=None,
        exactness=Exactness.EXACT,
        save_states=SaveStates(),
        blocks_missing=5,
    )
    assert own_seconds(plan, 60) == 3.0 + 5.0 * 20 / 50
    assert own_seconds(plan, 90) == 8.0


def test_a_key_that_comes_twice_counts_once_and_leaves_no_trace() -> None:
    table = FlightTable(seconds=60.0)
    key = BlockKey(b"k" * 32)
    flight = table.announce("one", SPACE, [key, key, key], expected_seconds=1.0, now=0.0)
    assert flight is not None
    assert table.keys == 1
    table.check_integrity()
    assert table.end(flight.flight_id, "one") is flight
    assert (len(table), table.keys) == (0, 0)
    table.check_integrity()


def test_the_flights_of_a_namespace_end_together() -> None:
    table = FlightTable(seconds=60.0)
    mine = table.announce("one", SPACE, [BlockKey(b"a" * 32)], expected_seconds=1.0, now=0.0)
    theirs = table.announce("one", OTHER, [BlockKey(b"a" * 32)], expected_seconds=1.0, now=0.0)
    assert ended(table, table.of_namespace(SPACE)) == [mine]
    table.check_integrity()
    assert ended(table, table.of_namespace(None)) == [theirs]
    assert len(table) == 0


async def test_who_needs_exact_blocks_does_not_wait_for_approximate_ones() -> None:
    made = rig()
    found = made.look()
    found = found._replace(plan=found.plan._replace(exactness=Exactness.BOUNDED))
    flight = made.flights.announce(made.prompt("owner"), found, inherits=False)
    assert flight is not None
    assert not flight.exact
    waited = await asyncio.wait_for(made.wait("exact"), 5)
    assert waited == Waited()
    loose = asyncio.create_task(
        made.flights.wait(
            made.prompt("loose")._replace(exact_only=False),
            made.session("loose"),
            seconds=60.0,
            look=made.look,
        )
    )
    await turns()
    assert made.flights.waiting == 1
    whole(made.flights.clearing(SPACE))
    assert (await asyncio.wait_for(loose, 5)).inherits
    assert len(made.flights.table) == 0


async def test_prompts_that_wait_hold_a_bounded_number_of_keys() -> None:
    made = rig()
    made.announce("owner")
    fitting = WAITING_KEYS_MAX // len(A)
    made.flights._waiting_keys = (fitting - 1) * len(A)
    first = made.wait("first")
    await turns()
    assert made.flights.waiting == 1
    assert await asyncio.wait_for(made.wait("second"), 5) == Waited()
    made.show(A)
    await asyncio.wait_for(first, 5)
    assert made.flights._waiting_keys == (fitting - 1) * len(A)
