"""The service's calls over the wire: what they do, and the whole table of what they refuse and how."""

from __future__ import annotations

import math
import os
import signal
import socket
import stat
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvstore.profile.layout import state_layout
from kvstore.profile.registry import get_profile
from kvstore.v1 import cache_pb2 as pb
from tests.e2e.service_raw import FRAME_BYTES, Chain, Raw, error_of, payload_of, write_frames
from tests.support.service import ServiceProcess, running_service


@pytest.fixture(scope="module")
def service() -> Iterator[ServiceProcess]:
    with running_service(
        segment=8 << 20, staging=8 << 20, handoff=1 << 20, keys=10_000, sessions=20
    ) as process:
        yield process


@pytest.fixture
def raw(service: ServiceProcess) -> Iterator[Raw]:
    with Raw(service.directory) as made:
        yield made


@pytest.fixture
def namespace(raw: Raw, request: pytest.FixtureRequest) -> pb.Namespace:
    """One of its own for each test."""
    return raw.open(request.node.name[:128])


def wait_for(read: Callable[[], bool], seconds: float = 5.0) -> None:
    """Ask again until it is so; the question itself takes a while, so this needs no pause."""
    end = time.monotonic() + seconds
    while not read():
        assert time.monotonic() < end, "it did not come to be"


# ---- life cycle ---------------------------------------------------------------------------------------------


def test_what_was_committed_is_found_and_comes_back(raw: Raw, namespace: pb.Namespace) -> None:
    chain = Chain(namespace, 9, seed=1)
    reply = raw.store(chain, states=[8], pool=True)
    assert (reply.items, reply.bytes) == (10, 9 * namespace.block_bytes + namespace.state_bytes)
    found = raw.lookup(chain)
    assert (found.plan.chosen.compute_from, found.plan.chosen.state_source, found.blocks_held) == (
        288,
        pb.POOL,
        9,
    )
    items = raw.fetch(found.lease_id, count=9, state=True)
    assert [(header.kind, header.index) for header, _ in items] == [
        *((pb.BLOCK, i) for i in range(9)),
        (pb.STATE, 288),
    ]
    assert all(chain.is_right(header, data) for header, data in items)
    assert raw.call("Release", pb.ReleaseRequest(lease_id=found.lease_id)).was_held
    assert not raw.call("Release", pb.ReleaseRequest(lease_id=found.lease_id)).was_held


def test_a_part_of_a_lease_can_be_fetched(raw: Raw, namespace: pb.Namespace) -> None:
    chain = Chain(namespace, 6, seed=2)
    raw.store(chain, states=[5])
    found = raw.lookup(chain)
    items = raw.fetch(found.lease_id, first=2, count=3)
    assert [header.index for header, _ in items] == [2, 3, 4]
    assert all(chain.is_right(header, data) for header, data in items)
    assert raw.fetch(found.lease_id, first=6, count=0) == []


@pytest.mark.parametrize("tokens", [0, 1, 31, 32])
def test_short_prompts_get_ordinary_answers(raw: Raw, namespace: pb.Namespace, tokens: int) -> None:
    chain = Chain(namespace, 1, seed=3)
    raw.store(chain, states=[0])
    found = raw.lookup(chain, prompt_tokens=tokens)
    assert (found.plan.chosen.state_source, found.plan.chosen.compute_from, found.lease_id) == (pb.NONE, 0, 0)


def test_a_million_tokens_are_one_lookup(raw: Raw) -> None:
    namespace = raw.open("million", profile="flash-slim")
    reply = raw.call(
        "Lookup",
        pb.LookupRequest(
            namespace=namespace.digest,
            keys=os.urandom(32 * 7812),
            prompt_tokens=1_000_000,
        ),
    )
    assert (reply.blocks_held, reply.plan.blocks_missing) == (0, 7812)


