"""What goes into an engine and what comes out of it. Token ids are ints, times are seconds, positions are tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.errors import InvalidArgument
from kvstore.types import Exactness, Lineage, StateSource

MAX_PROMPT_TOKENS = 1_048_576
MAX_NEW_TOKENS = 65_536
MAX_TEMPERATURE = 100.0
MAX_SAMPLES = 16
TICKET_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt and what is wanted of it. `temperature` 0 is greedy; above 0 it needs a seed.

    samples: answers to one prompt; sample i is drawn with seed + i, and `sample` is the one that a decode worker makes.
    exactness: BOUNDED allows an approximate prefix; None is what the model was trained for. trace: report spans.
    """

    tokens: Sequence[int]
    max_new_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    return_logits: bool = False
    bypass_store: bool = False
    samples: int = 1
    sample: int = 0
    exactness: Exactness | None = None
    trace: bool = False

    def seed_of(self, sample: int) -> int | None:
        return None if self.seed is None else (self.seed + sample) % (1 << 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixReport:
    """What really happened to the prompt; the fields are those of the wire message of the same name."""

    prompt_tokens: int
    restored_tokens: int = 0
    replayed_tokens: int = 0
    computed_tokens: int = 0
    state_source: StateSource | None = StateSource.NONE
    exactness: Exactness = Exactness.EXACT
    bytes_ssd: int = 0
    bytes_memory: int = 0
    lookup_seconds: float = 0.0
    fetch_seconds: float = 0.0
    replay_seconds: float = 0.0
    expected_seconds: float = 0.0
    replay_layer_tokens: int = 0
    miss_reason: str = ""
    handoff: bool = False
    waited_seconds: float = 0.0

    @property
    def lineage(self) -> Lineage:
        """Of the sequence that goes on from here, and of all that is computed from it."""
        return Lineage.EXACT if self.exactness is Exactness.EXACT else Lineage.BOUNDED


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreReport:
    """What became of the blocks and states that one request handed to the writer."""

    blocks_stored: int = 0
    blocks_held_already: int = 0
    blocks_failed: int = 0
    blocks_pending: int = 0
    states_stored: int = 0
    states_failed: int = 0
    bytes_stored: int = 0
    rows_stored: int = 0
    failure: str = ""

    def plus(self, other: StoreReport) -> StoreReport:
        """Both together; the first failure is the one that is kept."""
        return StoreReport(
            blocks_stored=self.blocks_stored + other.blocks_stored,
            blocks_held_already=self.blocks_held_already + other.blocks_held_already,
            blocks_failed=self.blocks_failed + other.blocks_failed,
            blocks_pending=self.blocks_pending + other.blocks_pending,
            states_stored=self.states_stored + other.states_stored,
            states_failed=self.states_failed + other.states_failed,
            bytes_stored=self.bytes_stored + other.bytes_stored,
            rows_stored=self.rows_stored + other.rows_stored,
            failure=self.failure or other.failure,
        )


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time, on the line `track`. Starts in wall seconds; `detail`: pairs for people."""

    name: str
    track: str
    start_seconds: float
    seconds: float
    detail: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Prefixed:
    report: PrefixReport
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class Stored:
    report: StoreReport


@dataclass(frozen=True, slots=True)
class Picked:
    """A generated token; `first` is the one that follows the prompt. `logits`: float32 little-endian, or empty."""

    token: int
    logits: bytes
    first: bool
    sample: int = 0


@dataclass(frozen=True, slots=True)
class Done:
    report: StoreReport
    ticket: bytes = b""
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class Computed:
    """The last event of an engine: all is computed. `done` leaves the handoff and waits for the store, so it is not for
    the thread that computes, since other requests wait for that one."""

    done: Callable[[], Done]


Event = Prefixed | Stored | Picked | Computed


def check_request(request: Request, *, vocabulary: int | None) -> None:
    """Raise InvalidArgument for the first thing that is wrong. `vocabulary` None leaves token ids unchecked."""
    count = len(request.tokens)
    if not 1 <= count <= MAX_PROMPT_TOKENS:
        raise InvalidArgument(
            "nothing can be computed from an empty prompt" if not count else "the prompt is too long",
            field="tokens",
            value=f"{count} tokens",
            allowed=f"1 to {MAX_PROMPT_TOKENS} tokens",
        )
    if not 1 <= request.max_new_tokens <= MAX_NEW_TOKENS:
        raise InvalidArgument(
            "bad number of tokens to generate",
            field="max_new_tokens",
            value=request.max_new_tokens,
            allowed=f"1 to {MAX_NEW_TOKENS}",
        )
    if not math.isfinite(request.temperature) or not 0.0 <= request.temperature <= MAX_TEMPERATURE:
        raise InvalidArgument(
            "bad temperature",
            field="sampling.temperature",
            value=request.temperature,
            allowed=f"0 to {MAX_TEMPERATURE:g}",
        )
    if request.temperature > 0.0 and request.seed is None:
        raise InvalidArgument(
            "sampling needs a seed", field="sampling.seed", value="none", allowed="a seed, or temperature 0"
        )
    if not 1 <= request.samples <= MAX_SAMPLES:
        raise InvalidArgument(
            "bad number of samples", field="samples", value=request.samples, allowed=f"1 to {MAX_SAMPLES}"
        )
    if not 0 <= request.sample < request.samples:
        raise InvalidArgument(
            "no such sample", field="sample", value=request.sample, allowed=f"0 to {request.samples - 1}"
        )
    # max first: a loop in Python over a million tokens is slower than the scan that finds nothing.
    if vocabulary is not None and max(request.tokens) >= vocabulary:
        index = next(i for i, token in enumerate(request.tokens) if token >= vocabulary)
        raise InvalidArgument(
            "token id outside the vocabulary",
            field=f"tokens[{index}]",
            value=request.tokens[index],
            allowed=f"0 to {vocabulary - 1}",
        )
