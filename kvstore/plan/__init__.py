"""The restore plan: one pure function from what is held and what things cost to the cheapest correct resume."""

from kvstore.plan.base import Alternative, Costs, Coverage, RestorePlan, SaveStates
from kvstore.plan.planner import plan, replay_layer_tokens, tokens_saved, ways

__all__ = [
    "Alternative",
    "Costs",
    "Coverage",
    "RestorePlan",
    "SaveStates",
    "plan",
    "replay_layer_tokens",
    "tokens_saved",
    "ways",
]
