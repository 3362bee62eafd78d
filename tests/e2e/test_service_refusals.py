"""The whole table of what the service refuses over the wire, and how."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from kvstore.profile.layout import state_layout
from kvstore.profile.registry import get_profile
from kvstore.v1 import cache_pb2 as pb
from tests.e2e.service_raw import (
    FRAME_BYTES,
    Chain,
    Raw,
    error_of,
    frame_of,
    payload_of,
    put_handoff,
    write_frames,
)
from tests.support.service import ServiceProcess

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


def _handoff(**changed: Any) -> Case:
    size = state_layout(get_profile("tiny"), 45).total_bytes
    return lambda raw, namespace: put_handoff(raw, namespace, bytes(size), **changed)


def _take(*, before: int = 0, confirmed: bool = False, elsewhere: bool = False, **header: Any) -> Case:
    """A take of a ticket that may be taken once, after so many that went well; what is left of it is cleared."""
    size = state_layout(get_profile("tiny"), 45).total_bytes

    def take(raw: Raw, namespace: pb.Namespace, ticket: bytes) -> int:
        request = pb.TakeHandoffRequest(namespace=namespace.digest, ticket=ticket)
        return next(frame.header.take_id for frame in list(raw.call("TakeHandoff", request)))

    def call(raw: Raw, namespace: pb.Namespace) -> object:
        ticket = put_handoff(raw, namespace, bytes(size), crc32=zlib.crc32(bytes(size)), **header).ticket
        taken = [take(raw, namespace, ticket) for _ in range(before)]
        named = raw.open("elsewhere") if elsewhere else namespace
        try:
            for number in taken if confirmed else ():
                raw.call("ConfirmHandoff", pb.ConfirmHandoffRequest(take_id=number))
            return take(raw, named, ticket)
        finally:
            raw.admin.Clear(pb.ClearRequest(namespace=namespace.digest), timeout=10)

    return call


def _rows(**changed: Any) -> Case:
    def call(raw: Raw, namespace: pb.Namespace) -> object:
        return raw.reserve(namespace, [Chain(namespace, 1, seed=13).rows(0, **changed)])

    return call


def _large_policy(name: str) -> Case:
    def call(raw: Raw, namespace: pb.Namespace) -> object:
        if name == "OpenNamespace":
            return raw.open("large", profile="flash-slim", tenant_salt="large", policy="full")
        digest = raw.open("small", profile="flash-slim").digest
        return raw.admin.SetPolicy(pb.SetPolicyRequest(namespace=digest, policy="full"), timeout=10)

    return call


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
        _write(lambda number, data: [frame_of(0, data)]),
        "INVALID_ARGUMENT",
        "reservation_id",
    ),
    "write to no reservation": (
        _write(lambda number, data: [frame_of(2**60, data)]),
        "UNKNOWN_RESERVATION",
        "reservation_id",
    ),
    "second frame elsewhere": (
        _write(lambda number, data: [pb.WriteFrame(reservation_id=number), frame_of(number + 1, data)]),
        "INVALID_ARGUMENT",
        "reservation_id",
    ),
    "item not granted": (
        _write(lambda number, data: [frame_of(number, data, item=2)]),
        "INVALID_ARGUMENT",
        "items.item",
    ),
    "item of another length": (
        _write(lambda number, data: [frame_of(number, data, length=3327)]),
        "INVALID_ARGUMENT",
        "items.length",
    ),
    "item of no length": (
        _write(lambda number, data: [frame_of(number, data, length=0)]),
        "INVALID_ARGUMENT",
        "items.length",
    ),
    "item announced twice": (
        _write(lambda number, data: [frame_of(number, data), frame_of(number, data)]),
        "INVALID_ARGUMENT",
        "items.item",
    ),
    "bytes past the items": (
        _write(lambda number, data: [frame_of(number, data + b"x", crc32=zlib.crc32(data))]),
        "INVALID_ARGUMENT",
        "data",
    ),
    "bytes without an item": (
        _write(lambda number, data: [pb.WriteFrame(reservation_id=number, data=b"x")]),
        "INVALID_ARGUMENT",
        "data",
    ),
    "stream that ends early": (
        _write(lambda number, data: [frame_of(number, data[:-1])]),
        "INVALID_ARGUMENT",
        "data",
    ),
    "frame past its size": (
        _write(lambda number, data: [pb.WriteFrame(reservation_id=number, data=bytes(FRAME_BYTES + 1))]),
        "LIMIT_EXCEEDED",
        "data",
    ),
    "wrong checksum": (
        _write(lambda number, data: [frame_of(number, data, crc32=1)]),
        "DAMAGED_BYTES",
        "crc32",
    ),
    "wrong second checksum": (
        _write(lambda number, data: [frame_of(number, data, has_xxh3=True)]),
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
    "ticket of another namespace": (_take(elsewhere=True), "UNKNOWN_TICKET", "another namespace"),
    "ticket that is out": (_take(before=1), "LIMIT_EXCEEDED", "are out"),
    "ticket used too often": (_take(before=1, confirmed=True), "LIMIT_EXCEEDED", "used up"),
    "ticket used too late": (_take(seconds=1e-6), "UNKNOWN_TICKET", "past its deadline"),
    "rows for the pool": (_rows(to_pool=True), "INVALID_ARGUMENT", "items[0].to_pool"),
    "rows of another length": (_rows(length=12), "GEOMETRY_MISMATCH", "20480 or 23552"),
    "exactness of no kind": (_lookup(exactness=7), "INVALID_ARGUMENT", "exactness"),
    "policy with too many states for a prompt": (
        _large_policy("SetPolicy"),
        "POLICY_TOO_LARGE",
        "1,048,576 tokens / 128 = 8,192 blocks with 3,214,336 B",
    ),
    "the same of a new one": (_large_policy("OpenNamespace"), "POLICY_TOO_LARGE", "the share is"),
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
