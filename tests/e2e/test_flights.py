"""Single flight through a real service: who is asked for the same cold prompt at once computes it once."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import grpc
import pytest

from kvstore.errors import Draining, InvalidArgument, Unavailable
from kvstore.types import StateSource
from kvstore.v1 import cache_pb2 as pb
from kvstore_client import CacheClient, Costs, Lookup, OpenedNamespace
from tests.e2e.service_raw import EAGER as RAW_EAGER
from tests.e2e.service_raw import Chain as RawChain
from tests.e2e.service_raw import Raw, error_of
from tests.support.calls import Caller, look
from tests.support.chains import Chain, identity_of
from tests.support.owner import Owner
from tests.support.service import ServiceProcess, running_service

CALLERS = 16
BLOCKS = 32
PATIENT = 60.0
"""Longer than any of these tests may take: who waits for it fails the test's own limits."""
SOON = 5.0
"""A wake-up takes a millisecond. So much is for a machine that is busy with other things."""


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceProcess]:
    with running_service(sessions=100) as process:
        yield process


@pytest.fixture
def client(service: ServiceProcess) -> Iterator[CacheClient]:
    with CacheClient(service.directory, owner="tests") as made:
        yield made


@pytest.fixture
def namespace(client: CacheClient, request: pytest.FixtureRequest) -> OpenedNamespace:
    return opened(client, request.node.name)


def opened(client: CacheClient, name: str) -> OpenedNamespace:
    return client.open_namespace(identity_of(salt=name), name=name)


def until(client: CacheClient, name: str, value: float) -> None:
    """Return when the service's figure has that value."""
    deadline = time.monotonic() + 20
    while (now := client.stats()[name]) != value:
        assert time.monotonic() < deadline, f"{name} is {now}, not {value}"


class Worker:
    """Does what a prefill worker does: looks up, waits, restores, computes and stores what is missing, in two commits."""

    def __init__(self, client: CacheClient, chain: Chain, *, wait_seconds: float = PATIENT) -> None:
        self._client = client
        self._chain = chain
        self._wait_seconds = wait_seconds
        self.found: Lookup | None = None
        self.restored = self.computed = 0
        self.seconds = 0.0

    def run(self) -> None:
        chain, client = self._chain, self._client
        begin = time.monotonic()
        self.found = found = look(client, chain, announce=True, wait_seconds=self._wait_seconds)
        self.seconds = time.monotonic() - begin
        self.restored = found.plan.compute_from // chain.namespace.block_tokens
        self.computed = len(chain.keys) - self.restored
        if found.lease is not None:
            with found.lease:
                assert all(item.payload is not None for item in chain.fetch(client, found))
        if self.computed:
            with ExitStack() as stack:
                if found.flight is not None:
                    stack.enter_context(found.flight)
                middle = (self.restored + len(chain.keys)) // 2
                chain.store(client, first=self.restored, last=middle)
                chain.store(client, first=middle)
                chain.store(client, first=len(chain.keys), states=[len(chain.keys) - 1])


@pytest.fixture
def clients(service: ServiceProcess) -> Iterator[list[CacheClient]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(CacheClient(service.directory, owner=f"worker-{i}")) for i in range(CALLERS)
        ]


def run_all(workers: list[Worker]) -> list[Caller]:
    callers = [Caller(worker.run) for worker in workers]
    for caller in callers:
        caller.start()
    return callers


def join_all(callers: list[Caller], seconds: float = 30.0) -> None:
    for caller in callers:
        caller.join(seconds)
        assert not caller.is_alive(), "a caller still waits"
        assert caller.error is None, caller.error


# ---- one computes -------------------------------------------------------------------------------------------


