"""What a tile of rows needs to know about its positions: angles, masks, visible entries. Computed once per tile."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from kvstore_workers.model.config import TILE, ModelConfig
from kvstore_workers.model.rotary import Angles
from kvstore_workers.model.rows import entries_visible, window_visible


class Span(NamedTuple):
    """Tokens [first, last) that one tile of `height` rows computes."""

    first: int
    last: int
    height: int


def spans(start: int, end: int, small: int) -> list[Span]:
    """The tiles that cover [start, end): a small one where all tokens of a TILE fit in it."""
    found = []
    while start < end:
        last = min(end, start // TILE * TILE + TILE)
        fits = start // small == (last - 1) // small
        found.append(Span(start, last, small if fits else TILE))
        start = last
    return found


@dataclass(slots=True)
class Positions:
    """Tables of the TILE positions from `start` on, a multiple of TILE. Rows of a smaller tile are slices of these."""

    config: ModelConfig
    start: int
    window_from: int
    window_angles: Angles
    entry_angles: Angles
    hadamard: torch.Tensor
    positions: torch.Tensor
    biases: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def context_from(self) -> int:
        """The oldest position that a row of this tile attends to in its window."""
        return self.start - (self.config.window_tokens - 1)

    def bias(self, ratio: int) -> torch.Tensor:
        """float32 [TILE, window context | entries | 1]: 0 where a row may attend, else -inf; `ratio` 0 has no entries."""
        known = self.biases.get(ratio)
        if known is None:
            rows = torch.arange(self.context_from, self.start + TILE, device=self.positions.device)
            parts = [window_visible(self.positions, rows, self.config.window_tokens, self.window_from)]
            if ratio:
                entries = torch.arange((self.start + TILE) // ratio, device=self.positions.device)
                parts.append(entries < entries_visible(self.positions, ratio)[:, None])
            parts.append(torch.ones_like(parts[0][:, :1]))
            seen = torch.cat(parts, dim=1)
            known = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, float("-inf"))
            self.biases[ratio] = known
        return known


@dataclass(frozen=True, slots=True)
class Tile:
    """`height` rows from `start` on, a multiple of `height`, inside one TILE; rows [first, last) of them are real."""

    table: Positions
    start: int
    height: int
    first: int
    last: int

    @property
    def big_start(self) -> int:
        return self.table.start

    @property
    def context_from(self) -> int:
        return self.table.context_from

    @property
    def hadamard(self) -> torch.Tensor:
        return self.table.hadamard

    @property
    def _span(self) -> slice:
        offset = self.start - self.table.start
        return slice(offset, offset + self.height)

    def angles(self, window_only: bool) -> Angles:
        table = self.table.window_angles if window_only else self.table.entry_angles
        return table.rows(self._span.start, self._span.stop)

    def group_angles(self, ratio: int) -> Angles:
        """Of the first position of every group in the whole TILE."""
        return self.table.entry_angles.rows(0, TILE, ratio)

    def bias(self, ratio: int) -> torch.Tensor:
        return self.table.bias(ratio)[self._span]

    def visible(self, ratio: int) -> torch.Tensor:
        return entries_visible(self.table.positions[self._span], ratio)
