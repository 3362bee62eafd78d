"""Routed experts and the shared one, computed on whole tiles."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvstore_workers.model.config import ModelConfig
from kvstore_workers.model.weights import ExpertWeights


def apply(
    hidden: torch.Tensor, tokens: torch.Tensor, weights: ExpertWeights, config: ModelConfig, valid: slice
) -> torch.Tensor:
    """[rows, hidden] -> [rows, hidden]. Rows outside `valid` are dummies: finite, otherwise without meaning.

    An expert that some valid row chose runs on the whole tile and rows that did not choose it add it with weight 0:
    what a row gets then depends on no other row, and experts add up in ascending order.
    """
    scores = torch.sqrt(F.softplus(F.linear(hidden.float(), weights.gate)))
    if weights.table is not None:
        chosen = weights.table[tokens]
    else:
        assert weights.bias is not None
        chosen = torch.topk(scores + weights.bias, config.experts_per_token, dim=-1).indices
    shares = scores.gather(1, chosen)
    if config.norm_topk_prob:
        shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
    # a hash table may name an expert twice
    dense = torch.zeros_like(scores).scatter_add_(1, chosen, shares * config.routed_scaling_factor)
    # + 0 turns -0 into +0, which adding a weight of 0 would do anyway: skipping an expert changes no bit
    total = _expert(hidden, weights, config.experts, config.swiglu_limit).float() + 0.0
    for expert in sorted(set(chosen[valid].flatten().tolist())):
        result = _expert(hidden, weights, expert, config.swiglu_limit)
        total.addcmul_(result.float(), dense[:, expert : expert + 1])
    return total.to(hidden.dtype)


def _expert(hidden: torch.Tensor, weights: ExpertWeights, index: int, limit: float) -> torch.Tensor:
    gate, up = F.linear(hidden, weights.up[index]).chunk(2, dim=-1)
    return F.linear(F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit), weights.down[index])