def test_of_sixteen_sessions_one_computes_and_the_others_wait_and_hit(
    client: CacheClient, clients: list[CacheClient], namespace: OpenedNamespace
) -> None:
    chain = Chain.of(namespace, BLOCKS, seed=1)
    before = client.stats()
    workers = [Worker(each, chain) for each in clients]
    join_all(run_all(workers))
    assert sorted(worker.computed for worker in workers) == [0] * (CALLERS - 1) + [BLOCKS]
    for worker in workers:
        assert worker.found is not None
        assert (worker.found.flight is not None) == (worker.computed > 0)
        assert worker.found.blocks_in_flight == 0
        # The state is stored after the last block, and is waited for as well.
        source = worker.found.plan.state_source
        assert source is (StateSource.NONE if worker.computed else StateSource.CHECKPOINT)
    after = client.stats()
    assert after["flights_total"] - before["flights_total"] == 1
    assert after["flights_inherited_total"] == before["flights_inherited_total"]
    assert after["lookups_total"] - before["lookups_total"] == CALLERS, "what nobody is told is not counted"
    assert (after["flights"], after["flights_waiting"], after["leases"]) == (0, 0, 0)


def test_of_prompts_that_share_their_beginning_each_computes_its_own_end(
    client: CacheClient, clients: list[CacheClient], namespace: OpenedNamespace
) -> None:
    shared = Chain.of(namespace, 24, seed=2)
    # One that computes all the shared blocks and more, and some that share only these.
    with Owner(
        client._link.address.directory,
        salt=namespace.name,
        blocks=24,
        seed=2,  # type: ignore[union-attr]
    ) as owner:
        callers = [
            Caller(lambda c=c: look(c, shared, announce=True, wait_seconds=PATIENT)) for c in clients[:3]
        ]
        for caller in callers:
            caller.start()
        until(client, "flights_waiting", 3)
        probe = look(client, shared, lease=False)
        assert (probe.blocks_held, probe.blocks_in_flight) == (0, 24)
        assert probe.in_flight_seconds > 0
        # Writing needs no flight: whoever makes the blocks visible, those that wait for them go on.
        shared.store(client, states=[23])
        join_all(callers)
        for caller in callers:
            assert isinstance(caller.answer, Lookup)
            assert caller.answer.plan.compute_from == 24 * namespace.block_tokens
            assert 0 < caller.answer.waited_seconds < PATIENT
            assert caller.answer.flight is None, "nothing is left to compute"
        assert owner.flight_id


# ---- owners that go -----------------------------------------------------------------------------------------


def test_an_owner_killed_half_way_wakes_all_and_one_inherits_what_was_stored(
    client: CacheClient, clients: list[CacheClient], namespace: OpenedNamespace
) -> None:
    chain = Chain.of(namespace, BLOCKS, seed=3)
    before = client.stats()
    with Owner(
        client._link.address.directory, salt=namespace.name, blocks=BLOCKS, seed=3, stored=12
    ) as owner:  # type: ignore[union-attr]
        workers = [Worker(each, chain) for each in clients]
        callers = run_all(workers)
        until(client, "flights_waiting", CALLERS)
        killed = time.monotonic()
        owner.kill()
        join_all(callers)
        assert time.monotonic() - killed < SOON
    assert sorted(worker.computed for worker in workers) == [0] * (CALLERS - 1) + [BLOCKS - 12]
    after = client.stats()
    assert after["flights_inherited_total"] - before["flights_inherited_total"] == 1
    assert (after["flights"], after["flights_waiting"], after["leases"]) == (0, 0, 0)


def test_who_waits_for_an_owner_that_hangs_leaves_in_time(
    client: CacheClient, clients: list[CacheClient], namespace: OpenedNamespace
) -> None:
    chain = Chain.of(namespace, BLOCKS, seed=4)
    with (
        Owner(client._link.address.directory, salt=namespace.name, blocks=BLOCKS, seed=4) as owner,
        owner.suspended(),
    ):  # type: ignore[union-attr]
        callers = [
            Caller(lambda c=c, w=w: look(c, chain, announce=True, wait_seconds=w))
            for c, w in zip(clients, (0.2, 0.4, 0.8), strict=False)
        ]
        begin = time.monotonic()
        for caller in callers:
            caller.start()
        join_all(callers)
        assert time.monotonic() - begin < 0.8 + SOON
        for caller, least in zip(callers, (0.2, 0.4, 0.8), strict=True):
            assert isinstance(caller.answer, Lookup)
            assert least - 0.01 <= caller.answer.waited_seconds < least + SOON
            # The blocks are still another's: who gives up waiting computes without a flight of its own.
            assert (caller.answer.flight, caller.answer.blocks_in_flight) == (None, BLOCKS)


