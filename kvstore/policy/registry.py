"""Eviction policies by name."""

from __future__ import annotations

from collections.abc import Mapping

from kvstore.errors import InvalidArgument
from kvstore.policy.adaptive import ArcPolicy
from kvstore.policy.base import EvictionPolicy
from kvstore.policy.density import DensityPolicy
from kvstore.policy.frequency import GdsfPolicy, LfuPolicy
from kvstore.policy.leaves import FifoPolicy, LeafPolicy
from kvstore.policy.lru import LruPolicy
from kvstore.policy.queues import S3FifoPolicy, SievePolicy, SlruPolicy, TwoQueuePolicy

DEFAULT_EVICTION = LruPolicy.name

EVICTION_POLICIES: Mapping[str, type[LruPolicy] | type[LeafPolicy]] = {
    policy.name: policy
    for policy in (
        LruPolicy,
        FifoPolicy,
        S3FifoPolicy,
        SievePolicy,
        SlruPolicy,
        ArcPolicy,
        LfuPolicy,
        GdsfPolicy,
        TwoQueuePolicy,
        DensityPolicy,
    )
}
EVICTION_NAMES = ", ".join(EVICTION_POLICIES)


def make_policy(name: str, *, field: str = "eviction") -> EvictionPolicy:
    """An empty one. InvalidArgument for a name that is none, as the value of `field`."""
    if name not in EVICTION_POLICIES:
        raise InvalidArgument("unknown eviction policy", field=field, value=name, allowed=EVICTION_NAMES)
    return EVICTION_POLICIES[name]()
