"""What one tenant may take of what all share, and the bucket that measures rates. Pure: time comes in as a number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

BURST_SECONDS = 1.0
"""Of its rate a tenant may use so much at once after a pause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """`namespaces`: that it may open. `quota`: payload bytes of blocks and states on the disk, what is being written included; 0 keeps a
    tenant out. `in_flight`: bytes that are on their way in and out at once. Rates count calls that begin something, and payload
    bytes read and written. None: no limit but those that all share."""

    namespaces: int | None = None
    quota: int | None = None
    in_flight: int | None = None
    calls_per_second: float | None = None
    bytes_per_second: float | None = None


UNLIMITED = TenantLimits()


class Bucket(NamedTuple):
    """A token bucket at the time `at`, monotonic seconds: `level` of it is there to be spent; below zero it is owed."""

    level: float
    at: float


def full(rate: float, now: float) -> Bucket:
    return Bucket(_most(rate), now)


def spend(bucket: Bucket, amount: float, *, rate: float, now: float) -> tuple[Bucket, float]:
    """The bucket after `amount` was asked for, and the seconds to wait: 0 where it was spent. What is more than a bucket holds is
    spent from a full one and owed, so that the rate holds in the long run and nothing is too large for ever."""
    level = min(_most(rate), bucket.level + max(0.0, now - bucket.at) * rate)
    missing = min(amount, _most(rate)) - level
    if missing > 0:
        return Bucket(level, now), max(missing / rate, 0.001)
    return Bucket(level - amount, now), 0.0


def _most(rate: float) -> float:
    return max(1.0, rate * BURST_SECONDS)
