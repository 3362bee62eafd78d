"""How much may be written: the drive's daily budget, and what of it copies for the hit rate may take. No I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.errors import ConfigError

DAY_SECONDS = 86_400.0
SAVED_SECONDS = 3600.0
"""What is not written is saved for an hour at most."""

UNSEEN_SHARE = 1 / 8
"""Of the hour: what one write may take beyond its payload, for headers and footers, and for what is counted afterwards."""

START_SECONDS = 60.0
"""What a start has saved: nothing is known of what the runs before it wrote."""

BYTES_PER_DAY_MIN = 4 << 30
"""An hour's worth holds a sync of the usual size."""

COPIES_NEED_SAVED = 0.5
"""Copies for the hit rate end when this share of the hour is left, so that writes do not have to."""

COPIED_SHARE = 0.18
"""Copied bytes to appended ones, at most. With headers, padding, footers and the catalogue, and with copies of what those
copies displace, a drive then takes less than 1.25 bytes for each byte that is stored."""


@dataclass(frozen=True, slots=True)
class Refill:
    """A bucket that gains `per_second` and holds `most`."""

    per_second: float
    most: float


def check_bytes_per_day(bytes_per_day: int) -> None:
    """Raise ConfigError for a budget that no sync of the usual size would fit into."""
    if 0 < bytes_per_day < BYTES_PER_DAY_MIN:
        raise ConfigError(
            "the drive's daily budget for writes is too small to write in steps",
            field="wear",
            value=bytes_per_day,
            allowed=f"0 for no limit, or {BYTES_PER_DAY_MIN} bytes a day or more",
        )


def refill_of(bytes_per_day: int) -> Refill:
    """What keeps every day, whenever it begins, within its bytes: what may be saved comes off what is gained."""
    hour = bytes_per_day * SAVED_SECONDS / DAY_SECONDS
    return Refill((bytes_per_day - hour) / DAY_SECONDS, hour * (1 - UNSEEN_SHARE))


class WearBudget:
    """Bytes that the device may take now, by a count of those it took and a monotonic time. 0 bytes a day: no limit."""

    def __init__(self, bytes_per_day: int, *, now: float, written: int) -> None:
        """written: what the count says already."""
        self.bytes_per_day = bytes_per_day
        self._refill = refill_of(bytes_per_day)
        self._saved = min(self._refill.most, self._refill.per_second * START_SECONDS)
        self._now = now
        self._written = written

    @property
    def limited(self) -> bool:
        return self.bytes_per_day > 0

    @property
    def left_bytes(self) -> int:
        """As of the last `note`; negative where the last write was larger than it was taken for."""
        return int(self._saved)

    @property
    def most_bytes(self) -> int:
        """What may be saved up: no single write can be larger."""
        return int(self._refill.most)

    def note(self, written: int, now: float) -> None:
        """The device has taken `written` bytes in all by the time `now`."""
        gained = max(0.0, now - self._now) * self._refill.per_second
        self._saved = min(self._refill.most, self._saved + gained) - max(0, written - self._written)
        self._now = max(now, self._now)
        self._written = max(written, self._written)

    def seconds_until(self, need_bytes: int) -> float:
        """How long until so many bytes may be written; 0.0: now. For more than can be saved up: until all is."""
        if not self.limited:
            return 0.0
        missing = min(need_bytes, self._refill.most) - self._saved
        return max(0.0, missing / self._refill.per_second)

    def spares(self, copied_bytes: int) -> bool:
        """Whether copies that nobody is owed may be made."""
        return not self.limited or self._saved - copied_bytes >= COPIES_NEED_SAVED * self._refill.most


class CopyAllowance:
    """Bytes that may be copied forward for the hit rate: earned by appends, at most a segment's worth."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._earned = 0.0

    @property
    def bytes(self) -> int:
        return int(self._earned)

    def appended(self, payload_bytes: int) -> None:
        self._earned = min(self._most, self._earned + COPIED_SHARE * payload_bytes)

    def copied(self, payload_bytes: int) -> None:
        self._earned -= payload_bytes
