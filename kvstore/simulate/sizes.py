"""How much a simulated store holds, as texts that people write: shares of what the log asks for in all, or bytes."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction

from kvstore.errors import InvalidArgument
from kvstore.profile.base import Profile
from kvstore.units import parse_size

ALL = "all"
"""The size of a store without a limit."""


@dataclass(frozen=True, slots=True)
class Size:
    """`text` as it was given; `blocks` that fit, None for no limit."""

    text: str
    blocks: int | None


def parse_capacity(text: str, *, footprint: int, profile: Profile | None) -> Size:
    """Blocks in `3%` of the footprint (rounded down), or in `64GiB` of the profile's blocks; `all` for no limit.

    InvalidArgument for what is neither, for less than one block, for more than the footprint, and for bytes without a
    profile.
    """
    if text == ALL:
        return Size(text, None)
    share = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)%", text)
    allowed = f"a share above 0 and up to 100%, or bytes as in 64GiB, or {ALL}; the footprint is {footprint:,} blocks"
    if share is not None:
        # More than all is refused as written: of a small footprint it may round down to all.
        percent = Fraction(share[1])
        blocks = math.floor(percent * footprint / 100) if percent <= 100 else footprint + 1
    elif not re.match(r"[0-9]", text):
        raise InvalidArgument("not a size", field="--size", value=text, allowed=allowed)
    elif profile is None:
        raise InvalidArgument(
            "a size in bytes needs a model's block",
            field="--size",
            value=text,
            allowed=f"--profile NAME, or {allowed}",
        )
    else:
        blocks = parse_size(text, name="--size") // profile.block_bytes
    if blocks < 1:
        raise InvalidArgument("no block fits", field="--size", value=text, allowed=allowed)
    if blocks > footprint:
        raise InvalidArgument("more than the log asks for", field="--size", value=text, allowed=allowed)
    return Size(text, blocks)
