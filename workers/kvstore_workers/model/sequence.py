"""One running sequence: its entries, keys, window rows and compressor inputs, and their stored forms."""

from __future__ import annotations

import collections.abc
from collections.abc import Iterator

import torch

from kvstore.errors import InvalidArgument
from kvstore.profile.base import LayerKind, Profile
from kvstore.profile.layout import (
    LayerSlice,
    Section,
    block_layout,
    open_rows_bytes,
    rows_layout,
    rows_needed,
    state_layout,
)
from kvstore.types import BytesLike
from kvstore_workers.model.codec import codec_for
from kvstore_workers.model.config import TILE
from kvstore_workers.model.storage import GrowingRows, SlidingRows, WindowRows
from kvstore_workers.model.streams import Columns, before_start, overlap_columns, stream_width, tail_columns

EntryFeed = Iterator[tuple[LayerSlice, collections.abc.Sequence[BytesLike]]]
"""The restored blocks' bytes by layers: slices in the order of the layers, all layers in the end, each with those bytes
of every block, in order. It is advanced when a layer's entries are about to be read, so `next` may wait for them."""


class Sequence:
    """The state of one sequence after `position` tokens. Made by Model; not for use by two threads at once.

    `known_from`: rows of earlier positions are here only as far as a resume at `known_from` needs them.
    `rows_known_from`: window rows of earlier positions were never here.
    `window_from`: window rows of earlier positions do not exist for attention (0 but after an approximate replay).

    Entries of the blocks that it was restored from may come through a feed, layer by layer; `require` brings them. Where
    the feed raises, the sequence is of no more use.
    """

    def __init__(
        self,
        profile: Profile,
        *,
        device: torch.device,
        dtype: torch.dtype,
        position: int = 0,
        rows_from: int = 0,
    ) -> None:
        """`rows_from`: the first position that will be written, in every layer."""
        self.profile = profile
        self.position = position
        self.known_from = position
        self.rows_known_from = max(0, position - profile.window_rows)
        self.window_from = 0
        self._restored_blocks = 0
        self._feed: EntryFeed | None = None
        # Restored entries are here for the layers before this one.
        self._fed_layers = profile.layer_count
        self.device = device
        behind = max(profile.block_tokens, TILE)
        rows = codec_for(profile.row_format, profile.head_dim, profile.rope_dim)
        entries = codec_for(profile.entry_format, profile.head_dim, profile.rope_dim)
        keys = codec_for(profile.key_format, profile.index_head_dim, profile.rope_dim)
        self.window = [
            WindowRows(
                rows,
                profile.head_dim,
                keep=behind + profile.window_rows,
                dtype=dtype,
                device=device,
                position=rows_from,
            )
            for _ in profile.layers
        ]
        self.entries: dict[int, GrowingRows] = {}
        self.keys: dict[int, GrowingRows] = {}
        self.streams: dict[int, SlidingRows] = {}
        for index, layer in enumerate(profile.layers):
            if not layer.kind.has_entries:
                continue
            capacity = (max(rows_from, position) // TILE + 2) * TILE // layer.ratio
            self.entries[index] = GrowingRows(
                entries, profile.head_dim, dtype=dtype, device=device, capacity=capacity
            )
            if layer.kind.has_keys:
                self.keys[index] = GrowingRows(
                    keys,
                    profile.index_head_dim,
                    dtype=dtype,
                    device=device,
                    capacity=capacity,
                )
            # A group of an HCA layer lies inside a tile and nothing of it is left at a block edge; a CSA layer's overlap is.
            kept = layer.ratio + (behind if layer.kind is LayerKind.CSA else 0)
            self.streams[index] = SlidingRows(
                stream_width(profile, layer),
                keep=kept,
                dtype=torch.float32,
                device=device,
                position=rows_from,
                before=before_start(profile, layer, device),
            )

    def __repr__(self) -> str:
        return f"Sequence({self.profile.name}, position={self.position})"

    # ---- stored forms out -----------------------------------------------------------------------------------

    def block_payload(self, index: int) -> bytes:
        """Block `index` as stored; InvalidArgument unless the block is whole (index < position // block_tokens)."""
        self._expect_whole(index)
        if index < self._restored_blocks:
            self.finish_feed()
        parts = []
        for section in block_layout(self.profile).sections:
            store = self._entry_store(section)
            parts.append(store.packed(index * section.rows, (index + 1) * section.rows))
        return _joined(parts)

    def rows_payload(self, index: int, *, overlap: bool) -> bytes | None:
        """Window rows of every token of block `index` in `rows_layout`, with `overlap` the overlap at its end behind them.

        None where they are not here: this sequence was restored inside the block, or has gone on for more than a tile
        since its end. InvalidArgument unless the block is whole.
        """
        self._expect_whole(index)
        first = index * self.profile.block_tokens
        edge = first + self.profile.block_tokens
        if first < self.rows_known_from or any(first < rows.values.base for rows in self.window):
            return None
        if overlap and not self._has_overlap(edge):
            return None
        layout = rows_layout(self.profile, overlap=overlap)
        payload = _joined([self._section(section, edge) for section in layout.sections])
        assert len(payload) == layout.total_bytes
        return payload

    def open_rows(self) -> bytes:
        """Window rows of the open block that are older than the window, layer by layer: with them beside the state at
        `position`, who goes on from there can give the block's rows when it is whole. Empty where there are none, or
        where they were never here."""
        first, last = self._older_rows()
        if first >= last or first < self.rows_known_from:
            return b""
        return _joined([rows.packed(first, last) for rows in self.window])

    def _older_rows(self) -> tuple[int, int]:
        block_tokens = self.profile.block_tokens
        return self.position // block_tokens * block_tokens, self.position - self.profile.window_rows

    def state(self) -> bytes:
        """The state at `position`, whatever it is, in `state_layout`."""
        return self.state_at(self.position)

    def last_edge_state(self) -> tuple[int, bytes] | None:
        """(edge, state) at the last block edge <= position. None at edge 0, and where this sequence was resumed
        between that edge and `position`: it never had the rows before the edge."""
        edge = self.position // self.profile.block_tokens * self.profile.block_tokens
        if edge == 0 or edge < self.known_from:
            return None
        return edge, self.state_at(edge)

    def state_at(self, position: int) -> bytes:
        """The state at `position`, which lies in the newest block or tile and not before `known_from`."""
        assert self.known_from <= position <= self.position
        layout = state_layout(self.profile, position)
        payload = _joined([self._section(section, position) for section in layout.sections])
        assert len(payload) == layout.total_bytes
        return payload

    def fork(self) -> Sequence:
        """An independent copy at the same position."""
        self.finish_feed()
        twin = object.__new__(Sequence)
        twin.profile, twin.position, twin.device = self.profile, self.position, self.device
        twin.known_from, twin.rows_known_from = self.known_from, self.rows_known_from
        twin.window_from, twin._restored_blocks = self.window_from, self._restored_blocks
        twin._feed, twin._fed_layers = None, self._fed_layers
        twin.window = [rows.fork() for rows in self.window]
        twin.entries = {layer: rows.fork() for layer, rows in self.entries.items()}
        twin.keys = {layer: rows.fork() for layer, rows in self.keys.items()}
        twin.streams = {layer: rows.fork() for layer, rows in self.streams.items()}
        return twin

    # ---- stored forms in ------------------------------------------------------------------------------------

    def expect_blocks(self, count: int, feed: EntryFeed | None = None) -> None:
        """The first `count` blocks come by `load_slice`: from the caller, or from `feed` when they are needed."""
        for section in block_layout(self.profile).sections:
            self._entry_store(section).expect(count * section.rows)
        self._restored_blocks, self._feed, self._fed_layers = count, feed, 0

    def load_slice(self, part: LayerSlice, payloads: collections.abc.Sequence[BytesLike]) -> None:
        """Entries and keys of the layers of `part`, out of those bytes of every expected block, in order.

        InvalidArgument when layers, the number of payloads or a length are not those that come next.
        """
        if part.first_layer != self._fed_layers or not part.first_layer < part.end_layer <= len(self.window):
            raise InvalidArgument(
                "slices come in the order of the layers",
                field="slice",
                value=f"layers {part.first_layer} to {part.end_layer - 1}",
                allowed=f"from layer {self._fed_layers} on, of {len(self.window)}",
            )
        if len(payloads) != self._restored_blocks:
            raise InvalidArgument(
                "all whole blocks before the position",
                field="blocks",
                value=len(payloads),
                allowed=f"{self._restored_blocks}",
            )
        sections = [
            section
            for section in block_layout(self.profile).sections
            if part.first_layer <= section.layer < part.end_layer
        ]
        length = sum(section.length for section in sections)
        start = sections[0].offset if sections else part.offset
        for index, payload in enumerate(payloads):
            _expect_bytes(f"blocks[{index}]", payload, length)
        with torch.inference_mode():
            for section in sections if payloads else ():
                span = slice(section.offset - start, section.end - start)
                joined = bytearray().join([payload[span] for payload in payloads])
                self._entry_store(section).place(0, self._tensor(joined, section.row_bytes))
        self._fed_layers = part.end_layer

    def require(self, layer: int) -> None:
        """Restored entries and keys of `layer` are here when this returns; takes from the feed what is missing."""
        while layer >= self._fed_layers:
            self._advance()

    def finish_feed(self) -> None:
        """All restored entries and keys are here when this returns."""
        self.require(len(self.window) - 1)

    def _advance(self) -> None:
        part = None if self._feed is None else next(self._feed, None)
        if part is None:
            raise InvalidArgument(
                "the blocks' bytes ended before their last layer",
                field="layer",
                value=self._fed_layers,
                allowed=f"slices of all {len(self.window)} layers",
            )
        self.load_slice(*part)
        if self._fed_layers == len(self.window):
            self._feed = None

    def load_state(self, state: BytesLike, position: int) -> None:
        """Take window rows, overlap and open block from a state at `position`; the whole blocks are expected already."""
        layout = state_layout(self.profile, position)
        _expect_bytes("state", state, layout.total_bytes)
        self._cover(position)
        for section in layout.sections:
            if not section.length:
                continue
            data = bytearray(state[section.offset : section.end])
            if section.part == "window":
                self.window[section.layer].load(
                    position - section.rows, self._tensor(data, section.row_bytes)
                )
            elif section.part in ("entries", "keys"):
                self._entry_store(section).load(self._tensor(data, section.row_bytes))
            else:
                self._load_stream(section, position, data)

    def load_open_rows(self, payload: BytesLike) -> None:
        """What `open_rows` gave at the same position, after the state; nothing for no bytes."""
        if not payload:
            return
        first, last = self._older_rows()
        length = (last - first) * self.profile.row_bytes
        _expect_bytes("open_rows", payload, open_rows_bytes(self.profile, self.position))
        for layer, rows in enumerate(self.window):
            data = bytearray(payload[layer * length : (layer + 1) * length])
            rows.load(first, self._tensor(data, self.profile.row_bytes))
        self.rows_known_from = first

    def begin_windows(self, position: int) -> None:
        """Window rows of positions before `position` do not exist."""
        self.window_from = position
        self.rows_known_from = max(self.rows_known_from, position)

    def load_rows(self, rows: collections.abc.Sequence[BytesLike], edge: int, *, overlap: bool) -> None:
        """Take the window rows that a resume at block edge `edge` starts from, out of the rows of those blocks that
        `rows_needed` names; with `overlap` also the overlap at `edge`. Rows may be stored with or without an overlap."""
        profile, needed = self.profile, rows_needed(self.profile, edge, overlap=overlap)
        if len(rows) != needed.blocks:
            raise InvalidArgument(
                "the rows of all blocks that the window reaches into",
                field="rows",
                value=len(rows),
                allowed=f"{needed.blocks} for edge {edge}",
            )
        whole = rows_layout(profile, overlap=True)
        for index, payload in enumerate(rows):
            ends_here = overlap and index == len(rows) - 1
            lengths = (whole.total_bytes,) if ends_here else (profile.rows_block_bytes, whole.total_bytes)
            _expect_bytes(f"rows[{index}]", payload, *lengths)
        self._cover(needed.state_at)
        start = needed.first_block * profile.block_tokens
        first = max(0, needed.state_at - profile.window_rows)
        for section in whole.sections:
            if section.part == "window":
                joined = bytearray().join([payload[section.offset : section.end] for payload in rows])
                packed = self._tensor(joined, section.row_bytes)
                self.window[section.layer].load(first, packed[first - start : needed.state_at - start])
            elif overlap:
                self._load_stream(section, edge, bytearray(rows[-1][section.offset : section.end]))

    def _cover(self, position: int) -> None:
        tile_end = (max(position, 1) - 1) // TILE * TILE + TILE
        for rows in self.window:
            rows.cover(tile_end)
        for stream in self.streams.values():
            stream.cover(tile_end)

    def _has_overlap(self, edge: int) -> bool:
        layers = self.profile.layers
        overlaps = (layer for layer in self.streams if layers[layer].kind is LayerKind.CSA)
        return edge >= self.known_from and all(
            edge - layers[layer].ratio >= self.streams[layer].base for layer in overlaps
        )

    # ---- sections -------------------------------------------------------------------------------------------

    def _entry_store(self, section: Section) -> GrowingRows:
        return (self.entries if section.part == "entries" else self.keys)[section.layer]

    def _section(self, section: Section, position: int) -> torch.Tensor:
        if section.part == "window":
            return self.window[section.layer].packed(position - section.rows, position)
        if section.part in ("entries", "keys"):
            blocks = position // self.profile.block_tokens
            first = blocks * self.profile.block_tokens // self.profile.layers[section.layer].ratio
            return self._entry_store(section).packed(first, first + section.rows)
        first, columns = self._stream_span(section, position)
        rows = self.streams[section.layer].read(first, first + section.rows)
        return torch.cat([rows[:, span] for span in columns], dim=1).view(torch.uint8)

    def _load_stream(self, section: Section, position: int, data: bytearray) -> None:
        first, columns = self._stream_span(section, position)
        rows = self.streams[section.layer].read(first, first + section.rows)
        values = self._tensor(data, section.row_bytes).view(torch.float32)
        taken = 0
        for span in columns:
            width = span.stop - span.start
            rows[:, span] = values[:, taken : taken + width]
            taken += width

    def _stream_span(self, section: Section, position: int) -> tuple[int, Columns]:
        """First position and columns of an overlap or tail section."""
        layer = self.profile.layers[section.layer]
        group_start = position // layer.ratio * layer.ratio
        if section.part == "overlap":
            assert layer.kind is LayerKind.CSA
            return group_start - layer.ratio, overlap_columns(self.profile)[section.field]
        return group_start, tail_columns(self.profile, layer)[section.field]

    def _tensor(self, data: bytearray, row_bytes: int) -> torch.Tensor:
        return torch.frombuffer(data, dtype=torch.uint8).view(-1, row_bytes).to(self.device)

    def _expect_whole(self, index: int) -> None:
        blocks = self.position // self.profile.block_tokens
        if not 0 <= index < blocks:
            raise InvalidArgument(
                "no such whole block", field="index", value=index, allowed=f"0 to {blocks - 1}"
            )


def _joined(parts: list[torch.Tensor]) -> bytes:
    if not parts:
        return b""
    joined = torch.cat([part.reshape(-1) for part in parts]).cpu()
    return joined.numpy().tobytes()


def _expect_bytes(field: str, payload: BytesLike, *lengths: int) -> None:
    if len(payload) not in lengths:
        raise InvalidArgument(
            "payload of the wrong length",
            field=field,
            value=len(payload),
            allowed=" or ".join(f"{length} bytes" for length in lengths),
        )
