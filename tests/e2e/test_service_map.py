"""Map: what a lease protects lies in memory that the session's end maps, and nowhere that it may not look."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest

from kvstore.memory import why_not_mapped
from kvstore.profile.registry import get_profile
from kvstore.service.reader import MAPPED_BATCH_BYTES
from kvstore.v1 import cache_pb2 as pb
from tests.e2e.service_raw import Chain, Raw, error_of, payload_of
from tests.support.mapping import Mapped, extents_of, header_of
from tests.support.polling import wait_for
from tests.support.service import ServiceProcess, running_service

pytestmark = pytest.mark.skipif(bool(why_not_mapped()), reason=why_not_mapped() or "it is mapped")

TINY_CACHE = 1 << 20


@contextmanager
def session(service: ServiceProcess) -> Iterator[tuple[Raw, Mapped]]:
    with Raw(service.directory) as raw:
        mapped = Mapped(raw)
        yield raw, mapped
        mapped.close()


def blocks_of(chain: Chain, found: pb.LookupReply) -> int:
    return int(found.plan.chosen.compute_from // chain.namespace.block_tokens)


def release(raw: Raw, found: pb.LookupReply) -> None:
    assert raw.call("Release", pb.ReleaseRequest(lease_id=found.lease_id)).was_held


def read_bytes(raw: Raw) -> float:
    return raw.stats()["disk_read_payload_bytes_total"]


def stored(raw: Raw, name: str, blocks: int, *, seed: int = 1, profile: str = "tiny") -> Chain:
    chain = Chain(raw.open(name, profile=profile), blocks, seed=seed)
    for first in range(0, blocks, 400):
        raw.store(chain, first=first, last=min(first + 400, blocks))
    return chain


# ---- what is read ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("profile", "blocks", "pool"), [("tiny", 9, True), ("tiny", 1300, False), ("flash-slim", 6, True)]
)
def test_what_is_mapped_is_what_was_stored_and_is_read_once(
    service: ServiceProcess, profile: str, blocks: int, pool: bool
) -> None:
    with session(service) as (raw, mapped):
        chain = stored(raw, f"mapped {profile} {blocks}", blocks, profile=profile)
        raw.store_items(chain.namespace, [chain.state(blocks - 1, pool=pool, ssd=not pool)])
        found = raw.lookup(chain)
        assert found.plan.chosen.state_source == (pb.POOL if pool else pb.CHECKPOINT)
        before = read_bytes(raw)
        first = mapped.map(found.lease_id, count=blocks, state=True)
        assert [(each.kind, each.index) for each in first] == [
            *((pb.BLOCK, number) for number in range(blocks)),
            (pb.STATE, blocks * chain.namespace.block_tokens),
        ]
        assert all(each.lineage == pb.LINEAGE_EXACT and each.generation % 2 == 0 for each in first)
        assert all(chain.is_right(header_of(each), mapped.payload(each)) for each in first)
        assert all(mapped.is_current(each) for each in first)
        bytes_read = blocks * chain.namespace.block_bytes + (not pool) * chain.namespace.state_bytes
        assert read_bytes(raw) - before == bytes_read
        assert raw.stats()["mapped_items"] == blocks + 1
        # Again under the same lease: the same slots, each pinned once.
        assert mapped.map(found.lease_id, count=blocks, state=True) == first
        assert mapped.map(found.lease_id, first=2, count=3) == first[2:5]
        assert raw.stats()["mapped_items"] == blocks + 1
        with session(service) as (other, its):
            again = other.lookup(chain)
            shown = its.map(again.lease_id, count=blocks, state=True)
            assert shown[:blocks] == first[:blocks]
            assert all(chain.is_right(header_of(each), its.payload(each)) for each in shown)
            assert raw.stats()["mapped_items"] == 2 * blocks + 2
        assert read_bytes(raw) - before == bytes_read
        wait_for(lambda: raw.stats()["mapped_items"] == blocks + 1)
        release(raw, found)
        assert raw.stats()["mapped_items"] == 0


def test_a_fetch_is_answered_from_memory_with_the_same_bytes_whole_and_in_slices(
    service: ServiceProcess,
) -> None:
    with session(service) as (raw, mapped):
        chain = stored(raw, "fetched", 6, profile="flash-slim")
        found = raw.lookup(chain)
        blocks = blocks_of(chain, found)
        shown = mapped.map(found.lease_id, count=blocks)
        before = read_bytes(raw)
        items = raw.fetch(found.lease_id, count=blocks)
        assert [data for _, data in items] == [mapped.payload(each) for each in shown]
        frames = raw.cache.Fetch(
            pb.FetchRequest(lease_id=found.lease_id, block_count=blocks, slices=4),
            timeout=30,
            metadata=raw.metadata,
        )
        sliced = b"".join(frame.data for frame in frames)
        assert sorted(sliced) == sorted(b"".join(data for _, data in items))
        assert read_bytes(raw) == before


def test_what_was_fetched_is_in_memory_for_who_maps_it(service: ServiceProcess) -> None:
    with session(service) as (raw, mapped):
        chain = stored(raw, "fetched first", 20)
        found = raw.lookup(chain)
        blocks = blocks_of(chain, found)
        raw.fetch(found.lease_id, count=blocks)
        before = read_bytes(raw)
        shown = mapped.map(found.lease_id, count=blocks)
        assert all(chain.is_right(header_of(each), mapped.payload(each)) for each in shown)
        assert read_bytes(raw) == before


def test_what_is_missing_or_damaged_is_said_to_be_nowhere_and_fetch_says_the_same() -> None:
    with running_service() as service, session(service) as (raw, mapped):
        # The last one of what is read at once: what follows is looked for when it is known to be damaged.
        at = MAPPED_BATCH_BYTES // get_profile("flash-slim").block_bytes - 1
        chain = stored(raw, "damaged", at + 3, profile="flash-slim")
        found = raw.lookup(chain)
        blocks = blocks_of(chain, found)
        bent = payload_of(chain.keys[at], 64)
        [segment] = [path for path in service.directory.glob("segment-*.log") if bent in path.read_bytes()]
        with segment.open("r+b") as file:
            file.seek(segment.read_bytes().index(bent))
            file.write(bytes(64))
        shown = mapped.map(found.lease_id, count=blocks)
        assert [each.extent > 0 for each in shown] == [number < at for number in range(blocks)]
        assert [(each.kind, each.index) for each in shown] == [(pb.BLOCK, i) for i in range(blocks)]
        items = raw.fetch(found.lease_id, count=blocks)
        assert [header.missing for header, _ in items] == [each.extent == 0 for each in shown]
        again = mapped.map(found.lease_id, count=blocks)
        assert [each.extent > 0 for each in again] == [number < at for number in range(blocks)]
        release(raw, found)
        assert raw.stats()["mapped_items"] == 0


def test_refusals_of_map_are_those_of_fetch(service: ServiceProcess) -> None:
    with session(service) as (raw, mapped), Raw(service.directory) as other:
        chain = stored(raw, "refused", 4)
        found = raw.lookup(chain)
        for lease_id, first, count, state, name in (
            (found.lease_id, 0, 99, False, "INVALID_ARGUMENT"),
            (found.lease_id, 2**63, 1, False, "INVALID_ARGUMENT"),
            (found.lease_id, 0, 1, True, "INVALID_ARGUMENT"),
            (10**9, 0, 1, False, "UNKNOWN_LEASE"),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                mapped.map(lease_id, first=first, count=count, state=state)
            assert error_of(refused.value) == name
        with pytest.raises(grpc.RpcError) as refused:
            Mapped(other).map(found.lease_id, count=1)
        assert error_of(refused.value) == "UNKNOWN_LEASE"
        assert mapped.map(found.lease_id, count=0) == []
        mapped.listen()
        assert not mapped.memory


def test_a_service_without_such_memory_says_so_and_brings_the_same_bytes() -> None:
    without = """
