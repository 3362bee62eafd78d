"""What a namespace of opaque keys has in place of a model's geometry: payloads of one length, and what they are made of."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from kvstore.errors import ProfileError
from kvstore.profile.base import MAX_GEOMETRY_BYTES, Layer, LayerKind, Profile
from kvstore.profile.formats import RowFormat

PAYLOAD_BYTES_MAX = 1 << 30
TEXT_MAX = 512

_TEXTS = ("dtype", "layout", "part")
_NO_LAYERS = (Layer(LayerKind.WINDOW),)
_MARK = "keyed"


@dataclass(frozen=True, kw_only=True)
class KeyedProfile(Profile):
    """Of a `keyed` namespace: each block is a payload of `payload_bytes` bytes under a key that its writer made, and follows
    no other. There are no states, no plans and no layers to cut by.

    dtype, layout, part: what the bytes are, in the writer's own words: their numbers' type, their order in a payload, and
    which part of a model's parallel ranks they belong to. Namespaces that differ in any of them share nothing.
    """

    payload_bytes: int
    dtype: str = ""
    layout: str = ""
    part: str = ""

    # A block is one step of a chain of one.
    layers: tuple[Layer, ...] = field(default=_NO_LAYERS, init=False, repr=False)
    block_tokens: int = field(default=1, init=False, repr=False)
    window_tokens: int = field(default=2, init=False, repr=False)
    head_dim: int = field(default=1, init=False, repr=False)
    rope_dim: int = field(default=0, init=False, repr=False)
    index_head_dim: int = field(default=1, init=False, repr=False)
    entry_format: RowFormat = field(default=RowFormat.F32, init=False, repr=False)
    key_format: RowFormat = field(default=RowFormat.F32, init=False, repr=False)
    row_format: RowFormat = field(default=RowFormat.F32, init=False, repr=False)
    encoder_layers: int = field(default=0, init=False, repr=False)
    bounded_is_trained: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        size = self.payload_bytes
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= PAYLOAD_BYTES_MAX:
            raise ProfileError(
                "payloads have one length",
                field="payload_bytes",
                value=size,
                allowed=f"1 to {PAYLOAD_BYTES_MAX} bytes",
            )
        for name in _TEXTS:
            value = getattr(self, name)
            if not isinstance(value, str) or len(value) > TEXT_MAX or not value.isprintable():
                raise ProfileError(
                    f"{name} is a text",
                    field=name,
                    value=ascii(value),
                    allowed=f"up to {TEXT_MAX} printable characters",
                )

    @property
    def is_keyed(self) -> bool:
        return True

    @property
    def block_bytes(self) -> int:
        return self.payload_bytes

    @property
    def state_bytes(self) -> int:
        return 0

    @property
    def rows_block_bytes(self) -> int:
        return 0

    @property
    def rows_overlap_block_bytes(self) -> int:
        return 0

    def geometry(self) -> bytes:
        fields = {"payload_bytes": self.payload_bytes, **{name: getattr(self, name) for name in _TEXTS}}
        return json.dumps({_MARK: fields}, sort_keys=True, separators=(",", ":")).encode()


def profile_of(name: str, geometry: bytes) -> Profile:
    """Of either kind, from what its `geometry` has written. ProfileError for anything else."""
    if not geometry.startswith(f'{{"{_MARK}":'.encode()) or len(geometry) > MAX_GEOMETRY_BYTES:
        return Profile.from_geometry(name, geometry)
    try:
        profile = KeyedProfile(name=name, **json.loads(geometry)[_MARK])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ProfileError(
            "geometry could not be read",
            field="geometry",
            value=str(error),
            allowed="the JSON object that KeyedProfile.geometry writes",
        ) from error
    if profile.geometry() != geometry:
        raise ProfileError("geometry is not in canonical form", field="geometry", value=geometry[:60])
    return profile
