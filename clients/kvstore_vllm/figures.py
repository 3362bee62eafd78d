"""What the tier counts, by name."""

from __future__ import annotations

from collections.abc import Mapping

FIGURES: Mapping[str, str] = {
    "keys_asked": "Keys that the store was asked for.",
    "keys_held": "Keys that it said it holds.",
    "keys_late": "Keys taken for misses since no answer came in time.",
    "keys_refused": "Keys taken for misses since too many were being asked for.",
    "rows_loaded": "Rows loaded from the store into the host pool.",
    "rows_load_failed": "Rows that were to be loaded and were not: lost, damaged, or the store failed.",
    "rows_load_refused": "Rows that were not loaded since too many waited.",
    "rows_stored": "Rows that the store holds after they were given to it, also those that it held before.",
    "rows_store_failed": "Rows that were to be stored and were not.",
    "rows_store_refused": "Rows that were not stored since too many waited.",
    "calls_failed": "Calls to the store that failed.",
}


def metric_of(name: str) -> str:
    """Its name on the engine's metrics page, which adds `_total`."""
    return f"vllm:kv_offload_kvstore_{name}"
