"""What a scan finds in a file that had earlier lives."""

from __future__ import annotations

import random
import zlib
from pathlib import Path

import pytest

from kvstore.store.base import RecordKind
from kvstore.store.device import PosixDevice
from kvstore.store.format import (
    PAGE,
    SEGMENT_HEADER_BYTES,
    Entry,
    SegmentIdentity,
    encode_footer,
    encode_record_head,
    finish_footer,
    payload_gap,
    payload_sums,
    record_span,
)
from kvstore.store.lanes import InlineLanes
from kvstore.store.scan import Scan, scan_segment
from kvstore.store.segment import plan_batch
from kvstore.types import BlockKey, Checks, Lineage, NamespaceDigest

SIZE = 4 << 20
OLD, NEW = SegmentIdentity(7, 1, 1111), SegmentIdentity(7, 2, 2222)
SPACE = NamespaceDigest(b"n" * 32)


class File:
    """A segment's bytes, written batch by batch as a log writes them."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.data = bytearray(SIZE)
        self.directory = directory
        self.restart()

    def restart(self) -> None:
        """Another life: writing begins again over what is there."""
        self.end = SEGMENT_HEADER_BYTES
        self.written: list[tuple[int, int]] = []
        """Offset and payload length of each record of this life."""

    def batch(self, identity: SegmentIdentity, lengths: list[int]) -> None:
        layout = plan_batch(self.end, lengths)
        begin = layout.offsets[0]
        self.data[begin : -(-layout.end // PAGE) * PAGE] = bytes(-(-layout.end // PAGE) * PAGE - begin)
        for offset, length in zip(layout.offsets, lengths, strict=True):
            payload = self.rng.randbytes(length)
            head = encode_record_head(
                identity=identity,
                offset=offset,
                batch=begin,
                sequence=len(self.written) + 1,
                created_ms=0,
                kind=RecordKind.BLOCK,
                namespace=SPACE,
                key=BlockKey(self.rng.randbytes(32)),
                parent=BlockKey(SPACE),
                position=32,
                lineage=Lineage.EXACT,
                checks=Checks(zlib.crc32(payload)),
                sums=payload_sums(payload),
            )
            self.data[offset : offset + len(head) + length] = head + payload
            self.written.append((offset, length))
        self.end = layout.end

    def seal(self, identity: SegmentIdentity) -> None:
        """A footer at the end of the file, as a full segment has it."""
        entries = [
            Entry(b"k" * 32, b"p" * 32, 1, 0, 0, 32, 0, offset + payload_gap(length), length, 0, 1, 0)
            for offset, length in self.written
        ]
        at = SIZE - PAGE
        footer = encode_footer(
            identity, offset=at, records_end=self.end, namespaces=[SPACE], entries=entries[:30]
        )
        self.data[at:] = finish_footer(footer, offset=at, salt=identity.salt)

    def spoil(self, number: int, *, header: bool = False) -> None:
        offset, length = self.written[number]
        self.data[offset + (100 if header else payload_gap(length) + length // 2)] ^= 1

    def scan(self) -> Scan:
        (self.directory / "file").write_bytes(self.data)
        file = PosixDevice(self.directory).open("file")
        assert file is not None
        seen: list[int] = []
        try:
            return scan_segment(file, NEW, SIZE, lanes=InlineLanes(), progress=seen.append)
        finally:
            file.close()
            assert seen == sorted(seen)


def some_lengths(rng: random.Random) -> list[int]:
    return [
        rng.choice([1, 200, 3328, 4096, 65_536, rng.randrange(1, 150_000)]) for _ in range(rng.randint(1, 6))
    ]


def reused(directory: Path, seed: int) -> File:
    """Full of an earlier life, footer and all; then some batches of a new one."""
    file = File(directory, seed)
    while file.end < SIZE - (1 << 20):
        file.batch(OLD, some_lengths(file.rng))
    file.seal(OLD)
    file.restart()
    for _ in range(file.rng.randint(2, 5)):
        file.batch(NEW, some_lengths(file.rng))
    return file


@pytest.mark.parametrize("seed", range(8))
def test_records_of_an_earlier_life_are_nobodys(tmp_path: Path, seed: int) -> None:
    file = reused(tmp_path, seed)
    scan = file.scan()
    assert [(record.offset, record.length) for record in scan.records] == file.written, f"seed {seed}"
    assert (scan.end, scan.torn_bytes, scan.damaged_records, scan.footer) == (file.end, 0, 0, None)


@pytest.mark.parametrize("seed", range(8))
def test_the_last_record_is_torn_over_an_earlier_life(tmp_path: Path, seed: int) -> None:
    file = reused(tmp_path, seed)
    file.spoil(-1)
    scan = file.scan()
    assert [(record.offset, record.length) for record in scan.records] == file.written[:-1], f"seed {seed}"
    assert (scan.torn_bytes, scan.damaged_records) == (record_span(file.written[-1][1]), 0), f"seed {seed}"


@pytest.mark.parametrize("header", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_a_bad_record_with_a_whole_batch_behind_it_is_damage(tmp_path: Path, seed: int, header: bool) -> None:
    file = reused(tmp_path, seed)
    file.spoil(0, header=header)
    scan = file.scan()
    assert [(record.offset, record.length) for record in scan.records] == file.written[1:], f"seed {seed}"
    assert (scan.torn_bytes, scan.damaged_records) == (0, 1), f"seed {seed}"


def test_nothing_of_this_life_is_nothing(tmp_path: Path) -> None:
    file = File(tmp_path, 1)
    file.batch(OLD, [4096] * 100)
    file.seal(OLD)
    scan = file.scan()
    assert scan == Scan([], SEGMENT_HEADER_BYTES, 0, 0, None)


def test_a_footer_of_its_own_says_more_than_the_scan(tmp_path: Path) -> None:
    file = reused(tmp_path, 3)
    file.data[SIZE - PAGE :] = bytes(PAGE)
    file.seal(NEW)
    scan = file.scan()
    assert scan.footer is not None
    offsets = scan.footer.entries["offset"].tolist()
    assert offsets == [offset + payload_gap(length) for offset, length in file.written[:30]]
