"""The store fails at every call that a request makes, in turn: the request never does, and nothing is left open."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstore.errors import NoSpace, Unavailable
from kvstore.types import ItemKind
from kvstore_client import CacheClient, FetchedItem, Lookup, ReserveItem
from kvstore_client.lease import Lease
from kvstore_client.reservation import Reservation
from kvstore_workers.runtime.writer import WriterLimits
from tests.support.long import one_in
from tests.support.service import ServiceProcess, running_service
from tests.support.workers import (
    Answer,
    cold,
    decode,
    engine_on,
    fresh_engine,
    prefill,
    request_of,
    tiny_model,
    tokens_of,
)

B = 32


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceProcess]:
    with running_service() as service:
        yield service


class FaultyReservation:
    """A reservation each of whose calls may fail."""

    def __init__(self, inner: Reservation, step: Any) -> None:
        self._inner = inner
        self._step = step

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write(self, payloads: Any) -> None:
        self._step("write")
        self._inner.write(payloads)

    def commit(self) -> Any:
        self._step("commit")
        return self._inner.commit()

    def __enter__(self) -> FaultyReservation:
        self._inner.__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        self._inner.__exit__(*args)


class FaultyClient(CacheClient):
    """A client whose n-th step of one name (a call, or an item of a fetch) raises; with `forever`, all after it too."""

    def __init__(
        self, directory: Path, *, step: str, number: int, error: Exception, forever: bool = False
    ) -> None:
        super().__init__(directory, owner="faulty")
        self._name, self._left, self._error, self._forever = step, number, error, forever
        self._guard = threading.Lock()
        self.has_failed = False

    def _step(self, name: str) -> None:
        with self._guard:
            if self.has_failed:
                fails = self._forever
            else:
                self._left -= name == self._name
                fails = self.has_failed = self._left == 0
        if fails:
            raise self._error

    def open_namespace(self, *args: Any, **kwargs: Any) -> Any:
        self._step("open_namespace")
        return super().open_namespace(*args, **kwargs)

    def lookup(self, *args: Any, **kwargs: Any) -> Lookup:
        self._step("lookup")
        return super().lookup(*args, **kwargs)

    def fetch(self, lease: Lease, **kwargs: Any) -> Generator[FetchedItem, None, None]:
        self._step("fetch")
        for item in super().fetch(lease, **kwargs):
            self._step("item")
            yield item

    def reserve(self, namespace: bytes, items: Sequence[ReserveItem]) -> Any:
        self._step("reserve")
        return FaultyReservation(super().reserve(namespace, items), self._step)

    def put_handoff(self, *args: Any, **kwargs: Any) -> bytes:
        self._step("put_handoff")
        return super().put_handoff(*args, **kwargs)

    def take_handoff(self, *args: Any, **kwargs: Any) -> Any:
        self._step("take_handoff")
        return super().take_handoff(*args, **kwargs)


class RpcFailure(grpc.RpcError):
    """What gRPC raises below a client that did not translate it."""


def _session(client: CacheClient, salt: str) -> tuple[list[int], Answer, Answer, Answer]:
    """A cold turn with a handoff, and a turn that restores: the prompt of the second, and all three answers."""
    prompt = tokens_of(200, seed=21)
    limits = WriterLimits(in_flight_tries=2, in_flight_seconds=0.001)
    with engine_on(client, salt=salt, limits=limits) as engine:
        handed = prefill(engine, request_of(prompt, 4))
        answer = decode(engine, request_of(prompt, 4), ticket=handed.ticket, first_token=handed.tokens[0])
        longer = prompt + handed.tokens + answer.tokens + tokens_of(30, seed=22)
        return longer, handed, answer, decode(engine, request_of(longer, 4))


STEPS = (
    "open_namespace",
    "lookup",
    "fetch",
    "item",
    "reserve",
    "write",
    "commit",
    "put_handoff",
    "take_handoff",
)


@pytest.mark.parametrize("forever", [False, True], ids=["once", "from-then-on"])
@pytest.mark.parametrize("step", STEPS)
def test_a_store_that_fails_at_any_step_changes_no_token(
    service: ServiceProcess, salt: str, step: str, forever: bool
) -> None:
    expected = cold(tokens_of(200, seed=21), 4)
    errors = (Unavailable("killed"), NoSpace("full"), RpcFailure("raw"))
    # Until a session passes without coming to that step so often; items are many and alike.
    for number in range(1, 100, one_in(3) if step == "item" else 1):
        client = FaultyClient(
            service.directory, step=step, number=number, error=errors[number % 3], forever=forever
        )
        longer, handed, answer, second = _session(client, f"{salt}-{number}")
        assert (handed.tokens + answer.tokens, handed.logits + answer.logits) == expected.same, (
            f"{step} {number}"
        )
        assert second.same == cold(longer, 4).same, f"{step} {number}"
        if not client.has_failed:
            break
    assert not client.has_failed
    assert number > 1, f"no session came to {step}"
    with CacheClient(service.directory, owner="test-admin") as admin:
        stats = admin.stats()
    assert (stats["leases"], stats["reservations"], stats["handoff_takes_out"]) == (0, 0, 0)


class LossyClient(CacheClient):
    """A client that loses or changes one item of its first fetch."""

    change: Any = None

    def fetch(self, lease: Lease, **kwargs: Any) -> Generator[FetchedItem, None, None]:
        items = list(super().fetch(lease, **kwargs))
        change, self.change = self.change, None
        yield from items if change is None else change(items)


def _with(item: FetchedItem, payload: bytes | None) -> FetchedItem:
    return FetchedItem(kind=item.kind, index=item.index, payload=payload, lineage=item.lineage)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param(
            lambda items: [*items[:2], _with(items[2], None), *items[3:]], "missing", id="a block is missing"
        ),
        pytest.param(
            lambda items: [*items[:-1], _with(items[-1], None)], "missing", id="the state is missing"
        ),
        pytest.param(
            lambda items: [_with(items[0], b"short"), *items[1:]], "another size", id="a block is short"
        ),
        pytest.param(lambda items: items[:-1], "ended early", id="the end is missing"),
        pytest.param(lambda items: [items[1], items[0], *items[2:]], "out of order", id="two are swapped"),
        pytest.param(lambda items: [*items, items[0]], "more items", id="one comes twice"),
    ],
)
def test_a_damaged_fetch_is_a_miss_that_a_second_lookup_mends(
    service: ServiceProcess, salt: str, change: Any, reason: str
) -> None:
    prompt = tokens_of(200, seed=23)
    client = LossyClient(service.directory, owner="lossy")
    with engine_on(client, salt=salt) as engine:
        decode(engine, request_of(prompt, 4))
        client.change = change
        answer = decode(engine, request_of(prompt, 4))
    assert answer.same == cold(prompt, 4).same
    assert answer.report.miss_reason.startswith("DAMAGED_BYTES")
    assert reason in answer.report.miss_reason
    assert answer.report.restored_tokens == 192


def test_a_fault_of_the_program_is_not_taken_for_a_miss(service: ServiceProcess, salt: str) -> None:
    client = FaultyClient(service.directory, step="lookup", number=1, error=ZeroDivisionError("a bug"))
    with engine_on(client, salt=salt) as engine, pytest.raises(ZeroDivisionError):
        decode(engine, request_of(tokens_of(100, seed=24), 2))


def test_a_fault_of_the_program_in_the_writer_reaches_the_request(
    service: ServiceProcess, salt: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = FaultyClient(service.directory, step="commit", number=1, error=ZeroDivisionError("a bug"))
    prompt = tokens_of(100, seed=25)
    with engine_on(client, salt=salt) as engine:
        with pytest.raises(ZeroDivisionError):
            decode(engine, request_of(prompt, 2))
        assert "a fault in the writer" in caplog.text
        assert decode(engine, request_of(prompt, 2)).stored.blocks_stored == 3


# ---- the writer ---------------------------------------------------------------------------------------------------


def test_a_full_queue_gives_up_the_rest_of_the_request_and_the_next_one_starts_afresh(
    service: ServiceProcess, salt: str
) -> None:
    prompt = tokens_of(1000, seed=26)
    profile = tiny_model().profile
    client = CacheClient(service.directory, owner="test")
    # Room for a state and two blocks; a chunk hands over sixteen.
    limits = WriterLimits(queue_bytes=profile.state_bytes + 2 * profile.block_bytes)
    with engine_on(client, salt=salt, limits=limits) as engine:
        answer = decode(engine, request_of(prompt, 2))
        stored = answer.stored
        assert answer.same == cold(prompt, 2).same
        assert stored.failure.startswith("LIMIT_EXCEEDED: the writer's queue is full")
        assert stored.blocks_stored + stored.blocks_failed == 31
        # What had found room is stored, though more came after it.
        assert 2 <= stored.blocks_stored < 31
        again = decode(engine, request_of(prompt[:60], 1)).stored
    assert again.failure == ""
    assert (again.blocks_stored, again.blocks_failed) == (0, 0)


def _block_items(engine: Any, prompt: list[int], count: int) -> list[ReserveItem]:
    from kvstore.prefix.keys import block_keys

    root = engine._store.root
    keys = block_keys(root, prompt, block_tokens=B)
    return [
        ReserveItem(
            kind=ItemKind.BLOCK,
            key=keys[i],
            parent=keys[i - 1] if i else root,
            position=(i + 1) * B,
            length=tiny_model().profile.block_bytes,
        )
        for i in range(count)
    ]


def test_a_block_that_another_writer_claims_for_long_is_given_up(service: ServiceProcess, salt: str) -> None:
    prompt = tokens_of(200, seed=27)
    limits = WriterLimits(in_flight_tries=2, in_flight_seconds=0.01)
    with (
        CacheClient(service.directory, owner="rival") as rival,
        engine_on(CacheClient(service.directory, owner="test"), salt=salt, limits=limits) as engine,
    ):
        engine._store.open()  # type: ignore[union-attr]
        with rival.reserve(engine.namespace, _block_items(engine, prompt, 3)) as claimed:
            assert len(claimed.granted) == 3
            answer = decode(engine, request_of(prompt, 2))
        assert answer.stored.blocks_stored == 0
        assert answer.stored.blocks_failed == 6
        assert "another writer" in answer.stored.failure
        assert answer.same == cold(prompt, 2).same
        assert decode(engine, request_of(prompt, 2)).stored.blocks_stored == 6


def test_a_block_that_another_writer_gives_back_is_stored_by_us(service: ServiceProcess, salt: str) -> None:
    prompt = tokens_of(200, seed=28)
    limits = WriterLimits(in_flight_tries=1000, in_flight_seconds=0.005)
    with (
        CacheClient(service.directory, owner="rival") as rival,
        engine_on(CacheClient(service.directory, owner="test"), salt=salt, limits=limits) as engine,
    ):
        engine._store.open()  # type: ignore[union-attr]
        claimed = rival.reserve(engine.namespace, _block_items(engine, prompt, 3))
        timer = threading.Timer(0.1, claimed.abort)
        timer.start()
        answer = decode(engine, request_of(prompt, 2))
        timer.join()
    assert answer.stored.blocks_stored == 6
    assert answer.stored.failure == ""


def test_a_parent_that_was_evicted_ends_the_run_and_not_the_request(
    service: ServiceProcess, salt: str
) -> None:
    prompt = tokens_of(2000, seed=29)

    class ClearingClient(CacheClient):
        """Clears the namespace after its second commit."""

        reserves = 0

        def reserve(self, namespace: bytes, items: Sequence[ReserveItem]) -> Reservation:
            self.reserves += 1
            if self.reserves == 3:
                self.clear(namespace)
            return super().reserve(namespace, items)

    client = ClearingClient(service.directory, owner="test")
    with engine_on(client, salt=salt, limits=WriterLimits(batch_items=8)) as engine:
        answer = decode(engine, request_of(prompt, 2))
        assert answer.same == cold(prompt, 2).same
        assert answer.stored.failure.startswith("PARENT_MISSING")
        assert answer.stored.blocks_stored + answer.stored.blocks_failed == 62
        assert decode(engine, request_of(prompt, 2)).stored.blocks_stored == 62


# ---- the service itself goes --------------------------------------------------------------------------------------


def test_a_killed_service_is_used_again_when_it_is_back() -> None:
    prompt = tokens_of(300, seed=30)
    expected = cold(prompt, 4).same
    with running_service() as service, fresh_engine(service.directory, salt="kill") as engine:
        assert decode(engine, request_of(prompt, 4)).same == expected
        service.kill()
        dead = decode(engine, request_of(prompt, 4))
        assert dead.same == expected
        assert dead.report.miss_reason.startswith("UNAVAILABLE")
        assert dead.stored.blocks_failed == 9
        service.start()
        back = decode(engine, request_of(prompt, 4))
        assert back.same == expected
        assert back.report.restored_tokens == 288


def test_a_service_that_starts_on_an_empty_directory_is_told_the_namespace_again() -> None:
    import shutil

    prompt = tokens_of(300, seed=31)
    expected = cold(prompt, 4).same
    with running_service() as service, fresh_engine(service.directory, salt="empty") as engine:
        decode(engine, request_of(prompt, 4))
        service.kill()
        shutil.rmtree(service.directory)
        service.start()
        first, second = decode(engine, request_of(prompt, 4)), decode(engine, request_of(prompt, 4))
    assert first.same == second.same == expected
    assert first.stored.blocks_stored == 9
    assert second.report.restored_tokens == 288


def test_a_service_that_hangs_costs_deadlines_and_no_token() -> None:
    from kvstore_client import Deadlines

    prompt = tokens_of(300, seed=32)
    deadlines = Deadlines(lookup=0.2, control=0.2, connect=0.2, commit=0.2, handoff=0.2)
    with running_service() as service:
        client = CacheClient(service.directory, owner="test", deadlines=deadlines)
        with engine_on(client, salt="hang", flush_seconds=2.0) as engine:
            decode(engine, request_of(prompt, 4))
            with service.suspended():
                answer = prefill(engine, request_of(prompt, 4))
            assert answer.tokens == cold(prompt, 4).tokens[:1]
            assert answer.report.miss_reason.startswith("UNAVAILABLE")
