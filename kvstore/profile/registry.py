"""The profiles that ship. Schedules and formats are those of the published configurations."""

from __future__ import annotations

from kvstore.errors import ProfileError
from kvstore.profile.base import Layer, LayerKind, Profile
from kvstore.profile.formats import RowFormat

_WINDOW = Layer(LayerKind.WINDOW)


def _csa(ratio: int = 4) -> Layer:
    return Layer(LayerKind.CSA, ratio)


def _hca(ratio: int = 128) -> Layer:
    return Layer(LayerKind.HCA, ratio)


def _flash(name: str) -> Profile:
    # compress_ratios of V4-Flash: 0, 0, then 4, 128 in turn, ending with 4 at layer 42.
    layers = (_WINDOW, _WINDOW, *(_csa() if i % 2 == 0 else _hca() for i in range(2, 43)))
    return Profile(
        name=name,
        layers=layers,
        block_tokens=128,
        window_tokens=128,
        head_dim=512,
        rope_dim=64,
        index_head_dim=128,
        entry_format=RowFormat.FP8_ROPE_BF16,
        key_format=RowFormat.FP4_UE8M0,
        row_format=RowFormat.FP8_ROPE_BF16,
    )


def _pro() -> Profile:
    # compress_ratios of V4-Pro: 128, 128, then 4, 128 in turn, ending with 4 at layer 60.
    layers = (_hca(), _hca(), *(_csa() if i % 2 == 0 else _hca() for i in range(2, 61)))
    return Profile(
        name="deepseek-v4-pro",
        layers=layers,
        block_tokens=128,
        window_tokens=128,
        head_dim=512,
        rope_dim=64,
        index_head_dim=128,
        entry_format=RowFormat.FP8_ROPE_BF16,
        key_format=RowFormat.FP4_UE8M0,
        row_format=RowFormat.FP8_ROPE_BF16,
    )


def _v41_flash() -> Profile:
    # Key-value sources are layers 2, 8, 14 (one entry per 2 tokens) and 20 (one per token); 0 and 1 are window only.
    ratios = {2: 2, 8: 2, 14: 2, 20: 1}
    reader = Layer(LayerKind.CSA2_READER)
    layers = (
        _WINDOW,
        _WINDOW,
        *(Layer(LayerKind.CSA2, ratios[i]) if i in ratios else reader for i in range(2, 40)),
    )
    return Profile(
        name="deepseek-v4.1-flash",
        layers=layers,
        block_tokens=128,
        window_tokens=128,
        head_dim=512,
        rope_dim=64,
        index_head_dim=128,
        entry_format=RowFormat.FP4_E4M3,
        key_format=RowFormat.FP4_UE8M0,
        row_format=RowFormat.FP8_ALL,
        encoder_layers=20,
        bounded_is_trained=True,
    )


def _tiny() -> Profile:
    # Every V4 layer kind; an exact replay is 5 x 15 = 75 tokens, a small part of a few thousand.
    layers = (_WINDOW, _WINDOW, _csa(4), _hca(16), _csa(4))
    return Profile(
        name="tiny",
        layers=layers,
        block_tokens=32,
        window_tokens=16,
        head_dim=32,
        rope_dim=8,
        index_head_dim=16,
        entry_format=RowFormat.F32,
        key_format=RowFormat.F32,
        row_format=RowFormat.F32,
    )


PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (_flash("deepseek-v4-flash"), _pro(), _v41_flash(), _flash("flash-slim"), _tiny())
}


def get_profile(name: str) -> Profile:
    try:
        return PROFILES[name]
    except KeyError:
        raise ProfileError(
            "unknown profile", field="profile", value=name, allowed=", ".join(PROFILES)
        ) from None
