"""Where each part lies inside a block's or a state's payload. Offsets only; no bytes are touched here.

block   layer-major: for each layer with entries, its entries, then (where it has an index) its index keys.
state   at position t, in this order:
        window    per layer, W-1 rows, oldest first; the rows of positions below 0 are zero bytes.
        overlap   per CSA layer: previous-stream key-value of the last complete group [ratio, head_dim], its scores
                  [ratio, head_dim], then the same two of the index compressor [ratio, index_head_dim]; float32.
                  Before the first complete group: key-value 0, scores -inf.
        and only where r = t mod block_tokens > 0, the open block:
        entries, keys   per layer as in a block, the r // ratio that are finished.
        tail      per layer with entries: the r mod ratio rows that wait for their group, float32.
                  CSA: key-value [rows, 2 head_dim] (previous stream, then current), scores [rows, 2 head_dim], then
                  the index compressor's [rows, 2 index_head_dim] twice. HCA: key-value, then scores [rows, head_dim].
                  CSA2 (ratio 2): key-value, then scores [rows, head_dim].
Scores carry their positional bias already.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from kvstore.errors import InvalidArgument
from kvstore.profile.base import F32_BYTES, Layer, LayerKind, Profile


@dataclass(frozen=True, slots=True)
class Section:
    """`rows` rows of `row_bytes` each, at `offset` of the payload. `part` is entries, keys, window, overlap or tail;
    `field` tells apart the arrays of one part: kv, score, index_kv, index_score (empty for entries, keys, window)."""

    part: str
    layer: int
    field: str
    offset: int
    rows: int
    row_bytes: int

    @property
    def length(self) -> int:
        return self.rows * self.row_bytes

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True)
class Layout:
    sections: tuple[Section, ...]
    total_bytes: int

    def find(self, part: str, layer: int, field: str = "") -> Section:
        """The one section of that part, layer and field; KeyError when the payload has none."""
        return self._by_name[part, layer, field]

    @cached_property
    def _by_name(self) -> dict[tuple[str, int, str], Section]:
        return {(section.part, section.layer, section.field): section for section in self.sections}


class _Builder:
    def __init__(self) -> None:
        self.sections: list[Section] = []
        self.offset = 0

    def add(self, part: str, layer: int, field: str, rows: int, row_bytes: int) -> None:
        self.sections.append(Section(part, layer, field, self.offset, rows, row_bytes))
        self.offset += rows * row_bytes

    def build(self) -> Layout:
        return Layout(tuple(self.sections), self.offset)


def _add_entries(builder: _Builder, profile: Profile, tokens: int) -> None:
    for index, layer in enumerate(profile.layers):
        if layer.kind.has_entries:
            builder.add("entries", index, "", tokens // layer.ratio, profile.entry_bytes)
        if layer.kind.has_keys:
            builder.add("keys", index, "", tokens // layer.ratio, profile.key_bytes)


def _stream_fields(profile: Profile, layer: Layer, *, both_halves: bool) -> tuple[tuple[str, int], ...]:
    """(field, bytes per row) of a compressor's inputs that wait in `layer`."""
    halves = 2 if both_halves and layer.kind is LayerKind.CSA else 1
    main = halves * profile.head_dim * F32_BYTES
    fields: tuple[tuple[str, int], ...] = (("kv", main), ("score", main))
    if layer.kind is LayerKind.CSA:
        index = halves * profile.index_head_dim * F32_BYTES
        fields += (("index_kv", index), ("index_score", index))
    return fields


@lru_cache(maxsize=64)
def block_layout(profile: Profile) -> Layout:
    """Sections of a block's payload; `total_bytes` is `profile.block_bytes`."""
    builder = _Builder()
    _add_entries(builder, profile, profile.block_tokens)
    return builder.build()


@lru_cache(maxsize=1024)
def state_layout(profile: Profile, position: int) -> Layout:
    """Sections of a state after `position` tokens; at a block edge `total_bytes` is `profile.state_bytes`."""
    if position < 0:
        raise InvalidArgument("a state has a position", field="position", value=position, allowed=">= 0")
    return _state_layout(profile, position % profile.block_tokens)


@lru_cache(maxsize=4096)
def _state_layout(profile: Profile, open_tokens: int) -> Layout:
    builder = _Builder()
    for index in range(profile.layer_count):
        builder.add("window", index, "", profile.window_rows, profile.row_bytes)
    for index, layer in enumerate(profile.layers):
        if layer.kind is LayerKind.CSA:
            for field, width in _stream_fields(profile, layer, both_halves=False):
                builder.add("overlap", index, field, layer.ratio, width)
    if open_tokens:
        _add_entries(builder, profile, open_tokens)
        for index, layer in enumerate(profile.layers):
            if layer.kind.has_entries:
                for field, width in _stream_fields(profile, layer, both_halves=True):
                    builder.add("tail", index, field, open_tokens % layer.ratio, width)
    return builder.build()


def max_state_bytes(profile: Profile) -> int:
    """The largest state at any position: what a handoff may need."""
    return max(_state_layout(profile, r).total_bytes for r in range(profile.block_tokens))
