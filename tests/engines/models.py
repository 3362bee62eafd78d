"""Tiny models without weights: one group of caches, and two (a sliding window beside full attention)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_BOTH: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}

MODELS: dict[str, dict[str, Any]] = {
    "one-group": {
        **_BOTH,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 2,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    },
    "two-groups": {
        **_BOTH,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 256,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}

WIDE_ROWS = {
    **MODELS["one-group"],
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 4,
    "max_position_embeddings": 8192,
}
"""Its rows of 32 tokens have 1 MiB, about as long as those of DeepSeek V4: for measuring."""


def make_model(folder: Path, name: str, config: dict[str, Any] | None = None) -> Path:
    made = folder / name
    made.mkdir(parents=True, exist_ok=True)
    (made / "config.json").write_text(json.dumps(config or MODELS[name]))
    return made
