"""What computing costs on this machine, before any request has been run."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from kvstore.plan.figures import figures_of
from kvstore.plan.work import scanned
from kvstore_workers.model.config import TILE
from kvstore_workers.model.model import Model
from kvstore_workers.model.selfcheck import made_up
from kvstore_workers.model.sequence import Sequence

FAR_POSITION = 8_192
"""Where the index scan is timed: far enough to be told from noise, near enough to be made up in a moment."""

ROUNDS = 3


class MeasuredRates(NamedTuple):
    """Seconds per layer and token, and seconds per entry that an index scan looks at, neither negative; and how many more
    such entries a layer-token of the far tile had than one of the near tile (0: there is no index to time)."""

    seconds_per_layer_token: float
    seconds_per_index_entry: float
    density_spread: float


def measure_rates(
    model: Model, *, seconds: Callable[[], float] = time.perf_counter, far: int = FAR_POSITION
) -> MeasuredRates:
    """Times one tile at position 0 and one near `far` on made-up entries, and solves for the two prices.

    `seconds` is a clock. The fastest of a few rounds counts: what else the machine does only adds.
    """
    tokens = [random.Random(0).randrange(model.config.vocab_size) for _ in range(TILE)]
    far = far // TILE * TILE
    near_seconds = _tile_seconds(model, model.start(), tokens, seconds)
    layer_tokens = model.config.layer_count * TILE
    figures = figures_of(model.profile)
    near_entries, far_entries = scanned(figures, 0, TILE), scanned(figures, far, far + TILE)
    if far_entries == near_entries:
        return MeasuredRates(near_seconds / layer_tokens, 0.0, 0.0)
    far_seconds = _tile_seconds(model, made_up(model, far, seed=0), tokens, seconds)
    more = far_entries - near_entries
    per_entry = max(0.0, (far_seconds - near_seconds) / more)
    per_layer_token = max(0.0, near_seconds - near_entries * per_entry) / layer_tokens
    return MeasuredRates(per_layer_token, per_entry, more / layer_tokens)


def _tile_seconds(model: Model, sequence: Sequence, tokens: list[int], seconds: Callable[[], float]) -> float:
    taken = []
    for _ in range(ROUNDS):
        fork = sequence.fork()
        began = seconds()
        model.extend(fork, tokens, logits="none")
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        taken.append(seconds() - began)
    return min(taken)
