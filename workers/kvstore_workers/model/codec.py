"""Rows to stored bytes and back. The model attends to decode(encode(x)), so what it saw is what a restore brings."""

from __future__ import annotations

from typing import Protocol

import torch

from kvstore.profile.formats import RowFormat, row_bytes

E4M3_MAX = 448.0
E2M1_MAX = 6.0
FP8_GROUP = 64
FP8_ALL_GROUP = 32
FP4_GROUP = 32
FP4_E4M3_GROUP = 16
SCALE_BIAS = 127
# A group of zeros still has a scale; this is the smallest one that is written for it.
AMAX_FLOOR = 1e-4
# The same for scales that are e4m3 themselves: their smallest number above 0.
E4M3_SCALE_FLOOR = 2.0**-9


class RowCodec(Protocol):
    """Pure and row by row: a row's bytes depend on that row alone.

    decode(encode(x)) is what attention sees. encode(decode(b)) need not give b back, so bytes are kept, never remade.
    """

    @property
    def row_bytes(self) -> int: ...

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """float32 [n, dim] -> uint8 [n, row_bytes], in new or shared memory."""

    def decode(self, packed: torch.Tensor) -> torch.Tensor:
        """uint8 [n, row_bytes] -> float32 [n, dim], in new or shared memory."""


class F32Codec:
    """The rows themselves, little-endian."""

    def __init__(self, dim: int) -> None:
        self.row_bytes = 4 * dim

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.contiguous().view(torch.uint8)

    def decode(self, packed: torch.Tensor) -> torch.Tensor:
        return packed.contiguous().view(torch.float32)


class Fp8RopeBf16Codec:
    """e4m3 nope | bf16 rope | one ue8m0 scale per 64 nope numbers | zero padding to 8 scale bytes."""

    def __init__(self, dim: int, rope_dim: int) -> None:
        sizes = row_bytes(RowFormat.FP8_ROPE_BF16, dim, rope_dim)
        self.row_bytes = sizes.total
        self._nope = dim - rope_dim
        self._data = sizes.data
        self._scales = self._nope // FP8_GROUP

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        count = rows.shape[0]
        packed = torch.zeros(count, self.row_bytes, dtype=torch.uint8, device=rows.device)
        codes, scales = _e4m3_groups(rows[:, : self._nope].reshape(count, self._scales, FP8_GROUP))
        packed[:, : self._nope] = codes.reshape(count, self._nope)
        rope = rows[:, self._nope :].to(torch.bfloat16).contiguous()
        packed[:, self._nope : self._data] = rope.view(torch.uint8).reshape(count, self._data - self._nope)
        packed[:, self._data : self._data + self._scales] = scales
        return packed

    def decode(self, packed: torch.Tensor) -> torch.Tensor:
        count = packed.shape[0]
        codes = packed[:, : self._nope].reshape(count, self._scales, FP8_GROUP)
        nope = _e4m3_numbers(codes, packed[:, self._data : self._data + self._scales])
        rope = packed[:, self._nope : self._data].contiguous().view(torch.bfloat16).to(torch.float32)
        return torch.cat((nope.reshape(count, self._nope), rope), dim=1)


class Fp8AllCodec:
    """e4m3 | one ue8m0 scale per 32 numbers."""

    def __init__(self, dim: int) -> None:
        self.row_bytes = row_bytes(RowFormat.FP8_ALL, dim, 0).total
        self._dim = dim
        self._scales = dim // FP8_ALL_GROUP

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        count = rows.shape[0]
        codes, scales = _e4m3_groups(rows.reshape(count, self._scales, FP8_ALL_GROUP))
        return torch.cat((codes.reshape(count, self._dim), scales), dim=1)

    def decode(self, packed: torch.Tensor) -> torch.Tensor:
        count = packed.shape[0]
        codes = packed[:, : self._dim].reshape(count, self._scales, FP8_ALL_GROUP)
        return _e4m3_numbers(codes, packed[:, self._dim :]).reshape(count, self._dim)


