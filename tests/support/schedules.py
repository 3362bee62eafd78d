"""Small models of many layer schedules, and one run of each with everything that a store would have kept of it."""

from __future__ import annotations

import collections.abc
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from kvstore.profile.base import Layer, LayerKind, Profile
from kvstore.profile.formats import RowFormat
from kvstore.profile.layout import LayerSlice, layer_slices, rows_needed
from kvstore.profile.registry import get_profile
from kvstore_workers.model import Model, ModelConfig, RowsStart, Sequence, self_check

W = Layer(LayerKind.WINDOW)
F32 = (RowFormat.F32, RowFormat.F32, RowFormat.F32)
FLASH = (RowFormat.FP8_ROPE_BF16, RowFormat.FP4_UE8M0, RowFormat.FP8_ROPE_BF16)
LOWEST = (RowFormat.FP4_E4M3, RowFormat.FP4_UE8M0, RowFormat.FP8_ALL)
# (head_dim, rope_dim, index_head_dim) that fill whole scale groups
DIMS = {F32: (16, 4, 8), FLASH: (72, 8, 32), LOWEST: (32, 8, 32)}


def csa(ratio: int = 4) -> Layer:
    return Layer(LayerKind.CSA, ratio)


def hca(ratio: int = 16) -> Layer:
    return Layer(LayerKind.HCA, ratio)


@dataclass(frozen=True, slots=True)
class Schedule:
    """`formats` of entries, keys and rows."""

    layers: tuple[Layer, ...]
    block: int = 32
    window: int = 16
    topk: int = 4
    formats: tuple[RowFormat, RowFormat, RowFormat] = F32
    dtype: torch.dtype = torch.float32
    length: int = 300

    def profile(self) -> Profile:
        entry_format, key_format, row_format = self.formats
        head_dim, rope_dim, index_head_dim = DIMS[self.formats]
        return Profile(
            name="schedule",
            layers=self.layers,
            block_tokens=self.block,
            window_tokens=self.window,
            head_dim=head_dim,
            rope_dim=rope_dim,
            index_head_dim=index_head_dim,
            entry_format=entry_format,
            key_format=key_format,
            row_format=row_format,
        )

    def model(self, *, seed: int) -> Model:
        """Checked, so that its decode tile is the one that a worker would use."""
        config = replace(
            ModelConfig.for_profile(get_profile("tiny")),
            profile=self.profile(),
            vocab_size=64,
            hidden_size=32,
            heads=2,
            q_lora_rank=16,
            o_lora_rank=8,
            index_heads=2,
            index_topk=self.topk,
            experts=4,
            moe_width=16,
            num_hash_layers=0,
            hc_mult=2,
            hc_sinkhorn_iters=4,
        )
        model = Model.random(config, seed=seed, dtype=self.dtype)
        assert self_check(model, far=()).bit_equal
        return model


# With 300 tokens a CSA layer of ratio 4 has 75 entries: top-k 4 gathers what it selects, 32 masks it, 128 takes all.
SCHEDULES = {
    "window": Schedule((W,)),
    "csa": Schedule((csa(),)),
    "hca": Schedule((hca(),)),
    "window, window": Schedule((W, W)),
    "window, csa": Schedule((W, csa())),
    "csa, window": Schedule((csa(), W), topk=32),
    "window, hca": Schedule((W, hca())),
    "hca, window": Schedule((hca(), W)),
    "csa, hca": Schedule((csa(), hca()), topk=32),
    "hca, csa": Schedule((hca(), csa())),
    "csa, csa": Schedule((csa(), csa()), topk=128),
    "hca, hca": Schedule((hca(), hca(32))),
    "hca first, csa last": Schedule((hca(), W, csa(), csa())),
    "ratios 2 and 8, 8 and 32": Schedule((csa(2), hca(8), csa(8), hca(32)), topk=32),
    "blocks of one group": Schedule((W, csa(), hca()), block=16),
    "a window of several blocks": Schedule((csa(), hca()), window=80),
    "a window of more than a tile": Schedule((W, csa(), hca(32)), window=160),
    "blocks that are no tile": Schedule((csa(), hca(32)), block=160, length=560),
    "blocks of two tiles": Schedule((W, hca(64), csa()), block=256, window=200, length=600),
    "flash formats": Schedule((W, csa(), hca(), csa()), formats=FLASH),
    "flash formats, hca first": Schedule((hca(32), csa()), formats=FLASH, block=64, window=40, topk=32),
    "lowest formats": Schedule((W, csa(), hca()), formats=LOWEST),
    "bfloat16": Schedule((W, csa(), hca()), dtype=torch.bfloat16),
    "bfloat16, flash formats": Schedule((hca(), csa()), dtype=torch.bfloat16, formats=FLASH, topk=32),
}

