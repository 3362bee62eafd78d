"""The live index and everything that decides about it."""

from kvstore.core.base import (
    Cleared,
    CommitReport,
    Contained,
    CoreStatistics,
    Dropped,
    Ended,
    FetchItem,
    GivenBack,
    Gone,
    Granted,
    Limits,
    LoadReport,
    LookupResult,
    Outcome,
    Relocated,
    ReserveItem,
    ReserveOutcome,
    ReserveResult,
    Written,
)
from kvstore.core.core import Core
from kvstore.core.leases import Lease
from kvstore.core.namespaces import NamespaceInfo, describe, parse_description, unknown_namespace

__all__ = [
    "Cleared",
    "CommitReport",
    "Contained",
    "Core",
    "CoreStatistics",
    "Dropped",
    "Ended",
    "FetchItem",
    "GivenBack",
    "Gone",
    "Granted",
    "Lease",
    "Limits",
    "LoadReport",
    "LookupResult",
    "NamespaceInfo",
    "Outcome",
    "Relocated",
    "ReserveItem",
    "ReserveOutcome",
    "ReserveResult",
    "Written",
    "describe",
    "parse_description",
    "unknown_namespace",
]
