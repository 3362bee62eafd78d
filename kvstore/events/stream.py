"""A stream of numbered batches, and what of it is kept for those that ask again."""

from __future__ import annotations

END_SEQUENCE = b"\xff" * 8
"""In place of a number, with an empty payload: the end of an answer."""

SEQUENCE_BYTES = 8


class Kept:
    """Numbers batches one after the other, and keeps the last snapshot, from its first batch on, with what has come since.

    A snapshot begins by clearing everything, so that it and what follows say all that is held. Of what follows at most
    `limit_bytes` are kept; past that the snapshot goes, and then the oldest of the rest: who asks for more is given another snapshot.
    """

    def __init__(self, *, first: int, limit_bytes: int) -> None:
        """`first`: the first batch's number, larger than any of an earlier life of the sender, so that a reader takes a new life for
        a gap and asks."""
        self.next = first
        """The number of the next batch."""
        self.is_open = False
        """A snapshot is being written."""
        self._limit = limit_bytes
        self._batches: dict[int, bytes] = {}
        self._first = self._snapshot_at = self._snapshot_end = first
        self._later_bytes = self._bytes = 0

    @property
    def kept_bytes(self) -> int:
        """Of all payloads that are kept."""
        return self._bytes

    def begin_snapshot(self) -> None:
        """The next batch is a snapshot's first. What was kept before goes: nobody needs both."""
        self._batches.clear()
        self._first = self._snapshot_at = self._snapshot_end = self.next
        self._bytes = self._later_bytes = 0
        self.is_open = True

    def end_snapshot(self) -> None:
        self._snapshot_end = self.next
        self.is_open = False

    def add(self, payload: bytes) -> int:
        """The number of this batch."""
        number = self.next
        self.next += 1
        self._batches[number] = payload
        self._bytes += len(payload)
        if not self.is_open:
            self._later_bytes += len(payload)
            self._shrink()
        return number

    def skip(self) -> int:
        """The number of a batch that is not to be kept."""
        number = self.next
        self.next += 1
        self._first = self._snapshot_at = self._snapshot_end = self.next
        return number

    def get(self, number: int) -> bytes | None:
        """None for one that is not kept."""
        return self._batches.get(number)

    def begin_of_answer(self, asked: int) -> int | None:
        """With which batch an answer to who wants everything from `asked` on begins: that one, or, where some of it is kept no more or
        is of another life, the snapshot's first; None where there must be another snapshot before."""
        if self._first <= asked <= self.next:
            return asked
        return self._snapshot_at if self._snapshot_at >= self._first else None

    def _shrink(self) -> None:
        if self._later_bytes <= self._limit:
            return
        while self._first < self._snapshot_end:
            self._drop_first()
        while self._later_bytes > self._limit:
            self._later_bytes -= self._drop_first()

    def _drop_first(self) -> int:
        size = len(self._batches.pop(self._first))
        self._first += 1
        self._bytes -= size
        return size
