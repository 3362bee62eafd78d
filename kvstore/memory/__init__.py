"""Host memory that clients on this machine map: to read it, or to write to what is their own."""

from kvstore.memory.arena import Arena, Arenas
from kvstore.memory.cache import BlockCache
from kvstore.memory.dock import Dock, Docks
from kvstore.memory.extent import Extent, Slot, why_not_mapped

__all__ = ["Arena", "Arenas", "BlockCache", "Dock", "Docks", "Extent", "Slot", "why_not_mapped"]
