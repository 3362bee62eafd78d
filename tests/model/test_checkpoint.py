"""Checkpoint folders: a good one loads, a damaged one is refused by the tensor's name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kvstore.errors import ProfileError
from kvstore.profile.registry import get_profile
from kvstore_workers.model import Model, ModelConfig
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


def _write(folder: Path, change: Callable[[Tensors], object] = lambda _tensors: None) -> Path:
    tensors = random_tensors(TINY, seed=4)
    change(tensors)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_folder_with_the_same_tensors_computes_as_the_model_in_memory(tmp_path: Path) -> None:
    loaded = Model.load(_write(tmp_path), name="tiny")
    assert loaded.profile.name == "tiny"
    assert loaded.profile.layers == TINY.profile.layers
    same = Model.random(TINY, seed=4)
    tokens = list(range(40))
    a, b = loaded.extend(loaded.start(), tokens), same.extend(same.start(), tokens)
    assert a is not None
    assert b is not None
    assert torch.equal(a, b)


def test_the_weights_revision_follows_every_tensor_and_the_config(tmp_path: Path) -> None:
    def flip(tensors: Tensors) -> None:
        tensors["layers.3.attn.attn_sink"][1] += 1e-6

    for name in ("a", "b", "c", "d"):
        (tmp_path / name).mkdir()
    first, again = Model.load(_write(tmp_path / "a")), Model.load(_write(tmp_path / "b"))
    assert first.weights_revision == again.weights_revision
    assert Model.load(_write(tmp_path / "c", flip)).weights_revision != first.weights_revision
    _write(tmp_path / "d")
    (tmp_path / "d" / "config.json").write_text(json.dumps({**CONFIG, "swiglu_limit": 9.0}))
    assert Model.load(tmp_path / "d").weights_revision != first.weights_revision
    assert Model.random(TINY, seed=4).weights_revision != Model.random(TINY, seed=5).weights_revision


def test_tensors_of_the_draft_module_are_left_out(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    draft = lambda tensors: tensors.update({"mtp.0.enorm.weight": torch.ones(4)})  # noqa: E731
    assert Model.load(_write(tmp_path, draft)).weights_revision == Model.load(_write(plain)).weights_revision


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("layers.2.attn.indexer.wq_b.weight"),
            r"missing.*layers\.2\.attn\.indexer\.wq_b\.weight",
        ),
        (
            lambda t: t.update({"layers.0.attn.compressor.ape": torch.ones(4, 64)}),
            r"layers\.0\.attn\.compressor\.ape",
        ),
        (
            lambda t: t.update({"layers.1.ffn.gate.bias": torch.ones(9)}),
            r"layers\.1\.ffn\.gate\.bias.*\(9,\).*\(8,\)",
        ),
        (lambda t: t.update({"norm.weight": torch.ones(64, dtype=torch.int8)}), r"norm\.weight.*int8"),
        (lambda t: t["layers.0.ffn.gate.tid2eid"].fill_(8), r"layers\.0\.ffn\.gate\.tid2eid"),
        (
            lambda t: t.update({"layers.0.ffn.gate.tid2eid": t["layers.0.ffn.gate.tid2eid"].float()}),
            r"tid2eid=torch\.float32; allowed: int64",
        ),
        (
            lambda t: t.update({"model.embed_tokens.weight": t["embed.weight"] + 1}),
            r"here twice.*model\.embed_tokens\.weight=embed\.weight",
        ),
        (lambda t: t.update({"two\nlines\x1b": torch.ones(1)}), r"tensor=two\\nlines\\x1b"),
    ],
)
def test_a_missing_extra_or_wrong_tensor_is_refused_by_name(
    tmp_path: Path, change: Callable[[Tensors], object], message: str
) -> None:
    with pytest.raises(ProfileError, match=message):
        Model.load(_write(tmp_path, change))


def test_unreadable_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"config\.json"):
        Model.load(tmp_path)
    _write(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0notjson!")
    with pytest.raises(ProfileError, match=r"model\.safetensors"):
        Model.load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ProfileError, match="folder"):
        Model.load(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"norm.weight": "../elsewhere.safetensors"}}))
    with pytest.raises(ProfileError, match="elsewhere"):
        Model.load(tmp_path)
    index.write_text(json.dumps({"weight_map": {"norm.weight": "absent.safetensors"}}))
    with pytest.raises(ProfileError, match="absent"):
        Model.load(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ProfileError, match=r"config\.json"):
        Model.load(tmp_path)
