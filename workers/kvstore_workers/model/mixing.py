"""Residual streams: how a sublayer reads one vector out of them and writes its result back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

from kvstore_workers.model.config import ModelConfig
from kvstore_workers.model.weights import MixWeights


@dataclass(frozen=True, slots=True)
class Mix:
    """What one sublayer does to the streams, float32: `back` [rows, k, k], doubly stochastic, and `post` [rows, k, 1]."""

    back: torch.Tensor
    post: torch.Tensor


def _projected(streams: torch.Tensor, weights: MixWeights, eps: float) -> torch.Tensor:
    flat = streams.flatten(1).float()
    return torch.addcmul(
        weights.base, F.linear(F.rms_norm(flat, flat.shape[1:], eps=eps), weights.fn), weights.gain
    )


def _collapse(pre: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
    return torch.bmm(pre[:, None, :], streams.float())[:, 0].to(streams.dtype)


@cache
def _scalar(number: float) -> torch.Tensor:
    """On the CPU, where it goes with tensors of any device. A plain number is made into a tensor at each use, which costs as
    much as the sum of a few small rows."""
    return torch.tensor(number)


def read(streams: torch.Tensor, weights: MixWeights, config: ModelConfig) -> tuple[torch.Tensor, Mix]:
    """The sublayer's input [rows, hidden] out of `streams` [rows, k, hidden], and how to write its result back."""
    k, eps = config.hc_mult, config.hc_eps
    mixes = _projected(streams, weights, config.rms_norm_eps)
    gates = torch.sigmoid(mixes[:, : 2 * k])
    comb = torch.softmax(mixes[:, 2 * k :].reshape(-1, k, k), dim=-1)
    # tokens last: sums over k numbers that lie apart run over whole vectors
    comb = (comb + eps).permute(1, 2, 0).contiguous()
    # alternately columns and rows, ending with columns
    more = _scalar(eps)
    comb /= comb.sum(0, keepdim=True).add_(more)
    for _ in range(config.hc_sinkhorn_iters - 1):
        comb /= comb.sum(1, keepdim=True).add_(more)
        comb /= comb.sum(0, keepdim=True).add_(more)
    mix = Mix(back=comb.permute(2, 1, 0).contiguous(), post=2 * gates[:, k:, None])
    return _collapse(gates[:, :k] + eps, streams), mix


def write(streams: torch.Tensor, mix: Mix, result: torch.Tensor) -> torch.Tensor:
    """The streams after a sublayer whose result is [rows, hidden]."""
    dtype = streams.dtype
    return torch.baddbmm(mix.post.to(dtype) * result[:, None, :], mix.back.to(dtype), streams)


def head_input(streams: torch.Tensor, weights: MixWeights, config: ModelConfig) -> torch.Tensor:
    """The last collapse, before norm and head: [rows, hidden]."""
    pre = torch.sigmoid(_projected(streams, weights, config.rms_norm_eps))
    return _collapse(pre + config.hc_eps, streams)
