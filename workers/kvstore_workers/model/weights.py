"""Checkpoint tensors as the forward uses them: projections that read the same input are one matrix."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvstore.errors import ProfileError
from kvstore.profile.base import LayerKind
from kvstore_workers.model.config import TILE, ModelConfig
from kvstore_workers.model.streams import stream_width


@dataclass(frozen=True, slots=True)
class MixWeights:
    """Stream mixing of one sublayer, float32: `fn` [n, streams * hidden], `gain` and `base` [n]."""

    fn: torch.Tensor
    gain: torch.Tensor
    base: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """`from_hidden` [q rank | head_dim | streams | index heads, hidden]; `from_query` [heads * head_dim | index, q rank].

    `stream_bias` float32 [TILE, streams]: the positional bias of a tile's rows, 0 in the key-value columns.
    """

    from_hidden: torch.Tensor
    hidden_widths: tuple[int, int, int, int]
    from_query: torch.Tensor
    query_norm: torch.Tensor
    row_norm: torch.Tensor
    sink: torch.Tensor
    group_out: torch.Tensor
    out: torch.Tensor
    stream_bias: torch.Tensor | None
    entry_norm: torch.Tensor | None
    key_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """`gate` float32 [experts, hidden]; `up` [experts + 1, 2 * width, hidden] and `down`, the shared expert last."""

    gate: torch.Tensor
    bias: torch.Tensor | None
    table: torch.Tensor | None
    up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attention_mix: MixWeights
    attention_norm: torch.Tensor
    attention: AttentionWeights
    expert_mix: MixWeights
    expert_norm: torch.Tensor
    experts: ExpertWeights


@dataclass(frozen=True, slots=True)
class Weights:
    embed: torch.Tensor
    layers: tuple[LayerWeights, ...]
    head_mix: MixWeights
    norm: torch.Tensor
    head: torch.Tensor


class _Source:
    """Checkpoint tensors by name, moved to where the forward wants them."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], device: torch.device, dtype: torch.dtype) -> None:
        self._tensors = tensors
        self._device = device
        self._dtype = dtype

    def model(self, *names: str) -> torch.Tensor:
        """Rows of all `names`, one after the other, in the model's dtype."""
        joined = [self._tensors[name].to(self._device, self._dtype) for name in names]
        return joined[0].contiguous() if len(joined) == 1 else torch.cat(joined)

    def f32(self, name: str) -> torch.Tensor:
        return self._tensors[name].to(self._device, torch.float32).contiguous()

    def ids(self, name: str) -> torch.Tensor:
        return self._tensors[name].to(self._device, torch.int64).contiguous()


def build_weights(
    config: ModelConfig, tensors: Mapping[str, torch.Tensor], *, device: torch.device, dtype: torch.dtype
) -> Weights:
    source = _Source(tensors, device, dtype)
    streams = config.hc_mult
    layers = []
    for index in range(config.layer_count):
        prefix = f"layers.{index}."
        layers.append(
            LayerWeights(
                attention_mix=_mix(source, f"{prefix}hc_attn_", (streams, streams, streams * streams)),
                attention_norm=source.f32(f"{prefix}attn_norm.weight"),
                attention=_attention(config, index, source, f"{prefix}attn."),
                expert_mix=_mix(source, f"{prefix}hc_ffn_", (streams, streams, streams * streams)),
                expert_norm=source.f32(f"{prefix}ffn_norm.weight"),
                experts=_experts(config, index, source, f"{prefix}ffn."),
            )
        )
    return Weights(
        embed=source.model("embed.weight"),
        layers=tuple(layers),
        head_mix=_mix(source, "hc_head_", (streams,)),
        norm=source.f32("norm.weight"),
        head=source.model("head.weight"),
    )


def _mix(source: _Source, prefix: str, widths: tuple[int, ...]) -> MixWeights:
    scale = source.f32(f"{prefix}scale")
    gain = torch.cat([scale[i : i + 1].expand(width) for i, width in enumerate(widths)])
    return MixWeights(source.f32(f"{prefix}fn"), gain.contiguous(), source.f32(f"{prefix}base"))


def _attention(config: ModelConfig, index: int, source: _Source, prefix: str) -> AttentionWeights:
    layer = config.profile.layers[index]
    rows = [source.model(f"{prefix}wq_a.weight"), source.model(f"{prefix}wkv.weight")]
    queries = [f"{prefix}wq_b.weight"]
    stream_bias = entry_norm = key_norm = None
    if layer.kind.has_entries:
        names = [f"{prefix}compressor."]
        if layer.kind.has_keys:
            names.append(f"{prefix}indexer.compressor.")
        halves = 2 if layer.kind is LayerKind.CSA else 1
        rows += [_interleaved([source.model(f"{n}wkv.weight") for n in names], halves)]
        rows += [_interleaved([source.model(f"{n}wgate.weight") for n in names], halves)]
        bias = _interleaved([source.f32(f"{n}ape").T for n in names], halves).T
        stream_bias = (
            torch.cat((torch.zeros_like(bias), bias), dim=1).repeat(TILE // layer.ratio, 1).contiguous()
        )
        entry_norm = source.f32(f"{prefix}compressor.norm.weight")
    if layer.kind.has_keys:
        key_norm = source.f32(f"{prefix}indexer.compressor.norm.weight")
        rows.append(source.model(f"{prefix}indexer.weights_proj.weight"))
        queries.append(f"{prefix}indexer.wq_b.weight")
    return AttentionWeights(
        from_hidden=torch.cat(rows),
        hidden_widths=(
            config.q_lora_rank,
            config.head_dim,
            stream_width(config.profile, layer) if layer.kind.has_entries else 0,
            config.index_heads if layer.kind.has_keys else 0,
        ),
        from_query=source.model(*queries),
        query_norm=source.f32(f"{prefix}q_norm.weight"),
        row_norm=source.f32(f"{prefix}kv_norm.weight"),
        sink=source.f32(f"{prefix}attn_sink"),
        group_out=source.model(f"{prefix}wo_a.weight").view(config.o_groups, config.o_lora_rank, -1),
        out=source.model(f"{prefix}wo_b.weight"),
        stream_bias=stream_bias,
        entry_norm=entry_norm,
        key_norm=key_norm,
    )


def _interleaved(parts: list[torch.Tensor], halves: int) -> torch.Tensor:
    """Rows of the first half of every part, then of the second: the column order of `streams`."""
    return torch.cat([part.chunk(halves)[half] for half in range(halves) for part in parts])


def _experts(config: ModelConfig, index: int, source: _Source, prefix: str) -> ExpertWeights:
    names = [*(f"{prefix}experts.{expert}" for expert in range(config.experts)), f"{prefix}shared_experts"]
    bias = table = None
    if config.is_hash_layer(index):
        table = source.ids(f"{prefix}gate.tid2eid")
        if int(table.min()) < 0 or int(table.max()) >= config.experts:
            raise ProfileError(
                "expert table names experts that do not exist",
                field=f"{prefix}gate.tid2eid",
                value=int(table.max()),
                allowed=f"0 to {config.experts - 1}",
            )
    else:
        bias = source.f32(f"{prefix}gate.bias")
    return ExpertWeights(
        gate=source.f32(f"{prefix}gate.weight"),
        bias=bias,
        table=table,
        up=torch.stack([source.model(f"{name}.w1.weight", f"{name}.w3.weight") for name in names]),
        down=torch.stack([source.model(f"{name}.w2.weight") for name in names]),
    )
