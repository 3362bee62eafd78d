"""Reads the config.json of a DeepseekV4ForCausalLM: as published (compress_ratios) or re-saved (layer_types)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvstore.errors import ProfileError
from kvstore.profile.base import Layer, LayerKind, Profile
from kvstore.profile.formats import RowFormat
from kvstore_workers.model.config import TILE, ModelConfig, Rope, Yarn

_KIND_OF_TYPE = {
    "sliding_attention": LayerKind.WINDOW,
    "compressed_sparse_attention": LayerKind.CSA,
    "heavily_compressed_attention": LayerKind.HCA,
}
# What the embedded model computes in one way only; a config that says otherwise would be computed wrongly.
_FIXED: dict[str, object] = {
    "model_type": "deepseek_v4",
    "scoring_func": "sqrtsoftplus",
    "hidden_act": "silu",
    "n_shared_experts": 1,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}


class _Fields:
    """Typed reads of one JSON object; every refusal names the field."""

    def __init__(self, values: Mapping[str, object], prefix: str = "") -> None:
        self.values = values
        self.prefix = prefix

    def whole(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.refuse(name, value, "a whole number")
        return value

    def number(
        self, name: str, default: float | None = None, *, above: float = 0.0, most: float = 1e6
    ) -> float:
        """A number in (above, most]: outside, logarithms, roots and quotients of the forward are not defined."""
        value = self.values.get(name, default)
        # not finite: NaN is above nothing
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not above < value <= most:
            raise self.refuse(name, value, f"a number above {above:g}, at most {most:g}")
        return float(value)

    def items(self, name: str) -> list[Any] | None:
        value = self.values.get(name)
        if value is not None and not isinstance(value, list):
            raise self.refuse(name, value, "a list")
        return value

    def nested(self, name: str) -> _Fields | None:
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.refuse(name, value, "an object")
        return _Fields(value, f"{self.prefix}{name}.")

    def refuse(self, name: str, value: object, allowed: str) -> ProfileError:
        return ProfileError(
            "unsupported model config", field=self.prefix + name, value=value, allowed=allowed
        )


def config_from_hf(config: Mapping[str, object], *, name: str, block_tokens: int | None) -> ModelConfig:
    top = _Fields(config)
    for field, wanted in _FIXED.items():
        if config.get(field, wanted) != wanted:
            raise top.refuse(field, config[field], str(wanted))
    layers = _layers(top)
    ratios = [layer.ratio for layer in layers if layer.ratio]
    head_dim = top.whole("head_dim")
    profile = Profile(
        name=name,
        layers=layers,
        block_tokens=block_tokens or (math.lcm(*ratios) if ratios else TILE),
        window_tokens=top.whole("sliding_window"),
        head_dim=head_dim,
        rope_dim=_rope_dim(top, head_dim),
        index_head_dim=top.whole("index_head_dim"),
        entry_format=RowFormat.F32,
        key_format=RowFormat.F32,
        row_format=RowFormat.F32,
    )
    window_rope, entry_rope = _ropes(top)
    return ModelConfig(
        profile=profile,
        vocab_size=top.whole("vocab_size"),
        hidden_size=top.whole("hidden_size"),
        heads=top.whole("num_attention_heads"),
        q_lora_rank=top.whole("q_lora_rank"),
        o_groups=top.whole("o_groups"),
        o_lora_rank=top.whole("o_lora_rank"),
        index_heads=top.whole("index_n_heads"),
        index_topk=top.whole("index_topk"),
        experts=top.whole("n_routed_experts"),
        experts_per_token=top.whole("num_experts_per_tok"),
        moe_width=top.whole("moe_intermediate_size"),
        num_hash_layers=_hash_layers(top, len(layers)),
        routed_scaling_factor=top.number("routed_scaling_factor"),
        norm_topk_prob=config.get("norm_topk_prob", True) is True,
        swiglu_limit=top.number("swiglu_limit"),
        hc_mult=top.whole("hc_mult"),
        hc_sinkhorn_iters=top.whole("hc_sinkhorn_iters"),
        hc_eps=top.number("hc_eps", most=1.0),
        rms_norm_eps=top.number("rms_norm_eps", most=1.0),
        window_rope=window_rope,
        entry_rope=entry_rope,
    )


def _layers(top: _Fields) -> tuple[Layer, ...]:
    count = top.whole("num_hidden_layers")
    rates = top.nested("compress_rates") or _Fields({}, "compress_rates.")
    ratio_of = {
        LayerKind.WINDOW: 0,
        LayerKind.CSA: rates.whole("compressed_sparse_attention", 4),
        LayerKind.HCA: rates.whole("heavily_compressed_attention", 128),
    }
    types, ratios = top.items("layer_types"), top.items("compress_ratios")
    if types is not None:
        for index, kind in enumerate(types):
            if not isinstance(kind, str) or kind not in _KIND_OF_TYPE:
                raise top.refuse(f"layer_types[{index}]", kind, ", ".join(_KIND_OF_TYPE))
        kinds = [_KIND_OF_TYPE[kind] for kind in types]
        source = "layer_types"
    elif ratios is not None:
        kind_of = {ratio: kind for kind, ratio in ratio_of.items()}
        for index, ratio in enumerate(ratios):
            if not isinstance(ratio, int) or ratio not in kind_of:
                raise top.refuse(
                    f"compress_ratios[{index}]", ratio, ", ".join(str(known) for known in kind_of)
                )
        kinds = [kind_of[ratio] for ratio in ratios]
        source = "compress_ratios"
    else:
        # The library's default schedule belongs to neither published model.
        raise top.refuse("layer_types", None, "layer_types or compress_ratios, one item per layer")
    # compress_ratios goes on with the draft blocks, which the embedded model does not have.
    if len(kinds) < count or (source == "layer_types" and len(kinds) != count):
        raise top.refuse(source, f"{len(kinds)} items", f"{count} items, one per layer")
    return tuple(Layer(kind, ratio_of[kind]) for kind in kinds[:count])


def _rope_dim(top: _Fields, head_dim: int) -> int:
    if "qk_rope_head_dim" in top.values:
        return top.whole("qk_rope_head_dim")
    return int(head_dim * top.number("partial_rotary_factor", most=1.0))


def _hash_layers(top: _Fields, count: int) -> int:
    types = top.items("mlp_layer_types")
    if types is None:
        return top.whole("num_hash_layers")
    hashed = types.count("hash_moe")
    if types != ["hash_moe"] * hashed + ["moe"] * (count - hashed):
        raise top.refuse("mlp_layer_types", types, f"hash_moe layers first, then moe, {count} in all")
    return hashed


def _ropes(top: _Fields) -> tuple[Rope, Rope]:
    parameters = (
        top.nested("rope_parameters") or top.nested("rope_scaling") or _Fields({}, "rope_parameters.")
    )
    main, entry = parameters.nested("main"), parameters.nested("compress")
    if main is not None and entry is not None:
        kind = main.values.get("rope_type", "default")
        if kind != "default":
            raise main.refuse("rope_type", kind, "default")
        return Rope(_theta(main)), Rope(_theta(entry), _yarn(entry))
    return Rope(_theta(top)), Rope(_theta(top, "compress_rope_theta"), _yarn(parameters))


def _theta(fields: _Fields, name: str = "rope_theta") -> float:
    return fields.number(name, above=1.0, most=1e12)


def _yarn(fields: _Fields) -> Yarn | None:
    kind = fields.values.get("rope_type", fields.values.get("type", "default"))
    if kind == "default":
        return None
    if kind != "yarn":
        raise fields.refuse("rope_type", kind, "default, yarn")
    if fields.number("attention_factor", 1.0) != 1.0:
        raise fields.refuse(
            "attention_factor", fields.values["attention_factor"], "1.0: V4 does not scale by it"
        )
    if fields.values.get("truncate", True) is not True:
        raise fields.refuse("truncate", fields.values["truncate"], "true")
    original = fields.whole("original_max_position_embeddings")
    if original < 1:
        raise fields.refuse("original_max_position_embeddings", original, "at least 1")
    return Yarn(
        fields.number("factor", above=1e-6),
        fields.number("beta_fast", 32.0, above=1e-6),
        fields.number("beta_slow", 1.0, above=1e-6),
        original,
    )
