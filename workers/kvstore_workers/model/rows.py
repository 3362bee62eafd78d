"""Which rows each layer reads and makes: the one description of the model's dependencies along positions.

A layer's window row at i needs the layer's input at i. Its output at i needs the window rows of (i - W, i], entries
that end at or before i, and nothing else. The replay and the attention mask both come from here, and so can a test
that spreads marks along the same dependencies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LayerRows:
    """Positions at which one layer works, up to the end of the run: window rows and compressor inputs from
    `keys_from` on, attention and experts (the layer's output) from `queries_from` on."""

    keys_from: int
    queries_from: int


def forward_rows(layers: int, start: int, outputs_from: int) -> tuple[LayerRows, ...]:
    """A plain forward from `start`; the last layer's output is wanted from `outputs_from` on only."""
    return tuple(LayerRows(start, start if layer < layers - 1 else outputs_from) for layer in range(layers))


def replay_rows(layers: int, window_tokens: int, replay_from: int, position: int) -> tuple[LayerRows, ...]:
    """The triangle that ends in the window rows of (position - W, position) in every layer.

    Layer l makes rows from position - (L - l)(W - 1) on, never before `replay_from`; its output is needed only where
    the next layer makes rows, so the last layer makes none.
    """
    keys = [max(replay_from, position - (layers - layer) * (window_tokens - 1)) for layer in range(layers)]
    return tuple(LayerRows(own, after) for own, after in zip(keys, [*keys[1:], position], strict=True))


def window_visible(
    queries: torch.Tensor, rows: torch.Tensor, window_tokens: int, first_row: int
) -> torch.Tensor:
    """bool [queries, rows]: which row positions each query position attends to; rows before `first_row` do not exist."""
    distance = queries[:, None] - rows[None, :]
    return (distance >= 0) & (distance < window_tokens) & (rows >= first_row)[None, :]


def entries_visible(position: torch.Tensor, ratio: int) -> torch.Tensor:
    """How many entries a query at `position` may see: a group may end at the query itself."""
    return (position + 1) // ratio
