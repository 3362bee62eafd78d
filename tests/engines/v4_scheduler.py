"""vLLM's own scheduler with the cache groups of a DeepSeek V4 of full size, and this store as a tier; only the model is not there.

The layers are made without memory, to say which caches they keep; the scheduler then plans a prompt as it would for real, and its
tiering manager gives rows of the host pool to the tier. What would run on a device is taken for done at once. Prints what was stored
and found as one JSON object on the descriptor that it is told.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="4", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR"
)

import torch

# Attention makes some when it is built, and the CPU has none.
torch.cuda.Event = type("Event", (), {"__init__": lambda self, *args, **options: None})  # type: ignore[assignment,misc]
torch.cuda.Stream = type("Stream", (), {"__init__": lambda self, *args, **options: None})  # type: ignore[assignment,misc]

from vllm import SamplingParams
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

LAYERS = 43
TOKENS = 2048
WAIT = 120.0

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "num_hash_layers": 3,
    "compress_ratios": [0, 0, *(4 if layer % 2 == 0 else 128 for layer in range(LAYERS - 2))],
    "compress_rope_theta": 160000.0,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "vocab_size": 129280,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "expert_dtype": "fp8",
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
        "rope_theta": 10000.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


def configured(address: str) -> tuple[Any, Any]:
    """(Engine configuration, caches of the model as the scheduler sees them.)"""
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(CONFIG))
    config = EngineArgs(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=4096,
        max_num_batched_tokens=4096,
        max_num_seqs=4,
        enable_prefix_caching=True,
        kv_cache_dtype="fp8_ds_mla",
    ).create_engine_config()
    # What the engine core comes to for this model on a device; the CPU platform switches both off.
    config.cache_config.enable_prefix_caching = True
    config.cache_config.kv_cache_layout = "BLHNC"
    config.scheduler_config.enable_chunked_prefill = True
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    # The folder is another one each time.
    config.model_config.model = "deepseek-v4-shaped"
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        kv_connector_extra_config={
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 160 << 20,
            "blocks_per_chunk": 1,
            "secondary_tiers": [
                {"type": "KvstoreTier", "module_path": "kvstore_vllm.tier", "address": address}
            ],
        },
    )
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder / 'group'}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        config.model_config.model, name = str(folder), config.model_config.model
        with torch.device("meta"):
            initialize_model(config)
        config.model_config.model = name
        specs = {
            layer: spec
            for layer, module in config.compilation_config.static_forward_context.items()
            if isinstance(module, AttentionLayerBase)
            and (spec := module.get_kv_cache_spec(config)) is not None
        }
        caches = kv_cache_utils.get_kv_cache_configs(config, [specs], [4 << 30])
    config.cache_config.num_gpu_blocks = caches[0].num_blocks
    return config, kv_cache_utils.generate_scheduler_kv_cache_config(caches)


class Engine:
    """A scheduler, and what would run its steps."""

    def __init__(self, config: Any, caches: Any, number: int) -> None:
        config.kv_transfer_config.engine_id = f"v4-{os.getpid()}-{number}"
        block, hashed = kv_cache_utils.resolve_kv_cache_block_sizes(caches, config)
        kv_cache_utils.init_none_hash(sha256)
        self._hasher = kv_cache_utils.get_request_block_hasher(hashed, sha256)
        self._cached = 0
        self.sizes = {"scheduler_block": block, "hash_block": hashed}
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=caches,
            structured_output_manager=StructuredOutputManager(config),
            log_stats=False,
            block_size=block,
            hash_block_size=hashed,
        )

        # What it counts stays with it, where it can be read.
        self.tier.get_stats = lambda: None

    @property
    def tier(self) -> Any:
        [tier] = self.manager.secondary_tiers
        return tier

    @property
    def manager(self) -> Any:
        return self.scheduler.connector.connector_scheduler.manager

    def run(self, tokens: list[int]) -> int:
        """How many tokens of the prompt were found."""
        sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        sampling.update_from_generation_config({}, 1)
        request = Request("r", tokens, sampling, None, block_hasher=self._hasher)
        self.scheduler.add_request(request)
        end = time.monotonic() + WAIT
        while self.scheduler.has_requests() or self.manager.has_pending_work():
            assert time.monotonic() < end, "the request never came to an end"
            self._step()
        return self._cached

    def _step(self) -> None:
        planned = self.scheduler.schedule()
        meta = planned.kv_connector_metadata
        done = OffloadingWorkerMetadata()
        loading = set()
        for number, job in {**meta.load_jobs, **meta.store_jobs}.items():
            done.mark_completed(number)
            if number in meta.load_jobs:
                loading.add(job.req_id)
        names = list(planned.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=[[7] for _ in names],
            kv_connector_output=KVConnectorOutput(
                finished_recving=loading or None, kv_connector_worker_meta=done
            ),
        )
        for outputs in self.scheduler.update_from_output(planned, output).values():
            for each in outputs.outputs:
                if each.prefill_stats is not None:
                    self._cached = int(each.prefill_stats.num_cached_tokens)

    def counts(self) -> dict[str, float]:
        """Of the tier."""
        found: dict[str, float] = self.tier._tier.take_counts()
        return found


def main() -> None:
    config, caches = configured(sys.argv[1])
    tokens = [place * 7 % 1000 + 3 for place in range(TOKENS + 10)]
    found: dict[str, Any] = {
        "groups": [
            (group.kv_cache_spec.block_size, len(group.layer_names)) for group in caches.kv_cache_groups
        ]
    }
    for number, name in enumerate(("cold", "warm")):
        engine = Engine(config, caches, number)
        cached = engine.run(tokens)
        found |= engine.sizes | {"row_bytes": engine.tier.block_size_bytes}
        found[name] = {"cached": cached, **engine.counts()}
        engine.scheduler.shutdown()
    with os.fdopen(int(sys.argv[2]), "w") as answers:
        json.dump(found, answers)


if __name__ == "__main__":
    main()
