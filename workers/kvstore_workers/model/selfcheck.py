"""Does this machine give the same bits for the same tokens, however they are cut, restored or replayed?"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from kvstore.errors import ProfileError
from kvstore.profile.layout import layer_slices, rows_needed
from kvstore_workers.model.config import TILE
from kvstore_workers.model.model import Model
from kvstore_workers.model.sequence import EntryFeed, Sequence
from kvstore_workers.model.starts import RowsStart, Start, StateStart

DECODE_TILES = (8, 16, 32, 64, TILE)
# Long contexts have other matrix shapes, and shapes are what bits depend on; these are checked on made-up entries.
FAR_POSITIONS = (4_096, 16_384)
# Vector loops take this many bytes at a time, two of the widest registers; what is left over is computed by other
# functions, which round some numbers otherwise, too few for a check on some hundred rows to be sure to see one.
LOOP_BYTES = 128
DECODED = 12
CHECKED_SLICES = 4


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
    """Run `tokens` random tokens (more than TILE; more where a block needs it) in every way and compare; leaves the decode
    tile found in `model`.

    ProfileError when the model gives no numbers at all: damaged weights would answer every request with a fault.
    """
    assert tokens > TILE + DECODED, f"{tokens} tokens do not cross a tile, more than {TILE + DECODED} do"
    # An edge to restore at, and tokens behind it to compare.
    tokens = max(tokens, model.profile.block_tokens + DECODED)
    details: dict[str, bool] = {}
    ways = _ways(model, tokens, seed, far)
    for tile in _candidates(model):
        for name, (whole, way) in ways.items():
            model.decode_tile = TILE
            expected = whole()
            model.decode_tile = tile
            details[f"{name}/{tile}"] = _same_bytes(expected, way())
        if all(details[f"{name}/{tile}"] for name in ways):
            return SelfCheck(True, tile, details)
    model.decode_tile = TILE
    return SelfCheck(False, TILE, details)


def _candidates(model: Model) -> list[int]:
    """Decode tiles whose rows fill whole vector loops wherever a function is taken of every number of a tile: stream
    weights, expert scores, and what is between an expert's two matrices."""
    config, number = model.config, torch.float32.itemsize
    widths = (config.hc_mult * number, config.experts * number, config.moe_width * model.dtype.itemsize)
    return [tile for tile in DECODE_TILES if tile == TILE or all(tile * w % LOOP_BYTES == 0 for w in widths)]


Way = tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor]]


