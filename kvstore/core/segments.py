"""Which items lie in which segment: what a cleaned segment's new places are looked up by."""

from __future__ import annotations

import sys
from array import array

import numpy as np
from numpy.typing import NDArray


class SegmentMap:
    """Per segment the handles of its items, four bytes each, and how many are still there.

    A handle that left is not taken out (that would be a search); `members` may therefore name handles that lie elsewhere
    by now, or one handle twice, and the caller compares places. A segment's list goes with its last item, and is never
    longer than the number of records that were written to it.
    """

    def __init__(self) -> None:
        self._members: dict[int, array[int]] = {}
        self._living: dict[int, int] = {}

    def add(self, segment_id: int, handle: int) -> None:
        members = self._members.get(segment_id)
        if members is None:
            members = self._members[segment_id] = array("i")
            self._living[segment_id] = 0
        members.append(handle)
        self._living[segment_id] += 1

    def fill(self, segment_ids: NDArray[np.uint64], handles: NDArray[np.int32]) -> None:
        """Add many, one at least, each to its segment."""
        order = np.argsort(segment_ids, kind="stable")
        ordered = segment_ids[order]
        begins = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
        for segment_id, own in zip(
            ordered[np.append(0, begins)].tolist(), np.split(handles[order], begins), strict=True
        ):
            members = self._members.setdefault(segment_id, array("i"))
            members.frombytes(own.tobytes())
            self._living[segment_id] = self._living.get(segment_id, 0) + len(own)

    def remove(self, segment_id: int) -> None:
        """One item has left the segment."""
        left = self._living[segment_id] - 1
        if left:
            self._living[segment_id] = left
        else:
            del self._living[segment_id]
            del self._members[segment_id]

    def members(self, segment_id: int) -> list[int]:
        """Handles, each once, in no order that means anything."""
        return list(dict.fromkeys(self._members.get(segment_id, ())))

    def counts(self) -> dict[int, int]:
        return dict(self._living)

    def memory_bytes(self) -> int:
        return sum(map(sys.getsizeof, self._members.values()))
