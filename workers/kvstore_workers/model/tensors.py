"""Names, shapes and roles of a checkpoint's tensors, in the published spelling."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kvstore.profile.base import LayerKind
from kvstore_workers.model.config import ModelConfig


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """`role` decides dtype and random values: matrix (model dtype), norm, bias, mixing, scale (float32), ids (int64)."""

    shape: tuple[int, ...]
    role: str


def tensor_specs(config: ModelConfig) -> dict[str, TensorSpec]:
    """Every tensor that a checkpoint of this config holds, by name."""
    c, hidden, streams = config, config.hidden_size, config.hc_mult
    mixes = (2 + streams) * streams
    specs = {
        "embed.weight": TensorSpec((c.vocab_size, hidden), "embedding"),
        "head.weight": TensorSpec((c.vocab_size, hidden), "matrix"),
        "norm.weight": TensorSpec((hidden,), "norm"),
        "hc_head_fn": TensorSpec((streams, streams * hidden), "mixing"),
        "hc_head_base": TensorSpec((streams,), "bias"),
        "hc_head_scale": TensorSpec((1,), "scale"),
    }
    for layer in range(c.layer_count):
        prefix = f"layers.{layer}."
        for name, spec in _attention(config, layer).items():
            specs[f"{prefix}attn.{name}"] = spec
        for name, spec in _experts(config, layer).items():
            specs[f"{prefix}ffn.{name}"] = spec
        for sublayer in ("attn", "ffn"):
            specs[f"{prefix}{sublayer}_norm.weight"] = TensorSpec((hidden,), "norm")
            specs[f"{prefix}hc_{sublayer}_fn"] = TensorSpec((mixes, streams * hidden), "mixing")
            specs[f"{prefix}hc_{sublayer}_base"] = TensorSpec((mixes,), "bias")
            specs[f"{prefix}hc_{sublayer}_scale"] = TensorSpec((3,), "scale")
    return specs


def _attention(c: ModelConfig, index: int) -> dict[str, TensorSpec]:
    layer = c.profile.layers[index]
    specs = {
        "wq_a.weight": TensorSpec((c.q_lora_rank, c.hidden_size), "matrix"),
        "q_norm.weight": TensorSpec((c.q_lora_rank,), "norm"),
        "wq_b.weight": TensorSpec((c.heads * c.head_dim, c.q_lora_rank), "matrix"),
        "wkv.weight": TensorSpec((c.head_dim, c.hidden_size), "matrix"),
        "kv_norm.weight": TensorSpec((c.head_dim,), "norm"),
        "wo_a.weight": TensorSpec((c.o_groups * c.o_lora_rank, c.heads // c.o_groups * c.head_dim), "matrix"),
        "wo_b.weight": TensorSpec((c.hidden_size, c.o_groups * c.o_lora_rank), "matrix"),
        "attn_sink": TensorSpec((c.heads,), "bias"),
    }
    if layer.kind.has_entries:
        halves = 2 if layer.kind is LayerKind.CSA else 1
        specs |= _compressor("compressor.", c.hidden_size, layer.ratio, halves, c.head_dim)
    if layer.kind.has_keys:
        specs |= _compressor("indexer.compressor.", c.hidden_size, layer.ratio, 2, c.index_head_dim)
        specs["indexer.wq_b.weight"] = TensorSpec((c.index_heads * c.index_head_dim, c.q_lora_rank), "matrix")
        specs["indexer.weights_proj.weight"] = TensorSpec((c.index_heads, c.hidden_size), "matrix")
    return specs


def _compressor(prefix: str, hidden: int, ratio: int, halves: int, dim: int) -> dict[str, TensorSpec]:
    return {
        f"{prefix}wkv.weight": TensorSpec((halves * dim, hidden), "matrix"),
        f"{prefix}wgate.weight": TensorSpec((halves * dim, hidden), "matrix"),
        f"{prefix}ape": TensorSpec((ratio, halves * dim), "bias"),
        f"{prefix}norm.weight": TensorSpec((dim,), "norm"),
    }


def _experts(c: ModelConfig, layer: int) -> dict[str, TensorSpec]:
    specs = {"gate.weight": TensorSpec((c.experts, c.hidden_size), "matrix")}
    if c.is_hash_layer(layer):
        specs["gate.tid2eid"] = TensorSpec((c.vocab_size, c.experts_per_token), "ids")
    else:
        specs["gate.bias"] = TensorSpec((c.experts,), "bias")
    for name in (*(f"experts.{expert}" for expert in range(c.experts)), "shared_experts"):
        specs[f"{name}.w1.weight"] = TensorSpec((c.moe_width, c.hidden_size), "matrix")
        specs[f"{name}.w2.weight"] = TensorSpec((c.hidden_size, c.moe_width), "matrix")
        specs[f"{name}.w3.weight"] = TensorSpec((c.moe_width, c.hidden_size), "matrix")
    return specs


def random_tensors(config: ModelConfig, *, seed: int) -> dict[str, torch.Tensor]:
    """float32 (int64 for ids) on the CPU; the same for the same seed and config."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, spec in sorted(tensor_specs(config).items()):
        if spec.role == "ids":
            # distinct experts per token, as a real table has
            order = torch.rand(spec.shape[0], config.experts, generator=generator).argsort(dim=1)
            tensors[name] = order[:, : spec.shape[1]].contiguous()
            continue
        noise = torch.randn(spec.shape, generator=generator)
        if spec.role == "matrix":
            tensors[name] = noise / math.sqrt(spec.shape[-1])
        elif spec.role == "mixing":
            tensors[name] = noise * (0.5 / math.sqrt(spec.shape[-1]))
        elif spec.role in ("norm", "scale"):
            tensors[name] = 1.0 + 0.1 * noise
        elif spec.role == "bias":
            tensors[name] = 0.5 * noise
        else:
            tensors[name] = noise
    return tensors


def digest(config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over the config and every tensor's name, dtype, shape and bytes."""
    total = hashlib.sha256(config.canonical())
    for name, tensor in sorted(tensors.items()):
        total.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return total.hexdigest()
