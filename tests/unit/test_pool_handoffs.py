from __future__ import annotations

import random
from itertools import count

import pytest

from kvstore.errors import InvalidArgument, LimitExceeded, UnknownTicket
from kvstore.pool import Handoff, HandoffTable, Take
from kvstore.types import Checks, Lineage, NamespaceDigest

ONE, TWO = NamespaceDigest(b"1" * 32), NamespaceDigest(b"2" * 32)


def table_of(budget: int = 100, **more: object) -> HandoffTable:
    numbers = count(1)
    return HandoffTable(
        budget, random_bytes=lambda size: next(numbers).to_bytes(size, "little"), take_seconds=10.0, **more
    )  # type: ignore[arg-type]


def handoff(length: int = 40, note: bytes = b"") -> Handoff:
    return Handoff(bytes(length), 77, Lineage.EXACT, Checks(1), note)


def test_a_handoff_is_taken_and_confirmed_once() -> None:
    table = table_of()
    ticket = table.put(ONE, handoff(note=b"hi"), takes=1, seconds=30, now=0.0)
    assert len(ticket) == 16
    take = table.take(ticket, ONE, "decode", 1.0)
    assert (take.handoff.position, take.handoff.note, len(take.handoff.payload)) == (77, b"hi", 40)
    with pytest.raises(LimitExceeded, match="are out"):
        table.take(ticket, ONE, "other", 1.0)
    assert table.confirm(take.take_id, "decode", 2.0)
    assert table.statistics().bytes == 0
    with pytest.raises(LimitExceeded, match="used up"):
        table.take(ticket, ONE, "other", 3.0)
    assert not table.confirm(take.take_id, "decode", 3.0)
    table.check_integrity()


def test_several_workers_fork_from_one_handoff() -> None:
    table = table_of()
    ticket = table.put(ONE, handoff(), takes=3, seconds=30, now=0.0)
    takes = [table.take(ticket, ONE, f"s{i}", 0.0) for i in range(3)]
    with pytest.raises(LimitExceeded):
        table.take(ticket, ONE, "s3", 0.0)
    assert all(table.confirm(take.take_id, take.session, 1.0) for take in takes)
    assert table.statistics().confirmed == 3


def test_a_handoff_that_is_dropped_is_gone_but_for_takes_that_are_out() -> None:
    table = table_of()
    ticket = table.put(ONE, handoff(), takes=3, seconds=30, now=0.0)
    assert not table.drop(ticket, TWO, 0.0)
    out = table.take(ticket, ONE, "decode", 0.0)
    assert table.drop(ticket, ONE, 1.0)
    with pytest.raises(UnknownTicket):
        table.take(ticket, ONE, "other", 1.0)
    assert table.confirm(out.take_id, "decode", 2.0)
    assert table.statistics().bytes == 0
    assert not table.drop(ticket, ONE, 2.0)
    unused = table.put(ONE, handoff(), takes=2, seconds=30, now=2.0)
    assert table.drop(unused, ONE, 3.0)
    assert (table.statistics().bytes, table.statistics().tickets) == (0, 0)
    with pytest.raises(LimitExceeded, match="used up"):
        table.take(unused, ONE, "decode", 3.0)
    table.check_integrity()


def test_a_take_comes_back_when_its_session_ends() -> None:
    table = table_of()
    ticket = table.put(ONE, handoff(), takes=1, seconds=30, now=0.0)
    lost = table.take(ticket, ONE, "dies", 1.0)
    assert table.end_session("dies", 2.0) == 1
    assert not table.confirm(lost.take_id, "dies", 2.0)
    again = table.take(ticket, ONE, "replaces", 3.0)
    assert table.confirm(again.take_id, "replaces", 3.0)


def test_a_take_comes_back_when_its_own_deadline_passes() -> None:
    table = table_of()
    ticket = table.put(ONE, handoff(), takes=1, seconds=30, now=0.0)
    table.take(ticket, ONE, "slow", 0.0)
    with pytest.raises(LimitExceeded):
        table.take(ticket, ONE, "next", 9.9)
    assert table.take(ticket, ONE, "next", 10.0).session == "next"
    assert table.statistics().returned == 1


