"""Attention of one tile: window rows and entries are keys and values at once, with a sink per head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kvstore.profile.base import LayerKind
from kvstore_workers.model import select
from kvstore_workers.model.config import TILE, ModelConfig
from kvstore_workers.model.rotary import Angles, rotate_
from kvstore_workers.model.sequence import Sequence
from kvstore_workers.model.tile import Tile
from kvstore_workers.model.weights import AttentionWeights

# Up to this many times index_topk entries, masking all of them costs less than gathering the chosen ones.
DENSE_SELECTIONS = 4
# Chosen entries are gathered for this many rows at a time, a divisor of every tile's height: what is gathered stays in
# the processor's cache until it is used.
GATHERED_ROWS = 8


@dataclass(frozen=True, slots=True)
class Projected:
    """What a layer computes from its input before it looks at anything stored; all [rows, ...]."""

    query_rank: torch.Tensor
    row: torch.Tensor
    streams: torch.Tensor
    index_weights: torch.Tensor


@dataclass(frozen=True, slots=True)
class Picked:
    """Rows `chosen` [rows, k] of `entries` [n, dim], with float32 `bias` [rows, k]: -inf where nothing was chosen."""

    entries: torch.Tensor
    chosen: torch.Tensor
    bias: torch.Tensor


def project(hidden: torch.Tensor, weights: AttentionWeights) -> Projected:
    return Projected(*torch.split(F.linear(hidden, weights.from_hidden), list(weights.hidden_widths), dim=1))


def window_row(
    projected: Projected, weights: AttentionWeights, config: ModelConfig, angles: Angles
) -> torch.Tensor:
    """float32 [rows, head_dim], normed and rotated."""
    row = F.rms_norm(projected.row.float(), (config.head_dim,), weights.row_norm, config.rms_norm_eps)
    return rotate_(row, angles)


def attend(
    projected: Projected,
    weights: AttentionWeights,
    config: ModelConfig,
    *,
    layer: int,
    tile: Tile,
    sequence: Sequence,
) -> torch.Tensor:
    """The sublayer's result [rows, hidden]; the tile's own rows and entries are stored in `sequence` already."""
    dtype = projected.query_rank.dtype
    rank = F.rms_norm(
        projected.query_rank.float(), (config.q_lora_rank,), weights.query_norm, config.rms_norm_eps
    )
    queries, index_queries = torch.tensor_split(
        F.linear(rank.to(dtype), weights.from_query),
        (config.heads * config.head_dim,),
        dim=1,
    )
    angles = tile.angles(config.profile.layers[layer].kind is LayerKind.WINDOW).per_head()
    q = F.rms_norm(
        queries.reshape(-1, config.heads, config.head_dim).float(),
        (config.head_dim,),
        eps=config.rms_norm_eps,
    )
    q = rotate_(q, angles).to(dtype)
    context = sequence.window[layer].values.read(tile.context_from, tile.big_start + TILE)
    sink_key = torch.zeros(1, config.head_dim, dtype=dtype, device=q.device)
    entries, bias, picked = _entries(
        index_queries,
        projected,
        config,
        layer=layer,
        tile=tile,
        sequence=sequence,
    )
    keys = torch.cat((context, entries, sink_key)) if entries is not None else torch.cat((context, sink_key))
    if picked is None:
        out = _shared(q, keys, bias, weights.sink, config.head_dim**-0.5)
    else:
        out = _picked(q, keys, bias, picked=picked, sink=weights.sink, scale=config.head_dim**-0.5)
    out = rotate_(out.float(), angles.inverse()).to(dtype)
    groups = out.view(-1, config.o_groups, weights.group_out.shape[2]).transpose(0, 1)
    low = torch.bmm(groups, weights.group_out.transpose(1, 2)).transpose(0, 1).flatten(1)
    return F.linear(low, weights.out)


def _entries(
    index_queries: torch.Tensor,
    projected: Projected,
    config: ModelConfig,
    *,
    layer: int,
    tile: Tile,
    sequence: Sequence,
) -> tuple[torch.Tensor | None, torch.Tensor, Picked | None]:
    """(entries that all rows share, bias over window | shared entries | sink key, entries that each row picks).

    How many entries a tile looks at depends on its position alone, whatever is stored: widths decide the last bits.
    """
    ratio = config.profile.layers[layer].ratio
    if ratio == 0:
        return None, tile.bias(0), None
    count = (tile.big_start + TILE) // ratio
    entries = sequence.entries[layer].values(count)
    if config.profile.layers[layer].kind is LayerKind.HCA or count <= config.index_topk:
        return entries, tile.bias(ratio), None
    queries = index_queries.reshape(-1, config.index_heads, config.index_head_dim).float()
    queries = rotate_(queries, tile.angles(False).per_head())
    keys = sequence.keys[layer].values(count)
    if not config.keys_are_plain:
        queries = queries @ tile.hadamard
    head_weights = projected.index_weights.float() * (config.index_head_dim * config.index_heads) ** -0.5
    score = select.scores(queries.to(keys.dtype), keys, head_weights)
    dense = count <= DENSE_SELECTIONS * config.index_topk
    # What is gathered is summed in this order; a mask has none.
    chosen = select.top(score, tile.visible(ratio), config.index_topk, ascending=not dense)
    if dense:
        mask = torch.full((chosen.shape[0], count + 1), float("-inf"), device=score.device)
        mask = mask.scatter_(1, chosen, 0.0)[:, :count]
        window = tile.bias(0)
        return entries, torch.cat((window[:, :-1], mask, window[:, -1:]), dim=1), None
    there = chosen < count
    bias = torch.zeros(chosen.shape, device=score.device).masked_fill_(~there, float("-inf"))
    return None, tile.bias(0), Picked(entries, torch.where(there, chosen, 0), bias)


def _shared(
    q: torch.Tensor, keys: torch.Tensor, bias: torch.Tensor, sink: torch.Tensor, scale: float
) -> torch.Tensor:
    """q [rows, heads, dim], keys [n + 1, dim] of which the last is zero: it carries the sink and adds nothing."""
    rows, heads, dim = q.shape
    logits = torch.matmul(q.view(rows * heads, dim), keys.T).view(rows, heads, -1).float()
    logits = torch.add(bias[:, None, :], logits, alpha=scale)
    logits[:, :, -1] = sink
    share = torch.softmax(logits, dim=-1).to(keys.dtype)
    return torch.matmul(share.view(rows * heads, -1), keys).view(rows, heads, dim)


def _picked(
    q: torch.Tensor,
    keys: torch.Tensor,
    bias: torch.Tensor,
    *,
    picked: Picked,
    sink: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """As `_shared`, with further keys that differ from row to row."""
    rows, heads, dim = q.shape
    shared, count = keys.shape[0], picked.chosen.shape[1]
    shared_logits = torch.matmul(q.view(rows * heads, dim), keys.T).view(rows, heads, -1)
    bias = torch.cat((bias, picked.bias), dim=1)[:, None, :]
    share = torch.empty(rows, heads, shared, dtype=keys.dtype, device=q.device)
    out = torch.empty_like(q)
    gathered = torch.empty(GATHERED_ROWS * count, dim, dtype=keys.dtype, device=q.device)
    for first in range(0, rows, GATHERED_ROWS):
        part = slice(first, first + GATHERED_ROWS)
        torch.index_select(picked.entries, 0, picked.chosen[part].flatten(), out=gathered)
        own = gathered.view(GATHERED_ROWS, count, dim)
        logits = torch.cat((shared_logits[part], torch.bmm(q[part], own.transpose(1, 2))), dim=-1).float()
        logits = torch.add(bias[part], logits, alpha=scale)
        logits[:, :, shared - 1] = sink
        shares = torch.softmax(logits, dim=-1).to(keys.dtype)
        share[part] = shares[:, :, :shared]
        out[part] = torch.bmm(shares[:, :, shared:], own)
    return out.add_(torch.matmul(share.view(rows * heads, shared), keys).view(rows, heads, dim))
