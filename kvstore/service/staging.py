"""Bytes that wait between a client and the disk on their way in: bounded in all, and for each session."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.errors import LimitExceeded
from kvstore.service.shares import NOBODY, Shares


class Staging:
    """Counts the bytes that are held. `take` before memory is used, `give_back` when it is let go."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self.refused_total = 0
        self._shares = Shares(limit_bytes)

    def take(self, length: int, session: str = NOBODY) -> None:
        """Claim room for `length` bytes, or LimitExceeded: nobody waits here, since what would free the room may be
        waiting too."""
        if not self._shares.allows(session, length):
            self.refused_total += 1
            raise LimitExceeded(
                "no room for more bytes of this session on their way in; commit or abort first",
                field="staging_per_session",
                value=self._shares.held(session) + length,
                allowed=f"{self._shares.share_bytes} bytes, or one item alone",
            )
        if self.held_bytes + length > self.limit_bytes:
            self.refused_total += 1
            raise LimitExceeded(
                "no room for more bytes on their way in; commit or abort first, or try again later",
                field="staging",
                value=self.held_bytes + length,
                allowed=f"{self.limit_bytes} bytes for all sessions together",
            )
        self.held_bytes += length
        self._shares.take(session, length)

    @contextmanager
    def holding(self, length: int, session: str = NOBODY) -> Iterator[None]:
        """So many bytes are held inside. Raises as `take`."""
        self.take(length, session)
        try:
            yield
        finally:
            self.give_back(length, session)

    def is_crowded(self, session: str = NOBODY) -> bool:
        """Whether more than half of what the session may hold, or of all, is held."""
        share = 2 * self._shares.held(session) > self._shares.share_bytes
        return share or 2 * self.held_bytes > self.limit_bytes

    def give_back(self, length: int, session: str = NOBODY) -> None:
        self._shares.give_back(session, length)
        assert 0 <= length <= self.held_bytes, f"{length} of {self.held_bytes} staged bytes given back"
        self.held_bytes -= length
