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
rows    the window rows of every token of a block: per layer, block_tokens rows, oldest first; with the overlap, then the
        overlap at the block's end, as in a state.
Scores carry their positional bias already.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from kvstore.errors import InvalidArgument
from kvstore.profile.base import F32_BYTES, Layer, LayerKind, Profile
from kvstore.types import ItemKind


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


def _add_overlap(builder: _Builder, profile: Profile) -> None:
    for index, layer in enumerate(profile.layers):
        if layer.kind is LayerKind.CSA:
            for field, width in _stream_fields(profile, layer, both_halves=False):
                builder.add("overlap", index, field, layer.ratio, width)


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
    _add_overlap(builder, profile)
    if open_tokens:
        _add_entries(builder, profile, open_tokens)
        for index, layer in enumerate(profile.layers):
            if layer.kind.has_entries:
                for field, width in _stream_fields(profile, layer, both_halves=True):
                    builder.add("tail", index, field, open_tokens % layer.ratio, width)
    return builder.build()


@lru_cache(maxsize=128)
def rows_layout(profile: Profile, *, overlap: bool) -> Layout:
    """Sections of a block's window rows; `total_bytes` is `profile.rows_block_bytes`, or `rows_overlap_block_bytes`."""
    builder = _Builder()
    for index in range(profile.layer_count):
        builder.add("window", index, "", profile.block_tokens, profile.row_bytes)
    if overlap:
        _add_overlap(builder, profile)
    return builder.build()


@dataclass(frozen=True, slots=True)
class RowsNeeded:
    """What a resume from window rows at one edge reads: the rows of blocks [first_block, first_block + blocks). They
    give the state at `state_at`; a replay of [state_at, edge) does the rest."""

    first_block: int
    blocks: int
    state_at: int


def rows_needed(profile: Profile, edge: int, *, overlap: bool) -> RowsNeeded:
    """`edge` > 0 is a block edge. With the overlap stored nothing is replayed; without it, the last CSA group is."""
    state_at = edge if overlap else max(0, edge - profile.overlap_tokens)
    first = max(0, state_at - profile.window_rows) // profile.block_tokens
    # With the overlap the last block is read for that too.
    end = edge if overlap else state_at
    last = max(end - 1, 0) // profile.block_tokens
    return RowsNeeded(first, last - first + 1, state_at)


def open_rows_bytes(profile: Profile, position: int) -> int:
    """Window rows of the open block at `position` that are older than the window, in all layers: what a handoff carries
    behind its state where rows are kept. 0 where the window reaches back to the block's start."""
    older = position % profile.block_tokens - profile.window_rows
    return max(older, 0) * profile.row_bytes * profile.layer_count


def rows_edge(profile: Profile, state_at: int) -> tuple[int, bool]:
    """(edge, overlap): the inverse of `rows_needed(...).state_at`, for profiles whose blocks are longer than the overlap."""
    if state_at > 0 and state_at % profile.block_tokens == 0:
        return state_at, True
    return (state_at // profile.block_tokens + 1) * profile.block_tokens, False


@dataclass(frozen=True, slots=True)
class LayerSlice:
    """Layers [first_layer, end_layer) of a block, which lie at bytes [offset, end) of its payload."""

    first_layer: int
    end_layer: int
    offset: int
    end: int


SLICES_MAX = 16


@lru_cache(maxsize=128)
def layer_slices(profile: Profile, count: int) -> tuple[LayerSlice, ...]:
    """A block cut by layers into at most `count` slices of about equal bytes, none of them empty, in the order of the layers. Both
    ends of a sliced fetch call this."""
    if not 1 <= count <= SLICES_MAX:
        raise InvalidArgument("too many slices", field="slices", value=count, allowed=f"1 to {SLICES_MAX}")
    sections = block_layout(profile).sections
    total = profile.block_bytes
    slices: list[LayerSlice] = []
    first, start = 0, 0
    for layer in range(profile.layer_count):
        end = max((s.end for s in sections if s.layer <= layer), default=0)
        is_last = layer == profile.layer_count - 1
        if is_last or (end > start and end >= total * (len(slices) + 1) / count):
            slices.append(LayerSlice(first, layer + 1, start, end))
            first, start = layer + 1, end
    if len(slices) > 1 and slices[-1].offset == slices[-1].end:
        # Layers without entries at the end belong to the slice before them.
        last = slices.pop()
        before = slices.pop()
        slices.append(LayerSlice(before.first_layer, last.end_layer, before.offset, before.end))
    return tuple(slices)


@lru_cache(maxsize=512)
def slice_ends(profile: Profile, kind: ItemKind, length: int) -> tuple[int, ...]:
    """Where a payload of `length` bytes may be cut by layers, so that its parts can be verified by themselves: the ends of
    each layer's entries in a block, or of its window rows in a state or rows. Ascending; the payload's own end is left out."""
    if kind is ItemKind.BLOCK:
        sections = block_layout(profile).sections
    elif kind is ItemKind.ROWS:
        sections = rows_layout(profile, overlap=False).sections
    else:
        sections = tuple(s for s in state_layout(profile, 0).sections if s.part == "window")
    ends = {section.layer: section.end for section in sections}
    return tuple(sorted(end for end in ends.values() if 0 < end < length))


def max_state_bytes(profile: Profile) -> int:
    """The largest state at any position: what a handoff may need."""
    return max(_state_layout(profile, r).total_bytes for r in range(profile.block_tokens))
