"""Items joined from frames: any sizes and any cuts give the same items; anything else is damage, never wrong bytes."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Generator, Iterable
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import DamagedBytes
from kvstore.types import ItemKind, Lineage
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.checks import make_checks
from kvstore_client.fetching import Fetching
from kvstore_client.framing import ITEM_BYTES_MAX, ItemJoiner, cut_frames
from kvstore_client.values import FetchedItem
from kvstore_client.wanted import Place, Whole

payload_lists = st.lists(st.one_of(st.binary(max_size=40), st.just(b""), st.none()), max_size=12)


def header(index: int, payload: bytes | None, *, kind: int = pb.BLOCK) -> pb.ItemHeader:
    if payload is None:
        return pb.ItemHeader(kind=kind, index=index, missing=True)
    checks = make_checks(payload)
    return pb.ItemHeader(
        kind=kind,
        index=index,
        length=len(payload),
        crc32=checks.crc32,
        xxh3_64=checks.xxh3_64,
        has_xxh3=checks.has_xxh3,
        lineage=pb.LINEAGE_EXACT,
    )


def sent(payloads: Iterable[bytes | None], *, frame_bytes: int = 16, first: int = 0) -> list[pb.ItemFrame]:
    items = [(header(first + i, payload), payload or b"") for i, payload in enumerate(payloads)]
    return [
        pb.ItemFrame(items=headers, data=data) for headers, data in cut_frames(items, frame_bytes=frame_bytes)
    ]


def stream(frames: Iterable[pb.ItemFrame]) -> Generator[pb.ItemFrame, None, None]:
    yield from frames


def read_items(
    frames: Generator[pb.ItemFrame, None, None], wanted: Whole, *, verify: bool
) -> Generator[FetchedItem, None, None]:
    fetching = Fetching(1, wanted, verify=verify)
    with closing(frames):
        for frame in frames:
            yield from fetching.feed(frame)
    fetching.finish()


def read(
    frames: Iterable[pb.ItemFrame],
    count: int,
    *,
    first: int = 0,
    state_at: int | None = None,
    verify: bool = True,
) -> list[FetchedItem]:
    state = () if state_at is None else (Place(ItemKind.STATE, state_at),)
    return list(read_items(stream(frames), Whole(first, count, state), verify=verify))


@given(payload_lists, st.integers(1, 50))
def test_any_items_cut_to_frames_of_any_size_come_back_whole(
    payloads: list[bytes | None], frame_bytes: int
) -> None:
    frames = sent(payloads, frame_bytes=frame_bytes)
    assert all(len(frame.data) <= frame_bytes for frame in frames)
    items = read(frames, len(payloads))
    assert [item.payload for item in items] == payloads
    assert [item.index for item in items] == list(range(len(payloads)))


@given(st.lists(st.binary(min_size=1, max_size=30), min_size=1, max_size=8), st.data())
def test_frames_cut_at_any_places_join_to_the_same_items(payloads: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(payloads)
    inner = data.draw(st.sets(st.integers(1, max(len(whole) - 1, 1))))
    edges = [0, *sorted(edge for edge in inner if edge < len(whole)), len(whole)]
    starts = [sum(map(len, payloads[:i])) for i in range(len(payloads))]
    frames = [
        pb.ItemFrame(
            items=[header(i, payloads[i]) for i, at in enumerate(starts) if low <= at < high],
            data=whole[low:high],
        )
        for low, high in itertools.pairwise(edges)
    ]
    assert [item.payload for item in read(frames, len(payloads))] == payloads


@given(
    st.lists(st.binary(min_size=1, max_size=60), min_size=1, max_size=6),
    st.integers(0, 10**6),
    st.integers(1, 255),
)
def test_a_changed_byte_is_damage_and_items_before_it_are_good(
    payloads: list[bytes], place: int, flip: int
) -> None:
    frames = sent(payloads)
    whole = bytearray(b"".join(frame.data for frame in frames))
    at = place % len(whole)
    whole[at] ^= flip
    cut = 0
    for frame in frames:
        size = len(frame.data)
        frame.data = bytes(whole[cut : cut + size])
        cut += size
    good: list[bytes | None] = []
    with pytest.raises(DamagedBytes, match="checksum"):
        good.extend(item.payload for item in read_items(stream(frames), Whole(0, len(payloads)), verify=True))
    assert good == payloads[: len(good)]
    assert sum(map(len, payloads[: len(good)])) <= at < sum(map(len, payloads[: len(good) + 1]))


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=6), st.integers(0, 10**6))
def test_a_stream_cut_short_anywhere_is_damage(payloads: list[bytes], place: int) -> None:
    frames = sent(payloads, frame_bytes=7)
    at = place % sum(map(len, payloads))
    kept = []
    for frame in frames:
        if len(frame.data) > at:
            # Headers of items whose first byte is gone stay: they promise what does not come.
            kept.append(pb.ItemFrame(items=frame.items, data=frame.data[:at]))
            break
        kept.append(frame)
        at -= len(frame.data)
    got: list[bytes | None] = []
    with pytest.raises(DamagedBytes):
        got.extend(item.payload for item in read_items(stream(kept), Whole(0, len(payloads)), verify=True))
    assert got == payloads[: len(got)]
    assert len(got) < len(payloads)


@given(st.lists(st.binary(max_size=40), max_size=6), st.binary(min_size=1, max_size=40))
def test_bytes_after_the_last_item_are_damage(payloads: list[bytes], extra: bytes) -> None:
    with pytest.raises(DamagedBytes):
        read([*sent(payloads), pb.ItemFrame(data=extra)], len(payloads))


@given(st.lists(st.binary(max_size=20), min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_items_in_another_order_are_damage(payloads: list[bytes], random: object) -> None:
    order = list(range(len(payloads)))
    random.shuffle(order)  # type: ignore[attr-defined]
    items = [(header(i, payloads[i]), payloads[i]) for i in order]
    frames = [pb.ItemFrame(items=headers, data=data) for headers, data in cut_frames(items, frame_bytes=16)]
    if order == sorted(order):
        assert [item.payload for item in read(frames, len(payloads))] == payloads
    else:
        with pytest.raises(DamagedBytes, match="another's place"):
            read(frames, len(payloads))


@given(
    st.lists(
        st.builds(
            lambda items, data: pb.ItemFrame(items=items, data=data),
            st.lists(
                st.builds(
                    pb.ItemHeader,
                    kind=st.sampled_from([0, 1, 2]),
                    index=st.integers(0, 3),
                    length=st.integers(0, 12),
                    crc32=st.sampled_from([0, zlib.crc32(b"abc")]),
                    lineage=st.sampled_from([0, 1, 2]),
                    missing=st.booleans(),
                ),
                max_size=3,
            ),
            st.sampled_from([b"", b"abc", b"abcabc", b"ab", b"c"]),
        ),
        max_size=5,
    )
)
def test_frames_of_any_content_give_checked_bytes_or_damage(frames: list[pb.ItemFrame]) -> None:
    try:
        items = read(frames, 3)
    except DamagedBytes:
        return
    assert [item.index for item in items] == [0, 1, 2]
    assert all(item.payload in (None, b"", b"abc") for item in items)


def test_a_state_comes_after_the_blocks_at_its_position() -> None:
    items = [(header(4, b"block"), b"block"), (header(160, b"state", kind=pb.STATE), b"state")]
    frames = [pb.ItemFrame(items=headers, data=data) for headers, data in cut_frames(items)]
    found = read(frames, 1, first=4, state_at=160)
    assert [(item.kind, item.index, item.payload, item.lineage) for item in found] == [
        (ItemKind.BLOCK, 4, b"block", Lineage.EXACT),
        (ItemKind.STATE, 160, b"state", Lineage.EXACT),
    ]
    with pytest.raises(DamagedBytes, match="another's place"):
        read(frames, 1, first=4, state_at=128)


@pytest.mark.parametrize(
    ("frames", "match"),
    [
        ([], "ended early"),
        ([pb.ItemFrame()], "ended early"),
        ([pb.ItemFrame(data=b"x")], "bytes of no item"),
        ([pb.ItemFrame(items=[header(0, b"ab")])], "begins in a later one"),
        (
            [pb.ItemFrame(items=[header(0, b"ab"), header(1, b"c")], data=b"a"), pb.ItemFrame(data=b"bc")],
            "begins in a later one",
        ),
        ([pb.ItemFrame(items=[header(0, b"ab")], data=b"a")], "inside an item"),
        ([pb.ItemFrame(items=[header(0, b"ab")], data=b"abc")], "bytes of no item"),
        ([pb.ItemFrame(items=[header(0, None), header(1, None)])], "nobody asked for"),
        ([pb.ItemFrame(items=[header(1, b"ab")], data=b"ab")], "another's place"),
        ([pb.ItemFrame(items=[header(0, b"ab", kind=pb.STATE)], data=b"ab")], "another's place"),
        (
            [pb.ItemFrame(items=[pb.ItemHeader(kind=pb.BLOCK, index=0, length=1 << 60)], data=b"ab")],
            "too long",
        ),
        (
            [
                pb.ItemFrame(
                    items=[pb.ItemHeader(kind=pb.BLOCK, index=0, length=2, crc32=zlib.crc32(b"ab"))],
                    data=b"ab",
                )
            ],
            "lineage",
        ),
    ],
)
def test_frames_that_no_sender_may_send_are_damage(frames: list[pb.ItemFrame], match: str) -> None:
    with pytest.raises(DamagedBytes, match=match):
        read(frames, 1)


def test_a_length_in_a_header_allocates_nothing() -> None:
    joiner: ItemJoiner[pb.ItemHeader] = ItemJoiner()
    assert list(joiner.feed([pb.ItemHeader(length=ITEM_BYTES_MAX)], b"abc")) == []
    with pytest.raises(DamagedBytes, match=f"bytes={ITEM_BYTES_MAX - 3}"):
        joiner.finish()


def test_a_reader_that_gives_up_closes_the_frames() -> None:
    closed = []

    def frames() -> Generator[pb.ItemFrame, None, None]:
        try:
            yield from sent([b"a" * 20, b"b" * 20, b"c" * 20])
        finally:
            closed.append(True)

    items = read_items(frames(), Whole(0, 3), verify=True)
    assert next(items).payload == b"a" * 20
    assert not closed
    items.close()  # type: ignore[attr-defined]
    assert closed


def test_without_verification_changed_bytes_pass() -> None:
    frames = [pb.ItemFrame(items=[header(0, b"abc")], data=b"abd")]
    assert [item.payload for item in read(frames, 1, verify=False)] == [b"abd"]
    with pytest.raises(DamagedBytes):
        read(frames, 1)


def test_the_crc_decides_where_the_writer_had_no_xxhash() -> None:
    good = pb.ItemHeader(
        kind=pb.BLOCK, index=0, length=3, crc32=zlib.crc32(b"abc"), lineage=pb.LINEAGE_BOUNDED
    )
    item = read([pb.ItemFrame(items=[good], data=b"abc")], 1)[0]
    assert (item.payload, item.lineage) == (b"abc", Lineage.BOUNDED)
    with pytest.raises(DamagedBytes):
        read([pb.ItemFrame(items=[good], data=b"abd")], 1)


@pytest.mark.timeout(20)
def test_joining_copies_each_byte_a_bounded_number_of_times() -> None:
    # An item in n frames: were the part that has come copied with each frame, this would move 200 GB and take minutes.
    frame = bytes(1 << 10)
    count = 20_000
    payload = frame * count
    joiner: ItemJoiner[pb.ItemHeader] = ItemJoiner()
    joined = list(joiner.feed([pb.ItemHeader(length=len(payload))], frame))
    for _ in range(count - 1):
        joined += joiner.feed([], frame)
    assert [len(item[1]) for item in joined] == [len(payload)]
