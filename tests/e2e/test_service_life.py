"""A service's life: start, kill, restart, stop under load, a full disk, slow readers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.v1 import cache_pb2 as pb
from tests.e2e.service_raw import EAGER, Chain, Raw, error_of, payload_of, write_frames
from tests.support.service import ServiceProcess, running_service, short_directory


def held_blocks(raw: Raw, chain: Chain) -> int:
    """Blocks that are found, each fetched and compared."""
    found = raw.lookup(chain)
    if not found.lease_id:
        return 0
    items = raw.fetch(found.lease_id, count=found.plan.chosen.compute_from // chain.namespace.block_tokens)
    raw.call("Release", pb.ReleaseRequest(lease_id=found.lease_id))
    assert all(chain.is_right(header, data) for header, data in items if not header.missing)
    return sum(not header.missing for header, _ in items)


def wait_for(raw: Raw, name: str, value: float, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while raw.stats()[name] != value:
        assert time.monotonic() < end, f"{name} is {raw.stats()[name]}, not {value}"


# ---- kill and restart ---------------------------------------------------------------------------------------


def test_what_was_acknowledged_outlives_a_kill() -> None:
    with running_service() as service:
        with Raw(service.directory) as raw:
            kept, cleared = raw.open("kept", policy="periodic:64"), raw.open("cleared")
            chains = [Chain(kept, 10, seed=i) for i in range(20)]
            for chain in chains:
                raw.store(chain, states=[9])
            gone = Chain(cleared, 10, seed=99)
            raw.store(gone)
            raw.admin.Clear(pb.ClearRequest(namespace=cleared.digest), timeout=10)
            raw.admin.SetPolicy(pb.SetPolicyRequest(namespace=kept.digest, policy="zero"), timeout=10)
            found = raw.lookup(chains[0])
            service.restart()
            # The old session and its lease are of another service, and are told so.
            with Raw(service.directory) as new:
                stream = new.cache.Fetch(
                    pb.FetchRequest(lease_id=found.lease_id), timeout=10, metadata=raw.metadata
                )
                with pytest.raises(grpc.RpcError) as refused:
                    next(stream)
                assert error_of(refused.value) == "UNKNOWN_SESSION"
                assert new.hello["boot"] != raw.hello["boot"]
        with Raw(service.directory) as raw:
            assert [held_blocks(raw, chain) for chain in chains] == [10] * 20
            assert {raw.lookup(chain, lease=False).plan.chosen.state_source for chain in chains} == {
                pb.CHECKPOINT
            }
            assert raw.lookup(gone, lease=False).blocks_held == 0
            names = {
                each.name: each.policy
                for each in raw.admin.ListNamespaces(pb.ListNamespacesRequest(), timeout=10).namespaces
            }
            assert names == {"kept": "zero", "cleared": "endpoints"}
            raw.store(gone)
            assert held_blocks(raw, gone) == 10
            assert "200 blocks, 20 states, 2 namespaces" in service.log


def drop_ssd_states(raw: Raw, namespace: bytes = b"") -> pb.DropStatesReply:
    return raw.admin.DropStates(pb.DropStatesRequest(namespace=namespace, tier=pb.STATE_TIER_SSD), timeout=10)


def edges_of(raw: Raw, chain: Chain) -> tuple[int, list[int], list[int]]:
    """Blocks of the chain that are found, and the edges where a resume finds a state or rows on SSD."""
    coverage = raw.lookup(chain, lease=False).coverage
    rows = sorted({*coverage.rows, *coverage.rows_overlap})
    return coverage.blocks, list(coverage.checkpoints), rows


@pytest.mark.parametrize("ending", ["stop", "kill"])
def test_dropped_states_stay_away_after_a_restart_and_later_ones_are_found(ending: str) -> None:
    with running_service() as service:
        with Raw(service.directory) as raw:
            one, other = raw.open("one"), raw.open("other")
            chains = [Chain(one, 8, seed=i) for i in range(10)]
            apart = Chain(other, 4, seed=50)
            for chain in [*chains, apart]:
                raw.store(chain, states=[3])
                raw.store_items(chain.namespace, [chain.rows(i) for i in range(4)])
            with_rows = edges_of(raw, apart)
            assert with_rows == (4, [128], [128])
            assert edges_of(raw, chains[0])[1:] == with_rows[1:]
            reply = drop_ssd_states(raw, one.digest)
            assert (reply.dropped, reply.kept) == (50, 0)
            raw.store_items(one, [chains[0].state(5), chains[1].state(3)])
        for _ in range(2):
            getattr(service, ending)()
            service.start()
            with Raw(service.directory) as raw:
                assert [edges_of(raw, chain) for chain in chains[2:]] == [(8, [], [])] * 8
                assert edges_of(raw, chains[0]) == (8, [192], [])
                assert edges_of(raw, chains[1]) == (8, [128], [])
                assert edges_of(raw, apart) == with_rows
                assert raw.stats()["states_ssd"] == 7
                assert [held_blocks(raw, chain) for chain in chains] == [8] * 10
        with Raw(service.directory) as raw:
            assert drop_ssd_states(raw).dropped == 7
        getattr(service, ending)()
        service.start()
        with Raw(service.directory) as raw:
            values = raw.stats()
            assert (values["states_ssd"], values["rows_ssd"], values["blocks"]) == (0, 0, 84)


def test_a_drop_beside_a_leased_state_is_made_good_by_the_next_one() -> None:
    with running_service() as service:
        with Raw(service.directory) as raw:
            namespace, other = raw.open("leased"), raw.open("other")
            kept, dropped, apart = (
                Chain(namespace, 4, seed=1),
                Chain(namespace, 4, seed=2),
                Chain(other, 4, seed=3),
            )
            for chain in (kept, dropped, apart):
                raw.store(chain, states=[3])
            found = raw.lookup(kept)
            assert found.plan.chosen.state_source == pb.CHECKPOINT
            reply = drop_ssd_states(raw)
            assert (reply.dropped, reply.kept) == (2, 1)
            items = raw.fetch(found.lease_id, count=4, state=True)
            assert len(items) == 5
            assert all(kept.is_right(header, data) for header, data in items)
        service.restart()
        with Raw(service.directory) as raw:
            assert edges_of(raw, kept) == (4, [128], [])
            assert edges_of(raw, apart) == (4, [], [])
            assert drop_ssd_states(raw).kept == 0
        service.restart()
        with Raw(service.directory) as raw:
            assert [edges_of(raw, chain) for chain in (kept, dropped, apart)] == [(4, [], [])] * 3


def test_drops_while_states_are_stored_leave_the_same_states_before_and_after_a_kill() -> None:
    with running_service() as service:
        with Raw(service.directory) as raw:
            namespace = raw.open("n")
            chains = [Chain(namespace, 2, seed=i) for i in range(150)]

            def store() -> None:
                with Raw(service.directory) as own:
                    for chain in chains:
                        own.store(chain, states=[0, 1])

            with ThreadPoolExecutor(1) as pool:
                storing = pool.submit(store)
                drops = 0
                while not storing.done():
                    drops += drop_ssd_states(raw).dropped > 0
                storing.result()
            assert drops > 5
            chains.append(Chain(namespace, 2, seed=999))
            raw.store(chains[-1], states=[1])
            before = [edges_of(raw, chain) for chain in chains]
            assert before[-1] == (2, [64], [])
        service.restart()
        with Raw(service.directory) as raw:
            assert [edges_of(raw, chain) for chain in chains] == before


class Writers:
    """Threads that store chains until the service goes; what each was told is durable, and its first odd error."""

    def __init__(self, directory: Path, threads: int) -> None:
        self.acknowledged: list[tuple[int, int]] = []
        self.odd: list[BaseException] = []
        self._directory = directory
        self._enough = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(threads)]

    def _run(self, number: int) -> None:
        try:
            with Raw(self._directory) as raw:
                namespace = raw.open("busy")
                for seed in range(number * 100_000, number * 100_000 + 5_000):
                    raw.store(Chain(namespace, 4, seed=seed))
                    self.acknowledged.append((seed, 4))
                    if len(self.acknowledged) > 20:
                        self._enough.set()
        except grpc.RpcError as error:
            gone = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
            if not gone and error_of(error) not in ("DRAINING", "UNKNOWN_SESSION"):
                self.odd.append(error)
        except OSError as error:
            self.odd.append(error)

    def run_until_busy(self) -> None:
        for thread in self._threads:
            thread.start()
        assert self._enough.wait(20), "the writers came to nothing"

    def join(self) -> None:
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive()


@pytest.mark.parametrize("ending", ["stop", "kill"])
def test_an_end_while_busy_loses_nothing_that_was_acknowledged(ending: str) -> None:
    with running_service() as service:
        writers = Writers(service.directory, 3)
        writers.run_until_busy()
        start = time.monotonic()
        status = getattr(service, ending)()
        assert time.monotonic() - start < 11
        assert status == (0 if ending == "stop" else -9)
        writers.join()
        assert writers.odd == []
        if ending == "stop":
            assert not (service.directory / "kvstore.sock").exists()
            assert "Traceback" not in service.log
        service.start()
        with Raw(service.directory) as raw:
            namespace = raw.open("busy")
            chains = [Chain(namespace, blocks, seed=seed) for seed, blocks in writers.acknowledged]
            missing = [
                chain for chain in chains if raw.lookup(chain, lease=False).blocks_held != len(chain.keys)
            ]
            assert missing == []
            assert held_blocks(raw, Chain(namespace, 4, seed=writers.acknowledged[-1][0])) == 4


def test_a_stop_ends_an_idle_client_that_holds_things_in_good_time() -> None:
    with running_service() as service, Raw(service.directory) as raw:
        chain = Chain(raw.open("n"), 2, seed=1)
        raw.store(chain)
        assert raw.lookup(chain).lease_id
        start = time.monotonic()
        assert service.stop() == 0
        assert time.monotonic() - start < 5
        assert raw.socket.recv(1) == b""


def test_a_drain_refuses_what_is_new_and_waits_for_what_is_open() -> None:
    with running_service() as service, Raw(service.directory) as raw:
        namespace = raw.open("n")
        chain = Chain(namespace, 3, seed=1)
        raw.store(chain, last=2)
        found = raw.lookup(chain)
        number = raw.reserve(namespace, [chain.block(2)]).reservation_id
        assert raw.admin.Drain(pb.DrainRequest(seconds=0.1), timeout=10).left_open == 2
        health = health_pb2_grpc.HealthStub(raw.channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
        for call in (
            lambda: raw.lookup(chain),
            lambda: raw.reserve(namespace, [chain.block(2)]),
            lambda: raw.call(
                "PutHandoff", iter([pb.HandoffFrame(header=pb.HandoffHeader(namespace=namespace.digest))])
            ),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                call()
            assert error_of(refused.value) == "DRAINING"
        drain = raw.admin.Drain.future(pb.DrainRequest(seconds=20), timeout=30)
        raw.write(number, {0: payload_of(chain.keys[2], namespace.block_bytes)})
        assert raw.commit(number).items == 1
        assert len(raw.fetch(found.lease_id, count=2)) == 2
        raw.call("Release", pb.ReleaseRequest(lease_id=found.lease_id))
        assert drain.result(10).left_open == 0
        assert raw.lookup(chain, lease=False).blocks_held == 3


# ---- starting -----------------------------------------------------------------------------------------------


def refused_start(directory: Path, **options: str) -> str:
    """What a service that does not start says: one line."""
    environment = {**os.environ, "KVSTORE_DIR": str(directory), "KVSTORE_DISK": "64MiB"}
    environment.update({f"KVSTORE_{name.upper()}": value for name, value in options.items()})
    ended = subprocess.run(
        [sys.executable, "-m", "kvstore.service"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    return ended.stderr


def test_a_second_service_on_a_directory_is_refused_and_harms_nothing() -> None:
    with running_service() as service, Raw(service.directory) as raw:
        chain = Chain(raw.open("n"), 3, seed=1)
        raw.store(chain)
        assert "another process" in refused_start(service.directory)
        assert held_blocks(raw, chain) == 3
        with Raw(service.directory) as other:
            assert held_blocks(other, chain) == 3


def test_starts_that_cannot_be_are_refused_by_name() -> None:
    with short_directory() as directory:
        assert "107 bytes" in refused_start(directory / ("d" * 120))
        assert not (directory / ("d" * 120)).exists()
        assert "holds fewer than 4 segments" in refused_start(directory, disk="4MiB", segment="2MiB")
        assert "HOST:PORT" in refused_start(directory, metrics="nowhere")
    with short_directory() as directory:
        directory.mkdir()
        (directory / "thesis.txt").write_text("keep me")
        mode = directory.stat().st_mode
        assert "thesis.txt" in refused_start(directory)
        assert (directory / "thesis.txt").read_text() == "keep me"
        assert directory.stat().st_mode == mode


def test_a_dead_services_sockets_are_replaced() -> None:
    with running_service() as service:
        service.kill()
        assert (service.directory / "kvstore.sock").exists()
        service.start()
        with Raw(service.directory) as raw:
            assert raw.stats()["ready"] == 1


# ---- time ---------------------------------------------------------------------------------------------------


def test_leases_and_reservations_end_at_their_deadline_without_help() -> None:
    with running_service(lease=0.3) as service, Raw(service.directory) as raw:
        namespace = raw.open("n")
        chain = Chain(namespace, 4, seed=1)
        raw.store(chain, last=3, states=[2], pool=True)
        leases = [raw.lookup(chain).lease_id for _ in range(50)]
        number = raw.reserve(namespace, [chain.block(3)]).reservation_id
        raw.write(number, {0: payload_of(chain.keys[3], namespace.block_bytes)})
        wait_for(raw, "leases", 0)
        wait_for(raw, "reservations", 0)
        values = raw.stats()
        assert (values["staged_bytes"], values["states_pool_pinned"], values["expired_leases_total"]) == (
            0,
            0,
            50,
        )
        for code, call in (
            ("UNKNOWN_LEASE", lambda: raw.fetch(leases[-1], count=1)),
            ("UNKNOWN_RESERVATION", lambda: raw.commit(number)),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                call()
            assert error_of(refused.value) == code
        assert list(raw.reserve(namespace, [chain.block(3)]).outcomes) == [pb.GRANTED]


def collect(frames: Iterator[pb.ItemFrame], data: bytearray) -> None:
    for frame in frames:
        data += frame.data


def test_a_reader_slower_than_its_lease_gets_right_bytes_or_the_leases_end() -> None:
    with running_service(lease=0.5, segment=8 << 20) as service, Raw(service.directory) as raw:
        chain = Chain(raw.open("n", profile="flash-slim"), 64, seed=1)
        for first in range(0, 64, 16):
            raw.store(chain, first=first, last=first + 16)
        found = raw.lookup(chain)
        blocks = found.plan.chosen.compute_from // chain.namespace.block_tokens
        frames = raw.cache.Fetch(
            pb.FetchRequest(lease_id=found.lease_id, block_count=blocks),
            timeout=30,
            metadata=raw.metadata,
        )
        stream = b"".join(payload_of(key, chain.namespace.block_bytes) for key in chain.keys[:blocks])
        first_frame = next(frames).data
        # The reader reads nothing more until its lease has run out; what it is sent then is right, or an error.
        with Raw(service.directory) as other:
            wait_for(other, "leases", 0)
        data = bytearray(first_frame)
        with pytest.raises(grpc.RpcError) as refused:
            collect(frames, data)
        assert error_of(refused.value) == "UNKNOWN_LEASE"
        assert bytes(data) == stream[: len(data)]
        wait_for(raw, "fetching_bytes", 0)


def test_blocks_leave_when_their_retention_is_over() -> None:
    with running_service(retention=1) as service, Raw(service.directory) as raw:
        raw.store(Chain(raw.open("n"), 20, seed=1), states=[19])
        wait_for(raw, "blocks", 0)
        values = raw.stats()
        assert (
            values["expired_blocks_total"],
            values["retention_shortfall_total"],
            values["states_ssd"],
        ) == (20, 0, 0)


# ---- space --------------------------------------------------------------------------------------------------

SMALL_DISK = {"disk": 8 << 20, "segment": 1 << 20}


def test_more_than_the_disk_holds_evicts_within_the_budget() -> None:
    with running_service(**SMALL_DISK) as service, Raw(service.directory) as raw:
        namespace = raw.open("n")
        chains = [Chain(namespace, 100, seed=i) for i in range(75)]
        for chain in chains:
            raw.store(chain, states=[99])
            values = raw.stats()
            assert values["disk_allocated_bytes"] + values["disk_other_bytes"] <= values["disk_budget_bytes"]
            assert values["states_ssd_bytes"] <= values["states_ssd_budget_bytes"]
        assert held_blocks(raw, chains[-1]) == 100
        held = [raw.lookup(chain, lease=False).blocks_held for chain in chains]
        assert held[0] == 0
        assert sum(held) * namespace.block_bytes > SMALL_DISK["disk"] // 3
        assert values["evicted_blocks_total"] > 0
        assert values["retention_shortfall_total"] == values["evicted_blocks_total"]
        service.stop()
        service.start()
        with Raw(service.directory) as again:
            assert held_blocks(again, chains[-1]) == 100


def test_a_disk_full_of_leased_blocks_refuses_and_goes_on_when_they_are_released() -> None:
    with (
        running_service(**SMALL_DISK) as service,
        Raw(service.directory) as raw,
        Raw(service.directory) as writer,
    ):
        namespace = raw.open("n")
        chains = [Chain(namespace, 100, seed=i) for i in range(60)]
        stored: list[Chain] = []

        def store_and_lease() -> None:
            for chain in chains:
                writer.store(chain)
                assert raw.lookup(chain).lease_id
                stored.append(chain)

        with pytest.raises(grpc.RpcError) as refused:
            store_and_lease()
        assert error_of(refused.value) == "NO_SPACE"
        assert len(stored) > 10
        values = raw.stats()
        assert (values["reservations"], values["staged_bytes"], values["evicted_blocks_total"]) == (0, 0, 0)
        # Reads go on, and nothing that is leased has gone.
        assert [held_blocks(raw, chain) for chain in stored] == [100] * len(stored)
        raw.close()
        wait_for(writer, "leases", 0)
        for chain in chains[len(stored) :]:
            writer.store(chain)
        assert held_blocks(writer, chains[-1]) == 100


def test_a_directory_over_its_budget_is_within_it_when_ready() -> None:
    with short_directory() as directory:
        with ServiceProcess(directory, disk=16 << 20, segment=1 << 20) as service, Raw(directory) as raw:
            namespace = raw.open("n")
            for seed in range(30):
                raw.store(Chain(namespace, 100, seed=seed))
            assert service.stop() == 0
        with ServiceProcess(directory, **SMALL_DISK), Raw(directory) as raw:
            values = raw.stats()
            assert values["disk_allocated_bytes"] + values["disk_other_bytes"] <= 8 << 20
            chain = Chain(raw.open("n"), 100, seed=100)
            raw.store(chain)
            assert held_blocks(raw, chain) == 100


def test_damage_is_a_counted_miss_and_can_be_stored_again() -> None:
    with running_service() as service, Raw(service.directory) as raw:
        chain = Chain(raw.open("n"), 10, seed=1)
        raw.store(chain, states=[9])
        [segment] = [path for path in service.directory.iterdir() if path.name.startswith("segment-")]
        damaged = payload_of(chain.keys[6], chain.namespace.block_bytes)
        place = segment.read_bytes().index(damaged)
        with segment.open("r+b") as file:
            file.seek(place + 100)
            file.write(bytes([damaged[100] ^ 1]))
            file.flush()
            os.fsync(file.fileno())
        found = raw.lookup(chain)
        items = raw.fetch(found.lease_id, count=10, state=True)
        assert [header.missing for header, _ in items] == [i == 6 for i in range(11)]
        assert all(chain.is_right(header, data) for header, data in items if not header.missing)
        values = raw.stats()
        assert (values["damaged_total"], values["damaged_blocks_total"], values["blocks"]) == (1, 1, 6)
        raw.store(chain, first=6, states=[9])
        assert held_blocks(raw, chain) == 10


# ---- others are not held up ---------------------------------------------------------------------------------


@contextmanager
def health_delays(raw: Raw) -> Iterator[list[float]]:
    """How long each of many health checks takes while the block runs, in seconds."""
    delays: list[float] = []
    over = threading.Event()
    stub = health_pb2_grpc.HealthStub(raw.channel)

    def ask() -> None:
        while not over.is_set():
            start = time.monotonic()
            stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
            delays.append(time.monotonic() - start)
            over.wait(0.02)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield delays
    finally:
        over.set()
        thread.join(20)


def test_health_answers_while_large_commits_and_fetches_run() -> None:
    with (
        running_service(disk=512 << 20, segment=32 << 20, staging=128 << 20) as service,
        Raw(service.directory) as raw,
    ):
        namespace = raw.open("n", profile="flash-slim")
        chain = Chain(namespace, 128, seed=1)
        payloads = [payload_of(key, namespace.block_bytes) for key in chain.keys]
        with health_delays(raw) as delays:
            reply = raw.reserve(namespace, [chain.block(i) for i in range(128)])
            raw.cache.Write(
                write_frames(reply.reservation_id, dict(enumerate(payloads))),
                timeout=30,
                metadata=raw.metadata,
            )
            assert raw.commit(reply.reservation_id).items == 128
            found = raw.lookup(chain)
            frames = raw.cache.Fetch(
                pb.FetchRequest(lease_id=found.lease_id, block_count=127),
                timeout=30,
                metadata=raw.metadata,
            )
            assert sum(len(frame.data) for frame in frames) == 127 * namespace.block_bytes
            for _ in range(5):
                raw.call(
                    "Lookup",
                    pb.LookupRequest(
                        namespace=namespace.digest,
                        keys=b"".join(chain.keys) * 61,
                        prompt_tokens=1_000_000,
                        costs=EAGER,
                    ),
                )
        assert len(delays) > 5
        # The client shares the two processors and its own interpreter with what it measures.
        assert sorted(delays)[len(delays) * 9 // 10] < 0.1, f"slowest: {sorted(delays)[-5:]}"


def test_readers_that_stop_reading_hold_others_up_no_longer_than_their_leases() -> None:
    with running_service(lease=2, segment=8 << 20, staging=8 << 20) as service, Raw(service.directory) as raw:
        namespace = raw.open("n", profile="flash-slim")
        chain = Chain(namespace, 32, seed=1)
        for first in range(0, 32, 8):
            raw.store(chain, first=first, last=first + 8)
        blocks = 31
        with ExitStack() as stack:
            streams = []
            for _ in range(16):
                other = stack.enter_context(Raw(service.directory))
                found = other.lookup(chain)
                blocks = found.plan.chosen.compute_from // namespace.block_tokens
                stream = other.cache.Fetch(
                    pb.FetchRequest(lease_id=found.lease_id, block_count=blocks),
                    timeout=30,
                    metadata=other.metadata,
                )
                streams.append(stream)
            with health_delays(raw) as delays:
                wait_for(raw, "leases", 0)
                found = raw.lookup(chain)
                items = raw.fetch(found.lease_id, count=blocks)
                assert all(chain.is_right(header, data) for header, data in items)
            assert sorted(delays)[len(delays) * 9 // 10] < 0.1, f"slowest: {sorted(delays)[-5:]}"
            for stream in streams:
                with pytest.raises(grpc.RpcError) as refused:
                    collect(stream, bytearray())
                assert error_of(refused.value) in ("UNKNOWN_LEASE", "LIMIT_EXCEEDED")
        wait_for(raw, "fetching_bytes", 0)
        wait_for(raw, "sessions", 1)


def test_the_metrics_page_has_the_figures_of_stats() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with running_service(metrics=f"127.0.0.1:{port}") as service, Raw(service.directory) as raw:
        raw.store(Chain(raw.open("n"), 3, seed=1))
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
            lines = page.read().decode().splitlines()
        shown = {line.split()[0]: float(line.split()[1]) for line in lines if not line.startswith("#")}
        values = raw.stats()
        assert shown.keys() == {f"kvstore_{name}" for name in values}
        assert shown["kvstore_blocks"] == 3
        assert shown["kvstore_commits_total"] == values["commits_total"] == 1
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/other", timeout=5)
