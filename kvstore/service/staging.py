"""Bytes that wait between a client and the disk, on their way in or, as later slices, out: bounded in all."""

from __future__ import annotations

from kvstore.errors import LimitExceeded


class Staging:
    """Counts the bytes that are held. `take` before memory is used, `give_back` when it is let go."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self.refused_total = 0

    def take(self, length: int) -> None:
        """Claim room for `length` bytes, or LimitExceeded: nobody waits here, since what would free the room may be
        waiting too."""
        if self.held_bytes + length > self.limit_bytes:
            self.refused_total += 1
            raise LimitExceeded(
                "no room for more bytes on their way in; commit or abort first, or try again later",
                field="staging",
                value=self.held_bytes + length,
                allowed=f"{self.limit_bytes} bytes for all sessions together",
            )
        self.held_bytes += length

    def take_for_readers(self, length: int) -> None:
        """Claim room for `length` bytes that a reader has yet to take, or LimitExceeded. Readers leave half of the room to
        writers, who would be refused while a slow one holds all of it."""
        room = self.limit_bytes // 2 - self.held_bytes
        if length > room:
            self.refused_total += 1
            raise LimitExceeded(
                "no room to keep slices until their turn; fetch whole blocks, or fewer",
                field="slices",
                value=f"{length} bytes of blocks",
                allowed=f"{max(room, 0)} bytes now",
            )
        self.held_bytes += length

    def give_back(self, length: int) -> None:
        assert 0 <= length <= self.held_bytes, f"{length} of {self.held_bytes} staged bytes given back"
        self.held_bytes -= length