import os
def refuse(*asked):
    raise OSError(38, "no such call")
os.memfd_create = refuse
"""
    with running_service(before=without) as service, Raw(service.directory) as raw:
        chain = stored(raw, "n", 6)
        found = raw.lookup(chain)
        with pytest.raises(grpc.RpcError) as refused:
            Mapped(raw).map(found.lease_id, count=1)
        assert error_of(refused.value) == "MEMORY_UNAVAILABLE"
        items = raw.fetch(found.lease_id, count=blocks_of(chain, found))
        assert all(chain.is_right(header, data) for header, data in items)
        release(raw, found)
        assert service.log.count("no sealed shared memory") == 1
        assert not any(name.startswith("memory_") for name in raw.stats())


def test_a_service_stops_though_its_memory_is_mapped() -> None:
    with running_service() as service, session(service) as (raw, mapped):
        chain = stored(raw, "n", 6)
        found = raw.lookup(chain)
        shown = mapped.map(found.lease_id, count=blocks_of(chain, found))
        assert service.stop() == 0
        # What is mapped outlives it.
        assert all(chain.is_right(header_of(each), mapped.payload(each)) for each in shown)


# ---- ends -----------------------------------------------------------------------------------------------------------


def test_what_a_lease_had_is_another_s_when_it_has_ended_and_the_generation_says_so() -> None:
    with running_service(cache=TINY_CACHE) as service, session(service) as (raw, mapped):
        slots = TINY_CACHE // 4096
        one, two = stored(raw, "n", slots, seed=1), stored(raw, "n", slots, seed=2)
        found = raw.lookup(one)
        first = mapped.map(found.lease_id, count=blocks_of(one, found))
        mine = [each for each in first if each.extent]
        # Pages of generations take a little of the memory; what has no room comes by Fetch.
        assert 0.9 * slots < len(mine) < len(first)
        rest = raw.fetch(found.lease_id, first=first.index(first[-1]), count=1)
        assert all(one.is_right(header, data) for header, data in rest)
        with session(service) as (other, its):
            another = other.lookup(two)
            none = its.map(another.lease_id, count=blocks_of(two, another))
            assert all(each.extent == 0 for each in none)
            assert all(
                mapped.is_current(each) and one.is_right(header_of(each), mapped.payload(each))
                for each in mine
            )
            release(raw, found)
            shown = [each for each in its.map(another.lease_id, count=blocks_of(two, another)) if each.extent]
            assert len(shown) == len(mine)
            assert all(two.is_right(header_of(each), its.payload(each)) for each in shown)
            assert not any(mapped.is_current(each) for each in mine)


def _release(raw: Raw, found: pb.LookupReply) -> None:
    release(raw, found)


def _hang_up(raw: Raw, found: pb.LookupReply) -> None:
    raw.socket.close()


def _wait(raw: Raw, found: pb.LookupReply) -> None:
    """Past its deadline."""


@pytest.mark.parametrize("end", [_release, _hang_up, _wait])
def test_however_a_lease_ends_its_memory_can_be_used_again(
    end: Callable[[Raw, pb.LookupReply], None],
) -> None:
    with running_service(cache=TINY_CACHE, lease=2) as service, session(service) as (raw, _):
        slots = TINY_CACHE // 4096
        one, two = stored(raw, "n", slots, seed=1), stored(raw, "n", slots, seed=2)
        with Raw(service.directory) as other:
            found = other.lookup(one)
            assert any(each.extent for each in Mapped(other).map(found.lease_id, count=blocks_of(one, found)))
            assert raw.stats()["mapped_items"] > 0.9 * slots
            end(other, found)
            wait_for(lambda: raw.stats()["mapped_items"] == 0)
        its = Mapped(raw)
        again = raw.lookup(two)
        shown = its.map(again.lease_id, count=blocks_of(two, again))
        assert sum(each.extent > 0 for each in shown) > 0.9 * slots
        its.close()


HOLDER = """
import sys
from pathlib import Path
from tests.e2e.service_raw import Chain, Raw
from tests.support.mapping import Mapped
raw = Raw(Path(sys.argv[1]))
chain = Chain(raw.open("killed"), 20, seed=1)
raw.store(chain)
shown = Mapped(raw).map(raw.lookup(chain).lease_id, count=19)
assert all(each.extent for each in shown)
print("holding", flush=True)
sys.stdin.read()
"""


def test_a_killed_client_pins_nothing(service: ServiceProcess) -> None:
    with Raw(service.directory) as raw:
        child = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(service.directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"holding\n"
            assert raw.stats()["mapped_items"] == 19
            child.send_signal(signal.SIGKILL)
            child.wait(10)
            wait_for(lambda: raw.stats()["mapped_items"] == 0)
        finally:
            child.kill()
            child.wait(10)
            for pipe in (child.stdin, child.stdout):
                assert pipe is not None
                pipe.close()


def test_what_is_cleared_or_dropped_is_let_go_of_at_once_but_for_who_reads_it(
    service: ServiceProcess,
) -> None:
    with session(service) as (raw, mapped):
        chain = stored(raw, "cleared", 20)
        found = raw.lookup(chain)
        blocks = blocks_of(chain, found)
        shown = mapped.map(found.lease_id, count=blocks)
        release(raw, found)
        assert all(mapped.is_current(each) for each in shown)
        raw.admin.Clear(pb.ClearRequest(namespace=chain.namespace.digest), timeout=10)
        assert not any(mapped.is_current(each) for each in shown)
        raw.store(chain)
        found = raw.lookup(chain)
        shown = mapped.map(found.lease_id, count=blocks)
        raw.admin.Clear(pb.ClearRequest(namespace=chain.namespace.digest), timeout=10)
        assert all(each.extent == 0 for each in mapped.map(found.lease_id, count=blocks))
        assert all(mapped.is_current(each) for each in shown)
        release(raw, found)
        assert not any(mapped.is_current(each) for each in shown)

        raw.store(chain, states=[19])
        found = raw.lookup(chain)
        [state] = mapped.map(found.lease_id, count=0, state=True)
        assert chain.is_right(header_of(state), mapped.payload(state))
        release(raw, found)
        raw.admin.DropStates(pb.DropStatesRequest(namespace=chain.namespace.digest), timeout=10)
        assert not mapped.is_current(state)


def test_blocks_that_are_copied_to_other_places_stay_in_memory() -> None:
    """Cleaning moves what lives in a segment of which most is dead."""
    with (
        running_service(disk=24 << 20, segment=1 << 20, cache=16 << 20) as service,
        session(service) as (raw, mapped),
    ):
        kept = stored(raw, "kept", 40)
        found = raw.lookup(kept)
        blocks = blocks_of(kept, found)
        shown = mapped.map(found.lease_id, count=blocks)
        before = read_bytes(raw)
        seed = 2
        while raw.stats()["log_cleaned_bytes_total"] == 0:
            assert seed < 100, "nothing was cleaned"
            stored(raw, "others", 200, seed=seed)
            seed += 1
        assert mapped.map(found.lease_id, count=blocks) == shown
        assert all(kept.is_right(header_of(each), mapped.payload(each)) for each in shown)
        assert read_bytes(raw) == before


# ---- who may look where ---------------------------------------------------------------------------------------------


def test_a_session_is_given_memory_of_its_own_domain_only(service: ServiceProcess) -> None:
    with ExitStack() as stack:
        ends = [stack.enter_context(session(service)) for _ in range(3)]
        seen: list[set[int]] = []
        for number, (raw, mapped) in enumerate(ends):
            chain = stored(raw, f"domain {number}", 30)
            found = raw.lookup(chain)
            shown = mapped.map(found.lease_id, count=blocks_of(chain, found))
            assert all(chain.is_right(header_of(each), mapped.payload(each)) for each in shown)
            seen.append(extents_of(shown))
        for number, (_, mapped) in enumerate(ends):
            mapped.listen()
            assert mapped.memory.keys() == seen[number]
            others = [payload_of(Chain(each, 30, seed=1).keys[5], 64) for each in _others(ends, number)]
            for memory in mapped.memory.values():
                assert not any(memory.find(bytes_) >= 0 for bytes_ in others)
        assert not seen[0] & seen[1]
        assert not seen[1] & seen[2]


def _others(ends: list[tuple[Raw, Mapped]], number: int) -> list[pb.Namespace]:
    return [raw.open(f"domain {each}") for each, (raw, _) in enumerate(ends) if each != number]


def test_a_client_can_neither_write_to_what_it_was_given_nor_change_its_size(service: ServiceProcess) -> None:
    with session(service) as (raw, mapped):
        chain = stored(raw, "written to", 20)
        found = raw.lookup(chain)
        blocks = blocks_of(chain, found)
        shown = mapped.map(found.lease_id, count=blocks)
        [extent] = extents_of(shown)
        given = mapped.descriptors[extent]
        size = len(mapped.memory[extent])
        through = os.open(f"/proc/self/fd/{given}", os.O_RDWR)
        try:
            for descriptor in (given, through):
                with pytest.raises(PermissionError):
                    mmap.mmap(descriptor, size)
                with pytest.raises(PermissionError):
                    os.pwrite(descriptor, b"x", shown[0].offset)
                for other_size in (0, 2 * size):
                    with pytest.raises(PermissionError):
                        os.ftruncate(descriptor, other_size)
                with pytest.raises(PermissionError):
                    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        finally:
            os.close(through)
        assert all(chain.is_right(header_of(each), mapped.payload(each)) for each in shown)
        items = raw.fetch(found.lease_id, count=blocks)
        assert all(chain.is_right(header, data) for header, data in items)


def test_what_a_tenants_session_was_given_stays_that_tenants_until_the_session_ends() -> None:
    with running_service(cache=TINY_CACHE) as service, session(service) as (raw, mapped):
        slots = TINY_CACHE // 4096
        one, two = stored(raw, "one", slots), stored(raw, "two", slots)
        # Who only fetches has been given nothing.
        found = raw.lookup(two)
        raw.fetch(found.lease_id, count=blocks_of(two, found))
        release(raw, found)
        with session(service) as (other, its):
            theirs = other.lookup(one)
            shown = its.map(theirs.lease_id, count=blocks_of(one, theirs))
            assert sum(each.extent > 0 for each in shown) > 0.9 * slots
            release(other, theirs)
            found = raw.lookup(two)
            before = read_bytes(raw)
            none = mapped.map(found.lease_id, count=blocks_of(two, found))
            assert all(each.extent == 0 for each in none)
            # It is read once, for the fetch that brings it.
            assert read_bytes(raw) == before
            items = raw.fetch(found.lease_id, count=blocks_of(two, found))
            assert all(two.is_right(header, data) for header, data in items)
            assert read_bytes(raw) - before == len(items) * two.namespace.block_bytes
            its.listen()
            assert its.memory.keys() == extents_of([each for each in shown if each.extent])
            assert sum(map(len, its.memory.values())) <= TINY_CACHE
        wait_for(lambda: raw.stats()["sessions"] == 1)
        shown = mapped.map(found.lease_id, count=blocks_of(two, found))
        assert sum(each.extent > 0 for each in shown) > 0.9 * slots
        assert raw.stats()["memory_allocated_bytes"] <= TINY_CACHE


def test_what_a_session_cannot_be_given_comes_by_fetch_and_the_session_lives_on() -> None:
    crowded = """
