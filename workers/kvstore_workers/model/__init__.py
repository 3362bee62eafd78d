"""The embedded DeepSeek V4 model: forward, state out and in, replay."""

from kvstore_workers.model.config import ModelConfig
from kvstore_workers.model.model import Model
from kvstore_workers.model.sampling import pick
from kvstore_workers.model.selfcheck import SelfCheck, numerics, self_check
from kvstore_workers.model.sequence import Sequence

__all__ = ["Model", "ModelConfig", "SelfCheck", "Sequence", "numerics", "pick", "self_check"]
