"""Rotary positions: interleaved pairs on the last `rope_dim` numbers of a row."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kvstore_workers.model.config import Rope


def frequencies(rope: Rope, rope_dim: int) -> torch.Tensor:
    """float32 [rope_dim / 2], radians per position."""
    exponent = torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim
    plain = 1.0 / (rope.theta**exponent)
    yarn = rope.yarn
    if yarn is None:
        return plain
    stretched = 1.0 / (yarn.factor * rope.theta**exponent)

    def pair_of(turns: float) -> float:
        """The (fractional) pair that makes `turns` turns over the original context."""
        return rope_dim * math.log(yarn.original_tokens / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(pair_of(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_of(yarn.beta_slow)), rope_dim - 1)
    ramp = (torch.arange(rope_dim // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)
    slow = ramp.clamp(0, 1)
    return stretched * slow + plain * (1 - slow)


@dataclass(frozen=True, slots=True)
class Angles:
    """Cosines and sines of a run of positions, float32 [positions, rope_dim], each value twice (once per pair member);
    the sine carries the sign that its pair member needs, so that rotating is x * cos + swapped(x) * sin."""

    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def at(cls, inverse: torch.Tensor, positions: torch.Tensor) -> Angles:
        turned = positions.to(torch.float32)[:, None] * inverse
        cos = turned.cos().repeat_interleave(2, dim=-1)
        sin = turned.sin()
        return cls(cos, torch.stack((-sin, sin), dim=-1).flatten(-2))

    def rows(self, first: int, last: int, step: int = 1) -> Angles:
        return Angles(self.cos[first:last:step], self.sin[first:last:step])

    def inverse(self) -> Angles:
        return Angles(self.cos, -self.sin)

    def per_head(self) -> Angles:
        """For rows [positions, heads, dim]."""
        return Angles(self.cos[:, None, :], self.sin[:, None, :])


def rotate_(x: torch.Tensor, angles: Angles) -> torch.Tensor:
    """Rotates float32 `x` in place and returns it."""
    width = angles.cos.shape[-1]
    if width == 0:
        return x
    tail = x[..., -width:]
    swapped = tail.reshape(*tail.shape[:-1], width // 2, 2).flip(-1).flatten(-2)
    tail.mul_(angles.cos).addcmul_(swapped, angles.sin)
    return x
