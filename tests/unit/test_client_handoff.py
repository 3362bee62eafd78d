"""Handoffs and writes as frames: what is sent comes back whole, and anything else is damage."""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import DamagedBytes
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.checks import make_checks
from kvstore_client.framing import FRAME_BYTES, cut_frames
from kvstore_client.handoff import read_handoff
from kvstore_client.handoff_frames import handoff_frames
from kvstore_client.write_messages import write_frames


def header(payload: bytes, **changes: object) -> pb.HandoffHeader:
    fields = {
        "length": len(payload),
        "crc32": zlib.crc32(payload),
        "lineage": pb.LINEAGE_EXACT,
        "position": 7,
        **changes,
    }
    return pb.HandoffHeader(**fields)  # type: ignore[arg-type]


def stream(frames: Iterable[pb.HandoffFrame]) -> Generator[pb.HandoffFrame, None, None]:
    yield from frames


@pytest.mark.parametrize("size", [0, 1, FRAME_BYTES - 1, FRAME_BYTES, FRAME_BYTES + 1, 3 * FRAME_BYTES + 5])
def test_a_handoff_of_any_size_comes_back(size: int) -> None:
    payload = bytes(i % 251 for i in range(1000)) * (size // 1000 + 1)
    payload = payload[:size]
    frames = list(handoff_frames(header(payload), payload))
    assert all(len(frame.data) <= FRAME_BYTES for frame in frames)
    assert [frame.HasField("header") for frame in frames] == [True] + [False] * (len(frames) - 1)
    got = read_handoff(stream(frames))
    assert (got["position"], got["payload"]) == (7, payload)


@given(st.binary(min_size=1, max_size=60), st.integers(0, 100), st.integers(1, 255))
def test_a_changed_byte_of_a_handoff_is_damage(payload: bytes, place: int, flip: int) -> None:
    changed = bytearray(payload)
    changed[place % len(payload)] ^= flip
    with pytest.raises(DamagedBytes, match="checksum"):
        read_handoff(stream([pb.HandoffFrame(header=header(payload), data=bytes(changed))]))


@pytest.mark.parametrize(
    ("frames", "match"),
    [
        ([], "without frames"),
        ([pb.HandoffFrame(data=b"ab")], "no header"),
        ([pb.HandoffFrame(header=header(b"ab"), data=b"a")], "ended early"),
        ([pb.HandoffFrame(header=header(b"ab"), data=b"abc")], "too many bytes"),
        ([pb.HandoffFrame(header=header(b"ab"), data=b"ab"), pb.HandoffFrame(data=b"c")], "too many bytes"),
        (
            [
                pb.HandoffFrame(header=header(b"ab"), data=b"a"),
                pb.HandoffFrame(header=header(b"ab"), data=b"b"),
            ],
            "second header",
        ),
        ([pb.HandoffFrame(header=header(b"ab", length=1 << 40), data=b"ab")], "too long"),
        ([pb.HandoffFrame(header=header(b"ab", lineage=0), data=b"ab")], "no lineage"),
    ],
)
def test_handoff_frames_that_no_sender_may_send_are_damage(frames: list[pb.HandoffFrame], match: str) -> None:
    with pytest.raises(DamagedBytes, match=match):
        read_handoff(stream(frames))


@given(st.dictionaries(st.integers(0, 50), st.binary(max_size=30), min_size=1, max_size=8))
def test_a_write_names_the_reservation_once_and_the_items_in_order(payloads: dict[int, bytes]) -> None:
    frames = list(write_frames(9, sorted(payloads.items())))
    assert [frame.reservation_id for frame in frames] == [9] + [0] * (len(frames) - 1)
    items = [item for frame in frames for item in frame.items]
    assert [item.item for item in items] == sorted(payloads)
    assert b"".join(frame.data for frame in frames) == b"".join(payloads[index] for index in sorted(payloads))
    for item in items:
        checks = make_checks(payloads[item.item])
        assert (item.length, item.crc32) == (len(payloads[item.item]), zlib.crc32(payloads[item.item]))
        assert (item.xxh3_64, item.has_xxh3) == (checks.xxh3_64, checks.has_xxh3)


def test_frames_are_made_no_earlier_than_they_are_sent() -> None:
    made = []

    def items() -> Generator[tuple[int, bytes], None, None]:
        for index in range(10):
            made.append(index)
            yield index, bytes(FRAME_BYTES)

    frames = cut_frames(items())
    next(frames)
    assert made == [0, 1]
