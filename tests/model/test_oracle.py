"""The forward against an independent implementation of the same architecture, on checkpoints that it wrote."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvstore_workers.model import Model

# Where it is used otherwise: the import takes seconds, and each process of a test run imports this file to list its tests.
if TYPE_CHECKING:
    from transformers import DeepseekV4ForCausalLM

WINDOW, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
TOLERANCE = 1e-4
YARN = {
    "rope_type": "yarn",
    "factor": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 256,
}

# layer types, index_topk, hash layers, rope of the entry layers, seed. With 300 tokens there are 75 entries in a CSA
# layer: top-k 4 gathers what it selects, 16 masks it, 128 selects nothing.
SCHEDULES = {
    "all kinds, gathered": ((WINDOW, WINDOW, CSA, HCA, CSA), 4, 1, YARN, 0),
    "all kinds, masked": ((WINDOW, WINDOW, CSA, HCA, CSA), 16, 3, YARN, 1),
    "all kinds, unselected": ((WINDOW, WINDOW, CSA, HCA, CSA), 128, 0, {"rope_type": "default"}, 2),
    "hca first": ((HCA, CSA, WINDOW, CSA), 8, 2, YARN, 3),
    "csa only": ((CSA, CSA), 4, 0, YARN, 4),
    "hca only": ((HCA,), 4, 1, YARN, 5),
    "window only": ((WINDOW, WINDOW), 4, 1, YARN, 6),
}


class _TiesToTheLowest(torch.Tensor):
    """Scores whose topk takes the lowest index among equals, which plain topk leaves open."""

    def topk(self, k: int, dim: int = -1) -> Any:  # type: ignore[override]
        ordered = self.as_subclass(torch.Tensor).sort(dim=dim, descending=True, stable=True)
        return torch.return_types.topk((ordered.values[..., :k], ordered.indices[..., :k]))


@pytest.fixture(autouse=True)
def _stable_ties(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as oracle_module
    from transformers.utils import logging as oracle_logging

    plain = oracle_module.DeepseekV4IndexerScorer.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return plain(self, *args, **kwargs).as_subclass(_TiesToTheLowest)

    monkeypatch.setattr(oracle_module.DeepseekV4IndexerScorer, "forward", forward)
    oracle_logging.disable_progress_bar()
    yield
    oracle_logging.enable_progress_bar()


def _oracle(schedule: str) -> DeepseekV4ForCausalLM:
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    types, topk, hashed, rope, seed = SCHEDULES[schedule]
    config = DeepseekV4Config(
        vocab_size=320,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=len(types),
        num_attention_heads=4,
        head_dim=32,
        q_lora_rank=32,
        num_experts_per_tok=2,
        n_routed_experts=8,
        max_position_embeddings=4096,
        layer_types=list(types),
        compress_rates={CSA: 4, HCA: 16},
        sliding_window=16,
        o_groups=2,
        o_lora_rank=32,
        mlp_layer_types=["hash_moe"] * min(hashed, len(types)) + ["moe"] * max(0, len(types) - hashed),
        index_n_heads=4,
        index_head_dim=16,
        index_topk=topk,
        qk_rope_head_dim=8,
        rope_parameters=dict(rope),
        swiglu_limit=1.5,
    )
    torch.manual_seed(seed)
    model = DeepseekV4ForCausalLM(config).eval()
    # The library's initial values are zeros and ones in many places, which would hide a term that is left out.
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            if name.endswith("tid2eid"):
                tensor.copy_(torch.randint(0, 8, tensor.shape))
            elif "norm" in name or name.endswith("scale"):
                tensor.copy_(1 + 0.1 * torch.randn_like(tensor))
            elif tensor.dim() >= 2 and "position_bias" not in name and "embed" not in name:
                tensor.copy_(torch.randn_like(tensor) / tensor.shape[-1] ** 0.5)
            else:
                tensor.copy_(torch.randn_like(tensor))
    return model


def _worst(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_logits_equal_the_oracles_at_once_in_chunks_and_token_by_token(schedule: str, tmp_path: Path) -> None:
    oracle = _oracle(schedule)
    oracle.save_pretrained(tmp_path)
    model = Model.load(tmp_path)
    model.decode_tile = 8
    tokens = torch.randint(0, 320, (1, 300), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        expected = oracle(tokens, use_cache=False).logits[0]
    flat = tokens[0].tolist()
    whole = model.extend(model.start(), flat, logits="all")
    assert whole is not None
    assert expected.std() > 0.5, "logits this small would make the tolerance meaningless"
    assert _worst(whole, expected) <= TOLERANCE

    sequence = model.start()
    cuts = [0, 1, 6, 37, 130, 131, 250, 300]
    chunks = [model.extend(sequence, flat[a:b], logits="all") for a, b in itertools.pairwise(cuts)]
    assert _worst(torch.cat([chunk for chunk in chunks if chunk is not None]), expected) <= TOLERANCE

    sequence = model.start()
    model.extend(sequence, flat[:90], logits="none")
    for position in (*range(90, 130), *range(250, 300)):
        model.extend(sequence, flat[sequence.position : position], logits="none")
        step = model.extend(sequence, flat[position : position + 1])
        assert step is not None
        assert _worst(step[0], expected[position]) <= TOLERANCE, f"position {position}"


def test_logits_equal_the_oracles_own_decode_with_its_cache(tmp_path: Path) -> None:
    from transformers import DynamicCache

    oracle = _oracle("all kinds, gathered")
    oracle.save_pretrained(tmp_path)
    model = Model.load(tmp_path)
    tokens = torch.randint(0, 320, (1, 140), generator=torch.Generator().manual_seed(8))
    flat = tokens[0].tolist()
    cache = DynamicCache(config=oracle.config)
    sequence = model.start()
    with torch.no_grad():
        expected = oracle(tokens[:, :99], cache=cache, use_cache=True).logits[0]
        ours = model.extend(sequence, flat[:99], logits="all")
        assert ours is not None
        assert _worst(ours, expected) <= TOLERANCE
        for position in range(99, 140):
            expected = oracle(tokens[:, position : position + 1], cache=cache, use_cache=True).logits[0]
            ours = model.extend(sequence, flat[position : position + 1])
            assert ours is not None
            assert _worst(ours, expected) <= TOLERANCE, f"position {position}"


def test_a_bfloat16_model_stays_near_the_float32_oracle(tmp_path: Path) -> None:
    oracle = _oracle("all kinds, unselected")
    oracle.save_pretrained(tmp_path)
    model = Model.load(tmp_path, dtype=torch.bfloat16)
    tokens = torch.randint(0, 320, (1, 200), generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        expected = oracle(tokens, use_cache=False).logits[0]
    ours = model.extend(model.start(), tokens[0].tolist(), logits="all")
    assert ours is not None
    assert ours.dtype is torch.float32
    # 8 bits of mantissa through ten sublayers; an omitted term moves logits by their own size, about 1
    assert float((ours - expected).square().mean().sqrt()) < 0.1


def test_module_names_and_published_names_load_the_same_model(tmp_path: Path) -> None:
    oracle = _oracle("all kinds, gathered")
    oracle.save_pretrained(tmp_path / "published")
    oracle.save_pretrained(tmp_path / "modules", save_original_format=False)
    published, modules = Model.load(tmp_path / "published"), Model.load(tmp_path / "modules")
    assert published.weights_revision == modules.weights_revision


def test_a_sharded_checkpoint_loads_the_same_model(tmp_path: Path) -> None:
    oracle = _oracle("hca first")
    oracle.save_pretrained(tmp_path / "one")
    oracle.save_pretrained(tmp_path / "many", max_shard_size="200KB")
    assert not (tmp_path / "many" / "model.safetensors").exists()
    assert Model.load(tmp_path / "one").weights_revision == Model.load(tmp_path / "many").weights_revision
