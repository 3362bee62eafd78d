"""One engine process that answers requests on stdin, one JSON object a line, with one a line on the file descriptor it is told.

A request is {"tokens": [...]}, {"figures": true}, {"script": [...]} or {"pause": seconds}. The environment has vLLM; the model's folder
has a configuration and no weights: they are made from a seed, and so are the same in every process.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="WARNING",
)
sys.path.insert(0, str(Path(__file__).resolve().parent))

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.sampling_params import RequestOutputKind

from kvstore_vllm import rows


def engine(options: dict[str, Any]) -> LLM:
    """Without a tier the engine has no connector at all."""
    transfer = KVTransferConfig(
        kv_connector="OffloadingConnector",
        kv_role="kv_both",
        engine_id=options["name"],
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "cpu_spec",
            "cpu_bytes_to_use": options["pool_bytes"],
            "blocks_per_chunk": 1,
            "secondary_tiers": [options["tier"]],
        },
    )
    return LLM(
        model=options["model"],
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=options["model_tokens"],
        max_num_seqs=4,
        enable_prefix_caching=True,
        num_gpu_blocks_override=options["device_blocks"],
        block_size=32,
        seed=0,
        disable_hybrid_kv_cache_manager=False,
        disable_log_stats=False,
        kv_transfer_config=transfer if options["tier"] else None,
    )


def answer(llm: LLM, request: dict[str, Any]) -> dict[str, Any]:
    if "tokens" in request:
        sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=0)
        [done] = llm.generate([{"prompt_token_ids": request["tokens"]}], sampling, use_tqdm=False)
        first = done.outputs[0]
        return {
            "tokens": list(first.token_ids),
            "logprob": first.cumulative_logprob,
            "cached": done.num_cached_tokens,
            "why": first.finish_reason,
        }
    if "pause" in request:
        rows.PAUSE_SECONDS = request["pause"]
        return request
    if "script" in request:
        steps, cached = stepped(llm, request["script"])
        return {"steps": steps, "cached": cached}
    figures: dict[str, float] = {}
    for metric in llm.get_metrics():
        if "kv_offload" in metric.name and hasattr(metric, "value"):
            figures[metric.name] = figures.get(metric.name, 0) + metric.value
    return {"figures": figures}


def stepped(llm: LLM, script: list[dict[str, Any]]) -> tuple[list[list[Any]], dict[str, int]]:
    """Requests {name, at, tokens, count}, each added before step `at`, for `count` tokens. For each step the seconds that it
    took, and the names of the requests that got a token by it; and of each request how many tokens of its prompt were not computed."""
    waiting, steps = list(script), []
    cached: dict[str, int] = {}
    core = llm.llm_engine
    while waiting or core.has_unfinished_requests():
        while waiting and waiting[0]["at"] <= len(steps):
            each = waiting.pop(0)
            sampling = SamplingParams(
                temperature=0,
                max_tokens=each["count"],
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            core.add_request(each["name"], {"prompt_token_ids": each["tokens"]}, sampling)
        begin = perf_counter()
        outputs = core.step()
        steps.append([perf_counter() - begin, [o.request_id for o in outputs if o.outputs[0].token_ids]])
        cached.update({o.request_id: o.num_cached_tokens or 0 for o in outputs})
    return steps, cached


def main() -> None:
    options = json.loads(sys.argv[1])
    with os.fdopen(options["answers"], "w") as answers:
        llm = engine(options)
        print(json.dumps({"ready": True}), file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(llm, json.loads(line))), file=answers, flush=True)
        llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
