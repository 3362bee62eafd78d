"""When to leave a service alone that could not be reached, and how often to ask it again. Pure: time comes from the caller."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Breaker:
    """`failures` in a row, and the monotonic second until which calls are refused at once.

    closed: failures == 0. open: now < until. half open: neither; one caller may look whether the service lives.
    """

    pause_first: float
    pause_most: float
    failures: int = 0
    until: float = 0.0

    def seconds_left(self, now: float) -> float:
        """Seconds for which calls are still refused; 0 where they are not."""
        return max(self.until - now, 0.0) if self.failures else 0.0

    @property
    def is_closed(self) -> bool:
        return self.failures == 0

    def failed(self, now: float) -> Breaker:
        """Failures of calls that ran beside each other count once: they had the same cause."""
        if self.pause_most == 0 or self.seconds_left(now) > 0:
            return self
        # The exponent is bounded so that a service that is away for days does not overflow a float.
        pause = min(self.pause_first * 2.0 ** min(self.failures, 30), self.pause_most)
        return Breaker(self.pause_first, self.pause_most, self.failures + 1, now + pause)

    def succeeded(self) -> Breaker:
        return self if self.is_closed else Breaker(self.pause_first, self.pause_most)


RETRY_TOKENS_MAX = 10.0
RETRY_TOKENS_PER_CALL = 0.1


@dataclass(frozen=True, slots=True)
class RetryBudget:
    """What all retries of one client may cost together. A retry takes a whole token, and a call that succeeded brings a
    tenth of one: so retries are a tenth of the calls in the long run, however many a broken network asks for."""

    tokens: float = RETRY_TOKENS_MAX

    def taken(self) -> RetryBudget | None:
        """None: there is to be no retry now."""
        return RetryBudget(self.tokens - 1) if self.tokens >= 1 else None

    def succeeded(self) -> RetryBudget:
        if self.tokens == RETRY_TOKENS_MAX:
            return self
        return RetryBudget(min(self.tokens + RETRY_TOKENS_PER_CALL, RETRY_TOKENS_MAX))
