"""A reservation's items as messages, and how long it may take to hand them over. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvstore.types import BytesLike
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.checks import make_checks
from kvstore_client.framing import cut_frames
from kvstore_client.values import Deadlines

Items = Sequence[tuple[int, BytesLike]]
"""By their place in the reserve call, ascending."""


def size_of(items: Items) -> int:
    return sum(memoryview(payload).nbytes for _, payload in items)


def write_seconds(deadlines: Deadlines, size: int) -> float:
    """How long a write of so many bytes may take."""
    return deadlines.write + size / (1 << 20) * deadlines.write_per_mib


def write_frames(reservation_id: int, items: Items) -> Iterator[pb.WriteFrame]:
    described = ((write_item(index, payload), payload) for index, payload in items)
    for headers, data in cut_frames(described):
        yield pb.WriteFrame(reservation_id=reservation_id, items=headers, data=data)
        reservation_id = 0


def write_item(index: int, payload: BytesLike) -> pb.WriteItem:
    checks = make_checks(payload)
    return pb.WriteItem(
        item=index,
        length=memoryview(payload).nbytes,
        crc32=checks.crc32,
        xxh3_64=checks.xxh3_64,
        has_xxh3=checks.has_xxh3,
    )
