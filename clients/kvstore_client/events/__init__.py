"""KV events of a store, or of an engine: read them, keep what they tell, and add the tokens that a store does not know.

Reading needs pyzmq and msgpack (`pip install kvstore[events]`); they are imported when a reader is opened.
"""

from kvstore.events.base import (
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    Event,
    StateRemoved,
    StateStored,
    UnknownEvent,
    short_hash,
)
from kvstore_client.events.held import HeldBlocks
from kvstore_client.events.prompts import PromptBook
from kvstore_client.events.reader import EventReader, packed
from kvstore_client.events.relay import Relay

__all__ = [
    "AllBlocksCleared",
    "Batch",
    "BlockRemoved",
    "BlockStored",
    "Event",
    "EventReader",
    "HeldBlocks",
    "PromptBook",
    "Relay",
    "StateRemoved",
    "StateStored",
    "UnknownEvent",
    "packed",
    "short_hash",
]