def test_reserve_tells_held_in_flight_and_parent_missing(
    service: ServiceProcess, raw: Raw, namespace: pb.Namespace
) -> None:
    chain = Chain(namespace, 4, seed=4)
    raw.store(chain, last=1)
    reply = raw.reserve(namespace, [chain.block(0), chain.block(1), chain.block(3)])
    assert list(reply.outcomes) == [pb.HELD, pb.GRANTED, pb.PARENT_MISSING]
    with Raw(service.directory) as other:
        again = other.reserve(namespace, [chain.block(1)])
        assert (list(again.outcomes), again.reservation_id) == ([pb.IN_FLIGHT], 0)
        assert again.owner_age_seconds[0] > 0
        assert raw.call("Abort", pb.AbortRequest(reservation_id=reply.reservation_id)).was_open
        assert not raw.call("Abort", pb.AbortRequest(reservation_id=reply.reservation_id)).was_open
        assert list(other.reserve(namespace, [chain.block(1)]).outcomes) == [pb.GRANTED]


def test_a_child_is_not_shown_without_its_parent(raw: Raw, namespace: pb.Namespace) -> None:
    chain = Chain(namespace, 2, seed=5)
    parent = raw.reserve(namespace, [chain.block(0)])
    child = raw.reserve(namespace, [chain.block(1)])
    raw.write(child.reservation_id, {0: payload_of(chain.keys[1], namespace.block_bytes)})
    raw.call("Abort", pb.AbortRequest(reservation_id=parent.reservation_id))
    assert raw.commit(child.reservation_id).items == 0
    assert raw.lookup(chain, lease=False).blocks_held == 0
    raw.store(chain)
    assert raw.lookup(chain, lease=False).blocks_held == 2


def test_handoffs_go_to_as_many_as_may_take_them(
    service: ServiceProcess, raw: Raw, namespace: pb.Namespace
) -> None:
    payload = os.urandom(state_layout(get_profile("tiny"), 45).total_bytes)
    ticket = put_handoff(raw, namespace, payload, takes=1, note=b"hello").ticket
    with Raw(service.directory) as other:
        frames = list(
            other.call("TakeHandoff", pb.TakeHandoffRequest(namespace=namespace.digest, ticket=ticket))
        )
        header = frames[0].header
        assert (header.position, header.note, header.crc32) == (45, b"hello", zlib.crc32(payload))
        assert b"".join(frame.data for frame in frames) == payload
        with pytest.raises(grpc.RpcError) as refused:
            list(raw.call("TakeHandoff", pb.TakeHandoffRequest(namespace=namespace.digest, ticket=ticket)))
        assert error_of(refused.value) == "LIMIT_EXCEEDED"
    # The taker has gone without confirming: the take is back.
    wait_for(lambda: raw.stats()["handoff_takes_out"] == 0)
    frames = list(raw.call("TakeHandoff", pb.TakeHandoffRequest(namespace=namespace.digest, ticket=ticket)))
    take_id = frames[0].header.take_id
    assert raw.call("ConfirmHandoff", pb.ConfirmHandoffRequest(take_id=take_id)).was_out
    assert not raw.call("ConfirmHandoff", pb.ConfirmHandoffRequest(take_id=take_id)).was_out
    assert raw.stats()["handoff_bytes"] == 0


def put_handoff(raw: Raw, namespace: pb.Namespace, payload: bytes, **header: Any) -> pb.HandoffTicket:
    fields = {
        "position": 45,
        "crc32": zlib.crc32(payload),
        "lineage": pb.LINEAGE_EXACT,
        "length": len(payload),
        **header,
    }
    first = pb.HandoffHeader(namespace=namespace.digest, **fields)
    return raw.call("PutHandoff", iter([pb.HandoffFrame(header=first, data=payload)]))


def test_clear_empties_one_namespace_and_no_other(raw: Raw) -> None:
    one, other = raw.open("clear-one"), raw.open("clear-other")
    chains = [Chain(one, 3, seed=6), Chain(other, 3, seed=6)]
    for chain in chains:
        raw.store(chain, states=[2], pool=True)
    payload = os.urandom(state_layout(get_profile("tiny"), 45).total_bytes)
    ticket = put_handoff(raw, one, payload).ticket
    found = raw.lookup(chains[0])
    cleared = raw.admin.Clear(pb.ClearRequest(namespace=one.digest), timeout=10)
    assert (cleared.blocks, cleared.states) == (3, 2)
    assert [raw.lookup(chain, lease=False).blocks_held for chain in chains] == [0, 3]
    # What was leased is gone too, and says so.
    assert [header.missing for header, _ in raw.fetch(found.lease_id, count=3, state=True)] == [True] * 4
    with pytest.raises(grpc.RpcError) as refused:
        list(raw.call("TakeHandoff", pb.TakeHandoffRequest(namespace=one.digest, ticket=ticket)))
    assert error_of(refused.value) == "UNKNOWN_TICKET"
    raw.store(chains[0])
    assert raw.lookup(chains[0], lease=False).blocks_held == 3