class Fp4Codec:
    """e2m1, even element in the low nibble | one ue8m0 scale per 32 numbers."""

    def __init__(self, dim: int) -> None:
        self.row_bytes = row_bytes(RowFormat.FP4_UE8M0, dim, 0).total
        self._dim = dim
        self._scales = dim // FP4_GROUP

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        count = rows.shape[0]
        groups = rows.reshape(count, self._scales, FP4_GROUP)
        exponent = _scale_exponent(groups, E2M1_MAX)
        data = _e2m1_packed(_scaled(groups, -exponent).reshape(count, self._dim))
        return torch.cat((data, (exponent + SCALE_BIAS).to(torch.uint8)), dim=1)

    def decode(self, packed: torch.Tensor) -> torch.Tensor:
        count = packed.shape[0]
        numbers = _e2m1_numbers(packed[:, : self._dim // 2])
        exponent = packed[:, self._dim // 2 :].to(torch.int32) - SCALE_BIAS
        groups = numbers.reshape(count, self._scales, FP4_GROUP)
        return _scaled(groups, exponent).reshape(count, self._dim)


class Fp4E4m3Codec:
    """e2m1, even element in the low nibble | one e4m3 scale per 16 numbers, the nearest to a sixth of the largest."""

    def __init__(self, dim: int) -> None:
        self.row_bytes = row_bytes(RowFormat.FP4_E4M3, dim, 0).total
        self._dim = dim
        self._scales = dim // FP4_E4M3_GROUP

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        count = rows.shape[0]
        groups = rows.reshape(count, self._scales, FP4_E4M3_GROUP)
        wanted = (groups.abs().amax(dim=-1) / E2M1_MAX).clamp(E4M3_SCALE_FLOOR, E4M3_MAX)
        scale = wanted.to(torch.float8_e4m3fn)
        data = _e2m1_packed((groups / scale.to(torch.float32)[..., None]).reshape(count, self._dim))
        return torch.cat((data, scale.view(torch.uint8)), dim=1)

    def decode(self, packed: torch.Tensor) -> torch.Tensor:
        count = packed.shape[0]
        numbers = _e2m1_numbers(packed[:, : self._dim // 2])
        scale = packed[:, self._dim // 2 :].contiguous().view(torch.float8_e4m3fn).to(torch.float32)
        groups = numbers.reshape(count, self._scales, FP4_E4M3_GROUP)
        return (groups * scale[..., None]).reshape(count, self._dim)


def _e4m3_groups(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [n, groups, size] -> (codes of that shape, ue8m0 scales [n, groups]), both uint8."""
    exponent = _scale_exponent(groups, E4M3_MAX)
    scaled = _scaled(groups, -exponent).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return scaled.view(torch.uint8), (exponent + SCALE_BIAS).to(torch.uint8)


def _e4m3_numbers(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Inverse of `_e4m3_groups`, float32."""
    numbers = codes.contiguous().view(torch.float8_e4m3fn).to(torch.float32)
    return _scaled(numbers, scales.to(torch.int32) - SCALE_BIAS)


_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def _e2m1_codes(scaled: torch.Tensor) -> torch.Tensor:
    """Nearest e2m1 value, ties to the even code; uint8 codes, sign in bit 3."""
    size = scaled.abs()
    # A boundary lies halfway between code i and i + 1; it belongs to whichever of the two is even.
    above = (
        (size > 0.25).to(torch.uint8)
        + (size >= 0.75)
        + (size > 1.25)
        + (size >= 1.75)
        + (size > 2.5)
        + (size >= 3.5)
        + (size > 5.0)
    )
    return above | (torch.signbit(scaled).to(torch.uint8) << 3)


def _e2m1_packed(scaled: torch.Tensor) -> torch.Tensor:
    """float32 [n, dim] -> uint8 [n, dim / 2]."""
    codes = _e2m1_codes(scaled)
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def _e2m1_numbers(data: torch.Tensor) -> torch.Tensor:
    """uint8 [n, dim / 2] -> float32 [n, dim]."""
    codes = torch.stack((data & 15, data >> 4), dim=-1).flatten(1)
    return torch.tensor(_E2M1_VALUES, dtype=torch.float32, device=data.device)[codes.to(torch.int64)]


# 2^-127 to 2^127, and infinity where a scale byte is 255. A product with one of them is exact, and several times faster
# than ldexp.
_POWERS = torch.ldexp(torch.ones(256), torch.arange(-SCALE_BIAS, 256 - SCALE_BIAS))


def _scaled(groups: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """float32 [n, groups, size] times two to the int32 [n, groups], each from -127 to 127."""
    return groups * _POWERS.to(groups.device)[exponent + SCALE_BIAS][..., None]


def _scale_exponent(groups: torch.Tensor, largest: float) -> torch.Tensor:
    """int32 [..., groups]: the smallest power of two that brings each group's numbers to at most `largest`."""
    mantissa, exponent = torch.frexp(groups.abs().amax(dim=-1).clamp_min(AMAX_FLOOR) / largest)
    # frexp's mantissa lies in [0.5, 1); exactly 0.5 is a power of two already.
    return (exponent - (mantissa == 0.5).to(torch.int32)).clamp(-SCALE_BIAS, SCALE_BIAS).to(torch.int32)


def codec_for(row_format: RowFormat, dim: int, rope_dim: int) -> RowCodec:
    """ProfileError where `dim` does not fill whole scale groups."""
    match row_format:
        case RowFormat.F32:
            return F32Codec(dim)
        case RowFormat.FP8_ROPE_BF16:
            return Fp8RopeBf16Codec(dim, rope_dim)
        case RowFormat.FP8_ALL:
            return Fp8AllCodec(dim)
        case RowFormat.FP4_UE8M0:
            return Fp4Codec(dim)
        case RowFormat.FP4_E4M3:
            return Fp4E4m3Codec(dim)


def hadamard(dim: int) -> torch.Tensor:
    """float32 [dim, dim], orthogonal and its own inverse: turns index keys and queries alike before keys are quantised,
    which spreads outliers and changes no score. The identity where `dim` is no power of two."""
    if dim & (dim - 1):
        return torch.eye(dim)
    matrix = torch.full((1, 1), dim**-0.5)
    while matrix.shape[0] < dim:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix
