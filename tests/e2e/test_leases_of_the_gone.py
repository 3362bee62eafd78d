"""A lease outlives neither its client nor its time, whatever the clock says: then others store as much as they like."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.v1 import cache_pb2 as pb
from tests.e2e.service_raw import Chain, Raw
from tests.support.polling import wait_for
from tests.support.service import running_service, short_directory
from tests.support.serving import SetClock, serving

DISK = 8 << 20
SMALL_DISK = {"disk": DISK, "segment": 1 << 20}
HOUR = 3600.0


HELD_BLOCKS = 800
CHAIN_BLOCKS = 400


def store_times_capacity(raw: Raw, namespace: pb.Namespace, times: int, *, seed: int) -> None:
    """So many times what the disk holds, none of it refused."""
    for number in range(times * DISK // (CHAIN_BLOCKS * namespace.block_bytes) + 1):
        chain = Chain(namespace, CHAIN_BLOCKS, seed=seed + number)
        assert raw.store(chain).items == CHAIN_BLOCKS


HOLDER = """
import sys
from pathlib import Path
from tests.e2e.service_raw import Chain, Raw
from tests.support.mapping import Mapped
raw = Raw(Path(sys.argv[1]))
held = Chain(raw.open("capacity"), 800, seed=1)
for _ in range(20):
    found = raw.lookup(held)
    assert found.lease_id
mapped = Mapped(raw)
assert mapped.map(found.lease_id, count=100)
frames = raw.fetch(found.lease_id, count=100)
new = Chain(held.namespace, 100, seed=int(sys.argv[2]))
assert raw.reserve(held.namespace, [new.block(index) for index in range(100)]).reservation_id
print("holding", flush=True)
sys.stdin.read()
"""


def test_killed_clients_hold_nothing_and_others_store_three_times_the_capacity() -> None:
    with running_service(**SMALL_DISK, lease=600) as service, Raw(service.directory) as raw:
        namespace = raw.open("capacity")
        held = Chain(namespace, HELD_BLOCKS, seed=1)
        raw.store(held)
        children = [
            subprocess.Popen(
                [sys.executable, "-c", HOLDER, str(service.directory), str(50 + number)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for number in range(3)
        ]
        try:
            for child in children:
                assert child.stdout is not None
                assert child.stdout.readline() == b"holding\n"
            # While they live nothing of it goes, though the disk is too small for all.
            store_times_capacity(raw, raw.open("others"), 1, seed=100)
            stats = raw.stats()
            assert (stats["leases"], stats["reservations"]) == (60, 3)
            assert raw.lookup(held, lease=False).blocks_held == HELD_BLOCKS
            for child in children:
                child.send_signal(signal.SIGKILL)
                child.wait(10)
        finally:
            for child in children:
                child.kill()
                child.wait(10)
                for pipe in (child.stdin, child.stdout):
                    assert pipe is not None
                    pipe.close()
        names = ("leases", "reservations", "uploads", "mapped_items", "reserved_items")
        wait_for(lambda: not any(raw.stats()[name] for name in names))
        assert raw.stats()["sessions"] == 1
        store_times_capacity(raw, raw.open("others"), 3, seed=200)
        stats = raw.stats()
        assert raw.lookup(held, lease=False).blocks_held < HELD_BLOCKS
        assert stats["disk_allocated_bytes"] + stats["disk_other_bytes"] <= DISK


LEASE_SECONDS = 600.0


def hold_through(directory: Path, clock: SetClock, offset: float) -> None:
    """A lease, the wall clock moved by `offset`, the capacity stored; then the lease's end, and three times as much."""
    with Raw(directory) as raw, Raw(directory) as writer:
        namespace, others = raw.open("held"), writer.open("others")
        held = Chain(namespace, 100, seed=1)
        raw.store(held)
        leases = [raw.lookup(held).lease_id for _ in range(2)]
        clock.offset = offset
        store_times_capacity(writer, others, 1, seed=1000)
        assert raw.stats()["leases"] == 2
        items = raw.fetch(leases[0], count=100)
        assert [held.is_right(*item) for item in items] == [True] * 100
        assert raw.call("Release", pb.ReleaseRequest(lease_id=leases[0])).was_held
        # The other one lasts as long as was said, and no longer, whatever the wall clock says.
        clock.ahead = LEASE_SECONDS - 60.0
        store_times_capacity(writer, others, 1, seed=2000)
        assert len(raw.fetch(leases[1], count=1)) == 1
        clock.ahead = LEASE_SECONDS + 1.0
        wait_for(lambda: raw.stats()["leases"] == 0)
        store_times_capacity(writer, others, 3, seed=3000)
        assert raw.lookup(held, lease=False).blocks_held == 0
        assert not raw.call("Release", pb.ReleaseRequest(lease_id=leases[1])).was_held


@pytest.mark.parametrize("offset", [HOUR, -HOUR])
async def test_a_wall_clock_that_is_set_while_leases_are_held_changes_nothing(offset: float) -> None:
    clock = SetClock()
    with short_directory() as directory:
        async with serving(directory, clock=clock, **SMALL_DISK, lease=LEASE_SECONDS):
            await asyncio.to_thread(hold_through, directory, clock, offset)