def test_an_owner_that_is_late_by_its_own_price_is_not_waited_for(
    client: CacheClient, clients: list[CacheClient], namespace: OpenedNamespace
) -> None:
    chain = Chain.of(namespace, BLOCKS, seed=5)
    tokens = BLOCKS * namespace.block_tokens + 1
    layers = identity_of().profile.layer_count
    priced = Costs(seconds_per_layer_token=0.3 / (tokens * layers), seconds_per_index_entry=1e-12)
    owned = look(client, chain, announce=True, costs=priced)
    assert owned.flight is not None
    with owned.flight:
        found = look(clients[0], chain, announce=True, wait_seconds=PATIENT, costs=priced)
        assert 0.3 < found.waited_seconds < 0.6 + SOON
        again = look(clients[0], chain, announce=True, wait_seconds=PATIENT, costs=priced)
        assert again.waited_seconds == 0.0


# ---- what a flight is not -----------------------------------------------------------------------------------


def test_a_flight_ends_once_and_only_by_its_owner(
    client: CacheClient, clients: list[CacheClient], namespace: OpenedNamespace
) -> None:
    chain = Chain.of(namespace, 4, seed=6)
    found = look(client, chain, announce=True)
    assert found.flight is not None
    assert look(client, chain, announce=True, wait_seconds=PATIENT).waited_seconds == 0.0, "its own"
    with pytest.raises(grpc.RpcError):
        raw_end(clients[0], found.flight.id, session="0" * 32)
    assert not raw_end(clients[0], found.flight.id)
    assert found.flight.end()
    assert not found.flight.end()
    assert look(clients[0], chain, announce=True).flight is not None


def raw_end(client: CacheClient, flight_id: int, *, session: str | None = None) -> bool:
    connection = client._link.connection()
    metadata = connection.metadata if session is None else (("kvstore-session", session),)
    reply = connection.method("EndFlight")(pb.EndFlightRequest(flight_id=flight_id), metadata=metadata)
    return bool(reply.was_open)


def test_flights_are_for_lookups_with_a_lease(client: CacheClient, namespace: OpenedNamespace) -> None:
    chain = Chain.of(namespace, 2, seed=7)
    for asked in ({"announce": True}, {"wait_seconds": 1.0}):
        with pytest.raises(InvalidArgument, match=next(iter(asked))):
            look(client, chain, lease=False, **asked)  # type: ignore[arg-type]
    for seconds in (-1.0, float("nan"), 3601.0):
        with pytest.raises(InvalidArgument, match="wait_seconds"):
            look(client, chain, wait_seconds=seconds)


def test_a_drain_wakes_those_that_wait(tmp_path: object) -> None:
    with running_service() as service, ExitStack() as stack:
        one, two = (stack.enter_context(CacheClient(service.directory, owner=f"c{i}")) for i in range(2))
        chain = Chain.of(opened(one, "drained"), 4, seed=8)
        assert look(one, chain, announce=True).flight is not None
        caller = Caller(lambda: look(two, chain, wait_seconds=PATIENT))
        caller.start()
        until(one, "flights_waiting", 1)
        one.drain(0.0)
        caller.join(SOON)
        assert isinstance(caller.error, Draining)


# ---- callers that go ----------------------------------------------------------------------------------------


def waiting_request(chain: RawChain, *, wait_seconds: float) -> pb.LookupRequest:
    return pb.LookupRequest(
        namespace=chain.namespace.digest,
        keys=b"".join(chain.keys),
        prompt_tokens=len(chain.keys) * chain.namespace.block_tokens + 1,
        costs=RAW_EAGER,
        lease=True,
        announce=True,
        wait_seconds=wait_seconds,
    )


