"""Framing, both halves: any items, any cuts, exactly the same bytes or a named refusal."""

from __future__ import annotations

import random
import zlib

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import DamagedBytes, InvalidArgument, LimitExceeded
from kvstore.service.delivery import wire_frame
from kvstore.service.frames import FRAME_BYTES, Cutter, Incoming, Receiver
from kvstore.types import Checks
from kvstore.v1 import cache_pb2 as pb

SIZES = st.lists(
    st.one_of(
        st.integers(0, 3000),
        st.sampled_from([FRAME_BYTES - 1, FRAME_BYTES, FRAME_BYTES + 1, 2 * FRAME_BYTES]),
    ),
    max_size=8,
)


def checks_of(payload: bytes, *, xxh3: bool = True) -> Checks:
    return Checks(zlib.crc32(payload), xxhash.xxh3_64_intdigest(payload) if xxh3 else 0, xxh3)


def cut(payloads: list[bytes]) -> list[tuple[list[int], bytes]]:
    cutter = Cutter[int]()
    frames = [frame for number, payload in enumerate(payloads) for frame in cutter.add(number, payload)]
    return [(numbers, b"".join(data)) for numbers, data in (*frames, *cutter.rest())]


@settings(deadline=None)
@given(SIZES, st.integers(0, 2**32))
def test_what_is_cut_is_put_together_again(sizes: list[int], seed: int) -> None:
    payloads = [random.Random(seed + i).randbytes(size) for i, size in enumerate(sizes)]
    frames = cut(payloads)
    assert all(len(data) == FRAME_BYTES for _, data in frames[:-1])
    assert b"".join(data for _, data in frames) == b"".join(payloads)
    assert [number for numbers, _ in frames for number in numbers] == list(range(len(sizes)))
    receiver, incoming = (
        Receiver(),
        [Incoming(f"item {i}", len(payload), checks_of(payload)) for i, payload in enumerate(payloads)],
    )
    whole = [
        item for numbers, data in frames for item in receiver.accept([incoming[n] for n in numbers], data)
    ]
    receiver.finish()
    assert whole == incoming
    assert [bytes(item.payload()) for item in incoming] == payloads


@given(SIZES)
def test_each_frame_names_the_items_that_begin_in_it(sizes: list[int]) -> None:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    at = 0
    for numbers, data in cut([bytes(size) for size in sizes]):
        for number in numbers:
            inside = at <= starts[number] < at + len(data)
            assert inside or (sizes[number] == 0 and starts[number] == at + len(data))
        at += len(data)


@given(st.binary(min_size=1, max_size=200), st.integers(0, 10_000), st.booleans())
def test_every_changed_bit_is_noticed(payload: bytes, place: int, xxh3: bool) -> None:
    changed = bytearray(payload)
    changed[place // 8 % len(changed)] ^= 1 << place % 8
    item = Incoming("it", len(payload), checks_of(payload, xxh3=xxh3))
    assert item.feed(memoryview(bytes(changed))) == len(payload)
    with pytest.raises(DamagedBytes, match="xxh3_64" if xxh3 else "crc32"):
        item.check()


def test_the_stronger_checksum_counts_where_it_was_sent() -> None:
    item = Incoming("it", 3, Checks(zlib.crc32(b"abc"), 5, True))
    item.feed(memoryview(b"abc"))
    with pytest.raises(DamagedBytes, match="xxh3_64"):
        item.check()


def test_a_stream_that_ends_early_or_goes_on_too_long_is_refused() -> None:
    receiver = Receiver()
    assert list(receiver.accept([Incoming("it", 4, checks_of(b"abcd"))], b"ab")) == []
    with pytest.raises(InvalidArgument, match="data=2; allowed: 4"):
        receiver.finish()
    with pytest.raises(InvalidArgument, match="past the items"):
        list(receiver.accept([], b"cde"))
    with pytest.raises(LimitExceeded, match=str(FRAME_BYTES)):
        list(Receiver().accept([], bytes(FRAME_BYTES + 1)))


@given(
    st.lists(st.integers(0, 2**63), max_size=5),
    st.lists(st.integers(0, 300), max_size=4),
    st.sampled_from([0, 1, 127, 128, 16_383, 16_384, FRAME_BYTES]),
)
def test_a_frame_that_was_put_together_by_hand_is_the_message_to_the_byte(
    lengths: list[int], sizes: list[int], more: int
) -> None:
    headers = [pb.ItemHeader(kind=pb.BLOCK, index=i, length=length) for i, length in enumerate(lengths)]
    data = [memoryview(random.Random(size).randbytes(size)) for size in (*sizes, more) if size]
    made = wire_frame(headers, data)
    assert made == pb.ItemFrame(items=headers, data=b"".join(data)).SerializeToString()
