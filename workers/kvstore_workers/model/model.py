"""The model: forward at any position, state in, replay. Everything runs on tiles of fixed height (see `config.TILE`)."""

from __future__ import annotations

import collections.abc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F

from kvstore.errors import InvalidArgument
from kvstore.profile.base import Profile
from kvstore.profile.layout import LayerSlice
from kvstore.types import BytesLike
from kvstore_workers.model import attention, checkpoint, compress, experts, mixing
from kvstore_workers.model.codec import hadamard
from kvstore_workers.model.config import TILE, ModelConfig
from kvstore_workers.model.rotary import Angles, frequencies
from kvstore_workers.model.rows import LayerRows, forward_rows, replay_rows
from kvstore_workers.model.sequence import EntryFeed, Sequence
from kvstore_workers.model.starts import RowsStart, Start, StateStart, check_span
from kvstore_workers.model.tensors import digest, random_tensors
from kvstore_workers.model.tile import Positions, Span, Tile, spans
from kvstore_workers.model.weights import build_weights

Logits = Literal["last", "all", "none"]
DTYPES = (torch.float32, torch.bfloat16)
# Tables of the newest tiles are kept: sequences that decode in turn share or revisit them.
KNOWN_TABLES = 16


class Model:
    """Weights and forward. Holds no sequence; sequences of one model may advance in turn, not at the same time.

    `decode_tile`: rows of the tile that short extensions use, a divisor of TILE. The self check chooses it; TILE always
    gives the same bits as a whole prompt.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, torch.Tensor],
        *,
        weights_revision: str,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if dtype not in DTYPES:
            raise InvalidArgument(
                "unsupported dtype",
                field="dtype",
                value=dtype,
                allowed=", ".join(str(known) for known in DTYPES),
            )
        self.config = config
        self.weights_revision = weights_revision
        self.device = torch.device(device)
        self.dtype = dtype
        self.decode_tile = TILE
        with torch.inference_mode():
            self.weights = build_weights(config, tensors, device=self.device, dtype=dtype)
            self._window_frequencies = frequencies(config.window_rope, config.rope_dim).to(self.device)
            self._entry_frequencies = frequencies(config.entry_rope, config.rope_dim).to(self.device)
            self._hadamard = hadamard(config.index_head_dim).to(self.device)
        self._tables: dict[tuple[int, int], Positions] = {}

    @classmethod
    def random(
        cls,
        config: ModelConfig,
        *,
        seed: int,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> Model:
        """Random weights, the same for the same seed and config on every machine with the same torch."""
        tensors = random_tensors(config, seed=seed)
        revision = f"random-{seed}-{digest(config, tensors)[:16]}"
        return cls(config, tensors, weights_revision=revision, device=device, dtype=dtype)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        name: str = "checkpoint",
    ) -> Model:
        """From a checkpoint folder; ProfileError names a missing, extra or misshapen tensor and unsupported configs."""
        config, tensors = checkpoint.load_folder(Path(folder), name=name)
        revision = f"sha256-{digest(config, tensors)}"
        return cls(config, tensors, weights_revision=revision, device=device, dtype=dtype)

    @property
    def profile(self) -> Profile:
        return self.config.profile

    # ---- sequences ------------------------------------------------------------------------------------------

    def start(self) -> Sequence:
        """A sequence at position 0."""
        return self._sequence(0, 0)

    def restore(
        self,
        *,
        position: int,
        start: Start | None,
        tokens: collections.abc.Sequence[int] = (),
        blocks: collections.abc.Sequence[BytesLike] = (),
        feed: EntryFeed | None = None,
        exact: bool = True,
        triangular: bool = True,
    ) -> Sequence:
        """A sequence at `position` out of stored bytes, bit-equal to one that computed all tokens before it.

        `start` is where the window rows come from: a state, stored rows, or None, nothing. `tokens` are those from there
        to `position` and are replayed: entries are read, never recomputed; window rows and overlap are recomputed, each
        layer only where the result depends on it. From nothing this is exact with at least L(W-1) tokens, or all; fewer
        are refused unless `exact` is False, and then give an approximate state. Without `triangular` every layer runs at
        all of `tokens`, which costs more and gives the same state.

        `blocks` are all whole blocks before `position`. In their place `feed` may bring their bytes layer by layer while
        the layers before already run; what it raises comes out of the call that needed the bytes. InvalidArgument
        names what does not fit; `position` must be a block edge unless `start` is a state there.
        """
        check_span(self.profile, start, position=position, tokens=len(tokens), exact=exact)
        if feed is None:
            self._expect_blocks(blocks, position)
        elif blocks:
            raise InvalidArgument(
                "blocks come at once or by a feed",
                field="blocks",
                value=len(blocks),
                allowed="none beside a feed",
            )
        self._expect_tokens(tokens)
        replay_from = position - len(tokens)
        sequence = self._sequence(replay_from, position)
        with torch.inference_mode():
            sequence.expect_blocks(position // self.profile.block_tokens, feed)
            if feed is None:
                sequence.load_slice(
                    LayerSlice(0, self.config.layer_count, 0, self.profile.block_bytes), blocks
                )
            if isinstance(start, StateStart):
                sequence.load_state(start.payload, start.position)
                sequence.load_open_rows(start.open_rows)
            elif isinstance(start, RowsStart):
                sequence.load_rows(start.payloads, start.edge, overlap=start.overlap)
            else:
                sequence.begin_windows(replay_from)
            layers = self.config.layer_count
            if triangular:
                rows = replay_rows(layers, self.config.window_tokens, replay_from, position)
            else:
                rows = forward_rows(layers, replay_from, position)
            for span in spans(replay_from, position, self.decode_tile):
                tile_tokens = tokens[span.first - replay_from : span.last - replay_from]
                self._run(sequence, tile_tokens, span, rows, read_entries=True)
        return sequence

    def extend(
        self,
        seq: Sequence,
        tokens: collections.abc.Sequence[int],
        *,
        logits: Logits = "last",
        on_edge: Callable[[int], None] | None = None,
    ) -> torch.Tensor | None:
        """Advance `seq` by `tokens`. Returns float32 logits [1, vocab] of the last token, [n, vocab] of all, or None.

        `on_edge(edge)` is called, ascending, for every block edge in (position, position + n], when the tile that
        crosses it is done: `seq.state_at(edge)` and `seq.rows_payload(edge // block_tokens - 1, ...)` can be taken then.
        Where it raises, `seq` stands whole at the end of that tile. InvalidArgument for tokens outside the vocabulary,
        before anything has changed.
        """
        if logits not in ("last", "all", "none"):
            raise InvalidArgument("unknown logits", field="logits", value=logits, allowed="last, all, none")
        self._expect_tokens(tokens)
        start, end = seq.position, seq.position + len(tokens)
        if start == end:
            if logits == "last":
                raise InvalidArgument(
                    "no token, no logits", field="tokens", value=0, allowed="at least one token"
                )
            return torch.zeros(0, self.config.vocab_size) if logits == "all" else None
        outputs_from = {"none": end, "last": end - 1, "all": start}[logits]
        rows = forward_rows(self.config.layer_count, start, outputs_from)
        parts = []
        with torch.inference_mode():
            for span in spans(start, end, self.decode_tile):
                first, last, height = span
                streams = self._run(seq, tokens[first - start : last - start], span, rows, read_entries=False)
                seq.position = last
                if last > outputs_from:
                    tile_start = first // height * height
                    kept = slice(max(first, outputs_from) - tile_start, last - tile_start)
                    parts.append(self._logits(streams)[kept])
                if on_edge is not None:
                    for edge in self._edges(first, last):
                        on_edge(edge)
            return torch.cat(parts) if parts else None

    # ---- forward --------------------------------------------------------------------------------------------

    def _run(
        self,
        seq: Sequence,
        tokens: collections.abc.Sequence[int],
        span: Span,
        rows: tuple[LayerRows, ...],
        *,
        read_entries: bool,
    ) -> torch.Tensor:
        """One tile through all layers; returns its streams [height, k, hidden]. Rows outside the span are dummies."""
        first, last, height = span
        tile_start = first // height * height
        tile = Tile(self._table(first // TILE * TILE, seq.window_from), tile_start, height, first, last)
        ids = torch.zeros(height, dtype=torch.int64)
        ids[first - tile_start : last - tile_start] = torch.tensor(tokens, dtype=torch.int64)
        ids = ids.to(self.device)
        streams = self.weights.embed[ids][:, None, :].expand(-1, self.config.hc_mult, -1).contiguous()
        for layer, wanted in enumerate(rows):
            if wanted.keys_from < last:
                streams = self._layer(
                    seq,
                    streams,
                    ids,
                    layer=layer,
                    tile=tile,
                    rows=wanted,
                    read_entries=read_entries,
                )
        return streams

    def _layer(
        self,
        seq: Sequence,
        streams: torch.Tensor,
        ids: torch.Tensor,
        *,
        layer: int,
        tile: Tile,
        rows: LayerRows,
        read_entries: bool,
    ) -> torch.Tensor:
        config, weights = self.config, self.weights.layers[layer]
        hidden, mix = mixing.read(streams, weights.attention_mix, config)
        hidden = _norm(hidden, weights.attention_norm, config.rms_norm_eps)
        projected = attention.project(hidden, weights.attention)
        self._store(seq, projected, layer, tile, max(rows.keys_from, tile.first), read_entries=read_entries)
        if rows.queries_from >= tile.last:
            return streams
        seq.require(layer)
        result = attention.attend(projected, weights.attention, config, layer=layer, tile=tile, sequence=seq)
        streams = mixing.write(streams, mix, result)
        hidden, mix = mixing.read(streams, weights.expert_mix, config)
        hidden = _norm(hidden, weights.expert_norm, config.rms_norm_eps)
        valid = slice(max(rows.queries_from, tile.first) - tile.start, tile.last - tile.start)
        return mixing.write(streams, mix, experts.apply(hidden, ids, weights.experts, config, valid))

    def _store(
        self,
        seq: Sequence,
        projected: attention.Projected,
        layer: int,
        tile: Tile,
        first: int,
        *,
        read_entries: bool,
    ) -> None:
        """Window rows and compressor inputs of [first, tile.last), and the entries that they complete."""
        config, weights = self.config, self.weights.layers[layer].attention
        kind, ratio = config.profile.layers[layer].kind, config.profile.layers[layer].ratio
        rows = attention.window_row(projected, weights, config, tile.angles(ratio == 0))
        window = seq.window[layer]
        window.cover(tile.big_start + TILE)
        real = slice(first - tile.start, tile.last - tile.start)
        window.write(first, rows[real])
        if weights.stream_bias is None:
            return
        stream = seq.streams[layer]
        stream.cover(tile.big_start + TILE)
        bias = weights.stream_bias[tile.start - tile.big_start :][: tile.height]
        stream.write(first, projected.streams[real] + bias[real])
        done, ready = first // ratio, tile.last // ratio
        if read_entries or ready == done:
            return
        # Always all groups of the TILE, in one shape; only those that the new rows complete are kept.
        sums = compress.group_sums(stream.read(tile.big_start - ratio, tile.big_start + TILE), kind, ratio)
        entries, keys = compress.finish(sums, weights, config, tile.group_angles(ratio))
        groups = slice(done - tile.big_start // ratio, ready - tile.big_start // ratio)
        seq.entries[layer].append(entries[groups])
        if keys is not None:
            if not config.keys_are_plain:
                keys = keys @ self._hadamard
            seq.keys[layer].append(keys[groups])

    def _logits(self, streams: torch.Tensor) -> torch.Tensor:
        hidden = mixing.head_input(streams, self.weights.head_mix, self.config)
        hidden = _norm(hidden, self.weights.norm, self.config.rms_norm_eps)
        return F.linear(hidden, self.weights.head).float()

    def _table(self, start: int, window_from: int) -> Positions:
        # Only a first tile can see that earlier rows do not exist.
        window_from = max(window_from, 0) if window_from > start - self.config.window_tokens else 0
        table = self._tables.get((start, window_from))
        if table is None:
            positions = torch.arange(start, start + TILE, device=self.device)
            table = Positions(
                self.config,
                start,
                window_from,
                Angles.at(self._window_frequencies, positions),
                Angles.at(self._entry_frequencies, positions),
                self._hadamard,
                positions,
            )
            while len(self._tables) >= KNOWN_TABLES:
                del self._tables[next(iter(self._tables))]
            self._tables[start, window_from] = table
        return table

    # ---- arguments ------------------------------------------------------------------------------------------

    def _sequence(self, rows_from: int, position: int) -> Sequence:
        with torch.inference_mode():
            return Sequence(
                self.profile,
                device=self.device,
                dtype=self.dtype,
                position=position,
                rows_from=rows_from,
            )

    def _edges(self, first: int, last: int) -> range:
        block_tokens = self.profile.block_tokens
        return range((first // block_tokens + 1) * block_tokens, last + 1, block_tokens)

    def _expect_blocks(self, blocks: collections.abc.Sequence[BytesLike], position: int) -> None:
        if len(blocks) != position // self.profile.block_tokens:
            raise InvalidArgument(
                "all whole blocks before the position",
                field="blocks",
                value=len(blocks),
                allowed=f"{position // self.profile.block_tokens} for position {position}",
            )

    def _expect_tokens(self, tokens: collections.abc.Sequence[int]) -> None:
        bad = next((token for token in tokens if not 0 <= token < self.config.vocab_size), None)
        if bad is not None:
            raise InvalidArgument(
                "no such token",
                field="tokens",
                value=bad,
                allowed=f"0 to {self.config.vocab_size - 1}",
            )


def _norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(hidden.float(), weight.shape, weight, eps).to(hidden.dtype)
