"""Which keys are held, as far as is known: asked for once, answered later, forgotten with the last request that asked. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class Verdict(Enum):
    """HIT, MISS, or LATER: it is being asked for."""

    HIT = "hit"
    MISS = "miss"
    LATER = "later"


class Question(NamedTuple):
    """`number` tells this question from an earlier one about the same key, whose answer counts no more."""

    key: bytes
    number: int


@dataclass(slots=True)
class _Known:
    number: int
    since: float
    verdict: Verdict = Verdict.LATER
    requests: set[str] = field(default_factory=set)


class Lookups:
    """One scheduler's table. Times are monotonic seconds.

    A verdict does not change while any request that asked for the key lives, but to MISS: after a load that failed, so that
    nobody tries it for ever, and where no answer has come within `patience_seconds`, so that nobody waits for a service that
    is slow. Past `most` keys a key is a MISS and is not asked for.
    """

    def __init__(self, *, patience_seconds: float, most: int) -> None:
        self._patience = patience_seconds
        self._most = most
        self._known: dict[bytes, _Known] = {}
        self._requests: dict[str, set[bytes]] = {}
        self._to_ask: list[Question] = []
        self._last = 0
        self.late = 0
        """Keys given up since no answer came in time."""
        self.refused = 0
        """Keys that found the table full."""

    def __len__(self) -> int:
        return len(self._known)

    def verdict(self, key: bytes, request: str, now: float) -> Verdict:
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= self._most:
                self.refused += 1
                return Verdict.MISS
            self._last += 1
            known = self._known[key] = _Known(self._last, now)
            self._to_ask.append(Question(key, known.number))
        known.requests.add(request)
        self._requests.setdefault(request, set()).add(key)
        if known.verdict is Verdict.LATER and now - known.since >= self._patience:
            known.verdict = Verdict.MISS
            self.late += 1
        return known.verdict

    @property
    def has_questions(self) -> bool:
        """Whether something is to be asked."""
        return bool(self._to_ask)

    def take_questions(self) -> list[Question]:
        """What is to be asked now, in the order in which it came up; each question once."""
        taken = [each for each in self._to_ask if self._open(each) is not None]
        self._to_ask = []
        return taken

    def answered(self, answers: Iterable[tuple[Question, bool]]) -> None:
        for question, is_held in answers:
            known = self._open(question)
            if known is not None:
                known.verdict = Verdict.HIT if is_held else Verdict.MISS

    def load_failed(self, keys: Iterable[bytes]) -> None:
        """These could not be loaded: a MISS for every request that knows them."""
        for key in keys:
            known = self._known.get(key)
            if known is not None:
                known.verdict = Verdict.MISS

    def request_ended(self, request: str) -> None:
        for key in self._requests.pop(request, ()):
            known = self._known[key]
            known.requests.discard(request)
            if not known.requests:
                del self._known[key]

    def _open(self, question: Question) -> _Known | None:
        """What is known of the question's key, while it waits for this question's answer."""
        known = self._known.get(question.key)
        if known is None or known.number != question.number or known.verdict is not Verdict.LATER:
            return None
        return known
