"""Does this machine give the same bits for the same tokens, however they are cut, restored or replayed?"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from kvstore.errors import ProfileError
from kvstore_workers.model.config import TILE
from kvstore_workers.model.model import Model
from kvstore_workers.model.sequence import Sequence

DECODE_TILES = (8, 16, 32, 64, TILE)
# Long contexts have other matrix shapes, and shapes are what bits depend on; these are checked on made-up entries.
FAR_POSITIONS = (4_096, 16_384)
DECODED = 12


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """`bit_equal`: every way below gave the logits of one prefill, byte for byte. `decode_tile`: the smallest tile for
    which it held, TILE if it held for none. `details`: "way/tile" -> passed, for every tile tried."""

    bit_equal: bool
    decode_tile: int
    details: Mapping[str, bool]


def self_check(
    model: Model, *, tokens: int = TILE + 64, seed: int = 0, far: tuple[int, ...] = FAR_POSITIONS
) -> SelfCheck:
    """Run `tokens` random tokens (more than TILE) in every way and compare; leaves the decode tile found in `model`.

    ProfileError when the model gives no numbers at all: damaged weights would answer every request with a fault.
    """
    assert tokens > TILE + DECODED, f"{tokens} tokens do not cross a tile, more than {TILE + DECODED} do"
    details: dict[str, bool] = {}
    ways = _ways(model, tokens, seed, far)
    for tile in DECODE_TILES:
        for name, (whole, way) in ways.items():
            model.decode_tile = TILE
            expected = whole()
            model.decode_tile = tile
            details[f"{name}/{tile}"] = _same_bytes(expected, way())
        if all(details[f"{name}/{tile}"] for name in ways):
            return SelfCheck(True, tile, details)
    model.decode_tile = TILE
    return SelfCheck(False, TILE, details)


Way = tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]


def _ways(model: Model, count: int, seed: int, far: tuple[int, ...]) -> dict[str, Way]:
    """Name -> (the logits of one prefill, the same logits in another way)."""
    rng = random.Random(seed)
    tokens = [rng.randrange(model.config.vocab_size) for _ in range(count)]
    near = TILE - DECODED // 2  # decoding crosses a tile and, with it, a block and every kind of group
    block_tokens = model.profile.block_tokens
    edge = count // block_tokens * block_tokens

    @functools.cache
    def prefill() -> torch.Tensor:
        logits = _logits(model, model.start(), tokens)
        if not bool(torch.isfinite(logits).all()):
            raise ProfileError(
                "the model's logits are not finite: its weights or its config are damaged",
                field="weights",
                value=model.weights_revision,
            )
        return logits

    def whole(first: int = 0, last: int = count) -> torch.Tensor:
        return prefill()[first:last]

    def chunked() -> torch.Tensor:
        cuts = sorted(rng.sample(range(1, count), 6))
        sequence = model.start()
        spans = zip([0, *cuts], [*cuts, count], strict=True)
        return torch.cat([_logits(model, sequence, tokens[first:last]) for first, last in spans])

    def decoded() -> torch.Tensor:
        sequence = model.start()
        model.extend(sequence, tokens[:near], logits="none")
        return _one_by_one(model, sequence, tokens[near : near + DECODED])

    def restored(position: int) -> Sequence:
        """What a store would have kept of a run to `position`."""
        origin = model.start()
        model.extend(origin, tokens[:position], logits="none")
        return model.resume(blocks=_blocks(origin), state=origin.state(), position=position)

    def replayed() -> torch.Tensor:
        origin = model.start()
        model.extend(origin, tokens[:edge], logits="none")
        replay_from = max(0, edge - model.profile.exact_replay_tokens)
        sequence = model.replay(
            blocks=_blocks(origin),
            tokens=tokens[replay_from:edge],
            replay_from=replay_from,
            position=edge,
            state=None,
        )
        return _logits(model, sequence, tokens[edge:])

    ways: dict[str, Way] = {
        "chunked": (whole, chunked),
        "decoded": (lambda: whole(near, near + DECODED), decoded),
        "resumed": (lambda: whole(near), lambda: _logits(model, restored(near), tokens[near:])),
        "replayed": (lambda: whole(edge), replayed),
    }
    for position in far:
        ways[f"decoded at {position}"] = _far_way(model, position // TILE * TILE, tokens[:DECODED], seed)
    return ways


def _far_way(model: Model, position: int, tokens: list[int], seed: int) -> Way:
    made_up = _made_up(model, position, seed)
    return (
        functools.cache(lambda: _logits(model, made_up.fork(), tokens)),
        lambda: _one_by_one(model, made_up.fork(), tokens),
    )


def _made_up(model: Model, position: int, seed: int) -> Sequence:
    """A sequence at a TILE's start whose entries and rows are noise: equal bits need no meaning."""
    generator = torch.Generator().manual_seed(seed)

    def noise(rows: int, width: int) -> torch.Tensor:
        return torch.randn(rows, width, generator=generator).to(model.device)

    profile = model.profile
    made = profile.window_rows
    with torch.inference_mode():
        sequence = Sequence(
            profile, device=model.device, dtype=model.dtype, position=position, rows_from=position
        )
        for layer, rows in enumerate(sequence.window):
            rows.write(position - made, noise(made, profile.head_dim))
            ratio = profile.layers[layer].ratio
            if ratio:
                sequence.entries[layer].append(noise(position // ratio, profile.head_dim))
                stream = sequence.streams[layer]
                stream.write(position - ratio, noise(ratio, stream.rows.shape[1]))
            if layer in sequence.keys:
                sequence.keys[layer].append(noise(position // ratio, profile.index_head_dim))
    return sequence


def _logits(model: Model, sequence: Sequence, tokens: list[int]) -> torch.Tensor:
    logits = model.extend(sequence, tokens, logits="all")
    assert logits is not None
    return logits


def _one_by_one(model: Model, sequence: Sequence, tokens: list[int]) -> torch.Tensor:
    return torch.cat([_logits(model, sequence, [token]) for token in tokens])


def _blocks(sequence: Sequence) -> list[bytes]:
    return [sequence.block_payload(i) for i in range(sequence.position // sequence.profile.block_tokens)]


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(
        a.contiguous().view(torch.int32), b.contiguous().view(torch.int32)
    )


def numerics(model: Model) -> str:
    """Names everything that the last bits depend on: runs with equal names give equal bits where the check passed."""
    if model.device.type == "cuda":
        where = f"cuda:{torch.cuda.get_device_name(model.device)}:{torch.version.cuda}"
    else:
        where = f"cpu:{torch.backends.cpu.get_cpu_capability()}:threads={torch.get_num_threads()}"
    dtype = str(model.dtype).removeprefix("torch.")
    return f"{where};{dtype};tile={TILE}/{model.decode_tile};torch={torch.__version__}"
