"""vLLM's plug-in entry point: makes the tier known by the short name `kvstore`."""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)


def register() -> None:
    """Called in every process of vLLM, whether it offloads or not. It stops none: where vLLM has no tiers, there is nothing
    to be known in. The tier itself is imported when it is used."""
    try:
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    except ImportError as error:
        log.warning("no kvstore tier: this vLLM has no secondary tiers (%s)", error)
        return
    try:
        SecondaryTierFactory.register_tier("kvstore", "kvstore_vllm.tier", "KvstoreTier")
    except ValueError:
        log.debug("the kvstore tier is known already")
