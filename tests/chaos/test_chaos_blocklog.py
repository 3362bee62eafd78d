"""What may be on a device after a power cut."""

from __future__ import annotations

import random

import pytest

from kvstore.chaos.blocklog import SECTOR, SUPERBLOCK_END, Disk, Loss, encode_op, flushes, parse_log
from kvstore.chaos.journal import Event, Word
from kvstore.chaos.powercut import ledger_at, plan_cuts, states_per_log

AT = SUPERBLOCK_END
FIRST = bytes(SUPERBLOCK_END + 8 * SECTOR)


def sectors(letter: str, count: int) -> bytes:
    return letter.encode() * (count * SECTOR)


LOG = b"".join(
    [
        encode_op(AT, sectors("a", 2)),
        encode_op(None),
        encode_op(AT + SECTOR, sectors("b", 3)),
        encode_op(AT, sectors("c", 1)),
        encode_op(None),
        encode_op(AT + 4 * SECTOR, sectors("d", 4)),
    ]
)


def shape(image: bytes) -> str:
    return "".join(chr(image[at]) if image[at] else "." for at in range(AT, len(image), SECTOR))


def test_a_log_is_parsed_up_to_its_last_whole_entry() -> None:
    ops = parse_log(LOG)
    assert [(op.flush, op.offset, len(op.data)) for op in ops] == [
        (False, AT, 2 * SECTOR),
        (True, 0, 0),
        (False, AT + SECTOR, 3 * SECTOR),
        (False, AT, SECTOR),
        (True, 0, 0),
        (False, AT + 4 * SECTOR, 4 * SECTOR),
    ]
    assert ops[-1].end == len(LOG)
    assert flushes(ops) == [1, 4]
    assert parse_log(LOG[:-1]) == ops[:-1]
    assert parse_log(b"") == []


@pytest.mark.parametrize(
    ("cut", "none", "everything"),
    [
        (0, "........", "aa......"),
        (1, "aa......", "aa......"),
        (2, "aa......", "abbb...."),
        (3, "aa......", "cbbb...."),
        (4, "cbbb....", "cbbb...."),
        (5, "cbbb....", "cbbbdddd"),
    ],
)
def test_flushed_writes_are_there_and_later_ones_as_the_loss_says(
    cut: int, none: str, everything: str
) -> None:
    disk = Disk(FIRST, parse_log(LOG))
    assert shape(disk.after_cut(cut, Loss.NONE, random.Random(0))) == none
    assert shape(disk.after_cut(cut, Loss.ALL, random.Random(0))) == everything


def test_cuts_may_be_asked_for_in_any_order() -> None:
    ops = parse_log(LOG)
    disk = Disk(FIRST, ops)
    for cut in (5, 0, 3, 4, 1):
        fresh = Disk(FIRST, ops).after_cut(cut, Loss.ALL, random.Random(0))
        assert disk.after_cut(cut, Loss.ALL, random.Random(0)) == fresh


def test_unflushed_writes_are_torn_by_sectors_kept_whole_or_all_but_one_lost() -> None:
    disk = Disk(FIRST, parse_log(LOG))
    rng = random.Random(1)
    torn = {shape(disk.after_cut(3, Loss.TORN, rng)) for _ in range(400)}
    whole = {shape(disk.after_cut(3, Loss.WHOLE, rng)) for _ in range(100)}
    one = {shape(disk.after_cut(3, Loss.ONE, rng)) for _ in range(100)}
    assert torn == {
        first + second + third + fourth + "...."
        for first in "ac"
        for second in "ab"
        for third in ".b"
        for fourth in ".b"
    }
    assert whole == {"aa......", "abbb....", "ca......", "cbbb...."}
    assert one == {"abbb....", "ca......"}


def test_a_superblock_is_never_torn() -> None:
    ops = parse_log(encode_op(1024, sectors("s", 2)))
    found = {bytes(Disk(FIRST, ops).after_cut(0, Loss.TORN, random.Random(n))[1024:2048]) for n in range(50)}
    assert found == {bytes(1024), sectors("s", 2)}


@pytest.mark.parametrize("states", [1, 2, 3, 60, 81, 10_000])
def test_states_are_shared_out_over_both_file_systems(states: int) -> None:
    shares = states_per_log(states)
    assert sum(shares) == states
    assert abs(sum(shares[::2]) - sum(shares[1::2])) <= len(shares)
    cuts = plan_cuts(parse_log(LOG), states, random.Random(states))
    assert sum(1 + cut.again for cut in cuts) == states
    assert [cut.at for cut in cuts] == sorted(cut.at for cut in cuts)


def test_what_was_said_after_the_cut_is_not_owed() -> None:
    events = [
        Event(Word.TRY, 10, (3, 5)),
        Event(Word.DONE, 20, (3, 5)),
        Event(Word.TRY, 20, (5, 7)),
        Event(Word.DONE, 30, (5, 7)),
    ]
    assert ledger_at(events, 19).owed == set()
    assert ledger_at(events, 29).owed == {3, 4}
    assert ledger_at(events, 29).next_number == 7
    assert ledger_at(events, 30).owed == {3, 4, 5, 6}
