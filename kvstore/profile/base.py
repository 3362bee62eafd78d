"""A profile: the frozen description of a model's cache geometry. All byte and replay arithmetic derives from it."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from enum import StrEnum

from kvstore.errors import ProfileError
from kvstore.profile.formats import RowFormat, row_bytes

F32_BYTES = 4


class LayerKind(StrEnum):
    """What a layer keeps beside its window rows.

    WINDOW      nothing.
    CSA         an entry and an index key per `ratio` tokens, compressed from two overlapping streams (V4).
    HCA         an entry per `ratio` tokens, compressed without overlap, no index (V4).
    CSA2        an entry and an index key per `ratio` tokens, no overlap (V4.1 key-value source).
    CSA2_READER nothing of its own: it reads the entries of an earlier CSA2 layer.
    """

    WINDOW = "window"
    CSA = "csa"
    HCA = "hca"
    CSA2 = "csa2"
    CSA2_READER = "csa2_reader"

    @property
    def has_entries(self) -> bool:
        return self in (LayerKind.CSA, LayerKind.HCA, LayerKind.CSA2)

    @property
    def has_keys(self) -> bool:
        return self in (LayerKind.CSA, LayerKind.CSA2)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of the schedule. `ratio` is tokens per entry, 0 where the layer keeps no entries."""

    kind: LayerKind
    ratio: int = 0


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Cache geometry of one model. Token counts are tokens, `*_bytes` are bytes, `*_dim` count numbers.

    window_tokens (W): a query attends to the last W positions, itself included, so a resume needs W-1 rows.
    encoder_layers: layers whose window a resume needs when only the encoder is rebuilt; 0 where the model has no
    such split. bounded_is_trained: the model was trained for a replay of W tokens only.
    """

    name: str
    layers: tuple[Layer, ...]
    block_tokens: int
    window_tokens: int
    head_dim: int
    rope_dim: int
    index_head_dim: int
    entry_format: RowFormat
    key_format: RowFormat
    row_format: RowFormat
    encoder_layers: int = 0
    bounded_is_trained: bool = False

    def __post_init__(self) -> None:
        _check(self)

    @property
    def is_keyed(self) -> bool:
        """Whether its namespaces hold payloads under opaque keys, instead of prompts' blocks (kvstore.profile.keyed)."""
        return False

    # ---- schedule -------------------------------------------------------------------------------------------

    @property
    def layer_count(self) -> int:
        return len(self.layers)

    def count(self, kind: LayerKind) -> int:
        return sum(layer.kind is kind for layer in self.layers)

    @property
    def entry_layers(self) -> tuple[int, ...]:
        """Indices of the layers that own entries, ascending."""
        return tuple(i for i, layer in enumerate(self.layers) if layer.kind.has_entries)

    # ---- bytes ----------------------------------------------------------------------------------------------

    @property
    def entry_bytes(self) -> int:
        return row_bytes(self.entry_format, self.head_dim, self.rope_dim).total

    @property
    def key_bytes(self) -> int:
        return row_bytes(self.key_format, self.index_head_dim, self.rope_dim).total

    @property
    def row_bytes(self) -> int:
        """One window row of one layer."""
        return row_bytes(self.row_format, self.head_dim, self.rope_dim).total

    @property
    def block_bytes(self) -> int:
        """Entries and index keys of all layers for `block_tokens` tokens."""
        total = 0
        for layer in self.layers:
            if layer.kind.has_entries:
                total += self.block_tokens // layer.ratio * self.entry_bytes
            if layer.kind.has_keys:
                total += self.block_tokens // layer.ratio * self.key_bytes
        return total

    @property
    def bytes_per_token(self) -> float:
        return self.block_bytes / self.block_tokens

    @property
    def window_rows(self) -> int:
        """Rows per layer that a resume needs."""
        return self.window_tokens - 1

    @property
    def window_bytes(self) -> int:
        return self.window_rows * self.row_bytes * self.layer_count

    def overlap_layer_bytes(self, layer: Layer) -> int:
        """The previous-block half of the last complete group: key-value and score, main and index, float32."""
        if layer.kind is not LayerKind.CSA:
            return 0
        return layer.ratio * 2 * (self.head_dim + self.index_head_dim) * F32_BYTES

    @property
    def overlap_bytes(self) -> int:
        return sum(self.overlap_layer_bytes(layer) for layer in self.layers)

    @property
    def state_bytes(self) -> int:
        """A whole state at a block edge: window rows and overlap; nothing is open there."""
        return self.window_bytes + self.overlap_bytes

    @property
    def rows_block_bytes(self) -> int:
        """The window rows of every token of a block, all layers (policy `full`)."""
        return self.block_tokens * self.row_bytes * self.layer_count

    @property
    def rows_overlap_block_bytes(self) -> int:
        """The same with the overlap at the block's end (policy `full+overlap`)."""
        return self.rows_block_bytes + self.overlap_bytes

    @property
    def overlap_tokens(self) -> int:
        """How many tokens' replay gives the overlap back: the largest CSA ratio, 0 where no layer has an overlap."""
        return max((layer.ratio for layer in self.layers if layer.kind is LayerKind.CSA), default=0)

    # ---- replay ---------------------------------------------------------------------------------------------

    @property
    def exact_replay_tokens(self) -> int:
        """L(W-1): tokens that an exact replay touches."""
        return self.layer_count * self.window_rows

    @property
    def exact_replay_layer_tokens(self) -> int:
        """(W-1)L(L+1)/2: layer l is run only at positions >= t - (L-l)(W-1), a triangle."""
        return self.window_rows * self.layer_count * (self.layer_count + 1) // 2

    @property
    def bounded_replay_tokens(self) -> int:
        return self.window_tokens

    # ---- identity -------------------------------------------------------------------------------------------

    def geometry(self) -> bytes:
        """Canonical bytes of everything above but the name: equal geometry, equal bytes, in every process."""
        fields: dict[str, object] = {
            "layers": [[layer.kind.value, layer.ratio] for layer in self.layers],
            "block_tokens": self.block_tokens,
            "window_tokens": self.window_tokens,
            "head_dim": self.head_dim,
            "rope_dim": self.rope_dim,
            "index_head_dim": self.index_head_dim,
            "entry_format": self.entry_format.value,
            "key_format": self.key_format.value,
            "row_format": self.row_format.value,
            "encoder_layers": self.encoder_layers,
            "bounded_is_trained": self.bounded_is_trained,
        }
        return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_geometry(cls, name: str, geometry: bytes) -> Profile:
        """Inverse of `geometry`; raises ProfileError on anything that `geometry` would not have written."""
        if len(geometry) > MAX_GEOMETRY_BYTES:
            raise ProfileError(
                "geometry is too long",
                field="geometry",
                value=f"{len(geometry)} bytes",
                allowed=f"{MAX_GEOMETRY_BYTES} bytes",
            )
        try:
            fields = json.loads(geometry)
            layers = tuple(Layer(LayerKind(kind), ratio) for kind, ratio in fields.pop("layers"))
            for key in ("entry_format", "key_format", "row_format"):
                fields[key] = RowFormat(fields[key])
            profile = cls(name=name, layers=layers, **fields)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ProfileError(
                "geometry could not be read",
                field="geometry",
                value=str(error),
                allowed="the JSON object that Profile.geometry writes",
            ) from error
        if profile.geometry() != geometry:
            raise ProfileError("geometry is not in canonical form", field="geometry", value=geometry[:60])
        return profile

    def geometry_digest(self) -> bytes:
        return hashlib.sha256(self.geometry()).digest()


