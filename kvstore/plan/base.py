"""Values that go into and come out of a restore plan. All positions are tokens from the start of the prompt.

Those that every lookup makes anew are tuples: frozen dataclasses take about twice as long to make.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvstore.types import Exactness, StateSource


class Coverage(NamedTuple):
    """What is held for one prompt, counted from its first token.

    blocks: whole blocks held without a gap from the start. pool_states, checkpoints: block edges in tokens, ascending,
    each at most blocks x block_tokens, at which a whole state is held in that tier. rows, rows_overlap: edges at which
    all window rows are held that a resume there needs, without the overlap and with it; the deepest usable one of each
    is enough. branch_at: the edge where the prompt leaves what is held although that goes on in another way, 0 if nowhere.
    """

    blocks: int
    pool_states: tuple[int, ...] = ()
    checkpoints: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    rows_overlap: tuple[int, ...] = ()
    branch_at: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Measured rates. Seconds per layer-token (one layer run for one token), seconds per entry that an index scan looks
    at (a token at position p looks at p / ratio in every layer with an index), seconds per byte from each tier up to the
    worker's memory, and seconds that any fetch costs at least. Tokens are computed in tiles of `tile_tokens`: a prompt's
    last tile costs as much as a whole one."""

    seconds_per_layer_token: float = 2e-5
    seconds_per_ssd_byte: float = 2e-9
    seconds_per_memory_byte: float = 1e-9
    seconds_per_fetch: float = 5e-4
    seconds_per_index_entry: float = 0.0
    tile_tokens: int = 1


class Alternative(NamedTuple):
    """One way to resume, with its price. `seconds` is the whole time to the first token: reading, replaying and
    computing the rest of the prompt, which the last three fields give one by one. `index_entries`: looked at by index
    scans, in the replay and in the rest."""

    compute_from: int
    state_source: StateSource
    state_at: int
    replay_from: int
    replay_layer_tokens: int
    bytes_ssd: int
    bytes_memory: int
    seconds: float
    index_entries: int = 0
    read_seconds: float = 0.0
    replay_seconds: float = 0.0
    compute_seconds: float = 0.0

    @property
    def replay_tokens(self) -> int:
        return self.compute_from - self.replay_from


class SaveStates(NamedTuple):
    """Which states the worker is to keep. `pool` and `ssd` are edges inside the prompt, ascending; the two flags say
    whether the last edge of the output goes to that tier; `every_tokens` > 0 asks for each further multiple of it
    (in the output) on SSD; `rows` that the window rows of every computed token go there, block by block, and
    `rows_overlap` that the overlap at each block's end goes with them."""

    pool: tuple[int, ...] = ()
    ssd: tuple[int, ...] = ()
    output_edge_pool: bool = False
    output_edge_ssd: bool = False
    every_tokens: int = 0
    rows: bool = False
    rows_overlap: bool = False


class RestorePlan(NamedTuple):
    """How to resume a prompt of `prompt_tokens` tokens most cheaply and correctly.

    Blocks [0, compute_from) are read; only positions >= compute_from are computed and written. Laws:
    replay_from <= compute_from <= max(prompt_tokens - 1, 0); replay_tokens = compute_from - replay_from;
    state_at == replay_from unless the source is REPLAY or NONE; NONE has compute_from == 0.
    """

    prompt_tokens: int
    chosen: Alternative
    runner_up: Alternative | None
    exactness: Exactness
    save_states: SaveStates
    blocks_missing: int
    wait_for: tuple[int, ...] = ()

    @property
    def compute_from(self) -> int:
        return self.chosen.compute_from

    @property
    def state_source(self) -> StateSource:
        return self.chosen.state_source

    @property
    def state_at(self) -> int:
        return self.chosen.state_at

    @property
    def replay_from(self) -> int:
        return self.chosen.replay_from

    @property
    def replay_tokens(self) -> int:
        return self.chosen.replay_tokens
