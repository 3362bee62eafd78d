"""Pure policies: which window states to keep, and what to evict first."""

from kvstore.policy.base import EvictionPolicy
from kvstore.policy.leaves import FifoPolicy
from kvstore.policy.lru import LruPolicy
from kvstore.policy.window import WindowPolicy

__all__ = ["EvictionPolicy", "FifoPolicy", "LruPolicy", "WindowPolicy"]
