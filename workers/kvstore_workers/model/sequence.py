"""One running sequence: its entries, keys, window rows and compressor inputs, and their stored forms."""

from __future__ import annotations

import collections.abc

import torch

from kvstore.errors import InvalidArgument
from kvstore.profile.base import LayerKind, Profile
from kvstore.profile.layout import Layout, Section, block_layout, state_layout
from kvstore_workers.model.codec import codec_for
from kvstore_workers.model.config import TILE
from kvstore_workers.model.storage import GrowingRows, SlidingRows, WindowRows
from kvstore_workers.model.streams import Columns, before_start, overlap_columns, stream_width, tail_columns


class Sequence:
    """The state of one sequence after `position` tokens. Made by Model; not for use by two threads at once.

    `known_from`: rows of earlier positions are here only as far as a resume at `known_from` needs them.
    `window_from`: window rows of earlier positions do not exist for attention (0 but after an approximate replay).
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
        self.window_from = 0
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
            capacity = (rows_from // TILE + 2) * TILE // layer.ratio
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
        blocks = self.position // self.profile.block_tokens
        if not 0 <= index < blocks:
            raise InvalidArgument(
                "no such whole block", field="index", value=index, allowed=f"0 to {blocks - 1}"
            )
        parts = []
        for section in block_layout(self.profile).sections:
            store = self._entry_store(section)
            parts.append(store.packed(index * section.rows, (index + 1) * section.rows))
        return _joined(parts)

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
        twin = object.__new__(Sequence)
        twin.profile, twin.position, twin.device = self.profile, self.position, self.device
        twin.known_from, twin.window_from = self.known_from, self.window_from
        twin.window = [rows.fork() for rows in self.window]
        twin.entries = {layer: rows.fork() for layer, rows in self.entries.items()}
        twin.keys = {layer: rows.fork() for layer, rows in self.keys.items()}
        twin.streams = {layer: rows.fork() for layer, rows in self.streams.items()}
        return twin

    # ---- stored forms in ------------------------------------------------------------------------------------

    def load_blocks(self, blocks: collections.abc.Sequence[bytes]) -> None:
        """Append the entries of whole blocks, the first of which follows what is here."""
        layout = block_layout(self.profile)
        for index, payload in enumerate(blocks):
            _expect_bytes(f"blocks[{index}]", payload, layout)
        for section in layout.sections:
            joined = b"".join(payload[section.offset : section.end] for payload in blocks)
            if joined:
                self._entry_store(section).load(self._tensor(joined, section.row_bytes))

    def load_state(self, state: bytes, position: int) -> None:
        """Take window rows, overlap and open block from a state at `position`; the whole blocks are loaded already."""
        layout = state_layout(self.profile, position)
        _expect_bytes("state", state, layout)
        tile_end = (max(position, 1) - 1) // TILE * TILE + TILE
        for rows in self.window:
            rows.cover(tile_end)
        for stream in self.streams.values():
            stream.cover(tile_end)
        for section in layout.sections:
            if not section.length:
                continue
            data = state[section.offset : section.end]
            if section.part == "window":
                self.window[section.layer].load(
                    position - section.rows, self._tensor(data, section.row_bytes)
                )
            elif section.part in ("entries", "keys"):
                self._entry_store(section).load(self._tensor(data, section.row_bytes))
            else:
                self._load_stream(section, position, data)

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

    def _load_stream(self, section: Section, position: int, data: bytes) -> None:
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

    def _tensor(self, data: bytes, row_bytes: int) -> torch.Tensor:
        flat = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, row_bytes)
        return flat.to(self.device)


def _joined(parts: list[torch.Tensor]) -> bytes:
    if not parts:
        return b""
    joined = torch.cat([part.reshape(-1) for part in parts]).cpu()
    return joined.numpy().tobytes()


def _expect_bytes(field: str, payload: bytes, layout: Layout) -> None:
    if len(payload) != layout.total_bytes:
        raise InvalidArgument(
            "payload of the wrong length",
            field=field,
            value=len(payload),
            allowed=f"{layout.total_bytes} bytes",
        )
