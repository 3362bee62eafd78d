"""All that is taken from vLLM, for the versions that this tier was written for: 0.32 and 0.33. Importing it needs vLLM."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import canonical_format_id
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvstore.errors import ConfigError
from kvstore_vllm.identity import EngineRows, Group

__all__ = [
    "JobResult",
    "Locality",
    "LookupResult",
    "Medium",
    "OffloadingConnectorStats",
    "OffloadingCounterMetadata",
    "OffloadingEvent",
    "RequestOffloadingContext",
    "SecondaryTierManager",
    "in_prompt_order",
    "rows_of",
]

VERSIONS = ("0.32", "0.33")


def checked_version(text: str) -> str:
    """Major and minor of a version that is supported; ConfigError for any other: what a plug-in is called with changes."""
    found = re.match(r"(\d+\.\d+)(?:\.|$)", text)
    if found is None or found[1] not in VERSIONS:
        raise ConfigError(
            "the kvstore tier was not written for this vLLM",
            field="vllm.__version__",
            value=text,
            allowed=f"{' and '.join(VERSIONS)}; install one of these, or a kvstore for yours",
        )
    return found[1]


def rows_of(spec: Any, row_bytes: int) -> EngineRows:
    """What an OffloadingSpec says of its rows."""
    config = spec.config
    parallel = config.parallel
    same_for_all = parallel.is_parallelism_agnostic or config.replicated_layout
    sizes = ("tp_size", "pp_size", "pcp_size", "dcp_size", "world_size")
    layout = [str(config.kv_cache_layout)]
    if config.canonical_layout:
        layout.append(f"canonical:{canonical_format_id(config.kv_cache_layout)}")
    if config.replicated_layout:
        layout.append("replicated")
    return EngineRows(
        engine=f"vllm-{checked_version(vllm.__version__)}",
        model=config.model.name,
        dtype=str(config.model.dtype),
        layout=" ".join(layout),
        row_bytes=row_bytes,
        blocks_per_row=config.cache.blocks_per_chunk,
        tokens_per_hash=config.cache.tokens_per_hash,
        groups=tuple(
            Group(tokens_per_block=group.tokens_per_block, layers=tuple(group.layer_names))
            for group in config.groups
        ),
        parallel=() if same_for_all else tuple((name, getattr(parallel, name)) for name in sizes),
    )


def in_prompt_order(
    keys: Sequence[bytes], rows: Sequence[int], context: Any
) -> tuple[list[bytes], list[int]]:
    """Keys with their rows by where they end in their request's prompt, as far as the scheduler has noted that."""
    places = [context.get_offload_key_position(key) or 0 for key in keys]
    order = sorted(range(len(keys)), key=places.__getitem__)
    return [keys[at] for at in order], [int(rows[at]) for at in order]
