"""The profiles' arithmetic against the published figures, and what a profile refuses."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvstore.cli.main import main
from kvstore.errors import ProfileError
from kvstore.profile.base import Layer, LayerKind, Profile
from kvstore.profile.formats import RowFormat, row_bytes
from kvstore.profile.layout import block_layout, max_state_bytes, state_layout
from kvstore.profile.registry import PROFILES, get_profile
from kvstore.profile.report import profile_report

GOLDEN = {
    "deepseek-v4-flash": {
        "csa": 21,
        "hca": 20,
        "window": 2,
        "per_token": 3514.25,
        "block": 449_824,
        "window_bytes": 3_189_224,
        "overlap": 430_080,
        "state": 3_619_304,
        "replay": 5_461,
        "replay_blocks": 5_504,
        "equivalents": 2_794,
    },
    "deepseek-v4-pro": {
        "csa": 30,
        "hca": 31,
        "window": 0,
        "per_token": 5031.4375,
        "block": 644_024,
        "window_bytes": 4_524_248,
        "overlap": 614_400,
        "state": 5_138_648,
        "replay": 7_747,
        "replay_blocks": 7_808,
        "equivalents": 3_937,
    },
    "deepseek-v4.1-flash": {
        "csa": 0,
        "hca": 0,
        "window": 2,
        "per_token": 890,
        "block": 113_920,
        "window_bytes": 2_682_240,
        "overlap": 0,
        "state": 2_682_240,
        "replay": 5_080,
        "replay_blocks": 5_120,
        "equivalents": 2_603.5,
    },
}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_published_figures_come_out_of_the_arithmetic(name: str) -> None:
    profile, want = get_profile(name), GOLDEN[name]
    report = profile_report(profile)
    got = {
        "csa": profile.count(LayerKind.CSA),
        "hca": profile.count(LayerKind.HCA),
        "window": profile.count(LayerKind.WINDOW),
        "per_token": report["bytes_per_token"],
        "block": report["block_bytes"],
        "window_bytes": report["window_bytes"],
        "overlap": report["overlap_bytes"],
        "state": report["state_bytes"],
        "replay": report["replay"]["exact_tokens"],
        "replay_blocks": report["replay"]["exact_tokens_whole_blocks"],
        "equivalents": report["replay"]["exact_token_equivalents"],
    }
    assert got == want


def test_the_encoder_of_v41_is_rebuilt_alone() -> None:
    replay = profile_report(get_profile("deepseek-v4.1-flash"))["replay"]
    assert (replay["encoder_exact_tokens"], replay["encoder_exact_tokens_whole_blocks"]) == (2_540, 2_560)
    assert replay["bounded_tokens"] == 128
    assert replay["bounded_is_trained"]


def test_the_older_accounting_leaves_scales_out() -> None:
    old = profile_report(get_profile("deepseek-v4-flash"))["without_scales"]
    assert old["bytes_per_token"] == 3_450
    assert round(old["bytes_per_token_with_window"]) == 3_453
    assert round(old["gib_per_1048576_tokens"], 3) == 3.372
    assert round(old["percent_of_bf16_gqa"], 2) == 1.96


def test_policies_cost_what_is_published() -> None:
    policies = profile_report(get_profile("deepseek-v4-flash"))["policies"]
    factors = {
        name: round(figures["times_blocks"], 2)
        for name, figures in policies.items()
        if "times_blocks" in figures
    }
    assert factors == {
        "zero": 0,
        "periodic:128": 8.05,
        "periodic:2048": 0.5,
        "periodic:8192": 0.13,
        "full": 7.15,
        "full+overlap": 8.1,
    }
    assert policies["endpoints"]["bytes_per_request"] == 2 * 3_619_304


def test_flash_slim_has_the_geometry_of_flash() -> None:
    assert get_profile("flash-slim").geometry() == get_profile("deepseek-v4-flash").geometry()


def test_tiny_has_every_v4_layer_kind_and_a_short_replay() -> None:
    tiny = get_profile("tiny")
    assert {layer.kind for layer in tiny.layers} == {LayerKind.WINDOW, LayerKind.CSA, LayerKind.HCA}
    assert tiny.exact_replay_tokens < 100


@pytest.mark.parametrize("name", PROFILES)
def test_layouts_have_no_gaps_and_add_up(name: str) -> None:
    profile = get_profile(name)
    assert block_layout(profile).total_bytes == profile.block_bytes
    assert state_layout(profile, 5 * profile.block_tokens).total_bytes == profile.state_bytes
    for position in range(profile.block_tokens + 1):
        layout = state_layout(profile, position)
        end = 0
        for section in layout.sections:
            assert section.offset == end
            end = section.end
        assert end == layout.total_bytes <= max(max_state_bytes(profile), profile.state_bytes)


def test_a_block_is_layer_major_with_keys_after_entries() -> None:
    order = [(s.layer, s.part) for s in block_layout(get_profile("tiny")).sections]
    assert order == [(2, "entries"), (2, "keys"), (3, "entries"), (4, "entries"), (4, "keys")]


@pytest.mark.parametrize(
    ("row_format", "dim", "rope", "want"),
    [
        (RowFormat.FP8_ROPE_BF16, 512, 64, (576, 584)),
        (RowFormat.FP4_UE8M0, 128, 64, (64, 68)),
        (RowFormat.FP4_E4M3, 512, 64, (256, 288)),
        (RowFormat.FP8_ALL, 512, 64, (512, 528)),
        (RowFormat.F32, 32, 8, (128, 128)),
    ],
)
def test_row_formats_have_their_published_sizes(
    row_format: RowFormat, dim: int, rope: int, want: tuple[int, int]
) -> None:
    size = row_bytes(row_format, dim, rope)
    assert (size.data, size.total) == want


@pytest.mark.parametrize("name", PROFILES)
def test_geometry_survives_the_wire(name: str) -> None:
    profile = get_profile(name)
    assert Profile.from_geometry(name, profile.geometry()) == profile


@pytest.mark.parametrize(
    "geometry",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"\xff",
        b"[" * 100_000,
        b'{"layers": [["csa", 4]]}',
        get_profile("tiny").geometry() + b" ",
    ],
)
def test_geometry_that_nobody_wrote_is_refused(geometry: bytes) -> None:
    with pytest.raises(ProfileError, match="geometry"):
        Profile.from_geometry("tiny", geometry)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_tokens": 24}, ("block_tokens=24", "lcm", "16")),
        ({"window_tokens": 0}, ("window_tokens=0", "from 2")),
        ({"layers": (Layer("dense", 4),)}, ("layers[0].kind=dense", "window, csa, hca")),
        ({"layers": (Layer(LayerKind.CSA, 0),)}, ("layers[0].ratio=0",)),
        ({"layers": (Layer(LayerKind.WINDOW, 4),)}, ("layers[0].ratio=4",)),
        ({"layers": ()}, ("layers=0",)),
        ({"name": ""}, ("name",)),
        ({"rope_dim": 33}, ("rope_dim=33", "0 to 32")),
        ({"entry_format": RowFormat.FP8_ROPE_BF16}, ("dim=24", "multiple of 64")),
        ({"window_tokens": 4}, ("window_tokens=4", "more than the CSA ratio, 4")),
    ],
)
def test_a_bad_profile_is_refused_with_field_value_and_what_is_allowed(
    changes: dict[str, object], words: tuple[str, ...]
) -> None:
    with pytest.raises(ProfileError) as caught:
        replace(get_profile("tiny"), **changes)  # type: ignore[arg-type]
    for word in words:
        assert word in str(caught.value)


def test_the_command_prints_json_keyed_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profiles", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == set(PROFILES)
    assert main(["profiles", "tiny", "--layout", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tiny"]["layout"]["block"][1] == {
        "part": "keys",
        "layer": 2,
        "offset": 1024,
        "rows": 8,
        "row_bytes": 64,
        "bytes": 512,
    }


def test_an_unknown_profile_is_one_line_that_lists_the_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profiles", "deepseek-v9"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "deepseek-v9" in error
    assert "tiny" in error
