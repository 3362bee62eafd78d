"""A worker that loads while it runs, and workers that share one computation; no bit depends on either."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
import pytest

from kvstore.errors import NoSpace, Unavailable
from kvstore.types import StateSource
from kvstore.v1 import worker_pb2 as pb
from kvstore.v1 import worker_pb2_grpc
from kvstore_client import CacheClient, Costs
from kvstore_client.lease import Lease
from kvstore_workers.runtime.stop import Stop, Stopped
from tests.support.long import one_in
from tests.support.peers import Peer
from tests.support.service import ServiceProcess, running_service
from tests.support.workers import (
    Answer,
    cold,
    cold_on,
    decode,
    engine_on,
    fresh_engine,
    prefill,
    request_of,
    shipped_model,
    tiny_model,
    tokens_of,
    twin,
)

B = 32

# As on a machine of its own: computing has a price, so that waiting for another's blocks is worth it.
HONEST = Costs(
    seconds_per_layer_token=2e-5,
    seconds_per_ssd_byte=1e-9,
    seconds_per_memory_byte=1e-9,
    seconds_per_fetch=1e-4,
)

# So that a wait is long enough for a machine on which sixteen models and other tests run at once.
DEAR = replace(HONEST, seconds_per_layer_token=10 * HONEST.seconds_per_layer_token)


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceProcess]:
    with running_service(prompt_tokens=16_384, sessions=40) as service:
        yield service


def _left_open(admin: CacheClient) -> dict[str, float]:
    stats = admin.stats()
    return {name: stats[name] for name in ("leases", "reservations", "handoff_takes_out", "flights")}


NOTHING = {"leases": 0, "reservations": 0, "handoff_takes_out": 0, "flights": 0}


# ---- loading while running --------------------------------------------------------------------------------------------


WAYS = [
    ("endpoints", None, StateSource.POOL),
    ("endpoints", "pool", StateSource.CHECKPOINT),
    ("full", "pool", StateSource.ROWS),
    ("full+overlap", "pool", StateSource.ROWS),
    ("endpoints", "both", StateSource.REPLAY),
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way[2]}-{way[0]}")
@pytest.mark.parametrize("count", [7 * B + 1, 40 * B, 40 * B + 17])
def test_blocks_that_come_by_layers_while_the_model_runs_change_no_bit(
    service: ServiceProcess, admin: CacheClient, salt: str, way: tuple[str, Any, StateSource], count: int
) -> None:
    policy, drop, source = way
    history = tokens_of(count, seed=51)
    with fresh_engine(service.directory, salt=salt, policy=policy, sliced_bytes=0) as engine:
        first = decode(engine, request_of(history, 4))
        assert first.same == cold(history, 4).same
        if drop is not None:
            admin.drop_states(engine.namespace, drop)
        longer = history + tokens_of(B + 3, seed=52)
        second = decode(engine, request_of(longer, 40, trace=True))
        assert second.same == cold(longer, 40).same
        assert second.report.state_source is source
        assert second.report.miss_reason == ""
        assert second.stored.failure == ""
        # What it has stored serves the next turn.
        longest = longer + second.tokens + tokens_of(5, seed=53)
        third = decode(engine, request_of(longest, 4))
        assert third.same == cold(longest, 4).same
        assert third.report.restored_tokens == (len(longer) + 39) // B * B
    names = {span.name for span in second.spans}
    assert {"fetch slice 0", "first tile", "restore"} <= names
    assert _left_open(admin) == NOTHING


class BreakingClient(CacheClient):
    """Its n-th item of a sliced fetch does not come."""

    def __init__(self, directory: Path, *, number: int, error: Exception) -> None:
        super().__init__(directory, owner="breaking")
        self._left, self._error = number, error

    @property
    def has_failed(self) -> bool:
        return self._left <= 0

    def fetch_slices(self, lease: Lease, **kwargs: Any) -> Generator[Any, None, None]:
        for item in super().fetch_slices(lease, **kwargs):
            self._left -= 1
            if self._left == 0:
                raise self._error
            yield item


@pytest.mark.parametrize("drop", [None, "both"], ids=["state", "replay"])
def test_a_sliced_fetch_that_breaks_at_any_item_changes_no_token_and_stores_nothing_wrong(
    service: ServiceProcess, admin: CacheClient, salt: str, drop: Any
) -> None:
    history = tokens_of(6 * B + 3, seed=54)
    longer = history + tokens_of(40, seed=55)
    for number in range(1, 60, one_in(3)):
        error = (Unavailable("killed"), NoSpace("full"))[number % 2]
        client = BreakingClient(service.directory, number=number, error=error)
        with engine_on(client, salt=f"{salt}-{number}", sliced_bytes=0) as engine:
            decode(engine, request_of(history, 1))
            if drop is not None:
                admin.drop_states(engine.namespace, drop)
            answer = decode(engine, request_of(longer, 4))
            assert answer.same == cold(longer, 4).same, number
            assert answer.report.restored_tokens == 6 * B
            assert answer.stored.failure == ""
            assert bool(answer.report.miss_reason) == client.has_failed
            if number % 3 == 1:
                again = decode(engine, request_of(longer + tokens_of(9, seed=56), 4))
                assert again.same == cold(longer + tokens_of(9, seed=56), 4).same
        if not client.has_failed:
            break
    assert not client.has_failed
    assert number > 10, "a sliced fetch has an item for every slice of every block"
    assert _left_open(admin) == NOTHING


def test_a_request_given_up_while_its_blocks_come_leaves_nothing_open(
    service: ServiceProcess, admin: CacheClient, salt: str
) -> None:
    history = tokens_of(30 * B, seed=57)
    with fresh_engine(service.directory, salt=salt, sliced_bytes=0) as engine:
        decode(engine, request_of(history, 1))
        for step in range(6):
            stop = Stop()
            events = engine.decode(request_of(history + tokens_of(9, seed=58), 30), stop=stop)
            for _ in range(step):
                next(events)
            stop.set()
            if step:
                events.close()
            else:
                with pytest.raises(Stopped):
                    next(events)
        _flushed(engine)
    assert _left_open(admin) == NOTHING


def _flushed(engine: Any) -> None:
    """Another request's blocks are stored: so is all that was handed over before."""
    decode(engine, request_of(tokens_of(2 * B, seed=59), 1))


