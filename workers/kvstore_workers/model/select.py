"""The index: which entries a query of a CSA layer attends to."""

from __future__ import annotations

import torch

# Scores are made for this many keys at a time, so that a long context does not need a tile's whole score cube.
KEY_CHUNK = 2048
_LOWEST = torch.iinfo(torch.int64).min


def scores(queries: torch.Tensor, keys: torch.Tensor, head_weights: torch.Tensor) -> torch.Tensor:
    """Sum over heads of weight * relu(query . key): [rows, heads, dim], [n, dim], [rows, heads] -> float32 [rows, n]."""
    rows, heads, dim = queries.shape
    flat = queries.reshape(rows * heads, dim)
    parts = []
    for first in range(0, keys.shape[0], KEY_CHUNK):
        hits = torch.matmul(flat, keys[first : first + KEY_CHUNK].T).relu_().float()
        parts.append(torch.bmm(head_weights[:, None, :], hits.view(rows, heads, -1))[:, 0])
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def top(score: torch.Tensor, visible: torch.Tensor, count: int, *, ascending: bool = True) -> torch.Tensor:
    """int64 [rows, count], ascending or in any order: the `count` best of each row's first visible[row] entries; n where
    there are fewer.

    Relu makes exact ties common, and a tie goes to the lowest index: the choice must not depend on how many entries
    are stored, which differs between a prompt at once and one token at a time.
    """
    n = score.shape[1]
    index = torch.arange(n, device=score.device)
    # Order of floats as order of integers; + 0 makes one zero of two. Below the score: the lower index is the larger.
    bits = (score + 0.0).view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    ranked = ordered * (1 << 32) + (n - 1 - index)
    ranked = torch.where(index < visible[:, None], ranked, _LOWEST + index)
    best = torch.topk(ranked, count, dim=1, sorted=False).indices
    best = torch.where(best < visible[:, None], best, n)
    return best.sort(dim=1).values if ascending else best
