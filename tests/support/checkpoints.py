"""A checkpoint folder of the model that `tiny` stands for, in the published spelling."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from kvstore.profile.registry import get_profile
from kvstore_workers.model import ModelConfig
from kvstore_workers.model.tensors import random_tensors

TINY = ModelConfig.for_profile(get_profile("tiny"))
CONFIG: dict[str, object] = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 5,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 32,
    "sliding_window": 16,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "index_topk": 16,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "routed_scaling_factor": 1.5,
    "num_hash_layers": 1,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-6,
    "vocab_size": 320,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
    "compress_ratios": [0, 0, 4, 16, 4],
    "compress_rates": {"heavily_compressed_attention": 16},
}
Tensors = dict[str, torch.Tensor]


def write_checkpoint(folder: Path, change: Callable[[Tensors], object] = lambda _tensors: None) -> Path:
    """Config and weights into `folder`, which exists; `change` works on the tensors before they are written."""
    tensors = random_tensors(TINY, seed=4)
    change(tensors)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, folder / "model.safetensors")
    return folder