# ---- single flight ---------------------------------------------------------------------------------------------------


def _side_by_side(jobs: list[Callable[[], Answer]]) -> list[Answer]:
    with ThreadPoolExecutor(len(jobs)) as pool:
        gate = threading.Barrier(len(jobs))

        def run(job: Callable[[], Answer]) -> Answer:
            gate.wait(30.0)
            return job()

        return list(pool.map(run, jobs))


def test_sixteen_workers_that_are_asked_for_one_cold_prompt_compute_it_once(
    service: ServiceProcess, admin: CacheClient, salt: str
) -> None:
    prompt = tokens_of(4096, seed=61)
    expected = cold(prompt, 1)
    with ExitStack() as stack:
        engines = [
            stack.enter_context(
                fresh_engine(service.directory, salt=salt, costs=DEAR, model=twin(tiny_model()))
            )
            for _ in range(16)
        ]
        answers = _side_by_side([lambda e=engine: prefill(e, request_of(prompt, 1)) for engine in engines])  # type: ignore[misc]
    assert all(answer.same == expected.same for answer in answers)
    computed = sum(answer.report.computed_tokens for answer in answers)
    # Each of the fifteen that waited computes the tokens of the last block, which no lookup may cover.
    assert computed <= 1.1 * 4096 + 15 * B, computed
    assert sum(answer.report.waited_seconds > 0 for answer in answers) >= 10
    assert _left_open(admin) == NOTHING


