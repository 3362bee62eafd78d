"""The next token from logits."""

from __future__ import annotations

import torch

from kvstore.errors import InvalidArgument


def pick(logits: torch.Tensor, *, seed: int | None, temperature: float, position: int) -> int:
    """A token id from float32 `logits` [vocab] or [1, vocab].

    Temperature 0 takes the largest, the lowest id among equals. Above 0 the choice depends on the logits, `seed`
    (needed then) and `position` alone, so that a request cut anywhere continues as if it had not been.
    """
    if not temperature >= 0 or temperature == float("inf"):
        raise InvalidArgument(
            "bad temperature", field="temperature", value=temperature, allowed="0 or a positive number"
        )
    row = logits.reshape(-1).to("cpu", torch.float32)
    if temperature == 0:
        return int((row == row.max()).nonzero()[0])
    if seed is None:
        raise InvalidArgument("sampling needs a seed", field="seed", value=seed, allowed="a whole number")
    # from the largest down: divided by a tiny temperature, plain logits would overflow
    shares = torch.softmax((row.double() - row.max().double()) / temperature, dim=0)
    # A generator seeded with seed + position would repeat a neighbour seed's draws one position later.
    mixed = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03) & 0x7FFF_FFFF_FFFF_FFFF
    generator = torch.Generator().manual_seed(mixed)
    draw = torch.rand((), generator=generator, dtype=torch.float64)
    total = shares.cumsum(0)
    # the running sum may end a little below 1
    return min(int(torch.searchsorted(total, draw * total[-1], right=True)), row.shape[0] - 1)
