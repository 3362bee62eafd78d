"""Places of what is visible and not durable yet: no segment of a log ever has such a number."""

from __future__ import annotations

from kvstore.store.base import Place

ACCEPTED_SEGMENTS = 1 << 31
"""From here on, a number for each reservation. A log whose segments are 64 MiB reaches it after 144 EB."""


def accepted_segment(reservation_id: int) -> int:
    return ACCEPTED_SEGMENTS + reservation_id % ACCEPTED_SEGMENTS


def accepted_place(reservation_id: int, index: int, length: int) -> Place:
    """Of the item with this place in its Reserve call, until it is durable. Nothing else has it meanwhile."""
    return Place(ACCEPTED_SEGMENTS + reservation_id % ACCEPTED_SEGMENTS, index, length)


def is_accepted(segment_id: int) -> bool:
    return segment_id >= ACCEPTED_SEGMENTS