def _ways(model: Model, count: int, seed: int, far: tuple[int, ...]) -> dict[str, Way]:
    """Name -> (the logits of one prefill, the same logits in another way)."""
    rng = random.Random(seed)
    tokens = [rng.randrange(model.config.vocab_size) for _ in range(count)]
    near = TILE - DECODED // 2  # decoding crosses a tile and, with it, a block and every kind of group
    block_tokens = model.profile.block_tokens
    edge = (count - DECODED) // block_tokens * block_tokens

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

    @functools.cache
    def stored(position: int) -> _Stored:
        return _stored(model, tokens[:position])

    def restored(position: int, start: Start | None, *, by_slices: bool = False) -> torch.Tensor:
        """The logits behind `position`, from what a store would have kept."""
        blocks = stored(position).blocks
        if start is None:
            replay_from = max(0, position - model.profile.exact_replay_tokens)
        else:
            replay_from = start.state_at(model.profile)
        sequence = model.restore(
            position=position,
            start=start,
            tokens=tokens[replay_from:position],
            blocks=() if by_slices else blocks,
            feed=_sliced(model, blocks) if by_slices else None,
        )
        return _logits(model, sequence, tokens[position:])

    def resumed(*, by_slices: bool) -> torch.Tensor:
        return restored(near, StateStart(stored(near).state, near), by_slices=by_slices)

    def from_rows(*, overlap: bool) -> torch.Tensor:
        return restored(edge, RowsStart(stored(edge).rows_for(edge, model, overlap), edge, overlap=overlap))

    ways: dict[str, Way] = {
        "chunked": (whole, chunked),
        "decoded": (lambda: whole(near, near + DECODED), decoded),
        "in decode tiles": (whole, lambda: _in_decode_tiles(model, model.start(), tokens)),
        "resumed": (lambda: whole(near), lambda: resumed(by_slices=False)),
        "resumed by slices": (lambda: whole(near), lambda: resumed(by_slices=True)),
        "replayed": (lambda: whole(edge), lambda: restored(edge, None)),
        "from rows": (lambda: whole(edge), lambda: from_rows(overlap=False)),
        "from rows with overlap": (lambda: whole(edge), lambda: from_rows(overlap=True)),
    }
    for position in far:
        ways[f"in decode tiles at {position}"] = _far_way(model, position // TILE * TILE, tokens[:TILE], seed)
    return ways


def _far_way(model: Model, position: int, tokens: list[int], seed: int) -> Way:
    far = made_up(model, position, seed=seed)
    return (
        functools.cache(lambda: _logits(model, far.fork(), tokens)),
        lambda: _in_decode_tiles(model, far.fork(), tokens),
    )


@dataclass(frozen=True, slots=True)
class _Stored:
    """What a store would have kept of a run: its blocks, its state at the end, each block's rows with the overlap."""

    blocks: list[bytes]
    state: bytes
    rows: list[bytes]

    def rows_for(self, edge: int, model: Model, overlap: bool) -> list[bytes]:
        """The rows that a resume at `edge` reads, stored without the overlap where it is not wanted."""
        needed = rows_needed(model.profile, edge, overlap=overlap)
        rows = self.rows[needed.first_block : needed.first_block + needed.blocks]
        return rows if overlap else [payload[: model.profile.rows_block_bytes] for payload in rows]


def _stored(model: Model, tokens: list[int]) -> _Stored:
    origin, rows = model.start(), []

    def take(edge: int) -> None:
        payload = origin.rows_payload(edge // model.profile.block_tokens - 1, overlap=True)
        assert payload is not None, "a run from position 0 has every row"
        rows.append(payload)

    model.extend(origin, tokens, logits="none", on_edge=take)
    blocks = [origin.block_payload(i) for i in range(origin.position // model.profile.block_tokens)]
    return _Stored(blocks, origin.state(), rows)


def _sliced(model: Model, blocks: list[bytes]) -> EntryFeed:
    for part in layer_slices(model.profile, CHECKED_SLICES):
        yield part, [block[part.offset : part.end] for block in blocks]


def made_up(model: Model, position: int, *, seed: int) -> Sequence:
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


def _in_decode_tiles(model: Model, sequence: Sequence, tokens: list[int]) -> torch.Tensor:
    """From a tile's start, so that every row of every decode tile is compared: a shape that computes otherwise does not
    round otherwise in each row, and a few rows may agree by chance."""
    step = model.decode_tile
    return torch.cat(
        [_logits(model, sequence, tokens[first : first + step]) for first in range(0, len(tokens), step)]
    )


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(
        a.contiguous().view(torch.int32), b.contiguous().view(torch.int32)
    )


def numerics(model: Model, *, bit_equal: bool = True) -> str:
    """Names everything that the last bits depend on: runs with equal names give equal bits where the check passed.

    `bit_equal` is what the check found. Where it failed the name ends in `;unequal`, so that workers whose bits are not
    those of a prefill share nothing with workers that promise it.
    """
    if model.device.type == "cuda":
        where = f"cuda:{torch.cuda.get_device_name(model.device)}:{torch.version.cuda}"
    else:
        where = f"cpu:{torch.backends.cpu.get_cpu_capability()}:threads={torch.get_num_threads()}"
    dtype = str(model.dtype).removeprefix("torch.")
    promise = "" if bit_equal else ";unequal"
    return f"{where};{dtype};tile={TILE}/{model.decode_tile};torch={torch.__version__}{promise}"
