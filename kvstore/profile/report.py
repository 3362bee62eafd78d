"""A profile in numbers: what a block, a state and a replay cost. Pure arithmetic, ready for JSON."""

from __future__ import annotations

from typing import Any

from kvstore.profile.base import LayerKind, Profile
from kvstore.profile.formats import row_bytes
from kvstore.profile.layout import Layout, block_layout, state_layout

MIBI_TOKENS = 1 << 20
PERIODS_IN_BLOCKS = (1, 16, 64)
"""Distances shown for `periodic:N`, in blocks: 128, 2,048 and 8,192 tokens where a block has 128."""

_BF16_BYTES = 2
_GQA_HEADS, _GQA_DIM = 8, 128


def profile_report(profile: Profile) -> dict[str, Any]:
    """All figures of one profile. Bytes are bytes, `_per_token` bytes per token, `_gib` GiB."""
    p = profile
    replay_tokens = p.exact_replay_tokens
    replay_blocks = -(-replay_tokens // p.block_tokens)
    return {
        "layers": {
            "total": p.layer_count,
            **{kind.value: p.count(kind) for kind in LayerKind if p.count(kind)},
        },
        "block_tokens": p.block_tokens,
        "block_bytes": p.block_bytes,
        "bytes_per_token": p.bytes_per_token,
        "gib_per_1048576_tokens": p.bytes_per_token * MIBI_TOKENS / (1 << 30),
        "entry_bytes": p.entry_bytes,
        "key_bytes": p.key_bytes,
        "row_bytes": p.row_bytes,
        "formats": {"entry": p.entry_format.value, "key": p.key_format.value, "row": p.row_format.value},
        "window_tokens": p.window_tokens,
        "window_bytes": p.window_bytes,
        "overlap_bytes": p.overlap_bytes,
        "state_bytes": p.state_bytes,
        "policies": _policies(p),
        "replay": {
            "exact_tokens": replay_tokens,
            "exact_tokens_whole_blocks": replay_blocks * p.block_tokens,
            "exact_blocks": replay_blocks,
            "exact_layer_tokens": p.exact_replay_layer_tokens,
            "exact_token_equivalents": p.exact_replay_layer_tokens / p.layer_count,
            "bounded_tokens": p.bounded_replay_tokens,
            "bounded_is_trained": p.bounded_is_trained,
            **_encoder(p),
        },
        "without_scales": _without_scales(p),
    }


def _policies(p: Profile) -> dict[str, dict[str, float]]:
    """Bytes that each window-state policy adds, per token and as a multiple of the blocks' own bytes."""
    rows = {"zero": 0.0}
    for blocks in PERIODS_IN_BLOCKS:
        rows[f"periodic:{blocks * p.block_tokens}"] = p.state_bytes / (blocks * p.block_tokens)
    rows["full"] = p.rows_block_bytes / p.block_tokens
    rows["full+overlap"] = p.rows_overlap_block_bytes / p.block_tokens
    report = {
        name: {"bytes_per_token": value, "times_blocks": value / p.bytes_per_token}
        for name, value in rows.items()
    }
    # Two states a request, whatever its length, and one more at each branch point: no figure per token without a length.
    report["endpoints"] = {"bytes_per_request": 2.0 * p.state_bytes}
    return report


def _encoder(p: Profile) -> dict[str, int]:
    if not p.encoder_layers:
        return {}
    tokens = p.encoder_layers * p.window_rows
    return {
        "encoder_exact_tokens": tokens,
        "encoder_exact_tokens_whole_blocks": -(-tokens // p.block_tokens) * p.block_tokens,
        "encoder_exact_layer_tokens": p.window_rows * p.encoder_layers * (p.encoder_layers + 1) // 2,
    }


def _without_scales(p: Profile) -> dict[str, float]:
    """The older accounting: no scale bytes; window rows spread over 1,048,576 tokens; against bf16 GQA."""
    entry = row_bytes(p.entry_format, p.head_dim, p.rope_dim).data
    key = row_bytes(p.key_format, p.index_head_dim, p.rope_dim).data
    row = row_bytes(p.row_format, p.head_dim, p.rope_dim).data
    per_token = sum(
        (entry + (key if layer.kind.has_keys else 0)) / layer.ratio
        for layer in p.layers
        if layer.kind.has_entries
    )
    with_window = per_token + p.layer_count * p.window_tokens * row / MIBI_TOKENS
    gqa = 2 * _GQA_HEADS * _GQA_DIM * _BF16_BYTES * p.layer_count
    return {
        "bytes_per_token": per_token,
        "bytes_per_token_with_window": with_window,
        "gib_per_1048576_tokens": with_window * MIBI_TOKENS / (1 << 30),
        "percent_of_bf16_gqa": 100 * with_window / gqa,
    }


def layout_report(profile: Profile) -> dict[str, Any]:
    """Payload offsets of a block, and of a state at a block edge."""
    return {
        "block": _sections(block_layout(profile)),
        "state": _sections(state_layout(profile, profile.block_tokens)),
    }


def _sections(layout: Layout) -> list[dict[str, Any]]:
    return [
        {
            "part": s.part,
            "layer": s.layer,
            **({"field": s.field} if s.field else {}),
            "offset": s.offset,
            "rows": s.rows,
            "row_bytes": s.row_bytes,
            "bytes": s.length,
        }
        for s in layout.sections
    ]
