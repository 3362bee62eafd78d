"""Configs: the published one gives the shipped profile's geometry, and what would be computed wrongly is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvstore.errors import ProfileError
from kvstore.profile.base import Layer, LayerKind
from kvstore.profile.formats import RowFormat
from kvstore.profile.registry import get_profile
from kvstore_workers.model import ModelConfig
from kvstore_workers.model.config import Rope, Yarn

YARN: dict[str, object] = {
    "type": "yarn",
    "factor": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 65536,
}
FLASH: dict[str, object] = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 43,
    "hidden_size": 4096,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 2048,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "num_hash_layers": 3,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-6,
    "vocab_size": 129280,
    "tie_word_embeddings": False,
    "rope_scaling": YARN,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
}


def test_the_published_config_gives_the_published_geometry() -> None:
    config = ModelConfig.from_hf(FLASH, name="deepseek-v4-flash")
    f32 = {"entry_format": RowFormat.F32, "key_format": RowFormat.F32, "row_format": RowFormat.F32}
    assert config.profile == replace(get_profile("deepseek-v4-flash"), **f32)
    assert config.window_rope == Rope(10000.0)
    assert config.entry_rope == Rope(160000.0, Yarn(16.0, 32.0, 1.0, 65536))
    assert (config.num_hash_layers, config.index_topk, config.experts) == (3, 512, 256)
    assert config.is_hash_layer(2)
    assert not config.is_hash_layer(3)


def test_block_tokens_may_be_given_and_must_hold_whole_entries() -> None:
    assert ModelConfig.from_hf(FLASH, name="x", block_tokens=256).profile.block_tokens == 256
    with pytest.raises(ProfileError, match="block_tokens"):
        ModelConfig.from_hf(FLASH, name="x", block_tokens=64)


@pytest.mark.parametrize("name", ["tiny", "flash-slim"])
def test_shipped_models_have_their_profiles_geometry(name: str) -> None:
    config = ModelConfig.for_profile(get_profile(name))
    assert config.profile == get_profile(name)
    assert config.num_hash_layers >= 1


@pytest.mark.parametrize(
    "profile",
    [get_profile("deepseek-v4.1-flash"), replace(get_profile("tiny"), window_tokens=32)],
    ids=["v4.1", "other"],
)
def test_a_geometry_without_a_shipped_model_is_refused(profile) -> None:
    with pytest.raises(ProfileError, match="tiny, flash-slim"):
        ModelConfig.for_profile(profile)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"compress_ratios": None}, "layer_types"),
        ({"compress_ratios": [0] * 42}, "compress_ratios"),
        ({"compress_ratios": [0, 2, *[4] * 41]}, r"compress_ratios\[1\]"),
        ({"layer_types": ["sliding_attention"] * 44}, "layer_types"),
        ({"layer_types": ["full_attention"] * 43}, r"layer_types\[0\]"),
        ({"model_type": "deepseek_v3"}, "model_type"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"n_shared_experts": 2}, "n_shared_experts"),
        ({"hidden_size": "4096"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps"),
        ({"hc_eps": 1e308}, "hc_eps"),
        ({"swiglu_limit": 1e308}, "swiglu_limit"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"compress_rope_theta": 1}, "compress_rope_theta"),
        ({"rope_scaling": {**YARN, "factor": 0}}, r"rope_scaling\.factor"),
        ({"rope_scaling": {**YARN, "beta_fast": 0}}, r"rope_scaling\.beta_fast"),
        ({"rope_scaling": {**YARN, "beta_slow": -1}}, r"rope_scaling\.beta_slow"),
        (
            {"rope_scaling": {**YARN, "original_max_position_embeddings": 0}},
            r"rope_scaling\.original_max_position_embeddings",
        ),
        ({"compress_ratios": [[4]] * 43}, r"compress_ratios\[0\]"),
        ({"layer_types": [{}] * 43}, r"layer_types\[0\]"),
        ({"index_topk": None}, "index_topk"),
        ({"num_experts_per_tok": 257}, "experts_per_token"),
        ({"o_groups": 7}, "o_groups"),
        ({"num_hash_layers": 44}, "num_hash_layers"),
        ({"mlp_layer_types": ["moe"] * 42 + ["hash_moe"]}, "mlp_layer_types"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type"),
        ({"rope_scaling": {"type": "yarn", "factor": 16}}, "original_max_position_embeddings"),
        ({"rope_scaling": {**YARN, "attention_factor": 1.27}}, "attention_factor"),
        ({"rope_scaling": []}, "rope_scaling"),
        ({"qk_rope_head_dim": 63}, "rope_dim"),
        (
            {"compress_rates": {"compressed_sparse_attention": 3, "heavily_compressed_attention": 128}},
            "compress_ratios",
        ),
    ],
)
def test_an_unsupported_config_is_refused_by_field(change: dict[str, object], named: str) -> None:
    with pytest.raises(ProfileError, match=named):
        ModelConfig.from_hf({**FLASH, **change}, name="x")


def test_layers_and_ratios_that_the_model_cannot_run_are_refused() -> None:
    tiny = ModelConfig.for_profile(get_profile("tiny"))
    csa2 = replace(tiny.profile, layers=(Layer(LayerKind.CSA2, 2),))
    with pytest.raises(ProfileError, match="csa2"):
        replace(tiny, profile=csa2)
    odd = replace(tiny.profile, layers=(Layer(LayerKind.HCA, 96),), block_tokens=96)
    with pytest.raises(ProfileError, match="divisor of 128"):
        replace(tiny, profile=odd)


def test_configs_that_compute_differently_have_different_bytes() -> None:
    tiny = ModelConfig.for_profile(get_profile("tiny"))
    assert tiny.canonical() == ModelConfig.for_profile(get_profile("tiny")).canonical()
    changed = [
        replace(tiny, hc_eps=1e-5),
        replace(tiny, entry_rope=Rope(10_000.0)),
        replace(tiny, index_topk=15),
    ]
    assert len({config.canonical() for config in [tiny, *changed]}) == 4
