"""What a sender keeps for readers that ask again: numbers, the last snapshot, and a bounded rest."""

from __future__ import annotations

import pytest

from kvstore.events.stream import Kept

FIRST = 1_000


def kept(limit: int = 100) -> Kept:
    """With a snapshot of three batches."""
    made = Kept(first=FIRST, limit_bytes=limit)
    made.begin_snapshot()
    for payload in (b"clear", b"one", b"two"):
        made.add(payload)
    made.end_snapshot()
    return made


def answer(stream: Kept, asked: int) -> list[bytes] | None:
    begin = stream.begin_of_answer(asked)
    return None if begin is None else [stream.get(n) or b"?" for n in range(begin, stream.next)]


def test_batches_are_numbered_one_after_the_other() -> None:
    made = Kept(first=FIRST, limit_bytes=100)
    made.begin_snapshot()
    assert [made.add(b"x") for _ in range(3)] == [FIRST, FIRST + 1, FIRST + 2]
    assert made.next == FIRST + 3


def test_who_missed_the_last_ones_is_given_them() -> None:
    stream = kept()
    stream.add(b"later")
    assert answer(stream, FIRST + 2) == [b"two", b"later"]
    assert answer(stream, FIRST + 4) == []


@pytest.mark.parametrize("asked", [0, FIRST - 1, FIRST + 50])
def test_who_knows_nothing_or_another_life_is_given_the_snapshot_and_what_came_after(asked: int) -> None:
    stream = kept()
    stream.add(b"later")
    assert answer(stream, asked) == [b"clear", b"one", b"two", b"later"]


def test_past_the_limit_the_snapshot_goes_first_and_then_the_oldest() -> None:
    stream = kept(limit=25)
    for number in range(6):
        stream.add(b"%010d" % number)
    assert answer(stream, 0) is None, "there has to be another snapshot"
    assert answer(stream, FIRST + 6) is None
    assert answer(stream, FIRST + 7) == [b"%010d" % 4, b"%010d" % 5]
    assert stream.kept_bytes == 20


def test_a_snapshot_is_kept_whole_whatever_its_size() -> None:
    stream = Kept(first=FIRST, limit_bytes=10)
    stream.begin_snapshot()
    for _ in range(5):
        stream.add(b"x" * 100)
    stream.end_snapshot()
    assert answer(stream, 0) == [b"x" * 100] * 5


def test_a_new_snapshot_takes_the_place_of_all_before_it() -> None:
    stream = kept()
    stream.begin_snapshot()
    assert stream.is_open
    stream.add(b"again")
    stream.end_snapshot()
    assert not stream.is_open
    assert answer(stream, FIRST) == [b"again"]
    assert stream.kept_bytes == 5


def test_what_is_not_kept_is_numbered_all_the_same() -> None:
    stream = Kept(first=FIRST, limit_bytes=10)
    stream.begin_snapshot()
    assert [stream.skip(), stream.skip()] == [FIRST, FIRST + 1]
    assert stream.kept_bytes == 0