import errno, socket
class Crowded(socket.socket):
    left = 3
    def sendmsg(self, *said):
        if Crowded.left:
            Crowded.left -= 1
            raise OSError(errno.ETOOMANYREFS, "too many on their way")
        return super().sendmsg(*said)
socket.socket = Crowded
"""
    with running_service(before=crowded) as service, session(service) as (raw, mapped):
        chain = stored(raw, "n", 6)
        raw.store_items(chain.namespace, [chain.state(5, pool=True, ssd=False)])
        found = raw.lookup(chain)
        blocks = blocks_of(chain, found)
        for _ in range(2):
            shown = mapped.map(found.lease_id, count=blocks)
            assert [(each.index, each.extent) for each in shown] == [(number, 0) for number in range(blocks)]
            assert (raw.stats()["mapped_items"], raw.stats().get("mapped_items_total", 0)) == (0, 0)
        items = raw.fetch(found.lease_id, count=blocks)
        assert all(chain.is_right(header, data) for header, data in items)
        [state] = mapped.map(found.lease_id, count=0, state=True)
        assert state.extent == 0
        shown = mapped.map(found.lease_id, count=blocks, state=True)
        assert all(chain.is_right(header_of(each), mapped.payload(each)) for each in shown)
        assert raw.stats()["mapped_items_total"] == blocks + 1
        release(raw, found)
        assert raw.stats()["mapped_items"] == 0


def test_descriptors_of_sessions_and_extents_that_are_gone_are_closed() -> None:
    with running_service(cache=TINY_CACHE) as service:
        folder = Path(f"/proc/{service.pid}/fd")
        try:
            len(list(folder.iterdir()))
        except PermissionError:
            pytest.skip("the service's descriptors cannot be counted")
        with Raw(service.directory) as raw:

            def come_and_go() -> int:
                for number in range(40):
                    with session(service) as (other, mapped):
                        chain = stored(other, f"domain {number}", 2)
                        found = other.lookup(chain)
                        [shown] = mapped.map(found.lease_id, count=1)
                        assert chain.is_right(header_of(shown), mapped.payload(shown))
                wait_for(lambda: raw.stats()["sessions"] == 1)
                return len(list(folder.iterdir()))

            for number in range(40):
                raw.store(Chain(raw.open(f"domain {number}"), 2, seed=3), first=0)
                raw.admin.Clear(pb.ClearRequest(namespace=raw.open(f"domain {number}").digest), timeout=10)
            first = come_and_go()
            raw.admin.Clear(pb.ClearRequest(), timeout=10)
            assert come_and_go() <= first + 2
