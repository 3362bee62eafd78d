"""The client against a real service: what is written comes back verified, and what is refused says why."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator

import grpc
import pytest

from kvstore.errors import (
    GeometryMismatch,
    InvalidArgument,
    KvstoreError,
    LimitExceeded,
    UnknownLease,
    UnknownNamespace,
    UnknownReservation,
    UnknownTicket,
)
from kvstore.prefix.identity import NamespaceIdentity
from kvstore.prefix.keys import block_keys
from kvstore.profile.base import Layer, LayerKind, Profile
from kvstore.profile.formats import RowFormat
from kvstore.types import ItemKind, Lineage, StateSource
from kvstore.v1 import cache_pb2 as pb
from kvstore_client import CacheClient, Committed, Costs, OpenedNamespace, ReserveItem, ReserveOutcome
from kvstore_client.link import Connection
from tests.support.calls import EAGER, look
from tests.support.chains import Chain, identity_of, open_state
from tests.support.service import ServiceProcess, running_service

SPENT = (UnknownTicket, LimitExceeded)
"""How a ticket without a take left is refused: the service may have forgotten it or still know that it is used up."""


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceProcess]:
    with running_service(pool=4 << 20, handoff=1 << 20) as process:
        yield process


@pytest.fixture
def client(service: ServiceProcess) -> Iterator[CacheClient]:
    with CacheClient(service.directory, owner="tests") as made:
        yield made


@pytest.fixture
def namespace(client: CacheClient, request: pytest.FixtureRequest) -> OpenedNamespace:
    """One of its own for each test."""
    return client.open_namespace(identity_of(salt=request.node.name), name=request.node.name[:128])


def found_blocks(client: CacheClient, chain: Chain) -> int:
    probe = look(client, chain, lease=False)
    assert probe.lease is None
    return probe.blocks_held


# ---- round trips --------------------------------------------------------------------------------------------


def test_an_opened_namespace_has_the_profiles_figures(client: CacheClient) -> None:
    identity = identity_of(salt="figures")
    opened = client.open_namespace(identity, name="figures", policy="zero")
    profile = identity.profile
    assert opened == OpenedNamespace(
        geometry=profile.geometry(),
        digest=identity.digest(),
        name="figures",
        profile_name="tiny",
        policy="zero",
        block_tokens=profile.block_tokens,
        block_bytes=profile.block_bytes,
        state_bytes=profile.state_bytes,
        states_share_states=opened.states_share_states,
    )
    assert opened.states_share_states > 0
    assert client.open_namespace(identity, name="figures", policy="endpoints") == opened
    assert opened in client.namespaces()
    assert client.set_policy(opened.digest, "periodic:64").policy == "periodic:64"


@pytest.mark.parametrize("to_pool", [False, True])
def test_blocks_and_a_state_come_back_as_they_were_written(
    client: CacheClient, namespace: OpenedNamespace, to_pool: bool
) -> None:
    chain = Chain.of(namespace, 5, seed=1)
    committed = chain.store(client, states=[4], to_pool=to_pool)
    assert committed.items == 6
    assert committed.bytes == 5 * namespace.block_bytes + namespace.state_bytes
    found = look(client, chain)
    assert found.blocks_held == 5
    assert found.plan.compute_from == 5 * namespace.block_tokens
    assert found.plan.state_source is (StateSource.POOL if to_pool else StateSource.CHECKPOINT)
    assert found.lease is not None
    with found.lease:
        items = chain.fetch(client, found)
    assert [(item.kind, item.index) for item in items] == [
        *((ItemKind.BLOCK, i) for i in range(5)),
        (ItemKind.STATE, 5 * namespace.block_tokens),
    ]
    assert all(item.payload is not None and item.lineage is Lineage.EXACT for item in items)


@pytest.mark.parametrize("profile", ["flash-slim", "deepseek-v4-flash"])
def test_items_larger_than_a_frame_come_back_whole(client: CacheClient, profile: str) -> None:
    namespace = client.open_namespace(identity_of(profile), name=f"large-{profile}")
    assert namespace.state_bytes > 1 << 20
    chain = Chain.of(namespace, 5, seed=2)
    chain.store(client, states=[4])
    found = look(client, chain)
    items = chain.fetch(client, found)
    assert [item.payload is not None for item in items] == [True] * 6


def test_a_reservation_may_be_written_in_several_calls(
    client: CacheClient, namespace: OpenedNamespace
) -> None:
    chain = Chain.of(namespace, 6, seed=3)
    items = [chain.block_item(i) for i in range(6)]
    with client.reserve(namespace.digest, items) as reservation:
        assert reservation.granted == tuple(range(6))
        reservation.write({})
        for index in (3, 0, 5, 1, 4, 2):
            reservation.write({index: memoryview(chain.payload(items[index]))})
        assert found_blocks(client, chain) == 0
        assert reservation.commit().items == 6
    assert found_blocks(client, chain) == 6


def test_what_was_not_written_is_given_back_by_the_commit(
    client: CacheClient, namespace: OpenedNamespace
) -> None:
    chain = Chain.of(namespace, 3, seed=4)
    items = [chain.block_item(i) for i in range(3)]
    with client.reserve(namespace.digest, items) as reservation:
        reservation.write({0: chain.payload(items[0])})
        assert reservation.commit().items == 1
    assert found_blocks(client, chain) == 1
    assert client.reserve(namespace.digest, items).outcomes == (
        ReserveOutcome.HELD,
        ReserveOutcome.GRANTED,
        ReserveOutcome.GRANTED,
    )


def test_leaving_without_commit_gives_everything_back(
    client: CacheClient, namespace: OpenedNamespace
) -> None:
    chain = Chain.of(namespace, 2, seed=5)
    items = [chain.block_item(i) for i in range(2)]
    with client.reserve(namespace.digest, items) as reservation:
        reservation.write({i: chain.payload(item) for i, item in enumerate(items)})
    assert reservation.abort() is False
    assert found_blocks(client, chain) == 0
    with client.reserve(namespace.digest, items) as again:
        assert again.granted == (0, 1)
    with pytest.raises(UnknownReservation):
        again.write({0: chain.payload(items[0])})
    with pytest.raises(UnknownReservation):
        again.commit()


def test_a_key_that_another_client_has_claimed_is_in_flight(
    service: ServiceProcess, client: CacheClient, namespace: OpenedNamespace
) -> None:
    chain = Chain.of(namespace, 1, seed=6)
    with CacheClient(service.directory, owner="other") as other:
        theirs = other.reserve(namespace.digest, [chain.block_item(0)])
        ours = client.reserve(namespace.digest, [chain.block_item(0)])
        assert ours.outcomes == (ReserveOutcome.IN_FLIGHT,)
        assert ours.id == 0
        assert 0 <= ours.owner_age_seconds[0] < 30
        assert ours.commit() == Committed(0, 0)
        assert theirs.granted == (0,)
    # The other client has gone, and its claim with it; its end reaches the service on a way of its own.
    deadline = time.monotonic() + 5
    while client.reserve(namespace.digest, [chain.block_item(0)]).outcomes != (ReserveOutcome.GRANTED,):
        assert time.monotonic() < deadline, "the claim outlived its owner"


# ---- prompts of every length --------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("blocks", [0, 1, 2, 3])
def test_a_prompt_at_or_past_a_block_edge_keeps_a_token_to_compute(
    client: CacheClient, namespace: OpenedNamespace, blocks: int, extra: int
) -> None:
    chain = Chain.of(namespace, 4, seed=7)
    chain.store(client, states=[0, 1, 2, 3])
    n = blocks * namespace.block_tokens + extra
    found = client.lookup(namespace.digest, chain.keys[:blocks], prompt_tokens=n, costs=EAGER)
    usable = max(n - 1, 0) // namespace.block_tokens * namespace.block_tokens
    assert found.plan.prompt_tokens == n
    assert found.plan.compute_from == usable
    if usable == 0:
        assert found.plan.state_source is StateSource.NONE
        assert found.lease is None
    else:
        items = chain.fetch(client, found)
        assert [item.index for item in items] == [*range(usable // namespace.block_tokens), usable]
        assert all(item.payload is not None for item in items)
    longer = client.lookup(
        namespace.digest,
        chain.keys,
        prompt_tokens=4 * namespace.block_tokens + 1 + n,
        costs=EAGER,
        lease=False,
    )
    assert longer.plan.compute_from == 4 * namespace.block_tokens


def slim_profile() -> Profile:
    """Blocks of 128 tokens as in the large models, and of few bytes, so that a million tokens are quickly stored."""
    return Profile(
        name="slim",
        layers=(Layer(LayerKind.WINDOW), Layer(LayerKind.HCA, 128)),
        block_tokens=128,
        window_tokens=2,
        head_dim=8,
        rope_dim=0,
        index_head_dim=8,
        entry_format=RowFormat.F32,
        key_format=RowFormat.F32,
        row_format=RowFormat.F32,
    )


def test_a_million_tokens_are_looked_up_in_one_call(client: CacheClient) -> None:
    identity = NamespaceIdentity(slim_profile(), weights_revision="w", numerics="n")
    namespace = client.open_namespace(identity, name="million")
    tokens = list(range(1_000_000))
    chain = Chain(namespace, block_keys(namespace.digest, tokens, block_tokens=128))
    assert len(chain.keys) == 7_812
    half = len(chain.keys) // 2
    seconds = {}
    for held, (first, last) in {0: (0, 0), half: (0, half), len(chain.keys): (half, len(chain.keys))}.items():
        for at in range(first, last, 500):
            chain.store(client, first=at, last=min(at + 500, last))
        start = time.monotonic()
        found = client.lookup(namespace.digest, chain.keys, prompt_tokens=len(tokens))
        seconds[held] = time.monotonic() - start
        assert found.blocks_held == held
        if found.lease is not None:
            found.lease.release()
    print({held: f"{1000 * value:.1f} ms" for held, value in seconds.items()})
    assert max(seconds.values()) < 0.5


# ---- leases -------------------------------------------------------------------------------------------------


def test_leases_are_counted_and_end_with_release_context_and_client(
    service: ServiceProcess, client: CacheClient, namespace: OpenedNamespace
) -> None:
    chain = Chain.of(namespace, 2, seed=8)
    chain.store(client, states=[1])
    n = 2 * namespace.block_tokens + 1
    before = client.stats()["leases"]
    held = [
        client.lookup(namespace.digest, chain.keys, prompt_tokens=n, costs=EAGER).lease for _ in range(10)
    ]
    assert client.stats()["leases"] == before + 10
    for lease in held:
        assert lease is not None
        assert lease.seconds > 0
        lease.release()
        lease.release()
    with client.lookup(namespace.digest, chain.keys, prompt_tokens=n, costs=EAGER).lease as lease:  # type: ignore[union-attr]
        assert client.stats()["leases"] == before + 1
    assert client.stats()["leases"] == before
    with CacheClient(service.directory, owner="other") as other:
        assert other.lookup(namespace.digest, chain.keys, prompt_tokens=n, costs=EAGER).lease is not None
        assert client.stats()["leases"] == before + 1
    deadline = time.monotonic() + 5
    while client.stats()["leases"] != before:
        assert time.monotonic() < deadline, "a lease outlived its client"


def test_a_fetch_after_release_is_refused_here_and_by_the_service(
    service: ServiceProcess, client: CacheClient, namespace: OpenedNamespace
) -> None:
    chain = Chain.of(namespace, 2, seed=9)
    chain.store(client, states=[1])
    found = look(client, chain)
    assert found.lease is not None
    # Ended behind the object's back, as a deadline would.
    connection = found.lease._connection
    assert connection.method("Release")(
        pb.ReleaseRequest(lease_id=found.lease.id), metadata=connection.metadata, timeout=5
    ).was_held
    with pytest.raises(UnknownLease):
        chain.fetch(client, found)
    found.lease.release()
    with pytest.raises(UnknownLease, match="released"):
        chain.fetch(client, found)


def test_a_lease_of_one_client_is_of_no_use_to_another(
    service: ServiceProcess, client: CacheClient, namespace: OpenedNamespace
) -> None:
    chain = Chain.of(namespace, 2, seed=10)
    chain.store(client, states=[1])
    found = look(client, chain)
    assert found.lease is not None
    with CacheClient(service.directory, owner="thief") as thief:
        connection = thief._link.connection()
        frames = connection.method("Fetch")(
            pb.FetchRequest(lease_id=found.lease.id, first_block=0, block_count=1),
            metadata=connection.metadata,
            timeout=5,
        )
        with pytest.raises(grpc.RpcError) as caught:
            list(frames)
    assert dict(caught.value.trailing_metadata())["kvstore-error"] == "UNKNOWN_LEASE"
    assert len(chain.fetch(client, found)) == 3


def test_closing_a_fetch_early_cancels_it_and_the_lease_still_serves(client: CacheClient) -> None:
    namespace = client.open_namespace(identity_of("flash-slim"), name="early")
    chain = Chain.of(namespace, 24, seed=11)
    chain.store(client)
    found = look(client, chain)
    assert found.lease is not None
    blocks = found.plan.compute_from // namespace.block_tokens
    assert blocks > 4
    for _ in range(20):
        items = client.fetch(found.lease, first_block=0, block_count=blocks, state=False)
        first = next(items)
        assert first.payload == chain.right_bytes(first)
        items.close()  # type: ignore[attr-defined]
    found.lease.release()
    assert client.stats()["leases"] == 0


def test_a_reader_slower_than_its_lease_gets_an_error_and_never_other_bytes() -> None:
    with running_service(lease=0.5) as service, CacheClient(service.directory, owner="slow") as client:
        namespace = client.open_namespace(identity_of("flash-slim"), name="slow")
        chain = Chain.of(namespace, 60, seed=18)
        chain.store(client, last=30)
        chain.store(client, first=30, states=[59])
        found = look(client, chain)
        assert found.lease is not None
        items = client.fetch(found.lease, first_block=0, block_count=60, state=True)
        got = [next(items)]
        deadline = time.monotonic() + 10
        while client.stats()["leases"]:
            assert time.monotonic() < deadline, "the lease does not end"
        with pytest.raises(UnknownLease):
            got.extend(items)
        assert 0 < len(got) < 61
        assert all(item.payload == chain.right_bytes(item) for item in got)
        assert len(chain.fetch(client, look(client, chain))) == 61


def test_what_is_cleared_under_a_lease_comes_back_as_missing(
    client: CacheClient, namespace: OpenedNamespace
) -> None:
    chain = Chain.of(namespace, 3, seed=12)
    chain.store(client, states=[2])
    found = look(client, chain)
    assert client.clear(namespace.digest) == (3, 1)
    items = chain.fetch(client, found)
    assert [(item.payload, item.lineage) for item in items] == [(None, None)] * 4
    assert found_blocks(client, chain) == 0
    # And can be stored again.
    chain.store(client, states=[2])
    assert found_blocks(client, chain) == 3


def test_states_can_be_dropped_by_tier_and_leased_ones_stay(
    client: CacheClient, namespace: OpenedNamespace
) -> None:
    chain = Chain.of(namespace, 2, seed=13)
    chain.store(client, states=[0, 1])
    chain.store(client, first=2, states=[1], to_pool=True)
    n = 2 * namespace.block_tokens + 1
    with client.lookup(namespace.digest, chain.keys, prompt_tokens=n, costs=EAGER).lease:  # type: ignore[union-attr]
        dropped, kept = client.drop_states(namespace.digest)
        assert dropped + kept >= 2
        assert kept >= 1
    assert client.drop_states(namespace.digest, "pool").kept == 0
    assert client.drop_states(namespace.digest, "ssd").kept == 0
    found = client.lookup(namespace.digest, chain.keys, prompt_tokens=n, costs=EAGER, lease=False)
    assert found.blocks_held == 2
    assert found.plan.state_source in (StateSource.REPLAY, StateSource.NONE)


# ---- handoffs -----------------------------------------------------------------------------------------------


def test_a_handoff_is_taken_confirmed_and_gone(
    client: CacheClient, service: ServiceProcess, namespace: OpenedNamespace
) -> None:
    payload = open_state("tiny", 41)
    ticket = client.put_handoff(
        namespace.digest, position=41, payload=payload, note="für dich".encode(), lineage=Lineage.BOUNDED
    )
    assert len(ticket) == 16
    with CacheClient(service.directory, owner="decode") as other:
        take = other.take_handoff(namespace.digest, ticket)
        assert (take.payload, take.position, take.note.decode(), take.lineage) == (
            payload,
            41,
            "für dich",
            Lineage.BOUNDED,
        )
        with pytest.raises(LimitExceeded):
            client.take_handoff(namespace.digest, ticket)
        assert take.confirm() is True
        assert take.confirm() is False
    with pytest.raises(SPENT):
        client.take_handoff(namespace.digest, ticket)


def test_an_unconfirmed_take_returns_when_its_taker_goes(
    client: CacheClient, service: ServiceProcess, namespace: OpenedNamespace
) -> None:
    payload = open_state("tiny", 1)
    ticket = client.put_handoff(namespace.digest, position=1, payload=payload)
    with CacheClient(service.directory, owner="lost") as lost:
        take = lost.take_handoff(namespace.digest, ticket)
    assert take.confirm() is False
    deadline = time.monotonic() + 5
    while True:
        try:
            again = client.take_handoff(namespace.digest, ticket)
            break
        except LimitExceeded:
            assert time.monotonic() < deadline, "the take did not return"
    assert again.payload == payload
    assert again.confirm()


def test_a_handoff_may_be_taken_as_often_as_it_says(client: CacheClient, namespace: OpenedNamespace) -> None:
    ticket = client.put_handoff(
        namespace.digest, position=3, payload=open_state("tiny", 3), takes=3, seconds=30
    )
    takes = [client.take_handoff(namespace.digest, ticket) for _ in range(3)]
    with pytest.raises(LimitExceeded):
        client.take_handoff(namespace.digest, ticket)
    assert all(take.confirm() for take in takes)
    with pytest.raises(SPENT):
        client.take_handoff(namespace.digest, ticket)


# ---- damage -------------------------------------------------------------------------------------------------


@pytest.fixture
def raw(client: CacheClient) -> Connection:
    """What is under the client, to send what it never would."""
    return client._link.connection()


@pytest.mark.parametrize("field", ["crc32", "xxh3_64"])
def test_a_wrong_checksum_is_refused_and_nothing_of_it_is_found(
    client: CacheClient, namespace: OpenedNamespace, raw: Connection, field: str
) -> None:
    chain = Chain.of(namespace, 1, seed=14)
    item = chain.block_item(0)
    payload = chain.payload(item)
    with client.reserve(namespace.digest, [item]) as reservation:
        head = pb.WriteItem(
            item=0, length=len(payload), crc32=zlib.crc32(payload), has_xxh3=field == "xxh3_64"
        )
        setattr(head, field, getattr(head, field) ^ 1)
        with pytest.raises(grpc.RpcError) as caught:
            raw.method("Write")(
                iter([pb.WriteFrame(reservation_id=reservation.id, items=[head], data=payload)]),
                metadata=raw.metadata,
                timeout=5,
            )
        assert dict(caught.value.trailing_metadata())["kvstore-error"] == "DAMAGED_BYTES"
    assert found_blocks(client, chain) == 0
    chain.store(client)
    assert found_blocks(client, chain) == 1


def test_a_handoff_with_a_wrong_checksum_is_refused(
    client: CacheClient, namespace: OpenedNamespace, raw: Connection
) -> None:
    payload = open_state("tiny", 1)
    header = pb.HandoffHeader(
        namespace=namespace.digest,
        position=1,
        length=len(payload),
        crc32=zlib.crc32(payload) ^ 1,
        lineage=pb.LINEAGE_EXACT,
    )
    with pytest.raises(grpc.RpcError) as caught:
        raw.method("PutHandoff")(
            iter([pb.HandoffFrame(header=header, data=payload)]), metadata=raw.metadata, timeout=5
        )
    assert dict(caught.value.trailing_metadata())["kvstore-error"] == "DAMAGED_BYTES"


# ---- what is refused ----------------------------------------------------------------------------------------


def test_a_name_opened_with_another_identity_is_a_mismatch(
    client: CacheClient, namespace: OpenedNamespace, request: pytest.FixtureRequest
) -> None:
    with pytest.raises(GeometryMismatch):
        client.open_namespace(identity_of("flash-slim", salt=request.node.name), name=namespace.name)


def test_tenants_have_names_of_their_own(client: CacheClient, namespace: OpenedNamespace) -> None:
    assert client.open_namespace(identity_of(salt="another"), name=namespace.name).digest != namespace.digest


def test_bad_input_is_refused_with_the_error_that_fits(
    client: CacheClient, namespace: OpenedNamespace
) -> None:
    ns = namespace.digest
    b = namespace.block_tokens
    chain = Chain.of(namespace, 2, seed=15)
    chain.store(client, states=[1])
    found = client.lookup(ns, chain.keys, prompt_tokens=2 * b + 1, costs=EAGER)
    lease = found.lease
    assert lease is not None
    block = chain.block_item(0)
    good = {
        "kind": ItemKind.BLOCK,
        "key": b"k" * 32,
        "parent": ns,
        "position": b,
        "length": namespace.block_bytes,
    }
    state = {"kind": ItemKind.STATE, "key": chain.keys[0], "position": b, "length": namespace.state_bytes}

    def reserve(fields: dict[str, object], **changes: object) -> object:
        return client.reserve(ns, [ReserveItem(**{**fields, **changes})])  # type: ignore[arg-type]

    identity = identity_of(salt="bad")
    large = client.open_namespace(identity_of("flash-slim", salt="bad"), name="bad-large")
    open_1 = open_state("tiny", 1)
    table: list[tuple[str, type[KvstoreError] | tuple[type[KvstoreError], ...], object]] = [
        ("empty name", InvalidArgument, lambda: client.open_namespace(identity, name="")),
        ("long name", InvalidArgument, lambda: client.open_namespace(identity, name="x" * 129)),
        (
            "bad policy",
            InvalidArgument,
            lambda: client.open_namespace(identity, name="p", policy="sometimes"),
        ),
        (
            "policy of no block",
            InvalidArgument,
            lambda: client.open_namespace(identity, name="p", policy="periodic:33"),
        ),
        ("short namespace", InvalidArgument, lambda: client.lookup(b"abc", [], prompt_tokens=1)),
        (
            "no namespace",
            (InvalidArgument, UnknownNamespace),
            lambda: client.lookup(b"", [], prompt_tokens=1),
        ),
        ("unknown namespace", UnknownNamespace, lambda: client.lookup(b"u" * 32, [], prompt_tokens=1)),
        (
            "more keys than blocks",
            InvalidArgument,
            lambda: client.lookup(ns, chain.keys, prompt_tokens=2 * b - 1),
        ),
        (
            "prompt out of range",
            (InvalidArgument, LimitExceeded),
            lambda: client.lookup(ns, [], prompt_tokens=1 << 62),
        ),
        (
            "too many keys",
            (InvalidArgument, LimitExceeded),
            lambda: client.lookup(ns, [b"k" * 32] * 70_000, prompt_tokens=70_000 * b),
        ),
        (
            "costs below zero",
            InvalidArgument,
            lambda: client.lookup(ns, [], prompt_tokens=1, costs=Costs(seconds_per_fetch=-1.0)),
        ),
        (
            "costs not a number",
            InvalidArgument,
            lambda: client.lookup(ns, [], prompt_tokens=1, costs=Costs(seconds_per_ssd_byte=float("nan"))),
        ),
        (
            "block past the lease",
            InvalidArgument,
            lambda: list(client.fetch(lease, first_block=2, block_count=1, state=False)),
        ),
        (
            "blocks past the lease",
            InvalidArgument,
            lambda: list(client.fetch(lease, first_block=0, block_count=3, state=False)),
        ),
        (
            "far past the lease",
            InvalidArgument,
            lambda: list(client.fetch(lease, first_block=1 << 60, block_count=1, state=False)),
        ),
        (
            "nothing to fetch",
            InvalidArgument,
            lambda: client.fetch(lease, first_block=0, block_count=0, state=False),
        ),
        ("reserve elsewhere", UnknownNamespace, lambda: client.reserve(b"u" * 32, [block])),
        ("short key", InvalidArgument, lambda: reserve(good, key=b"k" * 31)),
        ("short parent", InvalidArgument, lambda: reserve(good, parent=b"p")),
        ("position 0", InvalidArgument, lambda: reserve(good, position=0)),
        ("position inside a block", InvalidArgument, lambda: reserve(good, position=b + 1)),
        ("other length", GeometryMismatch, lambda: reserve(good, length=namespace.block_bytes + 1)),
        ("length 0", (GeometryMismatch, InvalidArgument), lambda: reserve(good, length=0)),
        ("state of other length", GeometryMismatch, lambda: reserve(state, length=1, to_ssd=True)),
        ("state to nowhere", InvalidArgument, lambda: reserve(state)),
        ("short ticket", InvalidArgument, lambda: client.take_handoff(ns, b"t" * 15)),
        ("unknown ticket", UnknownTicket, lambda: client.take_handoff(ns, b"t" * 16)),
        (
            "handoff elsewhere",
            UnknownNamespace,
            lambda: client.put_handoff(b"u" * 32, position=1, payload=open_1),
        ),
        (
            "handoff at position 0",
            InvalidArgument,
            lambda: client.put_handoff(ns, position=0, payload=open_1),
        ),
        (
            "handoff of other length",
            GeometryMismatch,
            lambda: client.put_handoff(ns, position=1, payload=b"x"),
        ),
        (
            "handoff too large",
            LimitExceeded,
            lambda: client.put_handoff(large.digest, position=1, payload=open_state("flash-slim", 1)),
        ),
        (
            "handoff in the past",
            InvalidArgument,
            lambda: client.put_handoff(ns, position=1, payload=open_1, seconds=-1.0),
        ),
        (
            "handoff at no time",
            InvalidArgument,
            lambda: client.put_handoff(ns, position=1, payload=open_1, seconds=float("nan")),
        ),
        (
            "note too long",
            (InvalidArgument, LimitExceeded),
            lambda: client.put_handoff(ns, position=1, payload=open_1, note=bytes((64 << 10) + 1)),
        ),
        ("policy of nobody", UnknownNamespace, lambda: client.set_policy(b"u" * 32, "zero")),
        ("unknown policy", InvalidArgument, lambda: client.set_policy(ns, "always")),
        ("clear of nobody", UnknownNamespace, lambda: client.clear(b"u" * 32)),
        ("states of nobody", UnknownNamespace, lambda: client.drop_states(b"u" * 32)),
        ("short namespace to clear", InvalidArgument, lambda: client.clear(b"u")),
        ("drain backwards", InvalidArgument, lambda: client.drain(-1.0)),
        ("drain never", InvalidArgument, lambda: client.drain(float("nan"))),
    ]
    wrong = []
    for what, kinds, call in table:
        try:
            call()  # type: ignore[operator]
        except KvstoreError as error:
            if not isinstance(error, kinds) or type(error) is KvstoreError:
                wrong.append(f"{what}: {type(error).__name__}: {error}")
        else:
            wrong.append(f"{what}: was accepted")
    assert not wrong, "\n".join(wrong)
    # None of it has harmed anything.
    assert len(chain.fetch(client, found)) == 3


def test_a_block_without_its_parent_is_told_so_and_those_before_it_are_granted(
    client: CacheClient, namespace: OpenedNamespace
) -> None:
    chain = Chain.of(namespace, 4, seed=16)
    items = [chain.block_item(0), chain.block_item(2), chain.block_item(3)]
    with client.reserve(namespace.digest, items) as reservation:
        assert reservation.outcomes[:2] == (ReserveOutcome.GRANTED, ReserveOutcome.PARENT_MISSING)
        assert reservation.outcomes[2] is ReserveOutcome.PARENT_MISSING
        with pytest.raises(InvalidArgument, match="not granted"):
            reservation.write({1: chain.payload(items[1])})
        with pytest.raises(InvalidArgument, match=r"payloads\[0\]"):
            reservation.write({0: b"short"})
        reservation.write({0: chain.payload(items[0])})
        assert reservation.commit().items == 1
    assert found_blocks(client, chain) == 1


def test_figures_count_what_was_done(client: CacheClient, namespace: OpenedNamespace) -> None:
    before = client.stats()
    chain = Chain.of(namespace, 3, seed=17)
    chain.store(client)
    found_blocks(client, chain)
    after = client.stats()
    assert after["blocks"] == before["blocks"] + 3
    assert after["lookups_total"] == before["lookups_total"] + 1
    assert after["sessions"] >= 1
