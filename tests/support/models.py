"""Configs of small models for tests that compare a model's bits with its own."""

from __future__ import annotations

from dataclasses import replace

from kvstore.profile.registry import get_profile
from kvstore_workers.model import ModelConfig


def quick_config(name: str = "tiny") -> ModelConfig:
    """The shipped one, with mixing weights that are normalised 4 times and not 20: that is a third of what a token of a small
    model costs, and nothing that a schedule, a state or a store could depend on."""
    return replace(ModelConfig.for_profile(get_profile(name)), hc_sinkhorn_iters=4)
