"""Engines for tests: one small model, any number of engines on a real service, and what they answer."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path

import torch

from kvstore.clock import SystemClock
from kvstore.prefix.identity import NamespaceIdentity
from kvstore.profile.registry import get_profile
from kvstore_client import CacheClient, Costs, Deadlines
from kvstore_workers.model.config import ModelConfig
from kvstore_workers.model.model import Model
from kvstore_workers.model.selfcheck import numerics, self_check
from kvstore_workers.runtime.engine import Engine
from kvstore_workers.runtime.feed import SLICED_BYTES
from kvstore_workers.runtime.rates import Rates
from kvstore_workers.runtime.stop import Stop
from kvstore_workers.runtime.store import PrefixStore
from kvstore_workers.runtime.values import (
    Computed,
    Event,
    Picked,
    Prefixed,
    PrefixReport,
    Request,
    Span,
    Stored,
    StoreReport,
)
from kvstore_workers.runtime.writer import Writer, WriterLimits
from tests.support.models import quick_config

RESTORING_PAYS = Costs(
    seconds_per_layer_token=1.0,
    seconds_per_ssd_byte=1e-9,
    seconds_per_memory_byte=1e-9,
    seconds_per_fetch=1e-6,
)
COMPUTING_PAYS = Costs(
    seconds_per_layer_token=1e-12,
    seconds_per_ssd_byte=1.0,
    seconds_per_memory_byte=1.0,
    seconds_per_fetch=1.0,
)


@cache
def tiny_model() -> Model:
    """The same object for all tests of a process; its self-check passed. One thread: machines that run tests are busy,
    and threads that wait for each other are slower there than one alone."""
    torch.set_num_threads(1)
    model = Model.random(quick_config(), seed=11)
    check = self_check(model, far=())
    assert check.bit_equal, check.details
    return model


def shipped_model() -> Model:
    """What a worker's process has that was told --seed 11, so that they are of one namespace; checked as there."""
    torch.set_num_threads(1)
    model = Model.random(ModelConfig.for_profile(get_profile("tiny")), seed=11)
    assert self_check(model, far=()).bit_equal
    return model


def twin(model: Model) -> Model:
    """An equal one, for engines that run side by side."""
    made = Model.random(model.config, seed=11)
    made.decode_tile = model.decode_tile
    return made


def tokens_of(count: int, *, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(quick_config().vocab_size) for _ in range(count)]


class FixedRates(Rates):
    """Prices that no measurement moves, so that a plan does not depend on how busy the machine is."""

    def __init__(self, costs: Costs) -> None:
        super().__init__()
        self._fixed = costs

    def costs(self) -> Costs:
        return self._fixed


@contextmanager
def engine_on(
    client: CacheClient,
    *,
    salt: str,
    policy: str = "endpoints",
    costs: Costs = RESTORING_PAYS,
    limits: WriterLimits | None = None,
    flush_seconds: float = 10.0,
    sliced_bytes: int = SLICED_BYTES,
    model: Model | None = None,
) -> Iterator[Engine]:
    """An engine whose namespace is its salt's own; client and writer are closed on leaving. `model`: in place of the one
    that all tests share."""
    model = tiny_model() if model is None else model
    identity = NamespaceIdentity(
        model.profile, weights_revision=model.weights_revision, numerics=numerics(model), tenant_salt=salt
    )
    store = PrefixStore(
        client, identity, name=f"test-{salt}", policy=policy, clock=SystemClock(), rates=FixedRates(costs)
    )
    writer = Writer(store, limits=limits)
    try:
        yield Engine(
            model,
            store=store,
            writer=writer,
            clock=SystemClock(),
            flush_seconds=flush_seconds,
            sliced_bytes=sliced_bytes,
        )
    finally:
        ended = writer.close(seconds=20.0)
        store.close()
        assert ended, "the writer's thread did not end"


@contextmanager
def fresh_engine(directory: Path, **options: object) -> Iterator[Engine]:
    """`engine_on` with a client of its own."""
    # An abort that takes longer than this is left to the session's end, which these tests do not wait for.
    client = CacheClient(directory, owner="test", deadlines=Deadlines(release=10.0))
    with engine_on(client, **options) as engine:  # type: ignore[arg-type]
        yield engine


@dataclass
class Answer:
    """All that one request gave."""

    tokens: list[int] = field(default_factory=list)
    logits: list[bytes] = field(default_factory=list)
    prefix: PrefixReport | None = None
    stored: StoreReport = field(default_factory=StoreReport)
    ticket: bytes = b""
    spans: list[Span] = field(default_factory=list)

    @property
    def same(self) -> tuple[list[int], list[bytes]]:
        """What must not depend on where the prompt's state came from."""
        return self.tokens, self.logits

    @property
    def report(self) -> PrefixReport:
        assert self.prefix is not None, "no PREFIX came"
        return self.prefix


def collect(events: Iterable[Event]) -> Answer:
    """Every event; asserts their order."""
    answer = Answer()
    ended = False
    for event in events:
        assert not ended, f"{event} after the end"
        assert isinstance(event, Prefixed) == (answer.prefix is None), f"{event} before or after PREFIX"
        if isinstance(event, Prefixed):
            answer.prefix = event.report
            answer.spans += event.spans
        elif isinstance(event, Picked):
            answer.tokens.append(event.token)
            answer.logits.append(event.logits)
        elif isinstance(event, Stored):
            answer.stored = event.report
        else:
            assert isinstance(event, Computed)
            done = event.done()
            answer.stored, answer.ticket, ended = done.report, done.ticket, True
            answer.spans += done.spans
    assert ended, "no end came"
    return answer


def request_of(tokens: Sequence[int], new: int = 4, **changes: object) -> Request:
    return Request(tokens=tokens, max_new_tokens=new, return_logits=True, **changes)  # type: ignore[arg-type]


def decode(
    engine: Engine, request: Request, *, ticket: bytes = b"", first_token: int | None = None
) -> Answer:
    return collect(engine.decode(request, stop=Stop(), ticket=ticket, first_token=first_token))


def prefill(engine: Engine, request: Request) -> Answer:
    return collect(engine.prefill(request, stop=Stop()))


def cold(tokens: Sequence[int], new: int = 4, **changes: object) -> Answer:
    """The answer of a worker without a store: what every other way must give."""
    return _cold(tuple(tokens), new, tuple(sorted(changes.items())))


@lru_cache(maxsize=256)
def _cold(tokens: tuple[int, ...], new: int, changes: tuple[tuple[str, object], ...]) -> Answer:
    return cold_on(tiny_model(), tokens, new, **dict(changes))


def cold_on(model: Model, tokens: Sequence[int], new: int, **changes: object) -> Answer:
    engine = Engine(model, store=None, writer=None, clock=SystemClock())
    return decode(engine, request_of(tokens, new, **changes))
