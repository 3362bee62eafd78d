"""Client of the cache service: grpcio and protobuf are all that it needs."""

from kvstore.prefix.opaque import OpaqueKey
from kvstore.types import Durability
from kvstore_client.address import InProcessAddress
from kvstore_client.client import CacheClient, Contained, Lookup
from kvstore_client.dock import Dock
from kvstore_client.flight import Flight
from kvstore_client.handoff import HandoffTake
from kvstore_client.keyed import KeyedStore
from kvstore_client.lease import Lease
from kvstore_client.mapped import MappedItem
from kvstore_client.prompt import PromptKeys
from kvstore_client.reservation import Reservation
from kvstore_client.values import (
    Alternative,
    Cleared,
    Committed,
    Costs,
    Coverage,
    Deadlines,
    DroppedStates,
    Eviction,
    FetchedItem,
    FetchedSlice,
    MemoryBudgets,
    OpenedNamespace,
    Plan,
    ReserveItem,
    ReserveOutcome,
    SaveStates,
)

__all__ = [
    "Alternative",
    "CacheClient",
    "Cleared",
    "Committed",
    "Contained",
    "Costs",
    "Coverage",
    "Deadlines",
    "Dock",
    "DroppedStates",
    "Durability",
    "Eviction",
    "FetchedItem",
    "FetchedSlice",
    "Flight",
    "HandoffTake",
    "InProcessAddress",
    "KeyedStore",
    "Lease",
    "Lookup",
    "MappedItem",
    "MemoryBudgets",
    "OpaqueKey",
    "OpenedNamespace",
    "Plan",
    "PromptKeys",
    "Reservation",
    "ReserveItem",
    "ReserveOutcome",
    "SaveStates",
]
