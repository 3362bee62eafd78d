"""Checkpoint folders: a good one loads, a damaged one is refused by the tensor's name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvstore.errors import ProfileError
from kvstore_workers.model import Model
from tests.support.checkpoints import CONFIG, TINY, Tensors, write_checkpoint


def test_a_folder_with_the_same_tensors_computes_as_the_model_in_memory(tmp_path: Path) -> None:
    loaded = Model.load(write_checkpoint(tmp_path), name="tiny")
    assert loaded.profile.name == "tiny"
    assert loaded.profile.layers == TINY.profile.layers
    same = Model.random(TINY, seed=4)
    tokens = list(range(40))
    a, b = loaded.extend(loaded.start(), tokens), same.extend(same.start(), tokens)
    assert a is not None
    assert b is not None
    assert torch.equal(a, b)


def test_the_weights_revision_follows_every_tensor_and_the_config(tmp_path: Path) -> None:
    def flip(tensors: Tensors) -> None:
        tensors["layers.3.attn.attn_sink"][1] += 1e-6

    for name in ("a", "b", "c", "d"):
        (tmp_path / name).mkdir()
    first, again = Model.load(write_checkpoint(tmp_path / "a")), Model.load(write_checkpoint(tmp_path / "b"))
    assert first.weights_revision == again.weights_revision
    assert Model.load(write_checkpoint(tmp_path / "c", flip)).weights_revision != first.weights_revision
    write_checkpoint(tmp_path / "d")
    (tmp_path / "d" / "config.json").write_text(json.dumps({**CONFIG, "swiglu_limit": 9.0}))
    assert Model.load(tmp_path / "d").weights_revision != first.weights_revision
    assert Model.random(TINY, seed=4).weights_revision != Model.random(TINY, seed=5).weights_revision


def test_tensors_of_the_draft_module_are_left_out(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.mkdir()
    draft = lambda tensors: tensors.update({"mtp.0.enorm.weight": torch.ones(4)})  # noqa: E731
    assert (
        Model.load(write_checkpoint(tmp_path, draft)).weights_revision
        == Model.load(write_checkpoint(plain)).weights_revision
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop("layers.2.attn.indexer.wq_b.weight"),
            r"1 tensors are missing.*tensor=layers\.2\.attn\.indexer\.wq_b\.weight; allowed: shape \(64, 32\)",
        ),
        (
            lambda t: [t.pop(name) for name in list(t) if name.startswith("layers.4.")],
            r"\d\d tensors are missing.*tensor=layers\.4\.attn\.attn_sink; allowed: shape \(4,\)",
        ),
        (
            lambda t: t.update({"layers.0.attn.compressor.ape": torch.ones(4, 64)}),
            r"1 tensors are not of this model.*tensor=layers\.0\.attn\.compressor\.ape of shape \(4, 64\)",
        ),
        (
            lambda t: t.update({"layers.1.ffn.gate.bias": torch.ones(9)}),
            r"layers\.1\.ffn\.gate\.bias.*\(9,\).*\(8,\)",
        ),
        (
            lambda t: t.update({name: t[name].T.contiguous() for name in t if name.endswith("wq_b.weight")}),
            r"7 tensors are of another shape.*layers\.0\.attn\.wq_b\.weight=\(32, 128\); allowed: \(128, 32\)",
        ),
        (
            lambda t: t.update({"embed.weight": t["embed.weight"][:319].clone()}),
            r"1 tensors are of another shape.*embed\.weight=\(319, 64\); allowed: \(320, 64\)",
        ),
        (
            lambda t: t.update({"norm.weight": t["norm.weight"].reshape(1, 64)}),
            r"norm\.weight=\(1, 64\); allowed: \(64,\)",
        ),
        (lambda t: t.update({"norm.weight": torch.ones(64, dtype=torch.int8)}), r"norm\.weight.*int8"),
        (lambda t: t["layers.0.ffn.gate.tid2eid"].fill_(8), r"layers\.0\.ffn\.gate\.tid2eid"),
        (
            lambda t: t.update({"layers.0.ffn.gate.tid2eid": t["layers.0.ffn.gate.tid2eid"].float()}),
            r"tid2eid=torch\.float32; allowed: int64",
        ),
        (
            lambda t: t.update({"model.embed_tokens.weight": t["embed.weight"] + 1}),
            r"here twice.*model\.embed_tokens\.weight=embed\.weight",
        ),
        (lambda t: t.update({"two\nlines\x1b": torch.ones(1)}), r"tensor=two\\nlines\\x1b"),
    ],
)
def test_a_missing_extra_or_wrong_tensor_is_refused_by_name(
    tmp_path: Path, change: Callable[[Tensors], object], message: str
) -> None:
    with pytest.raises(ProfileError, match=message):
        Model.load(write_checkpoint(tmp_path, change))


def test_a_folder_for_another_config_is_refused_with_both_shapes(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    for change, message in (
        (
            {"vocab_size": 321},
            r"3 tensors are of another shape.*embed\.weight=\(320, 64\); allowed: \(321, 64\)",
        ),
        (
            {"num_hidden_layers": 4},
            r"tensors are not of this model.*layers\.4\.attn\.attn_sink of shape \(4,\)",
        ),
        (
            {"n_routed_experts": 9},
            r"tensors are missing.*layers\.0\.ffn\.experts\.8\.w1\.weight; allowed: shape \(32, 64\)",
        ),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **change}))
        with pytest.raises(ProfileError, match=message):
            Model.load(tmp_path)


def test_one_file_of_two_that_is_cut_short_is_refused_by_its_name(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    whole = tmp_path / "model.safetensors"
    tensors = load_file(whole)
    names = sorted(tensors)
    for file, part in (("a.safetensors", names[::2]), ("b.safetensors", names[1::2])):
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    whole.unlink()
    weight_map = {name: "ab"[index % 2] + ".safetensors" for index, name in enumerate(names)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert Model.load(tmp_path).profile.layers == TINY.profile.layers
    (tmp_path / "b.safetensors").write_bytes((tmp_path / "b.safetensors").read_bytes()[:-1])
    with pytest.raises(ProfileError, match=r"b\.safetensors"):
        Model.load(tmp_path)


def test_unreadable_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"config\.json"):
        Model.load(tmp_path)
    write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0notjson!")
    with pytest.raises(ProfileError, match=r"model\.safetensors"):
        Model.load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ProfileError, match="folder"):
        Model.load(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"norm.weight": "../elsewhere.safetensors"}}))
    with pytest.raises(ProfileError, match="elsewhere"):
        Model.load(tmp_path)
    index.write_text(json.dumps({"weight_map": {"norm.weight": "absent.safetensors"}}))
    with pytest.raises(ProfileError, match="absent"):
        Model.load(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ProfileError, match=r"config\.json"):
        Model.load(tmp_path)
