"""One suite for every client on every way to a service: what each of them promises, against a real service process.

Another way to reach a service is another Transport below, and nothing else.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvloop

from kvstore.errors import (
    InvalidArgument,
    KvstoreError,
    LimitExceeded,
    Unavailable,
    UnknownLease,
    UnknownNamespace,
    UnknownReservation,
    UnknownTicket,
)
from kvstore.memory import why_not_mapped
from kvstore.prefix.identity import NamespaceIdentity
from kvstore.prefix.opaque import OpaqueKey, store_key
from kvstore.profile.keyed import KeyedProfile
from kvstore.profile.layout import layer_slices
from kvstore.profile.registry import get_profile
from kvstore.types import Durability, ItemKind, Lineage, StateSource
from kvstore_client import (
    CacheClient,
    Committed,
    FetchedSlice,
    OpenedNamespace,
    ReserveItem,
    ReserveOutcome,
)
from kvstore_client.aio import AsyncCacheClient
from tests.support.blocking import Blocking, LoopThread
from tests.support.calls import GONE, look, within
from tests.support.chains import Chain, identity_of, open_state
from tests.support.inprocess import running_here
from tests.support.remote import TOKENS, Secrets, make_secrets, port_of
from tests.support.service import ServiceProcess, running_service

PROFILE = "flash-slim"
BLOCKS = 4
ACCEPTED_HERE = Durability.DURABLE if why_not_mapped() else Durability.ACCEPTED
SPENT = (UnknownTicket, LimitExceeded)
"""How a ticket without a take left is refused: the service may have forgotten it or still know that it is used up."""


@dataclass(frozen=True)
class Transport:
    """A way to a service, which `runs` keeps. `reads` names the method that brings bytes; `options` are the service's,
    `address` gives a client's arguments, `admin` those of one that may ask for figures."""

    name: str
    reads: str
    is_local: bool
    options: Callable[[Path], dict[str, Any]] = lambda folder: {}
    address: Callable[[ServiceProcess, Path], dict[str, Any]] = lambda service, folder: {
        "address": service.directory
    }
    admin: Callable[[Any], dict[str, Any]] = lambda service: {"address": service.directory}
    runs: Callable[..., AbstractContextManager[Any]] = running_service


TRANSPORTS = [
    Transport("memory", "map", is_local=True),
    Transport("unix", "fetch", is_local=True),
    Transport(
        "tls",
        "fetch",
        is_local=False,
        options=lambda folder: {**Secrets(folder).options, "listen": f"127.0.0.1:{free_port()}"},
        address=lambda service, folder: {
            "address": f"tcp://localhost:{port_of(service)}",
            "token": TOKENS[1],
            "ca": folder / "issuer.pem",
        },
    ),
    # Nothing to map on another machine: what `map` brings is what `fetch` does.
    Transport(
        "plaintext",
        "map",
        is_local=False,
        options=lambda folder: {
            "listen": f"127.0.0.1:{free_port()}",
            "unsafe_plaintext_tcp": True,
            "token_file": Secrets(folder).options["token_file"],
        },
        address=lambda service, folder: {
            "address": f"tcp://127.0.0.1:{port_of(service)}",
            "token": folder / "token",
            "insecure": True,
        },
    ),
    Transport(
        "in-process",
        "fetch",
        is_local=True,
        address=lambda service, folder: {"address": service.address},
        admin=lambda service: {"address": service.address},
        runs=running_here,
    ),
]
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@dataclass
class Ground:
    """Where a test runs: a service, a transport to it, and clients of one kind."""

    service: ServiceProcess
    transport: Transport
    folder: Path
    stack: ExitStack
    thread: LoopThread | None

    def client(self, **options: Any) -> CacheClient:
        """Another client, closed at the test's end if not before."""
        given = {"owner": "conformance", **self.transport.address(self.service, self.folder), **options}
        if self.thread is None:
            made: Any = CacheClient(**given)
        else:
            made = Blocking(AsyncCacheClient(**given), self.thread)
        return self.stack.enter_context(made)

    def admin(self) -> CacheClient:
        """One that can always ask for figures."""
        return self.stack.enter_context(CacheClient(**self.transport.admin(self.service), owner="admin"))

    def read(self, client: CacheClient, found: Any, *, state: bool = True) -> list[tuple[Any, int, Any]]:
        """All that a lookup leased, as (kind, index, payload)."""
        blocks = found.plan.compute_from // get_profile(PROFILE).block_tokens
        items = getattr(client, self.transport.reads)(
            found.lease, first_block=0, block_count=blocks, state=state
        )
        return [
            (item.kind, item.index, None if item.payload is None else bytes(item.payload)) for item in items
        ]


