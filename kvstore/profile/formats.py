"""Byte formats of cached rows. A format is arithmetic here; the codecs are in the workers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvstore.errors import ProfileError


class RowFormat(StrEnum):
    """How one row of `dim` numbers, of which the last `rope_dim` carry the rotary position, is stored.

    F32             dim x float32.
    FP8_ROPE_BF16   the nope part as e4m3 with one ue8m0 scale per 64, the rope part as bf16; the scales are
                    padded to a multiple of 8 bytes (DeepSeek V4: 448 + 128 + 7 + 1 = 584).
    FP8_ALL         all of it e4m3, one ue8m0 scale per 32 (V4.1 window rows: 512 + 16 = 528).
    FP4_UE8M0       e2m1, one ue8m0 scale per 32 (V4 and V4.1 index keys: 64 + 4 = 68).
    FP4_E4M3        e2m1, one e4m3 scale per 16 (V4.1 entries: 256 + 32 = 288).
    """

    F32 = "f32"
    FP8_ROPE_BF16 = "fp8_e4m3_ue8m0x64_rope_bf16"
    FP8_ALL = "fp8_e4m3_ue8m0x32"
    FP4_UE8M0 = "fp4_e2m1_ue8m0x32"
    FP4_E4M3 = "fp4_e2m1_e4m3x16"


@dataclass(frozen=True, slots=True)
class RowBytes:
    """Bytes of one row. `data` is without scales and padding: the older accounting counts only that."""

    data: int
    total: int


def row_bytes(row_format: RowFormat, dim: int, rope_dim: int) -> RowBytes:
    """Bytes of one stored row; raises ProfileError where `dim` does not fill whole scale groups."""
    nope_dim = dim - rope_dim
    if row_format is RowFormat.F32:
        return RowBytes(4 * dim, 4 * dim)
    if row_format is RowFormat.FP8_ROPE_BF16:
        data = nope_dim + 2 * rope_dim
        return RowBytes(data, data + _round_up(_groups(row_format, nope_dim, 64), 8))
    if row_format is RowFormat.FP8_ALL:
        return RowBytes(dim, dim + _groups(row_format, dim, 32))
    if row_format is RowFormat.FP4_UE8M0:
        return RowBytes(dim // 2, dim // 2 + _groups(row_format, dim, 32))
    return RowBytes(dim // 2, dim // 2 + _groups(row_format, dim, 16))


def _groups(row_format: RowFormat, dim: int, group: int) -> int:
    if dim <= 0 or dim % group:
        raise ProfileError(
            f"format {row_format.value} scales {group} numbers together",
            field="dim",
            value=dim,
            allowed=f"a positive multiple of {group}",
        )
    return dim // group


def _round_up(count: int, unit: int) -> int:
    return -(-count // unit) * unit
