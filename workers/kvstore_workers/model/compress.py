"""Compressor inputs of whole groups to entries and index keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kvstore.profile.base import LayerKind
from kvstore_workers.model.config import ModelConfig
from kvstore_workers.model.rotary import Angles, rotate_
from kvstore_workers.model.weights import AttentionWeights


def group_sums(rows: torch.Tensor, kind: LayerKind, ratio: int) -> torch.Tensor:
    """Gated sums of every group but the first: [(groups + 1) * ratio, columns] -> [groups, width], float32.

    CSA: a channel's softmax runs over the previous group's `previous` stream and the group's own `current` stream.
    HCA: over the group's own rows; the leading group is only there for CSA and is not read.
    """
    groups = rows.shape[0] // ratio
    if kind is LayerKind.HCA:
        values, scores = rows[ratio:].view(groups - 1, ratio, 2, -1).unbind(2)
    else:
        grouped = rows.view(groups, ratio, 2, 2, -1)  # (group, row, kv | score, previous | current, channel)
        both = torch.cat((grouped[:-1, :, :, 0], grouped[1:, :, :, 1]), dim=1)
        values, scores = both.unbind(2)
    return (torch.softmax(scores, dim=1) * values).sum(1)


def finish(
    sums: torch.Tensor, weights: AttentionWeights, config: ModelConfig, angles: Angles
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(entries [groups, head_dim], index keys [groups, index_head_dim] or None), normed and rotated, float32."""
    assert weights.entry_norm is not None
    entries = F.rms_norm(
        sums[:, : config.head_dim], (config.head_dim,), weights.entry_norm, config.rms_norm_eps
    )
    entries = rotate_(entries, angles)
    if weights.key_norm is None:
        return entries, None
    keys = F.rms_norm(
        sums[:, config.head_dim :], (config.index_head_dim,), weights.key_norm, config.rms_norm_eps
    )
    return entries, rotate_(keys, angles)
