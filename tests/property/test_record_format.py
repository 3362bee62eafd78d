"""The disk format: what goes in comes out, and every change of the bytes is noticed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import FormatTooNew, StoreDamaged
from kvstore.store import catalog
from kvstore.store import format as disk
from kvstore.store.segment import PIECE_BYTES, fits, plan_batch
from kvstore.testing.sim_device import flipped
from kvstore.types import BlockKey, BytesLike, Checks, Lineage, NamespaceDigest
from tests.support.long import examples

U32, U64 = 2**32 - 1, 2**64 - 1
HOME = disk.SegmentIdentity(store_tag=0x1122334455667788, segment_id=7, salt=99)

digests = st.binary(min_size=32, max_size=32)
u64 = st.integers(0, U64)
checks = st.builds(Checks, st.integers(0, U32), u64, st.booleans())


def encode(
    payload: BytesLike, *, offset: int = 4096, kind: int = 1, slices: Sequence[int] = (), padded: bool = True
) -> bytes:
    head = disk.encode_record_head(
        identity=HOME,
        offset=offset,
        batch=4096,
        sequence=5,
        created_ms=1_800_000_000_000,
        kind=kind,
        namespace=NamespaceDigest(b"n" * 32),
        key=BlockKey(b"k" * 32),
        parent=BlockKey(b"p" * 32),
        position=128,
        lineage=Lineage.EXACT,
        checks=Checks(1, 2, True),
        sums=disk.payload_sums(payload, slices),
    )
    return (head + bytes(payload)).ljust(disk.record_span(len(payload)) if padded else 0, b"\0")


def entry(**changes: object) -> disk.Entry:
    plain = disk.Entry(b"k" * 32, b"p" * 32, 5, 2, 1_800_000_000_000, 128, 1, 4352, 3328, 0, 1, 1)
    return plain._replace(**changes)  # type: ignore[arg-type]


def footer(count: int) -> bytes:
    return disk.encode_footer(
        HOME,
        offset=8192,
        records_end=8000,
        namespaces=[NamespaceDigest(b"n" * 32)],
        entries=[entry(sequence=number) for number in range(count)],
    )


@given(
    payload=st.one_of(st.binary(max_size=5000), st.builds(bytes, st.integers(65_000, 66_000))),
    kind=st.sampled_from(sorted(disk.KINDS)),
    namespace=digests,
    key=digests,
    parent=digests,
    position=u64,
    sequence=u64,
    created=u64,
    lineage=st.sampled_from(Lineage),
    written=checks,
    page=st.integers(1, 2**30),
)
@settings(max_examples=examples(200), deadline=None)
def test_a_record_decodes_to_what_was_encoded(  # noqa: PLR0917
    payload: bytes,
    kind: int,
    namespace: bytes,
    key: bytes,
    parent: bytes,
    position: int,
    sequence: int,
    created: int,
    lineage: Lineage,
    written: Checks,
    page: int,
) -> None:
    offset = page * disk.PAGE
    head = disk.encode_record_head(
        identity=HOME,
        offset=offset,
        batch=offset,
        sequence=sequence,
        created_ms=created,
        kind=kind,
        namespace=NamespaceDigest(namespace),
        key=BlockKey(key),
        parent=BlockKey(parent),
        position=position,
        lineage=lineage,
        checks=written,
        sums=disk.payload_sums(payload),
    )
    data = head + payload
    assert len(head) == disk.payload_gap(len(payload))
    decoded = disk.decode_record(data, identity=HOME, offset=offset)
    assert not isinstance(decoded, disk.Verdict)
    header, out = decoded
    assert out == payload
    assert (header.kind, header.namespace, header.key, header.parent, header.position, header.sequence) == (
        kind,
        namespace,
        key,
        parent,
        position,
        sequence,
    )
    assert (header.created_ms, header.lineage, header.checks, header.length, header.salt, header.batch) == (
        created,
        lineage,
        written,
        len(payload),
        HOME.salt,
        offset,
    )


def test_every_single_flipped_bit_of_a_small_record_is_noticed() -> None:
    data = encode(bytes(range(40)))
    meaningful = disk.RECORD_HEADER_BYTES + 40
    for bit in range(8 * meaningful):
        assert disk.decode_record(flipped(data, bit), identity=HOME, offset=4096) is disk.Verdict.CORRUPT, bit
    for bit in range(8 * meaningful, 8 * len(data)):
        assert disk.decode_record(flipped(data, bit), identity=HOME, offset=4096) == disk.decode_record(
            data, identity=HOME, offset=4096
        )


def test_every_truncation_of_a_record_is_torn() -> None:
    data = encode(bytes(range(40)))[: disk.RECORD_HEADER_BYTES + 40]
    for length in range(len(data)):
        assert disk.decode_record(data[:length], identity=HOME, offset=4096) is disk.Verdict.TORN, length


LARGE = random.Random(1).randbytes(66_000)
CUTS = [4_096, 9_000, 20_000, 65_999]


def test_every_flipped_bit_of_a_large_record_s_head_is_noticed() -> None:
    """Header and table bit by bit; the payload, in which each bit is as good as another, by samples."""
    data = encode(LARGE, slices=CUTS, padded=False)
    table = disk.RECORD_HEADER_BYTES + disk.SLICE_ENTRY_BYTES * len(CUTS)
    for bit in range(8 * disk.RECORD_HEADER_BYTES):
        bent = flipped(data[: disk.LARGE_HEADER_BYTES], bit)
        assert disk.decode_record_header(bent, identity=HOME, offset=4096) is disk.Verdict.CORRUPT, bit
    header = disk.decode_record_header(data, identity=HOME, offset=4096)
    assert isinstance(header, disk.RecordHeader)
    whole = disk.decode_slices(data, header)
    for bit in range(8 * disk.RECORD_HEADER_BYTES, 8 * table):
        bent = flipped(data[: disk.LARGE_HEADER_BYTES], bit)
        assert disk.decode_slices(bent, header) is disk.Verdict.CORRUPT, bit
    for bit in range(8 * table, 8 * disk.LARGE_HEADER_BYTES):
        assert disk.decode_slices(flipped(data[: disk.LARGE_HEADER_BYTES], bit), header) == whole, bit
    chance = random.Random(2)
    for _ in range(100):
        bit = chance.randrange(8 * disk.LARGE_HEADER_BYTES, 8 * len(data))
        assert disk.decode_record(flipped(data, bit), identity=HOME, offset=4096) is disk.Verdict.CORRUPT, bit


def test_a_table_of_slices_that_ends_early_is_torn() -> None:
    data = encode(LARGE, slices=CUTS)
    header = disk.decode_record_header(data, identity=HOME, offset=4096)
    assert isinstance(header, disk.RecordHeader)
    for length in range(disk.RECORD_HEADER_BYTES, disk.RECORD_HEADER_BYTES + 8 * len(CUTS)):
        assert disk.decode_slices(data[:length], header) is disk.Verdict.TORN, length


sizes = st.integers(disk.LARGE_PAYLOAD_BYTES, disk.LARGE_PAYLOAD_BYTES + 9000)


@given(size=sizes, ends=st.lists(st.integers(-5, 80_000), max_size=150), seed=st.integers(0, 99))
@settings(max_examples=examples(150), deadline=None)
def test_every_part_of_a_payload_is_verified_by_the_slices_around_it(
    size: int, ends: list[int], seed: int
) -> None:
    chance = random.Random(seed)
    payload = chance.randbytes(size)
    data = encode(payload, slices=ends)
    header = disk.decode_record_header(data, identity=HOME, offset=4096)
    assert isinstance(header, disk.RecordHeader)
    slices = disk.decode_slices(data, header)
    assert not isinstance(slices, disk.Verdict)
    kept = [each.end for each in slices]
    inner = {end for end in ends if 0 < end < size}
    assert kept[-1] == size
    assert set(kept[:-1]) <= inner
    assert all(end - begin >= disk.PAGE for begin, end in pairwise([0, *kept[:-1]]))
    # What was left out is less than a page behind what was kept.
    assert all(any(0 <= end - each < disk.PAGE for each in [0, *kept]) for end in inner)
    for first, last in pairwise([0, *kept]):
        assert disk.slices_hold(slices, first, payload[first:last])
    begin = chance.randrange(size)
    end = chance.randint(begin, size)
    first, last = disk.covering_slices(slices, begin, end)
    assert first <= begin <= end <= last
    around = payload[first:last]
    assert disk.slices_hold(slices, first, around)
    if around:
        assert not disk.slices_hold(slices, first, flipped(around, chance.randrange(8 * len(around))))
        assert not disk.slices_hold(slices, first, around[:-1])
    other = chance.randrange(size)
    if payload[other : other + len(around)] != around:
        assert not disk.slices_hold(slices, other, around)


def test_more_slices_than_a_table_holds_are_thinned_out_evenly() -> None:
    length = 200 * disk.PAGE
    kept = disk.slice_ends(range(disk.PAGE, length, disk.PAGE), length)
    assert len(kept) == disk.SLICES_MAX - 1
    assert {end - begin for begin, end in pairwise(kept)} == {3 * disk.PAGE, 4 * disk.PAGE}
    assert disk.slice_ends(range(100), disk.LARGE_PAYLOAD_BYTES - 1) == ()


@pytest.mark.parametrize("ends", [[0, 5], [5, 5], [7, 5], [66_000], [66_001]])
def test_a_table_of_slices_without_order_is_corrupt_however_good_its_checksum(ends: list[int]) -> None:
    data = encode(LARGE, slices=CUTS[: len(ends)])
    header = disk.decode_record_header(data, identity=HOME, offset=4096)
    assert isinstance(header, disk.RecordHeader)
    table = b"".join(end.to_bytes(4, "little") + bytes(4) for end in ends)
    forged = data[: disk.RECORD_HEADER_BYTES] + table + data[disk.RECORD_HEADER_BYTES + len(table) :]
    claimed = header._replace(table_crc32c=disk.crc32c(table))
    assert disk.decode_slices(forged, claimed) is disk.Verdict.CORRUPT


def test_a_small_record_has_no_table_of_slices() -> None:
    data = encode(bytes(range(200)), slices=[10, 20])
    header = disk.decode_record_header(data, identity=HOME, offset=4096)
    assert isinstance(header, disk.RecordHeader)
    assert disk.decode_slices(data, header) == [disk.SliceEnd(200, header.crc32c)]


@pytest.mark.parametrize(
    "identity",
    [
        HOME._replace(store_tag=1),
        HOME._replace(segment_id=8),
        HOME._replace(salt=98),
    ],
)
def test_a_record_of_another_place_is_corrupt_however_good_its_checksums(
    identity: disk.SegmentIdentity,
) -> None:
    data = encode(b"payload")
    assert disk.decode_record(data, identity=identity, offset=4096) is disk.Verdict.CORRUPT
    assert disk.decode_record(data, identity=HOME, offset=4608) is disk.Verdict.CORRUPT
    assert disk.decode_record(encode(b"payload", kind=8), identity=HOME, offset=4096) is disk.Verdict.CORRUPT


@given(st.binary(max_size=600))
@settings(max_examples=examples(200), deadline=None)
def test_arbitrary_bytes_are_never_a_record_or_footer(data: bytes) -> None:
    assert isinstance(disk.decode_record(data, identity=HOME, offset=4096), disk.Verdict)
    assert isinstance(disk.decode_record(disk.RECORD_MAGIC + data, identity=HOME, offset=4096), disk.Verdict)
    assert isinstance(disk.decode_footer(disk.FOOTER_MAGIC + data, identity=HOME), disk.Verdict)
    assert isinstance(disk.decode_segment_header(data), disk.Verdict)
    assert isinstance(disk.decode_trailer(data), disk.Verdict)


@given(
    st.lists(
        st.builds(
            disk.Entry,
            digests,
            digests,
            u64,
            u64,
            u64,
            u64,
            st.integers(0, U32),
            st.integers(0, U32),
            st.integers(0, U32),
            st.integers(0, 2),
            st.sampled_from(sorted(disk.KINDS)),
            st.integers(0, 3),
        ),
        max_size=20,
    )
)
@settings(max_examples=examples(100), deadline=None)
def test_a_footer_decodes_to_what_was_encoded(entries: list[disk.Entry]) -> None:
    names = [NamespaceDigest(bytes([number]) * 32) for number in range(3)]
    data = disk.encode_footer(HOME, offset=8192, records_end=8000, namespaces=names, entries=entries)
    whole = disk.finish_footer(data, offset=8192, salt=HOME.salt)
    assert len(whole) == disk.footer_bytes(3, len(entries))
    assert disk.decode_footer(whole, identity=HOME) == disk.Footer(names, entries, 8000)
    assert disk.footer_extent(whole) == len(data)
    assert disk.decode_trailer(whole[-disk.TRAILER_BYTES :]) == (8192, HOME.salt)


def test_every_flipped_bit_and_truncation_of_a_footer_is_noticed() -> None:
    data = footer(3)
    for bit in range(8 * len(data)):
        assert isinstance(disk.decode_footer(flipped(data, bit), identity=HOME), disk.Verdict), bit
    for length in range(len(data)):
        assert isinstance(disk.decode_footer(data[:length], identity=HOME), disk.Verdict), length
    tail = disk.finish_footer(data, offset=8192, salt=HOME.salt)[-disk.TRAILER_BYTES :]
    for bit in range(8 * len(tail)):
        assert isinstance(disk.decode_trailer(flipped(tail, bit)), disk.Verdict), bit


def test_every_flipped_bit_of_a_segment_header_is_noticed() -> None:
    header = disk.SegmentHeader(b"u" * 16, 7, 99, 1, 1 << 20, 5)
    data = disk.encode_segment_header(header)
    assert disk.decode_segment_header(data) == header
    for bit in range(8 * len(data)):
        assert disk.decode_segment_header(flipped(data, bit)) is disk.Verdict.CORRUPT, bit
    assert disk.decode_segment_header(data[:-1]) is disk.Verdict.TORN


def test_every_flipped_bit_and_truncation_of_the_identity_is_refused() -> None:
    data = disk.encode_identity(b"u" * 16)
    assert disk.decode_identity(data, directory="here") == b"u" * 16
    for bit in range(8 * len(data)):
        with pytest.raises((StoreDamaged, FormatTooNew)):
            disk.decode_identity(flipped(data, bit), directory="here")
    for length in range(len(data)):
        with pytest.raises(StoreDamaged, match="here"):
            disk.decode_identity(data[:length], directory="here")


@given(st.integers(0, 2**31), st.lists(st.integers(0, 200_000), min_size=1, max_size=30))
@settings(max_examples=examples(200), deadline=None)
def test_a_batch_is_laid_out_without_overlap_and_never_in_a_written_page(
    end: int, lengths: list[int]
) -> None:
    layout = plan_batch(end, lengths)
    assert layout.offsets[0] % disk.PAGE == 0
    assert layout.offsets[0] >= end
    assert layout.pieces[0] == 0
    for first, last in pairwise([*layout.pieces, len(lengths)]):
        # Pieces are written side by side, each from its own page on.
        begin, until = layout.offsets[first], layout.offsets[last - 1] + disk.record_span(lengths[last - 1])
        assert begin % disk.PAGE == 0
        assert until - begin <= PIECE_BYTES or last - first == 1
        assert last == len(lengths) or disk.align(until, disk.PAGE) <= layout.offsets[last]
    ends = []
    for offset, length in zip(layout.offsets, lengths, strict=True):
        assert offset % disk.record_alignment(length) == 0
        ends.append(offset + disk.record_span(length))
    assert all(ended <= begun for ended, begun in zip(ends, layout.offsets[1:], strict=False))
    assert layout.end == ends[-1]
    capacity = disk.align(layout.end, disk.PAGE) + disk.footer_bytes(1, len(lengths))
    assert fits(layout, capacity=capacity, namespaces=1, records=len(lengths))
    assert not fits(layout, capacity=capacity - 1, namespaces=1, records=len(lengths))


def test_the_space_that_a_record_takes_is_what_the_format_promises() -> None:
    assert disk.record_span(3328) == 3584
    assert disk.record_span(4096) / 4096 < 1.13
    assert disk.record_span(449_824) == 110 * disk.PAGE == 449_824 + disk.LARGE_HEADER_BYTES


@given(
    digests,
    st.lists(st.tuples(st.integers(0, U32), st.integers(0, U32)), unique_by=lambda pair: pair[0]),
    u64,
    st.text(max_size=50),
)
@settings(max_examples=examples(100), deadline=None)
def test_catalogue_rows_decode_to_what_was_encoded(
    name: bytes, uses: list[tuple[int, int]], salt: int, policy: str
) -> None:
    assert catalog.decode_uses_row(catalog.uses_row(salt, uses), salt=salt).tolist() == [
        list(pair) for pair in uses
    ]
    assert not len(catalog.decode_uses_row(catalog.uses_row(salt, uses), salt=salt ^ 1))
    assert catalog.decode_policy_row(catalog.policy_row(salt, policy)) == (salt, policy)
    row = catalog.SegmentRow(salt, 5, catalog.DEAD)
    assert catalog.decode_segment_row(catalog.segment_row(row)) == row
    value = catalog.seal_value(name, b"value")
    assert catalog.open_value(name, value) == b"value"
    assert catalog.open_value(b"other", value) is None
    assert all(catalog.open_value(name, flipped(value, bit)) is None for bit in range(8 * len(value)))
    assert catalog.open_value(name, b"abc") is None
