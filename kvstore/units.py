"""Sizes, times and counts as people write them: 64GiB, 72h, 1000."""

from __future__ import annotations

import math
import re

from kvstore.errors import ConfigError

_SIZE_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_TIME_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
MAX_BYTES = 1 << 60


def parse_size(text: str | int, *, name: str) -> int:
    """Bytes from `64GiB`, `4096`, `1.5MiB`; ConfigError naming `name` for anything else."""
    allowed = "a number with one of B, KiB, MiB, GiB, TiB, as in 64GiB"
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", str(text).strip())
    if match is None or match[2] not in _SIZE_UNITS:
        raise ConfigError("not a size", field=name, value=text, allowed=allowed)
    number = float(match[1]) * _SIZE_UNITS[match[2]]
    if number > MAX_BYTES or number != math.floor(number):
        raise ConfigError(
            "not a size", field=name, value=text, allowed=f"{allowed}; whole bytes up to 1024 PiB"
        )
    return int(number)


def size_text(count: int) -> str:
    """The shortest text that `parse_size` reads as `count` bytes, a whole number."""
    for unit, scale in reversed(_SIZE_UNITS.items()):
        if unit and count and int(count) % scale == 0:
            return f"{count // scale}{unit}"
    return f"{count}B"


def rounded(count: int) -> str:
    """A size with three digits, for people."""
    unit = next(unit for unit, scale in reversed(_SIZE_UNITS.items()) if count >= scale or scale == 1)
    return f"{count / _SIZE_UNITS[unit]:.3g}{unit or 'B'}"


def time_text(seconds: float) -> str:
    """The shortest text that `parse_time` reads as so many seconds."""
    for unit in ("h", "m", "s"):
        if seconds >= _TIME_UNITS[unit] and seconds % _TIME_UNITS[unit] == 0:
            return f"{seconds / _TIME_UNITS[unit]:g}{unit}"
    return f"{seconds * 1000:g}ms" if 0 < seconds < 1 else f"{seconds:g}s"


def parse_time(text: str | float, *, name: str) -> float:
    """Seconds from `72h`, `500ms`, `0`; ConfigError naming `name` for anything else. 72 of what, nobody can tell."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", str(text).strip())
    if match is None or (match[2] not in _TIME_UNITS and (match[2] or float(match[1]))):
        why = "a time without a unit" if match and not match[2] else "not a time"
        raise ConfigError(
            why, field=name, value=text, allowed="a number with one of ms, s, m, h, d, as in 72h"
        )
    seconds = float(match[1]) * _TIME_UNITS.get(match[2], 0.0)
    if not math.isfinite(seconds):
        raise ConfigError("a time without end", field=name, value=text, allowed="a time, as in 72h")
    return seconds


def parse_count(text: str | int, *, name: str) -> int:
    # No count has more digits; Python refuses to read thousands of them.
    if isinstance(text, bool) or not re.fullmatch(r"[0-9]{1,19}", str(text).strip()):
        raise ConfigError("not a count", field=name, value=text, allowed="a whole number")
    return int(text)
