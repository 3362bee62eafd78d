"""The ledger: what a store owes follows from the journal and from nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.chaos import records
from kvstore.chaos.journal import Event, Journal, Word, decode_events, encode_event, policy_text, read_journal
from kvstore.chaos.ledger import Ledger, Sight
from kvstore.store.base import RecordKind


def ledger_of(*events: tuple[Word, tuple[int, ...]]) -> Ledger:
    ledger = Ledger()
    ledger.apply(Event(word, 0, numbers) for word, numbers in events)
    return ledger


def right(*numbers: int) -> dict[int, Sight]:
    return dict.fromkeys(numbers, Sight.RIGHT)


WRITTEN = ((Word.TRY, (3, 9)), (Word.DONE, (3, 9)))


def test_what_was_acknowledged_must_be_found_with_its_bytes() -> None:
    ledger = ledger_of(*WRITTEN)
    assert ledger.violations(right(*range(3, 9)), {}) == []
    assert ledger.violations(right(*range(3, 8)), {}) == ["acknowledged and not found again: 1 (8)"]
    assert ledger.violations({**right(*range(3, 9)), 4: Sight.MISS}, {}) == [
        "acknowledged and not readable: 1 (4)"
    ]
    [line] = ledger.violations({**right(*range(3, 9)), 4: Sight.WRONG}, {})
    assert line.startswith("served with wrong bytes")


def test_what_was_attempted_may_be_found_or_not_and_nothing_else_may() -> None:
    ledger = ledger_of(*WRITTEN, (Word.TRY, (9, 12)))
    assert ledger.violations(right(*range(3, 9)), {}) == []
    assert ledger.violations(right(*range(3, 12)), {}) == []
    assert ledger.violations({**right(*range(3, 9)), 9: Sight.MISS}, {}) == []
    assert ledger.violations({**right(*range(3, 9)), 9: Sight.WRONG}, {}) != []
    assert ledger.violations(right(*range(3, 13)), {}) == ["found, though nobody had written it: 1 (12)"]


def test_what_was_discarded_may_go_and_may_stay() -> None:
    ledger = ledger_of(*WRITTEN, (Word.DROP, (4, 5)))
    assert ledger.violations(right(3, 6, 7, 8), {}) == []
    assert ledger.violations(right(3, 4, 6, 7, 8), {}) == []
    assert ledger.violations(right(3, 6, 7), {}) != []


def test_an_acknowledged_clear_is_for_good_and_spares_what_came_later() -> None:
    events = (
        (Word.TRY, (0, 60)),
        (Word.DONE, (0, 60)),
        (Word.CLEAR, (1, 60, 0)),
        (Word.TRY, (60, 90)),
        (Word.DONE, (60, 90)),
    )
    kept = [n for n in range(90) if n % 3 != 1 or n < 3 or n >= 60]
    begun = ledger_of(*events)
    assert begun.violations(right(*range(90)), {}) == []
    assert begun.violations(right(*kept), {}) == []
    done = ledger_of(*events, (Word.CLEARED, (1, 60, 0)))
    assert done.violations(right(*kept), {}) == []
    [line] = done.violations(right(*range(90)), {})
    assert line.startswith("found again after an acknowledged clear: 19 (4,")


def test_a_clear_of_states_spares_blocks() -> None:
    ledger = ledger_of(
        (Word.TRY, (0, 300)), (Word.DONE, (0, 300)), (Word.CLEAR, (2, 300, 1)), (Word.CLEARED, (2, 300, 1))
    )
    blocks = [n for n in range(300) if n % 3 != 2 or n < 3 or records.kind_of(n) is RecordKind.BLOCK]
    assert 200 < len(blocks) < 300
    assert ledger.violations(right(*blocks), {}) == []
    assert ledger.violations(right(*blocks[:-1]), {}) != []


def test_what_an_opening_found_is_owed_by_the_next_one() -> None:
    ledger = ledger_of(*WRITTEN, (Word.TRY, (9, 12)))
    ledger.settle(right(*range(3, 11)))
    assert ledger.violations(right(*range(3, 10)), {}) == ["acknowledged and not found again: 1 (10)"]
    again = ledger_of(*WRITTEN, (Word.TRY, (9, 12)), (Word.FOUND, (3, 4, 5, 6, 7, 8, 11)))
    assert again.violations(right(*range(3, 9)), {}) == ["acknowledged and not found again: 1 (11)"]


def test_a_policy_is_the_acknowledged_one_or_one_attempted_since() -> None:
    ledger = ledger_of((Word.POLICY, (0, 5)), (Word.POLICY_DONE, (0, 5)), (Word.POLICY, (0, 6)))
    assert ledger.violations({}, {0: policy_text(5)}) == []
    assert ledger.violations({}, {0: policy_text(6)}) == []
    assert ledger.violations({}, {0: policy_text(4)}) != []
    assert ledger.violations({}, {}) != []
    assert ledger_of((Word.POLICY, (1, 5))).violations({}, {}) == []


def test_what_the_load_saw_is_a_violation() -> None:
    ledger = Ledger()
    ledger.apply([Event(Word.WRONG, 0, text="record 4 was read with wrong bytes")])
    assert ledger.violations({}, {}) == ["record 4 was read with wrong bytes"]


def test_a_line_cut_off_by_a_kill_did_not_happen(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    assert read_journal(path) == []
    with Journal(path) as journal:
        journal.say(Word.TRY, (3, 9))
        journal.say(Word.WRONG, text="two\nlines")
        journal.say(Word.DONE, (3, 9))
    events = read_journal(path)
    assert events == [
        Event(Word.TRY, 0, (3, 9)),
        Event(Word.WRONG, 0, text="two lines"),
        Event(Word.DONE, 0, (3, 9)),
    ]
    whole = path.read_bytes()
    for length in range(len(whole) - len(encode_event(events[-1])), len(whole)):
        assert decode_events(whole[:length]) == events[:2]


@pytest.mark.parametrize("number", [0, 2, 3, 4, 1000, 2**40])
def test_a_record_follows_from_its_number(number: int) -> None:
    record = records.record_of(number)
    assert records.number_of(record.key) == number
    assert record == records.record_of(number)
    assert len(record.payload) == records.size_of(number)
    assert records.number_of(bytes(32)) is None
