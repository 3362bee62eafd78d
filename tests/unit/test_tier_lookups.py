from __future__ import annotations

from kvstore_vllm.lookups import Lookups, Question, Verdict
from kvstore_vllm.touches import Touches

HIT, MISS, LATER = Verdict.HIT, Verdict.MISS, Verdict.LATER
A, B, C = b"a", b"b", b"c"


def table(*, patience: float = 1.0, most: int = 100) -> Lookups:
    return Lookups(patience_seconds=patience, most=most)


def answer(lookups: Lookups, *held: bytes) -> list[bytes]:
    """Answer all open questions; which keys they were about."""
    questions = lookups.take_questions()
    lookups.answered([(each, each.key in held) for each in questions])
    return [each.key for each in questions]


def test_a_key_is_asked_for_once_and_answered_for_everybody() -> None:
    lookups = table()
    assert [lookups.verdict(key, "r1", 0.0) for key in (A, B)] == [LATER, LATER]
    assert lookups.verdict(A, "r2", 0.1) is LATER
    assert answer(lookups, A) == [A, B]
    assert not lookups.has_questions
    assert [lookups.verdict(key, "r2", 0.2) for key in (A, B)] == [HIT, MISS]
    assert answer(lookups) == []


def test_a_question_that_nobody_waits_for_is_not_asked() -> None:
    lookups = table()
    lookups.verdict(A, "r1", 0.0)
    lookups.verdict(B, "r2", 0.0)
    lookups.request_ended("r1")
    assert answer(lookups) == [B]


def test_an_answer_to_an_earlier_question_counts_no_more() -> None:
    lookups = table()
    lookups.verdict(A, "r1", 0.0)
    [old] = lookups.take_questions()
    lookups.request_ended("r1")
    lookups.answered([(old, True)])
    assert lookups.verdict(A, "r2", 0.0) is LATER
    lookups.answered([(old, True), (Question(B, 77), True)])
    assert lookups.verdict(A, "r2", 0.0) is LATER
    assert answer(lookups, A) == [A]
    assert lookups.verdict(A, "r2", 0.0) is HIT


def test_a_verdict_ends_with_the_last_request_that_knows_it() -> None:
    lookups = table()
    lookups.verdict(A, "r1", 0.0)
    lookups.verdict(A, "r2", 0.0)
    answer(lookups, A)
    lookups.request_ended("r1")
    lookups.request_ended("unknown")
    assert lookups.verdict(A, "r2", 0.0) is HIT
    lookups.request_ended("r2")
    assert len(lookups) == 0
    assert lookups.verdict(A, "r3", 0.0) is LATER


def test_after_a_failed_load_the_key_is_a_miss_whoever_asks() -> None:
    lookups = table()
    for request in ("r1", "r2"):
        lookups.verdict(A, request, 0.0)
    answer(lookups, A)
    lookups.load_failed([A, b"unknown"])
    assert [lookups.verdict(A, request, 0.0) for request in ("r1", "r2", "r3")] == [MISS] * 3
    assert answer(lookups, A) == []


def test_a_failed_load_beats_an_answer_that_comes_after_it() -> None:
    lookups = table()
    lookups.verdict(A, "r1", 0.0)
    [question] = lookups.take_questions()
    lookups.load_failed([A])
    lookups.answered([(question, True)])
    assert lookups.verdict(A, "r1", 0.0) is MISS


def test_nobody_waits_longer_than_patience_allows() -> None:
    lookups = table(patience=1.0)
    lookups.verdict(A, "r1", 10.0)
    assert lookups.verdict(A, "r1", 10.9) is LATER
    [question] = lookups.take_questions()
    assert lookups.verdict(A, "r2", 11.0) is MISS
    lookups.answered([(question, True)])
    assert lookups.verdict(A, "r1", 11.1) is MISS, "a verdict does not change but to MISS"
    assert lookups.late == 1


def test_past_its_limit_the_table_answers_miss_and_asks_nothing() -> None:
    lookups = table(most=2)
    assert [lookups.verdict(key, "r1", 0.0) for key in (A, B, C)] == [LATER, LATER, MISS]
    assert (len(lookups), lookups.refused) == (2, 1)
    assert answer(lookups) == [A, B]
    lookups.request_ended("r1")
    assert lookups.verdict(C, "r2", 0.0) is LATER


def test_uses_are_told_in_their_order_and_not_each_time() -> None:
    touches = Touches(every_seconds=10.0, most=3)
    touches.used([A, B, A], 0.0)
    assert touches.take(0.0, most=10) == [A, B]
    touches.used([B, C], 9.0)
    assert touches.take(9.0, most=10) == [C]
    touches.used([B, A], 10.0)
    assert touches.take(10.0, most=1) == [B]
    assert touches.take(10.0, most=1) == [A]
    assert touches.take(10.0, most=1) == []


def test_uses_past_the_limit_are_not_told() -> None:
    touches = Touches(every_seconds=10.0, most=2)
    touches.used([A, B, C], 0.0)
    assert touches.take(0.0, most=10) == [A, B]
    touches.used([C], 1.0)
    assert touches.take(1.0, most=10) == [C]
    touches.used([A, B, C], 2.0)
    assert touches.take(2.0, most=10) == [A], "the one told longest ago is forgotten"
