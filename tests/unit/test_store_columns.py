"""Footers and records as columns say the same as they do as objects."""

from __future__ import annotations

import random

import pytest

from kvstore.store.base import Found, Place, RecordKind
from kvstore.store.columns import Footer, read_footer, without_entries_behind
from kvstore.store.format import (
    SEGMENT_HEADER_BYTES,
    Entry,
    SegmentIdentity,
    Verdict,
    decode_footer,
    encode_footer,
)
from kvstore.store.records import Records
from kvstore.types import BlockKey, Checks, Lineage, NamespaceDigest

IDENTITY = SegmentIdentity(7, 2, 2222)
SPACES = [NamespaceDigest(b"a" * 32), NamespaceDigest(b"b" * 32)]
FIRST = SEGMENT_HEADER_BYTES + 256


def some_entries(count: int, seed: int = 1) -> list[Entry]:
    rng = random.Random(seed)
    return [
        Entry(
            rng.randbytes(31) + b"\0",
            b"\0" + rng.randbytes(31),
            rng.getrandbits(60),
            rng.getrandbits(64),
            rng.getrandbits(40),
            rng.getrandbits(50),
            rng.getrandbits(32),
            FIRST + 4096 * number,
            rng.randrange(1, 3000),
            rng.randrange(2),
            rng.choice([1, 2, 3, 4, 5, 6, 7]),
            rng.randrange(4),
        )
        for number in range(count)
    ]


def encoded(entries: list[Entry], *, records_end: int = 1 << 20) -> bytes:
    return encode_footer(
        IDENTITY, offset=1 << 20, records_end=records_end, namespaces=SPACES, entries=entries
    )


@pytest.mark.parametrize("count", [0, 1, 200])
def test_a_footer_reads_the_same_in_columns(count: int) -> None:
    data = encoded(some_entries(count))
    footer, objects = (
        read_footer(data + bytes(100), identity=IDENTITY),
        decode_footer(data, identity=IDENTITY),
    )
    assert isinstance(footer, Footer)
    assert not isinstance(objects, Verdict)
    assert (footer.namespaces, footer.records_end, footer.data) == (SPACES, objects.records_end, data)
    assert len(footer.entries) == count
    for row, entry in zip(footer.entries, objects.entries, strict=True):
        for name, value in entry._asdict().items():
            assert (row[name].tobytes() if isinstance(value, bytes) else int(row[name])) == value


@pytest.mark.parametrize(
    "change",
    [
        {"offset": SEGMENT_HEADER_BYTES},
        {"offset": FIRST + 2 * 4096},
        {"length": 4096},
        {"namespace": 2},
        {"kind": 0},
        {"kind": 8},
    ],
)
def test_entries_that_no_writer_leaves_make_a_footer_worthless(change: dict[str, int]) -> None:
    entries = some_entries(5)
    entries[1] = entries[1]._replace(**change)
    assert read_footer(encoded(entries), identity=IDENTITY) is Verdict.CORRUPT


def test_entries_behind_the_end_of_the_records_make_a_footer_worthless() -> None:
    entries = some_entries(5)
    assert read_footer(encoded(entries, records_end=entries[-1].offset), identity=IDENTITY) is Verdict.CORRUPT


def test_any_flipped_bit_makes_a_footer_worthless() -> None:
    data = encoded(some_entries(20))
    for seed in range(50):
        bent = bytearray(data)
        bent[random.Random(seed).randrange(len(data))] ^= 1 << seed % 8
        assert isinstance(read_footer(bytes(bent), identity=IDENTITY), Verdict), f"seed {seed}"


def test_a_shorter_file_keeps_the_entries_that_are_within_it() -> None:
    entries = some_entries(10)
    footer = read_footer(encoded(entries), identity=IDENTITY)
    assert isinstance(footer, Footer)
    end = entries[6].offset + entries[6].length
    left = without_entries_behind(footer, end, identity=IDENTITY)
    assert left.entries["offset"].tolist() == [entry.offset for entry in entries[:7]]
    assert decode_footer(left.data, identity=IDENTITY) == (SPACES, entries[:7], end)


def test_records_are_a_sequence_of_what_they_were_made_of() -> None:
    rng = random.Random(3)
    found = [
        Found(
            rng.choice(list(RecordKind)),
            rng.choice(SPACES),
            BlockKey(rng.randbytes(31) + b"\0"),
            BlockKey(bytes(32)),
            rng.getrandbits(64),
            rng.choice(list(Lineage)),
            Checks(rng.getrandbits(32), rng.getrandbits(64), rng.random() < 0.5),
            Place(rng.getrandbits(40), rng.getrandbits(32), rng.getrandbits(31)),
            number,
            rng.random() * 1e9,
            b"payload" if number % 7 == 0 else b"",
        )
        for number in range(50)
    ]
    records = Records.of(found)
    assert list(records) == found
    assert (records[3], records[-1], records[5:9]) == (found[3], found[-1], found[5:9])
    assert records.of_kind(RecordKind.BLOCK) == [each for each in found if each.kind is RecordKind.BLOCK]
    assert records.newest_use() == max(each.last_use for each in found)
    with pytest.raises(IndexError):
        records[50]
    assert (list(Records.of([])), Records.of([]).newest_use()) == ([], 0.0)
