"""The embedded DeepSeek V4 model: forward, state out and in, replay."""

from kvstore_workers.model.config import ModelConfig
from kvstore_workers.model.model import Model
from kvstore_workers.model.rates import MeasuredRates, measure_rates
from kvstore_workers.model.sampling import pick
from kvstore_workers.model.selfcheck import SelfCheck, numerics, self_check
from kvstore_workers.model.sequence import EntryFeed, Sequence
from kvstore_workers.model.starts import RowsStart, StateStart

__all__ = [
    "EntryFeed",
    "MeasuredRates",
    "Model",
    "ModelConfig",
    "RowsStart",
    "SelfCheck",
    "Sequence",
    "StateStart",
    "measure_rates",
    "numerics",
    "pick",
    "self_check",
]