def test_only_the_taker_confirms() -> None:
    table = table_of()
    ticket = table.put(ONE, handoff(), takes=1, seconds=30, now=0.0)
    take = table.take(ticket, ONE, "mine", 0.0)
    assert not table.confirm(take.take_id, "other", 0.0)
    assert table.confirm(take.take_id, "mine", 0.0)


def test_unknown_tickets_say_why() -> None:
    table = table_of()
    ticket = table.put(ONE, handoff(), takes=1, seconds=30, now=0.0)
    with pytest.raises(UnknownTicket, match="never given"):
        table.take(b"x" * 16, ONE, "s", 0.0)
    with pytest.raises(UnknownTicket, match="another namespace"):
        table.take(ticket, TWO, "s", 0.0)
    with pytest.raises(UnknownTicket, match="past its deadline"):
        table.take(ticket, ONE, "s", 30.0)
    assert table.expire(30.0) == 1
    for namespace, words in ((ONE, "past its deadline"), (TWO, "another namespace")):
        with pytest.raises(UnknownTicket, match=words):
            table.take(ticket, namespace, "s", 31.0)


def test_a_ticket_that_was_used_too_often_is_told_so_after_its_deadline_too() -> None:
    table = table_of(max_tickets=2)
    tickets = [table.put(ONE, handoff(10), takes=1, seconds=30, now=0.0)]
    for now in (0.0, 29.0):
        take = None if now else table.take(tickets[0], ONE, "s", now)
        assert take is None or table.confirm(take.take_id, "s", now)
        with pytest.raises(LimitExceeded, match="used up"):
            table.take(tickets[0], ONE, "t", now)
    table.expire(30.0)
    with pytest.raises(LimitExceeded, match="used up"):
        table.take(tickets[0], ONE, "t", 31.0)
    for _ in range(2):
        table.put(ONE, handoff(10), takes=1, seconds=1, now=40.0)
    table.expire(50.0)
    with pytest.raises(UnknownTicket, match="forgotten long since"):
        table.take(tickets[0], ONE, "t", 50.0)


def test_a_take_that_comes_back_after_the_deadline_can_be_taken_again_for_as_long_as_it_waited() -> None:
    table = table_of()
    ticket = table.put(ONE, handoff(), takes=1, seconds=5, now=0.0)
    table.take(ticket, ONE, "dies", 4.0)
    assert table.expire(9.0) == 0
    assert table.end_session("dies", 9.0) == 1
    table.check_integrity()
    again = table.take(ticket, ONE, "replaces", 13.9)
    assert table.end_session("replaces", 14.0) == 1
    assert not table.confirm(again.take_id, "replaces", 14.0)
    with pytest.raises(UnknownTicket, match="past its deadline"):
        table.take(ticket, ONE, "late", 19.0)
    assert table.expire(19.0) == 1
    assert table.statistics().bytes == 0


def test_a_take_under_way_outlives_the_ticket() -> None:
    table = table_of()
    ticket = table.put(ONE, handoff(), takes=2, seconds=5, now=0.0)
    take = table.take(ticket, ONE, "s", 4.0)
    assert table.expire(6.0) == 0
    assert table.statistics().bytes == 40
    assert table.confirm(take.take_id, "s", 7.0)
    assert table.statistics().tickets == 0
    table.check_integrity()


def test_the_byte_budget_holds_and_nothing_is_evicted_for_it() -> None:
    table = table_of(100)
    with pytest.raises(LimitExceeded, match="handoff_bytes"):
        table.put(ONE, handoff(101), takes=1, seconds=1, now=0.0)
    first = table.put(ONE, handoff(60), takes=1, seconds=10, now=0.0)
    with pytest.raises(LimitExceeded, match="40 bytes now"):
        table.put(ONE, handoff(41), takes=1, seconds=10, now=0.0)
    assert table.take(first, ONE, "s", 0.0)
    assert table.put(ONE, handoff(100), takes=1, seconds=10, now=20.0), "late takes and handoffs make room"
    table.check_integrity()