OFTEN = (
    *(
        "window",
        "csa",
        "hca",
        "window, csa",
        "hca, csa",
        "csa, csa",
        "hca first, csa last",
        "ratios 2 and 8, 8 and 32",
    ),
    *(
        "blocks of one group",
        "a window of more than a tile",
        "blocks of two tiles",
        "flash formats, hca first",
    ),
    *("lowest formats", "bfloat16, flash formats"),
)
"""Every kind of layer first and last, every way to select, every format; the others put the same together otherwise."""


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()


@dataclass
class Kept:
    """What is to be had at block edges while a sequence advances. `rows`: without and with the overlap."""

    states: dict[int, bytes] = field(default_factory=dict)
    rows: dict[tuple[int, bool], bytes | None] = field(default_factory=dict)

    def advance(self, model: Model, sequence: Sequence, tokens: list[int]) -> torch.Tensor:
        """Logits of all `tokens`."""

        def take(edge: int) -> None:
            self.states[edge] = sequence.state_at(edge)
            for overlap in (False, True):
                self.rows[edge, overlap] = sequence.rows_payload(
                    edge // model.profile.block_tokens - 1, overlap=overlap
                )

        logits = model.extend(sequence, tokens, logits="all", on_edge=take)
        assert logits is not None
        return logits


class Run:
    """One prefill of seeded tokens: its logits, blocks, states and rows."""

    def __init__(self, schedule: Schedule, *, seed: int, name: str = "") -> None:
        rng = random.Random(seed)
        self.name = name
        self.model = schedule.model(seed=seed)
        self.profile = self.model.profile
        self.tokens = [rng.randrange(self.model.config.vocab_size) for _ in range(schedule.length)]
        self.kept = Kept()
        sequence = self.model.start()
        self.logits = self.kept.advance(self.model, sequence, self.tokens)
        self.blocks = blocks_of(sequence)
        self.edges = range(self.profile.block_tokens, schedule.length + 1, self.profile.block_tokens)

    def blocks_before(self, position: int) -> list[bytes]:
        return self.blocks[: position // self.profile.block_tokens]

    def rows_start(self, edge: int, *, overlap: bool) -> RowsStart:
        needed = rows_needed(self.profile, edge, overlap=overlap)
        payloads = []
        for block in range(needed.first_block, needed.first_block + needed.blocks):
            payload = self.kept.rows[(block + 1) * self.profile.block_tokens, overlap]
            assert payload is not None
            payloads.append(payload)
        return RowsStart(payloads, edge, overlap=overlap)

    def check(self, sequence: Sequence, position: int, *, after: int = 40) -> None:
        """`sequence` is at `position` what the run was, and stays so for `after` tokens, the first ones one by one, and
        for all blocks that they end."""
        assert sequence.position == position
        if position in self.kept.states:
            assert sequence.state() == self.kept.states[position]
        kept, tokens = Kept(), self.tokens[position : position + after]
        parts = [kept.advance(self.model, sequence, part) for part in ([tokens[:1], tokens[1:2], tokens[2:]])]
        assert same_bytes(torch.cat(parts), self.logits[position : position + after])
        for edge, state in kept.states.items():
            assert state == self.kept.states[edge], f"state at {edge}"
        for (edge, overlap), rows in kept.rows.items():
            restored_inside = edge - self.profile.block_tokens < position - self.profile.window_rows
            assert rows is None if restored_inside else rows == self.kept.rows[edge, overlap]
        assert blocks_of(sequence) == self.blocks_before(sequence.position)


def blocks_of(sequence: Sequence) -> list[bytes]:
    return [sequence.block_payload(i) for i in range(sequence.position // sequence.profile.block_tokens)]


def sliced(
    profile: Profile, blocks: collections.abc.Sequence[bytes], count: int
) -> Iterator[tuple[LayerSlice, list[bytes]]]:
    """`blocks` as a feed of at most `count` slices."""
    for part in layer_slices(profile, count):
        yield part, [block[part.offset : part.end] for block in blocks]