def test_drop_states_leaves_blocks_and_what_is_leased(raw: Raw, namespace: pb.Namespace) -> None:
    kept, dropped = Chain(namespace, 2, seed=7), Chain(namespace, 2, seed=8)
    for chain in (kept, dropped):
        raw.store(chain, states=[1], pool=True)
    found = raw.lookup(kept)
    reply = raw.admin.DropStates(pb.DropStatesRequest(namespace=namespace.digest), timeout=10)
    assert (reply.dropped, reply.kept) == (3, 1)
    assert raw.lookup(kept, lease=False).plan.chosen.state_source == pb.POOL
    assert raw.lookup(dropped, lease=False).plan.chosen.state_source in (pb.REPLAY, pb.NONE)
    assert all(kept.is_right(header, data) for header, data in raw.fetch(found.lease_id, count=2, state=True))


def test_the_policy_can_be_changed_and_is_told(raw: Raw, namespace: pb.Namespace) -> None:
    assert namespace.policy == "endpoints"
    changed = raw.admin.SetPolicy(
        pb.SetPolicyRequest(namespace=namespace.digest, policy="periodic:64"), timeout=10
    )
    assert changed.policy == "periodic:64"
    assert raw.lookup(Chain(namespace, 8, seed=9), lease=False).plan.save_states.every_tokens == 64
    assert raw.open(namespace.name).policy == "periodic:64"
    names = {
        each.name: each
        for each in raw.admin.ListNamespaces(pb.ListNamespacesRequest(), timeout=10).namespaces
    }
    assert names[namespace.name] == changed


def test_the_same_name_with_another_identity_is_refused(raw: Raw, namespace: pb.Namespace) -> None:
    with pytest.raises(grpc.RpcError, match="weights_revision") as refused:
        raw.open(namespace.name, weights_revision="other")
    assert error_of(refused.value) == "GEOMETRY_MISMATCH"


# ---- damage -------------------------------------------------------------------------------------------------


def test_damaged_bytes_are_refused_and_nothing_of_the_call_is_kept(raw: Raw, namespace: pb.Namespace) -> None:
    chain = Chain(namespace, 2, seed=10)
    reply = raw.reserve(namespace, [chain.block(0), chain.block(1)])
    right = [payload_of(key, namespace.block_bytes) for key in chain.keys]
    frames = list(write_frames(reply.reservation_id, dict(enumerate(right))))
    frames[0].items[1].crc32 ^= 1
    with pytest.raises(grpc.RpcError) as refused:
        raw.call("Write", iter(frames))
    assert error_of(refused.value) == "DAMAGED_BYTES"
    assert raw.stats()["staged_bytes"] == 0
    raw.write(reply.reservation_id, dict(enumerate(right)))
    assert raw.commit(reply.reservation_id).items == 2


# ---- the table of refusals ----------------------------------------------------------------------------------

KEY = b"k" * 32
Case = Callable[[Raw, pb.Namespace], object]


def _lookup(**changed: Any) -> Case:
    def call(raw: Raw, namespace: pb.Namespace) -> object:
        return raw.call(
            "Lookup", pb.LookupRequest(**{"namespace": namespace.digest, "prompt_tokens": 100, **changed})
        )

    return call


def _reserve(**changed: Any) -> Case:
    def call(raw: Raw, namespace: pb.Namespace) -> object:
        return raw.reserve(namespace, [Chain(namespace, 1, seed=11).block(0, **changed)])

    return call


def _write(build: Callable[[int, bytes], list[pb.WriteFrame]]) -> Case:
    """A Write call for a fresh reservation of two blocks."""

    def call(raw: Raw, namespace: pb.Namespace) -> object:
        chain = Chain(namespace, 2, seed=12)
        number = raw.reserve(namespace, [chain.block(0), chain.block(1)]).reservation_id
        try:
            return raw.call("Write", iter(build(number, payload_of(chain.keys[0], namespace.block_bytes))))
        finally:
            raw.call("Abort", pb.AbortRequest(reservation_id=number))

    return call


