"""Pure policies: which window states to keep, and what to evict first."""

from kvstore.policy.base import EvictionPolicy
from kvstore.policy.leaves import FifoPolicy, LeafPolicy
from kvstore.policy.lru import LruPolicy
from kvstore.policy.registry import DEFAULT_EVICTION, EVICTION_NAMES, EVICTION_POLICIES, make_policy
from kvstore.policy.window import WindowPolicy

__all__ = [
    "DEFAULT_EVICTION",
    "EVICTION_NAMES",
    "EVICTION_POLICIES",
    "EvictionPolicy",
    "FifoPolicy",
    "LeafPolicy",
    "LruPolicy",
    "WindowPolicy",
    "make_policy",
]
