"""A checkpoint folder: config.json and safetensors, in the published spelling or the library's module names."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from kvstore.errors import ProfileError
from kvstore_workers.model.config import ModelConfig
from kvstore_workers.model.tensors import TensorSpec, tensor_specs

MAX_JSON_BYTES = 64 << 20
# The draft module is not part of the backbone.
_IGNORED = re.compile(r"(^|\.)mtp\.")
# Other spellings of the same tensors, tried in order; each rule may apply once.
_SPELLINGS: tuple[tuple[str, str], ...] = (
    (r"^model\.", ""),
    (r"^embed_tokens\.", "embed."),
    (r"^lm_head\.", "head."),
    (r"^hc_head\.hc_(fn|base|scale)$", r"hc_head_\1"),
    (r"\.self_attn\.", ".attn."),
    (r"\.mlp\.", ".ffn."),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.(attn|ffn)_hc\.(fn|base|scale)$", r".hc_\1_\2"),
    (r"\.compressor\.indexer\.scorer\.", ".indexer."),
    (r"\.compressor\.indexer\.q_b_proj\.", ".indexer.wq_b."),
    (r"\.compressor\.indexer\.", ".indexer.compressor."),
    (r"\.position_bias$", ".ape"),
    (r"\.compressor\.kv_norm\.", ".compressor.norm."),
    (r"\.attn\.norm\.", ".attn.kv_norm."),
    (r"\.sinks$", ".attn_sink"),
    (r"\.q_a_norm\.", ".q_norm."),
    (r"\.q_a_proj\.", ".wq_a."),
    (r"\.q_b_proj\.", ".wq_b."),
    (r"\.o_a_proj\.", ".wo_a."),
    (r"\.o_b_proj\.", ".wo_b."),
    (r"\.ffn\.shared_experts\.gate_proj\.", ".ffn.shared_experts.w1."),
    (r"\.ffn\.shared_experts\.down_proj\.", ".ffn.shared_experts.w2."),
    (r"\.ffn\.shared_experts\.up_proj\.", ".ffn.shared_experts.w3."),
    (r"\.kv_proj\.", ".wkv."),
    (r"\.gate_proj\.", ".wgate."),
    (r"\.e_score_correction_bias$", ".bias"),
)
_NUMBER_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ID_DTYPES = (torch.int64, torch.int32, torch.int16, torch.uint8)
_STACKED = re.compile(r"^(layers\.\d+\.ffn\.experts)\.(gate_up_proj|down_proj)$")


def published_name(name: str) -> str:
    for pattern, replacement in _SPELLINGS:
        name = re.sub(pattern, replacement, name, count=1)
    return name


def load_folder(folder: Path, *, name: str) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """Config and tensors (on the CPU, as stored) of `folder`; ProfileError names what is missing, extra or misshapen."""
    config = ModelConfig.from_hf(_json(folder / "config.json"), name=name)
    found: dict[str, torch.Tensor] = {}
    for path in _tensor_files(folder):
        _read(path, found)
    specs = tensor_specs(config)
    _compare(folder, specs, found)
    return config, found


def _json(path: Path) -> Mapping[str, object]:
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ProfileError(
                "file too large",
                field=path.name,
                value=path.stat().st_size,
                allowed=f"{MAX_JSON_BYTES} bytes",
            )
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ProfileError(
            "file could not be read", field=str(path), value=error, allowed="a JSON object"
        ) from error
    if not isinstance(content, dict):
        raise ProfileError(
            "file could not be read", field=str(path), value=type(content).__name__, allowed="a JSON object"
        )
    return content


def _tensor_files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ProfileError(
            "no weights here",
            field="folder",
            value=folder,
            allowed=f"a folder with {single.name} or {index.name}",
        )
    weight_map = _json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ProfileError("index without weight_map", field=index.name, value=type(weight_map).__name__)
    names = sorted(set(weight_map.values()), key=str)
    for name in names:
        # a name from a file must not lead out of the folder
        if not isinstance(name, str) or Path(name).name != name:
            raise ProfileError(
                "bad file name in the index", field=index.name, value=name, allowed="a file of the folder"
            )
    return [folder / name for name in names]


def _read(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Add the file's tensors, each under its published name."""
    try:
        with safe_open(path, framework="pt") as file:
            for stored in file.keys():  # noqa: SIM118 (the handle is no mapping)
                if _IGNORED.search(stored):
                    continue
                for name, tensor in _unstacked(published_name(stored), file.get_tensor(stored)):
                    if name in tensors:
                        raise ProfileError(
                            f"a tensor is here twice, the second time in {path.name}",
                            field=stored,
                            value=name,
                            allowed="each tensor once, in one spelling",
                        )
                    tensors[name] = tensor
    except (OSError, SafetensorError) as error:
        raise ProfileError(
            "weights could not be read",
            field=str(path),
            value=error,
            allowed="a safetensors file",
        ) from error


def _unstacked(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Per-expert tensors out of one that holds all experts."""
    match = _STACKED.match(name)
    if match is None or tensor.dim() != 3:
        return [(name, tensor)]
    prefix, kind = match.groups()
    if kind == "gate_up_proj" and tensor.shape[1] % 2:
        # Not two halves: it stays as it is, and is named with its shape.
        return [(name, tensor)]
    if kind == "down_proj":
        return [(f"{prefix}.{expert}.w2.weight", rows) for expert, rows in enumerate(tensor)]
    pairs = []
    for expert, rows in enumerate(tensor):
        gate, up = rows.chunk(2, dim=0)
        pairs += [(f"{prefix}.{expert}.w1.weight", gate), (f"{prefix}.{expert}.w3.weight", up)]
    return pairs


def _compare(folder: Path, specs: Mapping[str, TensorSpec], found: Mapping[str, torch.Tensor]) -> None:
    """ProfileError that counts what is wrong and names the first of it, with shapes."""
    missing = sorted(specs.keys() - found.keys())
    if missing:
        raise ProfileError(
            f"{len(missing)} tensors are missing in {folder}",
            field="tensor",
            value=missing[0],
            allowed=f"shape {specs[missing[0]].shape}",
        )
    extra = sorted(found.keys() - specs.keys())
    if extra:
        raise ProfileError(
            f"{len(extra)} tensors are not of this model in {folder}",
            field="tensor",
            value=f"{extra[0]} of shape {tuple(found[extra[0]].shape)}",
            allowed=f"the {len(specs)} tensors of this config",
        )
    misshapen = sorted(name for name, spec in specs.items() if tuple(found[name].shape) != spec.shape)
    if misshapen:
        name = misshapen[0]
        raise ProfileError(
            f"{len(misshapen)} tensors are of another shape in {folder}",
            field=name,
            value=tuple(found[name].shape),
            allowed=str(specs[name].shape),
        )
    for name, spec in specs.items():
        known = _ID_DTYPES if spec.role == "ids" else _NUMBER_DTYPES
        if found[name].dtype not in known:
            raise ProfileError(
                "tensor of an unsupported type",
                field=name,
                value=found[name].dtype,
                allowed=", ".join(str(dtype).removeprefix("torch.") for dtype in known),
            )