def _frame(number: int, data: bytes, **item: Any) -> pb.WriteFrame:
    announced = pb.WriteItem(**{"item": 0, "length": 3328, "crc32": zlib.crc32(data), **item})
    return pb.WriteFrame(reservation_id=number, items=[announced], data=data)


def _handoff(**changed: Any) -> Case:
    size = state_layout(get_profile("tiny"), 45).total_bytes
    return lambda raw, namespace: put_handoff(raw, namespace, bytes(size), **changed)


def _open(**changed: Any) -> Case:
    profile = pb.Profile(name="tiny", geometry=get_profile("tiny").geometry())
    return lambda raw, _: raw.call(
        "OpenNamespace", pb.OpenNamespaceRequest(**{"name": "new", "profile": profile, **changed})
    )


def _call(name: str, request: Any) -> Case:
    return lambda raw, _: raw.call(name, request)


def _admin(name: str, request: Any) -> Case:
    return lambda raw, _: getattr(raw.admin, name)(request, timeout=10)


REFUSALS: dict[str, tuple[Case, str, str]] = {
    "namespace of 31 bytes": (_lookup(namespace=bytes(31)), "INVALID_ARGUMENT", "namespace"),
    "no namespace": (_lookup(namespace=b""), "INVALID_ARGUMENT", "namespace"),
    "namespace never opened": (_lookup(namespace=bytes(32)), "UNKNOWN_NAMESPACE", "namespace"),
    "keys of 33 bytes": (_lookup(keys=bytes(33)), "INVALID_ARGUMENT", "keys"),
    "more keys than blocks": (_lookup(keys=bytes(32 * 4)), "INVALID_ARGUMENT", "keys"),
    "too many keys": (_lookup(keys=bytes(32 * 10_001), prompt_tokens=8_000_000), "LIMIT_EXCEEDED", "10000"),
    "endless prompt": (_lookup(prompt_tokens=2**63), "LIMIT_EXCEEDED", "prompt_tokens"),
    "negative cost": (
        _lookup(costs=pb.Costs(seconds_per_ssd_byte=-1)),
        "INVALID_ARGUMENT",
        "seconds_per_ssd_byte",
    ),
    "cost that is no number": (
        _lookup(costs=pb.Costs(seconds_per_fetch=math.nan)),
        "INVALID_ARGUMENT",
        "seconds_per_fetch",
    ),
    "item without kind": (_reserve(kind=0), "INVALID_ARGUMENT", "items[0].kind"),
    "item of unknown kind": (_reserve(kind=77), "INVALID_ARGUMENT", "items[0].kind"),
    "item without lineage": (_reserve(lineage=0), "INVALID_ARGUMENT", "items[0].lineage"),
    "key of 5 bytes": (_reserve(key=b"short"), "INVALID_ARGUMENT", "items[0].key"),
    "no parent": (_reserve(parent=b""), "INVALID_ARGUMENT", "items[0].parent"),
    "position 0": (_reserve(position=0), "INVALID_ARGUMENT", "items[0].position"),
    "position inside a block": (_reserve(position=33), "INVALID_ARGUMENT", "items[0].position"),
    "position past all numbers": (_reserve(position=2**64 - 32), "INVALID_ARGUMENT", "items[0].p"),
    "no length": (_reserve(length=0), "GEOMETRY_MISMATCH", "items[0].length"),
    "length of another profile": (_reserve(length=449_824), "GEOMETRY_MISMATCH", "3328"),
    "block for the pool": (_reserve(to_pool=True), "INVALID_ARGUMENT", "to_pool"),
    "state that goes nowhere": (_reserve(kind=pb.STATE, length=12_672), "INVALID_ARGUMENT", "to_pool"),
    "write without frames": (_write(lambda number, data: []), "INVALID_ARGUMENT", "reservation_id"),
    "first frame without reservation": (
        _write(lambda number, data: [_frame(0, data)]),
        "INVALID_ARGUMENT",
        "reservation_id",
    ),
    "write to no reservation": (
        _write(lambda number, data: [_frame(2**60, data)]),
        "UNKNOWN_RESERVATION",
        "reservation_id",
    ),
    "second frame elsewhere": (
        _write(lambda number, data: [pb.WriteFrame(reservation_id=number), _frame(number + 1, data)]),
        "INVALID_ARGUMENT",
        "reservation_id",
    ),
    "item not granted": (
        _write(lambda number, data: [_frame(number, data, item=2)]),
        "INVALID_ARGUMENT",
        "items.item",
    ),
    "item of another length": (
        _write(lambda number, data: [_frame(number, data, length=3327)]),
        "INVALID_ARGUMENT",
        "items.length",
    ),
    "item of no length": (
        _write(lambda number, data: [_frame(number, data, length=0)]),
        "INVALID_ARGUMENT",
        "items.length",
    ),
    "item announced twice": (
        _write(lambda number, data: [_frame(number, data), _frame(number, data)]),
        "INVALID_ARGUMENT",
        "items.item",
    ),
    "bytes past the items": (
        _write(lambda number, data: [_frame(number, data + b"x", crc32=zlib.crc32(data))]),
        "INVALID_ARGUMENT",
        "data",
    ),
    "bytes without an item": (
        _write(lambda number, data: [pb.WriteFrame(reservation_id=number, data=b"x")]),
        "INVALID_ARGUMENT",
        "data",
    ),
    "stream that ends early": (
        _write(lambda number, data: [_frame(number, data[:-1])]),
        "INVALID_ARGUMENT",
        "data",
    ),
    "frame past its size": (
        _write(lambda number, data: [pb.WriteFrame(reservation_id=number, data=bytes(FRAME_BYTES + 1))]),
        "LIMIT_EXCEEDED",
        "data",
    ),
    "wrong checksum": (
        _write(lambda number, data: [_frame(number, data, crc32=1)]),
        "DAMAGED_BYTES",
        "crc32",
    ),
    "wrong second checksum": (
        _write(lambda number, data: [_frame(number, data, has_xxh3=True)]),
        "DAMAGED_BYTES",
        "xxh3_64",
    ),
    "unknown lease": (lambda raw, _: raw.fetch(2**50, count=1), "UNKNOWN_LEASE", "lease_id"),
    "lease 0": (lambda raw, _: raw.fetch(0, count=1), "UNKNOWN_LEASE", "lease_id"),
    "unknown reservation": (
        _call("Commit", pb.CommitRequest(reservation_id=2**50)),
        "UNKNOWN_RESERVATION",
        "reservation_id",
    ),
    "handoff without frames": (lambda raw, _: raw.call("PutHandoff", iter(())), "INVALID_ARGUMENT", "header"),
    "handoff at 0": (_handoff(position=0), "INVALID_ARGUMENT", "header.position"),
    "handoff at the end of the world": (_handoff(position=2**62), "INVALID_ARGUMENT", "header.position"),
    "handoff of another length": (_handoff(position=46), "GEOMETRY_MISMATCH", "header.length"),
    "handoff for ever": (_handoff(seconds=math.inf), "INVALID_ARGUMENT", "header.seconds"),
    "handoff for too many": (_handoff(takes=100_000), "INVALID_ARGUMENT", "takes"),
    "handoff without lineage": (_handoff(lineage=0), "INVALID_ARGUMENT", "header.lineage"),
    "handoff with a long note": (_handoff(note=bytes(65_537)), "INVALID_ARGUMENT", "note"),
    "handoff with wrong bytes": (_handoff(crc32=5), "DAMAGED_BYTES", "crc32"),
    "ticket of 3 bytes": (
        lambda raw, namespace: list(
            raw.call("TakeHandoff", pb.TakeHandoffRequest(namespace=namespace.digest, ticket=b"abc"))
        ),
        "INVALID_ARGUMENT",
        "ticket",
    ),
    "unknown ticket": (
        lambda raw, namespace: list(
            raw.call("TakeHandoff", pb.TakeHandoffRequest(namespace=namespace.digest, ticket=bytes(16)))
        ),
        "UNKNOWN_TICKET",
        "ticket",
    ),
    "no name": (_open(name=""), "INVALID_ARGUMENT", "name"),
    "name of 129 characters": (_open(name="n" * 129), "INVALID_ARGUMENT", "name"),
    "no profile": (_open(profile=None), "INVALID_ARGUMENT", "profile"),
    "geometry that is no JSON": (
        _open(profile=pb.Profile(name="x", geometry=b"{")),
        "INVALID_ARGUMENT",
        "geometry",
    ),
    "endless salt": (_open(tenant_salt="s" * 5000), "INVALID_ARGUMENT", "tenant_salt"),
    "unknown policy of a new one": (
        _open(tenant_salt="p", policy="periodic:7"),
        "INVALID_ARGUMENT",
        "policy",
    ),
    "unknown policy": (
        lambda raw, namespace: raw.admin.SetPolicy(
            pb.SetPolicyRequest(namespace=namespace.digest, policy="all"), timeout=10
        ),
        "INVALID_ARGUMENT",
        "policy",
    ),
    "policy of nobody": (
        _admin("SetPolicy", pb.SetPolicyRequest(namespace=bytes(32), policy="zero")),
        "UNKNOWN_NAMESPACE",
        "namespace",
    ),
    "clear of nobody": (
        _admin("Clear", pb.ClearRequest(namespace=bytes(32))),
        "UNKNOWN_NAMESPACE",
        "namespace",
    ),
    "clear of half a namespace": (
        _admin("Clear", pb.ClearRequest(namespace=b"half")),
        "INVALID_ARGUMENT",
        "namespace",
    ),
    "states of nobody": (
        _admin("DropStates", pb.DropStatesRequest(namespace=bytes(32))),
        "UNKNOWN_NAMESPACE",
        "namespace",
    ),
    "states of no tier": (_admin("DropStates", pb.DropStatesRequest(tier=9)), "INVALID_ARGUMENT", "tier"),
    "drain for ever": (_admin("Drain", pb.DrainRequest(seconds=math.inf)), "INVALID_ARGUMENT", "seconds"),
    "drain backwards": (_admin("Drain", pb.DrainRequest(seconds=-1)), "INVALID_ARGUMENT", "seconds"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_wrong_is_refused_by_name(raw: Raw, namespace: pb.Namespace, name: str) -> None:
    call, code, named = REFUSALS[name]
    with pytest.raises(grpc.RpcError) as refused:
        call(raw, namespace)
    assert error_of(refused.value) == code, refused.value.details()
    assert named in refused.value.details()
    assert refused.value.code() is not grpc.StatusCode.INTERNAL
    values = raw.stats()
    assert (values["staged_bytes"], values["reservations"], values["handoff_bytes"]) == (0, 0, 0)


@pytest.mark.parametrize("name", ["Reserve", "Commit", "Abort", "Release", "ConfirmHandoff"])
@pytest.mark.parametrize("number", ["", "0" * 32, "not hex"])
def test_calls_without_an_open_session_are_refused(raw: Raw, name: str, number: str) -> None:
    metadata = (("kvstore-session", number),)
    with pytest.raises(grpc.RpcError) as refused:
        getattr(raw.cache, name)(getattr(pb, f"{name}Request")(), timeout=10, metadata=metadata)
    assert error_of(refused.value) == "UNKNOWN_SESSION"


@pytest.mark.parametrize("name", ["Fetch", "TakeHandoff"])
def test_streams_without_a_session_are_refused(raw: Raw, name: str) -> None:
    stream = getattr(raw.cache, name)(getattr(pb, f"{name}Request")(), timeout=10)
    with pytest.raises(grpc.RpcError) as refused:
        next(stream)
    assert error_of(refused.value) == "UNKNOWN_SESSION"


def test_another_sessions_lease_and_reservation_are_unknown(
    service: ServiceProcess, raw: Raw, namespace: pb.Namespace
) -> None:
    chain = Chain(namespace, 3, seed=13)
    raw.store(chain, last=2, states=[1])
    found = raw.lookup(chain)
    mine = raw.reserve(namespace, [chain.block(2)])
    with Raw(service.directory) as other:
        for code, call in (
            ("UNKNOWN_LEASE", lambda: other.fetch(found.lease_id, count=1)),
            (
                "UNKNOWN_RESERVATION",
                lambda: other.write(mine.reservation_id, {0: bytes(namespace.block_bytes)}),
            ),
            ("UNKNOWN_RESERVATION", lambda: other.commit(mine.reservation_id)),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                call()
            assert error_of(refused.value) == code
        assert not other.call("Release", pb.ReleaseRequest(lease_id=found.lease_id)).was_held
        assert not other.call("Abort", pb.AbortRequest(reservation_id=mine.reservation_id)).was_open
    assert len(raw.fetch(found.lease_id, count=2, state=True)) == 3
    raw.call("Abort", pb.AbortRequest(reservation_id=mine.reservation_id))


def test_more_than_a_lease_covers_is_refused(raw: Raw, namespace: pb.Namespace) -> None:
    chain = Chain(namespace, 3, seed=14)
    raw.store(chain)
    found = raw.lookup(chain)
    blocks = found.plan.chosen.compute_from // namespace.block_tokens
    for arguments in (
        {"count": blocks + 1},
        {"first": blocks + 1, "count": 0},
        {"count": 2**63},
        {"count": 0, "state": True},
    ):
        with pytest.raises(grpc.RpcError) as refused:
            raw.fetch(found.lease_id, **arguments)
        assert error_of(refused.value) == "INVALID_ARGUMENT"


# ---- limits -------------------------------------------------------------------------------------------------


def test_staging_is_bounded_for_all_together(raw: Raw) -> None:
    namespace = raw.open("staging", profile="flash-slim")
    chain = Chain(namespace, 24, seed=15)
    reply = raw.reserve(namespace, [chain.block(i) for i in range(24)])
    payload = payload_of(b"any", namespace.block_bytes)
    with pytest.raises(grpc.RpcError, match="staging") as refused:
        raw.write(reply.reservation_id, dict.fromkeys(range(24), payload))
    assert error_of(refused.value) == "LIMIT_EXCEEDED"
    assert raw.stats()["staged_bytes"] == 0
    raw.write(reply.reservation_id, dict.fromkeys(range(8), payload))
    assert raw.stats()["staged_bytes"] == 8 * len(payload)
    assert raw.commit(reply.reservation_id).items == 8
    assert raw.stats()["staged_bytes"] == 0


def test_sessions_are_bounded_and_the_refused_one_is_told(service: ServiceProcess, raw: Raw) -> None:
    others: list[Raw] = []
    try:
        for _ in range(20 - int(raw.stats()["sessions"])):
            others.append(Raw(service.directory))
        with Raw(service.directory) as refused:
            assert refused.hello["error"] == "LIMIT_EXCEEDED"
            assert "sessions" in refused.hello["message"]
            assert refused.socket.recv(1) == b""
    finally:
        for other in others:
            other.close()
    wait_for(lambda: raw.stats()["sessions"] == 1)


def test_a_session_that_talks_is_hung_up_on(service: ServiceProcess, raw: Raw) -> None:
    with Raw(service.directory) as other:
        other.socket.sendall(b"hello?")
        assert other.socket.recv(1) == b""
        with pytest.raises(grpc.RpcError) as refused:
            other.call("Commit", pb.CommitRequest(reservation_id=1))
        assert error_of(refused.value) == "UNKNOWN_SESSION"
    wait_for(lambda: raw.stats()["sessions"] == 1)


# ---- ends ---------------------------------------------------------------------------------------------------

HOLDER = """
import sys
from pathlib import Path
from tests.e2e.service_raw import Chain, Raw, payload_of, pb
raw = Raw(Path(sys.argv[1]))
namespace = raw.open("killed")
held = Chain(namespace, 4, seed=20)
raw.store(held, states=[3], pool=True)
for _ in range(100):
    assert raw.lookup(held).lease_id
new = Chain(namespace, 4, seed=21)
reply = raw.reserve(namespace, [new.block(i) for i in range(4)])
raw.write(reply.reservation_id, {0: payload_of(new.keys[0], namespace.block_bytes)})
print("holding", flush=True)
sys.stdin.read()
"""


def test_a_killed_client_leaves_nothing_behind(raw: Raw, service: ServiceProcess) -> None:
    before = raw.stats()
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(service.directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"holding\n"
        values = raw.stats()
        assert (values["leases"], values["reservations"], values["sessions"]) == (
            100 + before["leases"],
            1,
            2,
        )
        assert (values["staged_bytes"], values["states_pool_pinned"]) == (3328, 1)
        child.send_signal(signal.SIGKILL)
        child.wait(10)
        names = (
            "leases",
            "reservations",
            "staged_bytes",
            "sessions",
            "states_pool_pinned",
            "reserved_items",
            "uploads",
        )
        wait_for(lambda: all(raw.stats()[name] == before[name] for name in names))
    finally:
        child.kill()
        child.wait(10)
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            pipe.close()
    chain = Chain(raw.open("killed"), 4, seed=21)
    assert list(raw.reserve(chain.namespace, [chain.block(0)]).outcomes) == [pb.GRANTED]


def test_the_end_of_a_session_ends_its_write_that_waits_for_bytes(
    raw: Raw, service: ServiceProcess, namespace: pb.Namespace
) -> None:
    chain = Chain(namespace, 1, seed=22)
    other = Raw(service.directory)
    number = other.reserve(namespace, [chain.block(0)]).reservation_id
    # One half of the item, and then nothing: the stream stays open.
    more, less = socket.socketpair()

    def frames() -> Iterator[pb.WriteFrame]:
        yield _frame(number, bytes(1000))
        less.recv(1)

    try:
        call = other.cache.Write.future(frames(), timeout=30, metadata=other.metadata)
        wait_for(lambda: raw.stats()["staged_bytes"] == 3328)
        other.socket.close()
        wait_for(lambda: raw.stats()["staged_bytes"] == 0)
        assert error_of(call.exception(10)) == "UNKNOWN_SESSION"
    finally:
        more.close()
        other.close()
        less.close()


def test_cancelled_calls_give_everything_back(raw: Raw) -> None:
    namespace = raw.open("cancelled", profile="flash-slim")
    chain = Chain(namespace, 16, seed=23)
    for first in (0, 8):
        raw.store(chain, first=first, last=first + 8)
    found = raw.lookup(chain)
    blocks = found.plan.chosen.compute_from // namespace.block_tokens
    for _ in range(20):
        frames = raw.cache.Fetch(
            pb.FetchRequest(lease_id=found.lease_id, block_count=blocks),
            timeout=20,
            metadata=raw.metadata,
        )
        assert next(frames).items
        frames.cancel()
    wait_for(lambda: raw.stats()["fetching_bytes"] == 0)
    new = Chain(namespace, 8, seed=24)
    number = raw.reserve(namespace, [new.block(i) for i in range(8)]).reservation_id
    payloads = {i: payload_of(new.keys[i], namespace.block_bytes) for i in range(8)}
    for _ in range(20):
        call = raw.cache.Write.future(write_frames(number, payloads), timeout=20, metadata=raw.metadata)
        call.cancel()
    wait_for(lambda: raw.stats()["staged_bytes"] in (0, 8 * namespace.block_bytes))
    if raw.stats()["staged_bytes"] == 0:
        raw.write(number, payloads)
    # A commit whose caller has gone is finished all the same.
    raw.cache.Commit.future(
        pb.CommitRequest(reservation_id=number), timeout=20, metadata=raw.metadata
    ).cancel()
    wait_for(lambda: raw.stats()["staged_bytes"] == 0 or not raw.stats()["jobs_waiting"])
    raw.call("Abort", pb.AbortRequest(reservation_id=number))
    wait_for(lambda: raw.stats()["reservations"] == 0)
    assert raw.lookup(new, lease=False).blocks_held in (0, 8)
    assert all(chain.is_right(header, data) for header, data in raw.fetch(found.lease_id, count=blocks))


# ---- what else is served ------------------------------------------------------------------------------------


def test_health_and_reflection_are_there(raw: Raw) -> None:
    health = health_pb2_grpc.HealthStub(raw.channel)
    for name in ("", "kvstore.v1.Cache", "kvstore.v1.Admin"):
        reply = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    stub = reflection_pb2_grpc.ServerReflectionStub(raw.channel)
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    names = {
        each.name for each in next(stub.ServerReflectionInfo(iter([asked]))).list_services_response.service
    }
    assert {"kvstore.v1.Cache", "kvstore.v1.Admin", "grpc.health.v1.Health"} <= names


def test_files_and_sockets_are_for_this_user_alone(service: ServiceProcess) -> None:
    assert stat.S_IMODE(service.directory.stat().st_mode) == 0o700
    for path in service.directory.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
