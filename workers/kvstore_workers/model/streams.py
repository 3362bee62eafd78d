"""The compressor's inputs of one layer, and where each field of a stored state lies among their columns.

CSA   P = head_dim + index_head_dim: [kv previous P | kv current P | score previous P | score current P], main compressor
      first in each P. One softmax then serves the main and the index compressor.
HCA   [kv head_dim | score head_dim].
Scores carry their positional bias.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvstore.profile.base import Layer, LayerKind, Profile

Columns = tuple[slice, ...]


def stream_width(profile: Profile, layer: Layer) -> int:
    if layer.kind is LayerKind.CSA:
        return 4 * (profile.head_dim + profile.index_head_dim)
    return 2 * profile.head_dim


def before_start(profile: Profile, layer: Layer, device: torch.device) -> torch.Tensor:
    """The row of every position below 0: key-value 0, score -inf, so that its softmax weight is 0."""
    row = torch.zeros(stream_width(profile, layer), device=device)
    row[row.shape[0] // 2 :] = float("-inf")
    return row


def overlap_columns(profile: Profile) -> Mapping[str, Columns]:
    """State field of a CSA layer's overlap -> its columns: the previous-block half."""
    main, both = profile.head_dim, profile.head_dim + profile.index_head_dim
    return {
        "kv": (slice(0, main),),
        "score": (slice(2 * both, 2 * both + main),),
        "index_kv": (slice(main, both),),
        "index_score": (slice(2 * both + main, 3 * both),),
    }


def tail_columns(profile: Profile, layer: Layer) -> Mapping[str, Columns]:
    """State field of a layer's tail -> its columns, in stored order."""
    main, both = profile.head_dim, profile.head_dim + profile.index_head_dim
    if layer.kind is LayerKind.HCA:
        return {"kv": (slice(0, main),), "score": (slice(main, 2 * main),)}
    previous = overlap_columns(profile)
    return {
        field: (columns, slice(columns.start + both, columns.stop + both))
        for field, (columns,) in previous.items()
    }
