"""Which segment goes, and which is cleaned first. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kvstore.store.base import Cheapest
from kvstore.store.segment import Segment, State

COPY_BYTES_MAX = 32 << 20
"""Of one piece of a clean."""


def may_go(segment: Segment) -> bool:
    """DYING: an earlier removal failed half-way."""
    if segment.state is State.DYING:
        return True
    return segment.state is State.CLOSED and segment.readers == 0 and not segment.has_live()


def cheapest_of(segments: Iterable[Segment]) -> Cheapest | None:
    """See RecordLog.cheapest_segment."""
    sealed = [
        Cheapest(segment.segment_id, segment.live, segment.allocated)
        for segment in segments
        if segment.state is State.CLOSED and segment.has_live()
    ]
    return min(sealed, key=lambda each: (each.live_share, each.segment_id), default=None)


def copy_groups(indexes: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
    """Records in pieces that memory holds easily."""
    group: list[int] = []
    total = 0
    for index, length in zip(indexes, lengths, strict=True):
        if group and total + length > COPY_BYTES_MAX:
            yield group
            group, total = [], 0
        group.append(index)
        total += length
    if group:
        yield group
