"""Who holds how much of something that all share: no session may hold all of it."""

from __future__ import annotations

NOBODY = ""
"""Who is not held to a share."""

SHARE = 2
"""One session holds at most this part of all."""


class Shares:
    """Bytes that are held, by session. What is larger than a share is for who holds nothing else."""

    def __init__(self, limit_bytes: int) -> None:
        self.share_bytes = max(1, limit_bytes // SHARE)
        self._held: dict[str, int] = {}

    def held(self, session: str) -> int:
        return self._held.get(session, 0)

    def allows(self, session: str, length: int) -> bool:
        held = self.held(session)
        return session == NOBODY or not held or held + length <= self.share_bytes

    def take(self, session: str, length: int) -> None:
        if session != NOBODY and length:
            self._held[session] = self.held(session) + length

    def give_back(self, session: str, length: int) -> None:
        if session == NOBODY or not length:
            return
        left = self.held(session) - length
        assert left >= 0, f"{length} bytes given back, {-left} more than were held"
        if left:
            self._held[session] = left
        else:
            del self._held[session]
