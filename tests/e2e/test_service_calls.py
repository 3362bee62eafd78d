"""The service's calls over the wire: what they do, what bounds them, and what is left when a client goes."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvstore.profile.layout import state_layout
from kvstore.profile.registry import get_profile
from kvstore.v1 import cache_pb2 as pb
from tests.e2e.service_raw import (
    Chain,
    Raw,
    error_of,
    frame_of,
    payload_of,
    put_handoff,
    write_frames,
)
from tests.support.service import ServiceProcess


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
from tests.e2e.service_raw import FRAME_BYTES, Chain, Raw, error_of, frame_of, payload_of, put_handoff, write_frames
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
        yield frame_of(number, bytes(1000))
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