def grounds() -> Iterator[Any]:
    """Every transport with every kind of client; in `make test` each transport with one of the loops."""
    for number, transport in enumerate(TRANSPORTS):
        often = ("sync", list(LOOPS)[number % len(LOOPS)])
        for kind in ("sync", *LOOPS):
            marks = () if kind in often else pytest.mark.long
            yield pytest.param((transport, kind), id=f"{transport.name}-{kind}", marks=marks)


@pytest.fixture(scope="module", params=grounds())
def way(request: pytest.FixtureRequest) -> tuple[Transport, str]:
    return request.param


def free_port() -> int:
    """For a service that is to come back where it was."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("secrets")
    make_secrets(made)
    (made / "token").write_text(TOKENS[0] + "\n")
    return made


@pytest.fixture(scope="module")
def transport(way: tuple[Transport, str]) -> Transport:
    return way[0]


@pytest.fixture(scope="module")
def service(transport: Transport, folder: Path) -> Iterator[ServiceProcess]:
    with transport.runs(handoff=64 << 20, pool=64 << 20, **transport.options(folder)) as process:
        yield process


@pytest.fixture(scope="module")
def thread(way: tuple[Transport, str]) -> Iterator[LoopThread | None]:
    """Where coroutines run; None for the client that has none."""
    kind = way[1]
    if kind == "sync":
        yield None
        return
    thread = LoopThread(LOOPS[kind])
    yield thread
    thread.close()


@pytest.fixture
def ground(
    service: ServiceProcess, transport: Transport, folder: Path, thread: LoopThread | None
) -> Iterator[Ground]:
    with ExitStack() as stack:
        yield Ground(service, transport, folder, stack, thread)


@pytest.fixture
def own_ground(transport: Transport, folder: Path, thread: LoopThread | None) -> Iterator[Ground]:
    """With a service of its own, which may be killed."""
    with transport.runs(**transport.options(folder)) as service, ExitStack() as stack:
        yield Ground(service, transport, folder, stack, thread)


@pytest.fixture
def client(ground: Ground) -> CacheClient:
    return ground.client()


@pytest.fixture
def namespace(client: CacheClient, request: pytest.FixtureRequest) -> OpenedNamespace:
    return opened(client, request.node.name)


@pytest.fixture
def chain(namespace: OpenedNamespace) -> Chain:
    return Chain.of(namespace, BLOCKS, seed=1)


def opened(client: CacheClient, salt: str) -> OpenedNamespace:
    return client.open_namespace(identity_of(PROFILE, salt=salt), name=salt[:128])


def until(true: Callable[[], bool], what: str) -> None:
    """What another process sees comes on a way of its own."""
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline, what


# ---- namespaces ---------------------------------------------------------------------------------------------


def test_a_namespace_is_opened_again_as_the_same(client: CacheClient, namespace: OpenedNamespace) -> None:
    identity = identity_of(PROFILE, salt=namespace.name)
    assert namespace.digest == identity.digest()
    assert client.open_namespace(identity, name=namespace.name) == namespace
    assert client.boot is not None


def test_an_unknown_namespace_is_refused_by_name(client: CacheClient) -> None:
    with pytest.raises(UnknownNamespace):
        client.lookup(b"x" * 32, [], prompt_tokens=1)


# ---- storing and reading ------------------------------------------------------------------------------------


def test_what_was_written_comes_back(ground: Ground, client: CacheClient, chain: Chain) -> None:
    assert look(client, chain).lease is None
    committed = chain.store(client, states=[BLOCKS - 1])
    assert committed.items == BLOCKS + 1
    found = look(client, chain)
    assert (found.blocks_held, found.plan.state_source) == (BLOCKS, StateSource.CHECKPOINT)
    with found.lease:
        got = ground.read(client, found)
    assert [(kind, index) for kind, index, _ in got] == [
        *((ItemKind.BLOCK, index) for index in range(BLOCKS)),
        (ItemKind.STATE, found.plan.state_at),
    ]
    blocks = [chain.payload(chain.block_item(index)) for index in range(BLOCKS)]
    assert [payload for _, _, payload in got] == [*blocks, chain.payload(chain.state_item(BLOCKS - 1))]


def test_a_part_can_be_read_from_any_block_on(ground: Ground, client: CacheClient, chain: Chain) -> None:
    chain.store(client, states=[BLOCKS - 1])
    found = look(client, chain)
    read = getattr(client, ground.transport.reads)
    items = list(read(found.lease, first_block=2, block_count=1, state=False))
    assert [bytes(item.payload) for item in items] == [chain.payload(chain.block_item(2))]
    items = list(read(found.lease, first_block=0, block_count=0, state=True))
    assert [(item.kind, item.index) for item in items] == [(ItemKind.STATE, found.plan.state_at)]


def test_a_reader_may_stop_at_any_item(ground: Ground, client: CacheClient, chain: Chain) -> None:
    chain.store(client, states=[BLOCKS - 1])
    found = look(client, chain)
    for _ in range(5):
        items = getattr(client, ground.transport.reads)(
            found.lease, first_block=0, block_count=BLOCKS, state=True
        )
        assert next(items).index == 0
        items.close()
    assert len(ground.read(client, found)) == BLOCKS + 1


def test_slices_are_the_blocks_cut_by_layers(client: CacheClient, chain: Chain) -> None:
    chain.store(client, states=[BLOCKS - 1])
    found = look(client, chain)
    items = list(client.fetch_slices(found.lease, first_block=0, block_count=BLOCKS, state=True, slices=3))
    cuts = layer_slices(get_profile(PROFILE), 3)
    assert items[0].kind is ItemKind.STATE
    pieces: dict[int, bytes] = {}
    for number, item in enumerate(items[1:]):
        assert isinstance(item, FetchedSlice)
        assert (item.slice, item.index) == divmod(number, BLOCKS)
        pieces[item.index] = pieces.get(item.index, b"") + item.payload
    assert len(items) == 1 + BLOCKS * len(cuts)
    assert [pieces[i] for i in range(BLOCKS)] == [chain.payload(chain.block_item(i)) for i in range(BLOCKS)]


def test_what_is_cleared_under_a_lease_is_missing(ground: Ground, client: CacheClient, chain: Chain) -> None:
    chain.store(client, states=[BLOCKS - 1])
    found = look(client, chain)
    ground.admin().clear(chain.namespace.digest)
    assert [payload for _, _, payload in ground.read(client, found)] == [None] * (BLOCKS + 1)


def test_a_released_lease_is_refused_by_name(ground: Ground, client: CacheClient, chain: Chain) -> None:
    chain.store(client, states=[BLOCKS - 1])
    found = look(client, chain)
    found.lease.release()
    found.lease.release()
    with pytest.raises(UnknownLease, match="lease_id"):
        ground.read(client, found)
    with pytest.raises(InvalidArgument, match="block_count"):
        list(client.fetch(look(client, chain).lease, first_block=0, block_count=0, state=False))


def test_payloads_under_opaque_keys_are_found_each_by_itself(
    ground: Ground, client: CacheClient, request: pytest.FixtureRequest
) -> None:
    profile = KeyedProfile(name="rows", payload_bytes=3000)
    identity = NamespaceIdentity(profile, "w1", "", tenant_salt=request.node.name)
    rows = client.open_namespace(identity, name=f"{request.node.name} rows"[:128])
    names = [store_key(rows.digest, OpaqueKey(b"key", group)) for group in range(3)]
    kept = [
        ReserveItem(kind=ItemKind.BLOCK, key=name, parent=rows.digest, position=1, length=3000)
        for name in names[:2]
    ]
    assert client.contains(rows.digest, names, lease=True).lease is None
    with client.reserve(rows.digest, kept) as reservation:
        reservation.write({0: b"a" * 3000, 1: b"b" * 3000})
        reservation.commit()
    found = client.contains(rows.digest, [names[2], names[1], names[0]], lease=True)
    assert found.held == (False, True, True)
    with found.lease as lease:
        items = list(
            getattr(client, ground.transport.reads)(lease, first_block=0, block_count=2, state=False)
        )
        assert [bytes(item.payload) for item in items] == [b"b" * 3000, b"a" * 3000]


# ---- reservations -------------------------------------------------------------------------------------------


def test_a_reservation_is_invisible_until_commit(client: CacheClient, chain: Chain) -> None:
    items = [chain.block_item(index) for index in range(BLOCKS)]
    with client.reserve(chain.namespace.digest, items) as reservation:
        assert reservation.granted == tuple(range(BLOCKS))
        for index, item in enumerate(items):
            reservation.write({index: chain.payload(item)})
        assert look(client, chain).blocks_held == 0
        assert reservation.commit() == Committed(BLOCKS, BLOCKS * chain.namespace.block_bytes)
    assert look(client, chain).blocks_held == BLOCKS
    assert set(client.reserve(chain.namespace.digest, items).outcomes) == {ReserveOutcome.HELD}


def test_what_is_accepted_is_visible_at_once(ground: Ground, client: CacheClient, chain: Chain) -> None:
    items = [chain.block_item(i) for i in range(BLOCKS)]
    with client.reserve(chain.namespace.digest, items) as reservation:
        reservation.write({i: chain.payload(items[i]) for i in reservation.granted})
        done = reservation.commit(Durability.ACCEPTED)
    # As durable where there is no memory to keep it in meanwhile, and where its write is over before it could be shown.
    assert done.items == BLOCKS
    assert done.durability in {ACCEPTED_HERE, Durability.DURABLE}
    found = look(client, chain)
    assert found.lease is not None
    with found.lease:
        got = ground.read(client, found)
    assert [payload for _, _, payload in got] == [chain.payload(item) for item in items]


def test_an_aborted_reservation_leaves_nothing(client: CacheClient, chain: Chain) -> None:
    items = [chain.block_item(index) for index in range(2)]
    with client.reserve(chain.namespace.digest, items) as reservation:
        reservation.write({0: chain.payload(items[0])})
    assert reservation.abort() is False
    with pytest.raises(UnknownReservation, match="reservation_id"):
        reservation.write({1: chain.payload(items[1])})
    with pytest.raises(UnknownReservation):
        reservation.commit()
    assert look(client, chain).blocks_held == 0
    again = client.reserve(chain.namespace.digest, items)
    assert again.abort() is True
    with pytest.raises(InvalidArgument, match=r"payloads\[0\]"):
        client.reserve(chain.namespace.digest, items).write({0: b"short"})


def test_two_clients_do_not_write_one_key(ground: Ground, client: CacheClient, chain: Chain) -> None:
    other = ground.client()
    theirs = other.reserve(chain.namespace.digest, [chain.block_item(0)])
    assert theirs.granted == (0,)
    ours = client.reserve(chain.namespace.digest, [chain.block_item(0)])
    assert (ours.id, ours.outcomes) == (0, (ReserveOutcome.IN_FLIGHT,))
    assert ours.commit() == Committed(0, 0)


# ---- flights ------------------------------------------------------------------------------------------------


def test_a_flight_is_told_to_others_until_it_ends(ground: Ground, client: CacheClient, chain: Chain) -> None:
    first = look(client, chain, announce=True)
    assert first.flight is not None
    other = ground.client()
    seen = look(other, chain, announce=True)
    assert (seen.flight, seen.blocks_in_flight) == (None, BLOCKS)
    assert first.flight.end() is True
    assert first.flight.end() is False
    assert look(other, chain, lease=False).blocks_in_flight == 0


def test_who_waits_is_woken_by_what_was_stored(ground: Ground, client: CacheClient, chain: Chain) -> None:
    other = ground.client()
    first = look(client, chain, announce=True)
    assert look(other, chain).blocks_in_flight == BLOCKS
    chain.store(client, states=[BLOCKS - 1])
    first.flight.end()
    assert look(other, chain, wait_seconds=5.0).blocks_held == BLOCKS


# ---- handoffs -----------------------------------------------------------------------------------------------


def test_a_handoff_goes_from_one_client_to_another(
    ground: Ground, client: CacheClient, namespace: OpenedNamespace
) -> None:
    payload = open_state(PROFILE, 41)
    ticket = client.put_handoff(
        namespace.digest, position=41, payload=payload, note=b"for you", lineage=Lineage.BOUNDED
    )
    other = ground.client()
    take = other.take_handoff(namespace.digest, ticket)
    assert (take.payload, take.position, take.note, take.lineage) == (
        payload,
        41,
        b"for you",
        Lineage.BOUNDED,
    )
    with pytest.raises(LimitExceeded):
        client.take_handoff(namespace.digest, ticket)
    assert take.confirm() is True
    assert take.confirm() is False
    with pytest.raises(SPENT):
        client.take_handoff(namespace.digest, ticket)


def test_a_handoff_can_be_dropped(client: CacheClient, namespace: OpenedNamespace) -> None:
    ticket = client.put_handoff(namespace.digest, position=3, payload=open_state(PROFILE, 3))
    assert client.drop_handoff(namespace.digest, ticket) is True
    assert client.drop_handoff(namespace.digest, ticket) is False
    with pytest.raises(SPENT):
        client.take_handoff(namespace.digest, ticket)


# ---- administration -----------------------------------------------------------------------------------------


def test_figures_are_served_in_the_directory_only(ground: Ground, client: CacheClient) -> None:
    if not ground.transport.is_local:
        for call in (client.stats, client.namespaces, client.clear, lambda: client.drain(0)):
            with pytest.raises(InvalidArgument, match="directory"):
                call()
        return
    assert client.stats()["sessions"] >= 1
    assert isinstance(client.buffered_because(), str)


def test_policies_and_states_are_managed(
    ground: Ground, client: CacheClient, namespace: OpenedNamespace, chain: Chain
) -> None:
    if not ground.transport.is_local:
        pytest.skip("administration is served in the directory only")
    assert client.set_policy(namespace.digest, "periodic:4096").policy == "periodic:4096"
    chain.store(client, states=[BLOCKS - 1])
    assert client.drop_states(namespace.digest, "ssd").dropped == 1
    assert client.clear(namespace.digest).blocks == BLOCKS
    with pytest.raises(InvalidArgument, match="tier=disk"):
        client.drop_states(tier="disk")  # type: ignore[arg-type]


# ---- sessions -----------------------------------------------------------------------------------------------


def test_the_end_of_a_session_gives_all_back(
    ground: Ground, client: CacheClient, chain: Chain, request: pytest.FixtureRequest
) -> None:
    chain.store(client, states=[BLOCKS - 1])
    more = Chain.of(chain.namespace, 1, seed=2)
    going = ground.client()
    found = look(going, chain)
    held = look(going, more, announce=True)
    assert going.reserve(chain.namespace.digest, [more.block_item(0)]).granted == (0,)
    ticket = client.put_handoff(chain.namespace.digest, position=1, payload=open_state(PROFILE, 1))
    going.take_handoff(chain.namespace.digest, ticket)
    assert found.lease is not None
    assert held.flight is not None
    admin = ground.admin()
    until(lambda: admin.stats()["leases"] == 1, "there is no lease, or another test's")
    going.close()
    until(lambda: admin.stats()["leases"] == 0, "the lease outlived its session")
    until(lambda: look(client, more, lease=False).blocks_in_flight == 0, "the flight or the claim did")
    assert client.reserve(chain.namespace.digest, [more.block_item(0)]).granted == (0,)
    assert client.take_handoff(chain.namespace.digest, ticket).position == 1
    with pytest.raises(Unavailable, match="closed"):
        look(going, chain)
    assert going.boot is None


def test_a_service_that_was_killed_is_used_again(own_ground: Ground) -> None:
    client = own_ground.client()
    chain = Chain.of(opened(client, "killed"), BLOCKS, seed=3)
    chain.store(client, states=[BLOCKS - 1])
    found = look(client, chain)
    claimed = client.reserve(chain.namespace.digest, [Chain.of(chain.namespace, 1, seed=4).block_item(0)])
    boot = client.boot
    own_ground.service.kill()
    with pytest.raises(GONE):
        look(client, chain)
    for _ in range(3):
        with pytest.raises(Unavailable):
            look(client, chain)
    assert client.boot is None
    own_ground.service.start()
    own_ground.service.wait_ready()
    again = within(10.0, lambda: look(client, chain))
    assert client.boot not in (None, boot)
    assert all(payload is not None for _, _, payload in own_ground.read(client, again))
    with pytest.raises(UnknownLease):
        own_ground.read(client, found)
    found.lease.release()
    with pytest.raises(UnknownReservation):
        claimed.commit()
    assert claimed.abort() is False


def test_a_forked_child_is_refused_by_name(ground: Ground, client: CacheClient, chain: Chain) -> None:
    chain.store(client, states=[BLOCKS - 1])
    with warnings.catch_warnings():
        # From Python 3.12 on, forking beside threads warns. That it is risky is why this test is here.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        code = 1
        try:
            look(client, chain)
        except InvalidArgument as error:
            code = 0 if "fork" in str(error) and client.boot is None else 2
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert look(client, chain).blocks_held == BLOCKS


def test_errors_have_one_type_on_every_way(client: CacheClient, chain: Chain) -> None:
    with pytest.raises(KvstoreError) as caught:
        client.reserve(b"x" * 32, [chain.block_item(0)])
    assert type(caught.value) is UnknownNamespace
    with pytest.raises(InvalidArgument, match=r"keys\[0\]"):
        client.lookup(chain.namespace.digest, [b"short"], prompt_tokens=1)