def test_the_number_of_tickets_is_limited() -> None:
    table = table_of(max_tickets=2)
    for _ in range(2):
        table.put(ONE, handoff(1), takes=1, seconds=10, now=0.0)
    with pytest.raises(LimitExceeded, match="handoff_tickets"):
        table.put(ONE, handoff(1), takes=1, seconds=10, now=0.0)


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("takes", {"takes": 0}),
        ("takes", {"takes": 1025}),
        ("seconds", {"seconds": 0.0}),
        ("seconds", {"seconds": float("inf")}),
        ("seconds", {"seconds": float("nan")}),
    ],
    ids=str,
)
def test_bad_numbers_are_refused_by_name(field: str, more: dict[str, float]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        table_of().put(ONE, handoff(), **{"takes": 1, "seconds": 1.0, "now": 0.0, **more})  # type: ignore[arg-type]
    assert caught.value.field == field


def test_bad_positions_and_notes_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="position"):
        table_of().put(ONE, Handoff(b"x", 0, Lineage.EXACT, Checks(1)), takes=1, seconds=1, now=0.0)
    with pytest.raises(InvalidArgument, match="note"):
        table_of(1 << 20).put(ONE, handoff(note=bytes(65_537)), takes=1, seconds=1, now=0.0)


def test_clear_drops_one_namespace_with_its_takes() -> None:
    table = table_of()
    mine = table.put(ONE, handoff(10), takes=1, seconds=10, now=0.0)
    other = table.put(TWO, handoff(10), takes=1, seconds=10, now=0.0)
    take = table.take(mine, ONE, "s", 0.0)
    assert table.clear(ONE) == 1
    assert not table.confirm(take.take_id, "s", 0.0)
    assert table.take(other, TWO, "s", 0.0)
    assert table.clear() == 1
    table.check_integrity()
    assert table.statistics().bytes == table.statistics().out == 0


@pytest.mark.parametrize("seed", range(8))
def test_any_sequence_of_events_keeps_the_books(seed: int) -> None:
    rng, refused = random.Random(seed), 0
    table, tickets, takes, now = table_of(300, max_tickets=20), [b"?" * 16], list[Take](), 0.0
    for _ in range(400):
        now += rng.random() * 3
        choice = rng.randrange(6)
        try:
            if choice == 0:
                tickets.append(
                    table.put(
                        rng.choice([ONE, TWO]),
                        handoff(rng.randint(1, 90)),
                        takes=rng.randint(1, 3),
                        seconds=rng.uniform(1, 40),
                        now=now,
                    )
                )
            elif choice <= 2:
                takes.append(table.take(rng.choice(tickets), rng.choice([ONE, TWO]), rng.choice("ab"), now))
            elif choice == 3 and takes:
                take = takes.pop(rng.randrange(len(takes)))
                table.confirm(take.take_id, take.session, now)
            elif choice == 4:
                table.expire(now)
            elif rng.random() < 0.3:
                table.end_session(rng.choice("ab"), now)
        except (UnknownTicket, LimitExceeded):
            refused += 1
        table.check_integrity()
    table.expire(now + 1000)
    assert table.statistics().bytes == 0, f"seed {seed}"
    assert 0 < refused < 400, f"seed {seed}"


def test_a_dropped_handoff_does_not_come_back_with_a_take_that_ends_unconfirmed() -> None:
    for ends in ("session", "deadline", "undelivered"):
        table = table_of()
        ticket = table.put(ONE, handoff(), takes=2, seconds=30, now=0.0)
        out = table.take(ticket, ONE, "decode", 0.0)
        assert table.drop(ticket, ONE, 1.0)
        if ends == "session":
            table.end_session("decode", 2.0)
        elif ends == "deadline":
            table.expire(11.0)
        else:
            table.give_back(out.take_id, 2.0)
        assert (table.statistics().bytes, table.statistics().out) == (0, 0), ends
        with pytest.raises((LimitExceeded, UnknownTicket)):
            table.take(ticket, ONE, "other", 12.0)
        table.check_integrity()