MAX_LAYERS = 512
MAX_BLOCK_TOKENS = 65_536
MAX_DIM = 65_536
MAX_GEOMETRY_BYTES = 65_536
"""More than MAX_LAYERS layers need. What is longer is not parsed at all."""


def _check(p: Profile) -> None:
    if not p.name or len(p.name) > 128:
        raise ProfileError(
            "a profile needs a name", field="name", value=p.name, allowed="1 to 128 characters"
        )
    if not 1 <= len(p.layers) <= MAX_LAYERS:
        raise ProfileError(
            "bad layer schedule", field="layers", value=len(p.layers), allowed=f"1 to {MAX_LAYERS} layers"
        )
    for field, low, high in (
        ("window_tokens", 2, MAX_BLOCK_TOKENS),
        ("block_tokens", 1, MAX_BLOCK_TOKENS),
        ("head_dim", 1, MAX_DIM),
        ("rope_dim", 0, p.head_dim if isinstance(p.head_dim, int) else MAX_DIM),
        ("index_head_dim", 1, MAX_DIM),
        ("encoder_layers", 0, len(p.layers)),
    ):
        value = getattr(p, field)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ProfileError(
                f"bad {field}", field=field, value=value, allowed=f"a whole number from {low} to {high}"
            )
    ratios: list[int] = []
    for index, layer in enumerate(p.layers):
        if not isinstance(layer.kind, LayerKind):
            raise ProfileError(
                "unknown layer kind",
                field=f"layers[{index}].kind",
                value=layer.kind,
                allowed=", ".join(kind.value for kind in LayerKind),
            )
        if layer.kind.has_entries:
            if not isinstance(layer.ratio, int) or not 1 <= layer.ratio <= MAX_BLOCK_TOKENS:
                raise ProfileError(
                    "a layer with entries needs a ratio",
                    field=f"layers[{index}].ratio",
                    value=layer.ratio,
                    allowed=f"1 to {MAX_BLOCK_TOKENS} tokens per entry",
                )
            ratios.append(layer.ratio)
            # The last group's rows, and the block that is open in an HCA layer, must lie inside the part of a replay
            # that is exact in every layer: its last W-1 positions.
            if layer.kind is LayerKind.CSA and layer.ratio > p.window_tokens - 1:
                raise ProfileError(
                    "the overlap must fit the window",
                    field="window_tokens",
                    value=p.window_tokens,
                    allowed=f"more than the CSA ratio, {layer.ratio}",
                )
        elif layer.ratio != 0:
            raise ProfileError(
                f"a {layer.kind.value} layer keeps no entries",
                field=f"layers[{index}].ratio",
                value=layer.ratio,
                allowed="0",
            )
    unit = math.lcm(*ratios) if ratios else 1
    if p.block_tokens % unit:
        raise ProfileError(
            "a block must hold whole entries of every layer",
            field="block_tokens",
            value=p.block_tokens,
            allowed=f"a multiple of lcm of the ratios = {unit}",
        )
    for row_format, dim in (
        (p.entry_format, p.head_dim),
        (p.row_format, p.head_dim),
        (p.key_format, p.index_head_dim),
    ):
        row_bytes(row_format, dim, p.rope_dim)
