"""Host memory: window states that live for minutes, and states handed from one worker to another."""

from kvstore.pool.handoffs import Handoff, HandoffStatistics, HandoffTable, Take
from kvstore.pool.states import PooledState, PoolStatistics, StatePin, StatePool

__all__ = [
    "Handoff",
    "HandoffStatistics",
    "HandoffTable",
    "PoolStatistics",
    "PooledState",
    "StatePin",
    "StatePool",
    "Take",
]
