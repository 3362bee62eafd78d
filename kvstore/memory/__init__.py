"""Host memory that clients on this machine map and read, without a copy on the way."""

from kvstore.memory.cache import BlockCache
from kvstore.memory.extent import Extent, Slot, why_not_mapped

__all__ = ["BlockCache", "Extent", "Slot", "why_not_mapped"]