class _Owner:
    """A prefill worker's process in the namespace of `salt`, killed while it stores a prompt."""

    def __init__(self, directory: Path, salt: str, folder: Path) -> None:
        arguments = ["--cache", str(directory), "--threads", "1", "--seed", "11", "--tenant-salt", salt]
        self._peer = Peer(folder / "o.sock", "worker", "prefill", *arguments)
        self.stored = 0

    def __enter__(self) -> _Owner:
        self._peer.start().wait_ready()
        self._channel = grpc.insecure_channel(self._peer.target)
        return self

    def __exit__(self, *error: object) -> None:
        self._channel.close()
        self._peer.__exit__(None, None, None)

    def begin(self, prompt: list[int]) -> None:
        """Returns when the worker has looked the prompt up, and so has announced it."""
        request = pb.GenerateRequest(tokens=prompt, max_new_tokens=1)
        self._events = worker_pb2_grpc.PrefillStub(self._channel).Run(request, timeout=60.0)
        event = next(self._events)
        assert event.prefix.computed_tokens == len(prompt)

    def killed_half_way(self) -> Answer:
        self.stored = next(
            event.stored.blocks_stored for event in self._events if event.stored.blocks_stored >= 10
        )
        self._peer.kill()
        return Answer()


def test_waiters_of_a_worker_that_is_killed_go_on_from_what_it_has_stored(
    service: ServiceProcess, admin: CacheClient, salt: str
) -> None:
    prompt = tokens_of(6_000, seed=62)
    model = shipped_model()
    expected = cold_on(model, prompt, 1)
    with TemporaryDirectory(prefix="kv-") as folder, ExitStack() as stack:
        owner = stack.enter_context(_Owner(service.directory, salt, Path(folder)))
        engines = [
            stack.enter_context(fresh_engine(service.directory, salt=salt, costs=DEAR, model=twin(model)))
            for _ in range(3)
        ]
        owner.begin(prompt)
        answers = _side_by_side(
            [lambda e=engine: prefill(e, request_of(prompt, 1)) for engine in engines]
            + [owner.killed_half_way]  # type: ignore[misc]
        )[:3]
    assert all(answer.same == expected.same for answer in answers)
    assert owner.stored > 0
    computed = sum(answer.report.computed_tokens for answer in answers)
    # One of them inherits and computes what the owner had not stored; the others wait for that one.
    assert computed < 2 * 6_000, computed
    assert all(answer.report.waited_seconds < 30.0 for answer in answers)
    assert _left_open(admin) == NOTHING


# ---- what is reported --------------------------------------------------------------------------------------------------


class BreakingFetch(CacheClient):
    """Its first fetches bring a block and then fail."""

    def __init__(self, directory: Path, *, failures: int) -> None:
        super().__init__(directory, owner="breaking")
        self._failures = failures

    def fetch(self, lease: Lease, **kwargs: Any) -> Generator[Any, None, None]:
        items = super().fetch(lease, **kwargs)
        if self._failures:
            self._failures -= 1
            yield next(iter(items))
            raise Unavailable("late")
        yield from items


def test_a_report_counts_the_time_of_tries_that_failed(service: ServiceProcess, salt: str) -> None:
    history = tokens_of(8 * B + 1, seed=71)
    with fresh_engine(service.directory, salt=salt) as engine:
        decode(engine, request_of(history, 1))
    client = BreakingFetch(service.directory, failures=2)
    with engine_on(client, salt=salt) as engine:
        answer = decode(engine, request_of(history, 1))
    assert answer.same == cold(history, 1).same
    assert answer.report.restored_tokens == 0
    assert answer.report.miss_reason.startswith("UNAVAILABLE")
    assert answer.report.lookup_seconds > 0.0
    assert answer.report.fetch_seconds > 0.0


def test_a_trace_has_a_span_for_every_item_that_was_stored(service: ServiceProcess, salt: str) -> None:
    with fresh_engine(service.directory, salt=salt) as engine:
        answer = decode(engine, request_of(tokens_of(20 * B, seed=72), 1, trace=True))
    stored = answer.stored.blocks_stored + answer.stored.states_stored
    spans = [dict(span.detail) for span in answer.spans if span.name == "store"]
    assert sum(int(detail["items"]) for detail in spans) == stored > 20
