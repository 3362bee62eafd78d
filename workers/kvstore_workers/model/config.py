"""The model's dimensions. The cache geometry inside is a Profile; everything else is what the weights need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from kvstore.errors import ProfileError
from kvstore.profile.base import LayerKind, Profile
from kvstore.profile.formats import RowFormat
from kvstore.profile.registry import get_profile

# Tokens are computed in tiles of this many rows, aligned to absolute positions: a row's result is then the same bits
# whatever its neighbours are, so a prompt may be cut anywhere. Smaller fixed tiles change the bits on some builds.
TILE = 128


@dataclass(frozen=True, slots=True)
class Yarn:
    """Stretches the rotary frequencies; there is no extra attention scale."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_tokens: int


@dataclass(frozen=True, slots=True)
class Rope:
    theta: float
    yarn: Yarn | None = None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Dimensions of one model; refused when they do not fit together (ProfileError names the field).

    `window_rope` serves window-only layers, `entry_rope` all others, their window rows and queries included.
    `num_hash_layers`: the first layers choose experts by token id.
    """

    profile: Profile
    vocab_size: int
    hidden_size: int
    heads: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    index_heads: int
    index_topk: int
    experts: int
    experts_per_token: int
    moe_width: int
    num_hash_layers: int
    routed_scaling_factor: float
    norm_topk_prob: bool
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    window_rope: Rope
    entry_rope: Rope

    def __post_init__(self) -> None:
        _check(self)

    @property
    def layer_count(self) -> int:
        return self.profile.layer_count

    @property
    def head_dim(self) -> int:
        return self.profile.head_dim

    @property
    def rope_dim(self) -> int:
        return self.profile.rope_dim

    @property
    def index_head_dim(self) -> int:
        return self.profile.index_head_dim

    @property
    def window_tokens(self) -> int:
        return self.profile.window_tokens

    @property
    def keys_are_plain(self) -> bool:
        """Index keys are stored as computed; quantised ones are rotated first, queries with them, to spread outliers."""
        return self.profile.key_format is RowFormat.F32

    def is_hash_layer(self, layer: int) -> bool:
        return layer < self.num_hash_layers

    @classmethod
    def for_profile(cls, profile: Profile) -> ModelConfig:
        """The shipped small models: real cache geometry, small everything else. ProfileError for other geometries."""
        shape = _SHIPPED.get(profile.name)
        if shape is None or profile.geometry() != get_profile(profile.name).geometry():
            raise ProfileError(
                "no embedded model has this geometry",
                field="profile",
                value=profile.name,
                allowed=", ".join(_SHIPPED),
            )
        return replace(shape, profile=profile)

    @classmethod
    def from_hf(
        cls, config_dict: Mapping[str, object], *, name: str, block_tokens: int | None = None
    ) -> ModelConfig:
        """From a DeepseekV4ForCausalLM config.json, published or re-saved. ProfileError names what is not supported.

        `block_tokens` defaults to the smallest block that holds whole entries of every layer.
        """
        # hf_config builds a ModelConfig: at the top this import would be a circle
        from kvstore_workers.model.hf_config import config_from_hf

        return config_from_hf(config_dict, name=name, block_tokens=block_tokens)

    def canonical(self) -> bytes:
        """Bytes that differ wherever two configs would compute differently."""
        parts = [self.profile.geometry()]
        parts += [f"{f.name}={getattr(self, f.name)!r}".encode() for f in fields(self) if f.name != "profile"]
        return b"\n".join(parts)


def _shipped(
    name: str,
    *,
    vocab_size: int,
    hidden_size: int,
    heads: int,
    rank: int,
    index_topk: int,
    moe_width: int,
    num_hash_layers: int,
) -> ModelConfig:
    return ModelConfig(
        profile=get_profile(name),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        heads=heads,
        q_lora_rank=rank,
        o_groups=2,
        o_lora_rank=rank,
        index_heads=4,
        index_topk=index_topk,
        experts=8,
        experts_per_token=2,
        moe_width=moe_width,
        num_hash_layers=num_hash_layers,
        routed_scaling_factor=1.5,
        norm_topk_prob=True,
        swiglu_limit=10.0,
        hc_mult=4,
        hc_sinkhorn_iters=20,
        hc_eps=1e-6,
        rms_norm_eps=1e-6,
        window_rope=Rope(10_000.0),
        entry_rope=Rope(160_000.0, Yarn(16.0, 32.0, 1.0, 65_536)),
    )


_KINDS = (LayerKind.WINDOW, LayerKind.CSA, LayerKind.HCA)


def _check(c: ModelConfig) -> None:
    for field in (
        "vocab_size",
        "hidden_size",
        "heads",
        "q_lora_rank",
        "o_groups",
        "o_lora_rank",
        "index_heads",
        "index_topk",
        "experts",
        "experts_per_token",
        "moe_width",
        "hc_mult",
    ):
        value = getattr(c, field)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1 << 20:
            raise ProfileError(
                f"bad {field}", field=field, value=value, allowed="a whole number from 1 to 1048576"
            )
    if not isinstance(c.hc_sinkhorn_iters, int) or not 1 <= c.hc_sinkhorn_iters <= 1000:
        # Run for every token in every layer: a slip here would look like a worker that hangs.
        raise ProfileError(
            "bad hc_sinkhorn_iters",
            field="hc_sinkhorn_iters",
            value=c.hc_sinkhorn_iters,
            allowed="a whole number from 1 to 1000",
        )
    if not 0 <= c.num_hash_layers <= c.layer_count:
        raise ProfileError(
            "bad num_hash_layers",
            field="num_hash_layers",
            value=c.num_hash_layers,
            allowed=f"0 to {c.layer_count}",
        )
    if c.experts_per_token > c.experts:
        raise ProfileError(
            "more experts per token than experts",
            field="experts_per_token",
            value=c.experts_per_token,
            allowed=f"1 to {c.experts}",
        )
    if (c.heads * c.head_dim) % c.o_groups or c.heads % c.o_groups:
        raise ProfileError(
            "output groups hold whole heads",
            field="o_groups",
            value=c.o_groups,
            allowed=f"a divisor of {c.heads} heads",
        )
    for field, dim in (("rope_dim", c.rope_dim), ("index_head_dim", c.index_head_dim)):
        if dim % 2 or dim < c.rope_dim:
            raise ProfileError(
                "rotary pairs fill the end of every head",
                field=field,
                value=dim,
                allowed=f"an even number, index_head_dim at least rope_dim = {c.rope_dim}",
            )
    for index, layer in enumerate(c.profile.layers):
        if layer.kind not in _KINDS:
            raise ProfileError(
                "the embedded model has no such layer",
                field=f"layers[{index}].kind",
                value=layer.kind.value,
                allowed=", ".join(kind.value for kind in _KINDS),
            )
        if layer.kind.has_entries and TILE % layer.ratio:
            raise ProfileError(
                "a tile holds whole groups",
                field=f"layers[{index}].ratio",
                value=layer.ratio,
                allowed=f"a divisor of {TILE}",
            )
    key_format, index_dim = c.profile.key_format, c.index_head_dim
    if key_format is not RowFormat.F32 and index_dim & (index_dim - 1):
        raise ProfileError(
            "quantised index keys are rotated by a Hadamard matrix first",
            field="index_head_dim",
            value=index_dim,
            allowed="a power of two",
        )


_SHIPPED = {
    config.profile.name: config
    for config in (
        _shipped(
            "tiny",
            vocab_size=320,
            hidden_size=64,
            heads=4,
            rank=32,
            index_topk=16,
            moe_width=32,
            num_hash_layers=1,
        ),
        _shipped(
            "flash-slim",
            vocab_size=512,
            hidden_size=128,
            heads=2,
            rank=64,
            index_topk=512,
            moe_width=64,
            num_hash_layers=3,
        ),
    )
}
