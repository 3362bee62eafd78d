"""No client takes all of anything, and nobody waits for another: leases, sessions, bytes, connections, the event loop."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import grpc
import pytest

from kvstore.v1 import cache_pb2 as pb
from tests.e2e.service_raw import Chain, Raw, error_of
from tests.e2e.test_service_map import wait_for
from tests.support.probe import Probe
from tests.support.service import PROGRAM, SMALL, running_service, short_directory


def test_a_clear_of_many_blocks_holds_nobody_up_and_leaves_nothing() -> None:
    with running_service(staging=64 << 20) as service, Raw(service.directory) as raw:
        doomed, kept = raw.open("doomed"), raw.open("kept")
        chains = [Chain(doomed, 4000, seed=seed) for seed in range(4)]
        for chain in chains:
            assert raw.store(chain).items == 4000
        other = Chain(kept, 8, seed=9)
        raw.store(other)
        with Probe(service.target) as probe, ThreadPoolExecutor(1) as threads:
            before = raw.stats()["loop_gaps_long_total"]
            begin = time.monotonic()
            clearing = threads.submit(raw.admin.Clear, pb.ClearRequest(namespace=doomed.digest), timeout=60)
            looked = 0
            while not clearing.done():
                assert raw.lookup(other, lease=False).blocks_held == 8
                looked += 1
            seconds = time.monotonic() - begin
        assert clearing.result().blocks == 16_000
        # In one piece it would have held up the first lookup, or one soon after, to its own end.
        assert looked > 3, (looked, seconds, before)
        assert not probe.errors
        assert probe.answers == 0 or probe.slowest_seconds < max(0.1, seconds / 2)
        assert all(raw.lookup(chain, lease=False).blocks_held == 0 for chain in chains)
        service.restart()
        with Raw(service.directory) as again:
            doomed, kept = again.open("doomed"), again.open("kept")
            assert again.stats()["blocks"] == 8
            assert again.lookup(Chain(doomed, 4000, seed=0), lease=False).blocks_held == 0


def test_one_session_has_a_share_of_all_leases_and_others_go_on() -> None:
    with running_service(leases=40) as service, Raw(service.directory) as greedy:
        namespace = greedy.open("leases")
        chain = Chain(namespace, 4, seed=1)
        greedy.store(chain)
        held = [greedy.lookup(chain).lease_id for _ in range(10)]
        with pytest.raises(grpc.RpcError, match="leases_per_session=11; allowed: 10") as refused:
            greedy.lookup(chain)
        assert error_of(refused.value) == "LIMIT_EXCEEDED"
        assert greedy.lookup(chain, lease=False).blocks_held == 4
        with Raw(service.directory) as other:
            assert other.lookup(chain).lease_id
        assert greedy.call("Release", pb.ReleaseRequest(lease_id=held[0])).was_held
        assert not greedy.call("Release", pb.ReleaseRequest(lease_id=held[0])).was_held
        assert greedy.lookup(chain).lease_id


def test_a_thousand_lookups_that_nobody_fetches_end_and_three_times_the_capacity_is_stored() -> None:
    with (
        running_service(lease=2.0, disk=32 << 20, segment=1 << 20) as service,
        Raw(service.directory) as idle,
        Raw(service.directory) as writer,
    ):
        namespace = idle.open("idle")
        chain = Chain(namespace, 16, seed=1)
        idle.store(chain)
        for _ in range(1000):
            assert idle.lookup(chain).lease_id
        rounds = 3 * (32 << 20) // (1000 * namespace.block_bytes) + 1
        for seed in range(rounds):
            assert writer.store(Chain(namespace, 1000, seed=100 + seed)).items == 1000
        wait_for(lambda: writer.stats()["leases"] == 0)
        stats = writer.stats()
        assert stats["expired_leases_total"] == 1000
        assert stats["evicted_blocks_total"] > 0
        assert stats["disk_allocated_bytes"] + stats["disk_other_bytes"] <= 32 << 20


def test_one_session_stages_its_share_and_others_write_beside_it() -> None:
    with running_service(staging=8 << 20) as service, Raw(service.directory) as greedy:
        namespace = greedy.open("staging", profile="flash-slim")
        fit = (4 << 20) // namespace.block_bytes
        chain = Chain(namespace, fit + 1, seed=1)
        reply = greedy.reserve(namespace, [chain.block(index) for index in range(fit + 1)])
        payload = bytes(namespace.block_bytes)
        greedy.write(reply.reservation_id, dict.fromkeys(range(fit), payload))
        with pytest.raises(grpc.RpcError, match="staging_per_session") as refused:
            greedy.write(reply.reservation_id, {fit: payload})
        assert error_of(refused.value) == "LIMIT_EXCEEDED"
        with Raw(service.directory) as other:
            assert other.store(Chain(namespace, 2, seed=2)).items == 2
        assert greedy.commit(reply.reservation_id).items == fit
        assert greedy.store(Chain(namespace, 2, seed=3)).items == 2
        assert greedy.stats()["staged_bytes"] == 0


def test_sixteen_clients_that_fetch_at_once_get_their_bytes_or_are_told_that_it_is_busy() -> None:
    # The fetches' part of so little memory is the least that there is, 4 MiB.
    options = {"memory": 64 << 20, "cache": 1 << 20, "pool": 1 << 20, "arenas": 1 << 20, "staging": 8 << 20}
    with running_service(**options, handoff=1 << 20) as service, ExitStack() as clients:
        raws = [clients.enter_context(Raw(service.directory)) for _ in range(16)]
        namespace = raws[0].open("fetches", profile="flash-slim")
        blocks = (8 << 20) // namespace.block_bytes
        chain = Chain(namespace, blocks, seed=1)
        for first in range(0, blocks, 2):
            raws[0].store(chain, first=first, last=min(first + 2, blocks))

        def fetch(raw: Raw) -> str:
            lease_id = raw.lookup(chain).lease_id
            try:
                items = raw.fetch(lease_id, count=blocks)
            except grpc.RpcError as error:
                return error_of(error)
            assert len(items) == blocks
            return "right" if all(chain.is_right(*item) for item in items) else "wrong"

        with Probe(service.target) as probe, ThreadPoolExecutor(16) as threads:
            ended = list(threads.map(fetch, raws))
        assert set(ended) <= {"right", "LIMIT_EXCEEDED"}, ended
        assert "right" in ended
        assert not probe.errors
        assert fetch(raws[3]) == "right"
        wait_for(lambda: raws[0].stats()["fetching_bytes"] == 0)


# ---- connections --------------------------------------------------------------------------------------------


@pytest.fixture
def connections() -> Iterator[list[socket.socket]]:
    made: list[socket.socket] = []
    yield made
    for each in made:
        each.close()


def test_a_flood_of_session_connections_is_refused_past_the_limit_and_harms_no_one(
    connections: list[socket.socket],
) -> None:
    with running_service(sessions=50) as service, Raw(service.directory) as raw:
        namespace = raw.open("flood")
        chain = Chain(namespace, 4, seed=1)
        raw.store(chain)
        path = str(service.directory / "session.sock")
        with Probe(service.target) as probe:
            # None of them ever reads, and some are gone before they are looked at.
            for number in range(500):
                made = socket.socket(socket.AF_UNIX)
                connections.append(made)
                # Without a time limit: with one, a full queue of connections would be an error at once.
                made.connect(path)
                if number % 5 == 0:
                    connections.pop().close()
            assert raw.lookup(chain, lease=False).blocks_held == 4
            assert raw.stats()["sessions"] <= 50
            while connections:
                connections.pop().close()
            wait_for(lambda: raw.stats()["sessions"] == 1)
        assert not probe.errors
        assert raw.stats()["sessions_refused_total"] > 0
        with Raw(service.directory) as after:
            assert after.lookup(chain).lease_id


def test_a_client_of_another_user_is_refused_by_its_uid() -> None:
    if os.geteuid() != 0:
        pytest.skip("root: only root can become another user")
    with running_service() as service, Raw(service.directory) as raw:
        # As if someone had opened the directory and the socket to all.
        for path, mode in (
            (service.directory.parent, 0o755),
            (service.directory, 0o755),
            (service.directory / "session.sock", 0o666),
        ):
            path.chmod(mode)
        program = (
            "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); s.settimeout(10);"
            "s.connect(sys.argv[1]); sys.stdout.write(s.makefile().readline())"
        )
        done = subprocess.run(
            [sys.executable, "-I", "-c", program, str(service.directory / "session.sock")],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        hello = json.loads(done.stdout)
        assert hello["error"] == "UNKNOWN_SESSION"
        assert "65534" in hello["message"]
        assert raw.stats()["sessions"] == 1


@pytest.mark.parametrize(
    ("options", "limit", "words"),
    [
        ({}, "ulimit -n 64", "RLIMIT_NOFILE"),
        ({"memory": 8 << 20}, "true", "--memory"),
        ({"pool": 1 << 55}, "true", "--pool"),
    ],
    ids=["descriptors", "parts of memory", "more than there is"],
)
def test_a_start_with_too_little_is_refused_at_once_by_name(
    options: dict[str, int], limit: str, words: str
) -> None:
    with short_directory() as directory:
        given = json.dumps({**SMALL, **options, "dir": str(directory)})
        done = subprocess.run(
            ["bash", "-c", f'{limit}; exec "$0" "$@"', sys.executable, "-c", PROGRAM, given],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode != 0
        assert words in done.stderr.splitlines()[-1], done.stderr
        assert not directory.exists()


def test_a_start_says_what_each_part_of_memory_has() -> None:
    with running_service(memory=256 << 20, pool=0, handoff=0, cache=0, staging=0) as service:
        assert "memory 256MiB of " in service.log
        assert "block cache 102MiB" in service.log
        assert "bytes a block beside that" in service.log