def test_a_waiting_lookup_that_is_cancelled_frees_its_place_at_once(service: ServiceProcess) -> None:
    with Raw(service.directory) as owner, Raw(service.directory) as other:
        chain = RawChain(owner.open("cancelled"), 4, seed=9)
        owner.call("Lookup", waiting_request(chain, wait_seconds=0))
        calls = [
            other.cache.Lookup.future(waiting_request(chain, wait_seconds=PATIENT), metadata=other.metadata)
            for _ in range(5)
        ]
        raw_until(owner, "flights_waiting", 5)
        for call in calls[:3]:
            call.cancel()
        raw_until(owner, "flights_waiting", 2)
        other.socket.close()
        raw_until(owner, "flights_waiting", 0)
        for call in calls[3:]:
            with pytest.raises(grpc.RpcError) as refused:
                call.result(timeout=SOON)
            assert error_of(refused.value) == "UNKNOWN_SESSION"
        assert owner.stats()["flights"] == 1


def raw_until(raw: Raw, name: str, value: float) -> None:
    deadline = time.monotonic() + 20
    while (now := raw.stats()[name]) != value:
        assert time.monotonic() < deadline, f"{name} is {now}, not {value}"


def test_calls_cancelled_at_random_moments_leave_nothing_behind() -> None:
    """What was granted by an answer that was lost on its way lasts for its deadline and no longer; the rest ends at once."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    pause = threading.Event()
    with (
        running_service(lease=1.0) as service,
        Raw(service.directory) as raw,
        Raw(service.directory) as other,
    ):
        namespace = raw.open("random")
        held = RawChain(namespace, 8, seed=1)
        raw.store(held, states=[7])
        cold = RawChain(namespace, 8, seed=2)
        calls = []
        for number in range(150):
            raw_, chain = rng.choice((raw, other)), rng.choice((held, cold))
            kind = rng.choice(("lookup", "lookup", "reserve"))
            if kind == "lookup":
                request = waiting_request(chain, wait_seconds=rng.choice((0, 0.5)))
                call = raw_.cache.Lookup.future(request, metadata=raw_.metadata)
            else:
                items = [RawChain(namespace, 2, seed=100 + number).block(0)]
                request = pb.ReserveRequest(namespace=namespace.digest, items=items)
                call = raw_.cache.Reserve.future(request, metadata=raw_.metadata)
            calls.append(call)
            pause.wait(rng.random() * 0.003)
            call.cancel()
        raw_until(raw, "flights_waiting", 0)
        for name in ("leases", "flights", "reservations", "uploads", "staged_bytes"):
            raw_until(raw, name, 0)
        assert raw.lookup(held).lease_id
        assert "unexpected error" not in service.log


def test_a_lookup_that_waits_longer_than_its_own_deadline_is_given_up(
    client: CacheClient, service: ServiceProcess, namespace: OpenedNamespace
) -> None:
    chain = Chain.of(namespace, 4, seed=11)
    assert look(client, chain, announce=True).flight is not None
    with Raw(service.directory) as raw:
        request = pb.LookupRequest(
            namespace=namespace.digest,
            keys=b"".join(chain.keys),
            prompt_tokens=4 * namespace.block_tokens + 1,
            costs=RAW_EAGER,
            lease=True,
            wait_seconds=PATIENT,
        )
        with pytest.raises(grpc.RpcError) as ended:
            raw.call("Lookup", request, timeout=0.3)
        assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        raw_until(raw, "flights_waiting", 0)


def test_a_client_that_closes_while_it_waits_gets_an_error_and_holds_nothing(
    client: CacheClient, service: ServiceProcess, namespace: OpenedNamespace
) -> None:
    chain = Chain.of(namespace, 4, seed=12)
    assert look(client, chain, announce=True).flight is not None
    closing = CacheClient(service.directory, owner="closing")
    caller = Caller(lambda: look(closing, chain, announce=True, wait_seconds=PATIENT))
    caller.start()
    until(client, "flights_waiting", 1)
    closing.close()
    caller.join(SOON)
    assert isinstance(caller.error, Unavailable)
    until(client, "flights_waiting", 0)
