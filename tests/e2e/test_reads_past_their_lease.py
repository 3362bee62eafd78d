"""A read that takes longer than its lease ends with the right bytes or by the lease's end, on every path: never with others'."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import UnknownLease
from kvstore.memory import why_not_mapped
from kvstore.profile.layout import layer_slices
from kvstore.profile.registry import get_profile
from kvstore_client import CacheClient, FetchedSlice, OpenedNamespace
from kvstore_client.aio import AsyncCacheClient
from tests.conformance.test_client import free_port
from tests.support.blocking import Blocking, LoopThread
from tests.support.calls import look
from tests.support.chains import Chain, identity_of, payload_of
from tests.support.polling import wait_for
from tests.support.service import short_directory
from tests.support.serving import HeldDevice, SetClock, serving

PROFILE = "flash-slim"
BLOCKS = 24
"""10 MiB: more than what gRPC takes in for who does not read."""
SLICES = 4
DISK = 40 << 20
SMALL = {"disk": DISK, "segment": 2 << 20, "staging": 32 << 20}
LEASE_SECONDS = 60.0

Reads = Iterator[tuple[int, int | None, bytes | memoryview | None]]
"""What came, as (block, slice or None, bytes or None for missing)."""


def _single(client: Any, found: Any) -> Reads:
    for item in client.fetch(found.lease, first_block=3, block_count=1, state=False):
        yield item.index, None, item.payload


def _batch(client: Any, found: Any) -> Reads:
    for item in client.fetch(found.lease, first_block=0, block_count=BLOCKS, state=False):
        yield item.index, None, item.payload


def _sliced(client: Any, found: Any) -> Reads:
    for each in client.fetch_slices(
        found.lease, first_block=0, block_count=BLOCKS, state=False, slices=SLICES
    ):
        assert isinstance(each, FetchedSlice)
        yield each.index, each.slice, each.payload


def _mapped(client: Any, found: Any) -> Reads:
    for item in client.map(found.lease, first_block=0, block_count=BLOCKS, state=False):
        room = bytearray(get_profile(PROFILE).block_bytes)
        yield item.index, None, bytes(room) if item.copy_to(room) else None


PATHS: dict[str, Callable[[Any, Any], Reads]] = {
    "single": _single,
    "batch": _batch,
    "slices": _sliced,
    "map": _mapped,
}


@dataclass(eq=False)
class Reader(threading.Thread):
    """Reads along one path: the first of it, and the rest when `go` is set. `right`, `missing` and `wrong` of what came;
    `ended`: the lease's end came instead of the rest."""

    client: Any
    chain: Chain
    path: Callable[[Any, Any], Reads]
    go: threading.Event
    begun: threading.Event = field(default_factory=threading.Event)
    right: int = 0
    missing: int = 0
    wrong: int = 0
    ended: bool = False
    error: Exception | None = None

    def __post_init__(self) -> None:
        super().__init__()
        self._slices = layer_slices(get_profile(PROFILE), SLICES)
        self.found = look(self.client, self.chain)
        assert self.found.lease is not None

    def __hash__(self) -> int:
        return id(self)

    def run(self) -> None:
        try:
            for index, cut, payload in self.path(self.client, self.found):
                self._note(index, cut, payload)
                self.begun.set()
                assert self.go.wait(60)
        except UnknownLease:
            self.ended = True
        except Exception as error:  # noqa: BLE001 -- the test tells of it
            self.error = error
        finally:
            self.begun.set()

    def _note(self, index: int, cut: int | None, payload: bytes | memoryview | None) -> None:
        whole = payload_of(self.chain.keys[index], self.chain.namespace.block_bytes)
        if payload is None:
            self.missing += 1
        elif payload == (whole if cut is None else whole[self._slices[cut].offset : self._slices[cut].end]):
            self.right += 1
        else:
            self.wrong += 1

    def wanted(self) -> int:
        return {_single: 1, _sliced: BLOCKS * len(self._slices)}.get(self.path, BLOCKS)

    def outcome(self) -> str:
        if self.error is not None:
            return f"error: {self.error!r}"
        if self.wrong:
            return f"{self.wrong} wrong"
        if self.ended:
            return "ended"
        return "right" if self.right == self.wanted() else f"{self.right} right, {self.missing} missing"


@dataclass(eq=False)
class Ground:
    """A service that is small enough to be replaced whole, and a client of each kind on each way to it."""

    directory: Path
    port: int
    clock: SetClock
    device: HeldDevice
    stack: ExitStack

    def clients(self) -> Iterator[tuple[str, Any]]:
        thread = LoopThread(asyncio.new_event_loop)
        self.stack.callback(thread.close)
        for way, address in (
            ("unix", {"address": self.directory}),
            ("tcp", {"address": f"tcp://127.0.0.1:{self.port}", "insecure": True}),
        ):
            yield f"{way} sync", self.stack.enter_context(CacheClient(owner="reader", **address))
            made = Blocking(AsyncCacheClient(owner="reader", **address), thread)
            yield f"{way} async", self.stack.enter_context(made)

    def readers(self, chain: Chain, go: threading.Event) -> dict[str, Reader]:
        made = {}
        for name, client in self.clients():
            # Who slices must know the namespace, which nobody is told over TCP.
            self.namespace(client, "read")
            for path, read in PATHS.items():
                made[f"{name} {path}"] = Reader(client, chain, read, go)
        return made

    def namespace(self, client: CacheClient, name: str) -> OpenedNamespace:
        return client.open_namespace(identity_of(PROFILE, salt=name), name=name)

    def end_leases(self, admin: CacheClient) -> None:
        self.clock.ahead += LEASE_SECONDS + 1.0
        wait_for(lambda: admin.stats()["leases"] == 0)

    def replace(self, admin: CacheClient, chain: Chain) -> None:
        """Three times the capacity of others, in the disk and, since it is read, in memory."""
        space = self.namespace(admin, "others")
        count = 3 * DISK // (space.block_bytes * BLOCKS) + 1
        for number in range(count):
            other = Chain.of(space, BLOCKS, seed=1000 + number)
            other.store(admin)
            if number >= count - 2 and not self.device.is_held:
                found = look(admin, other)
                assert all(item.payload is not None for item in other.fetch(admin, found))
                assert found.lease is not None
                found.lease.release()
        assert look(admin, chain, lease=False).blocks_held < BLOCKS


def read_from_disk(ground: Ground) -> dict[str, Reader]:
    """The device gives nothing until the lease has ended and the store is another."""
    go = threading.Event()
    go.set()
    with CacheClient(ground.directory, owner="admin") as admin, ground.stack:
        chain = Chain.of(ground.namespace(admin, "read"), BLOCKS, seed=1)
        chain.store(admin)
        readers = ground.readers(chain, go)
        ground.device.hold()
        for reader in readers.values():
            reader.start()
        wait_for(lambda: ground.device.standing > 0)
        ground.end_leases(admin)
        ground.replace(admin, chain)
        ground.device.let_go()
        for reader in readers.values():
            reader.join(60)
        wait_for(
            lambda: not any(admin.stats()[name] for name in ("fetching_bytes", "mapped_items", "leases"))
        )
    return readers


def read_slowly(ground: Ground) -> dict[str, Reader]:
    """The readers take one item, and the rest when the lease has ended and the store and its memory are another's."""
    go = threading.Event()
    with CacheClient(ground.directory, owner="admin") as admin, ground.stack:
        chain = Chain.of(ground.namespace(admin, "read"), BLOCKS, seed=1)
        chain.store(admin)
        found = look(admin, chain)
        assert all(item.payload is not None for item in chain.fetch(admin, found))
        assert found.lease is not None
        found.lease.release()
        readers = ground.readers(chain, go)
        for reader in readers.values():
            reader.start()
        for reader in readers.values():
            assert reader.begun.wait(30)
        ground.end_leases(admin)
        ground.replace(admin, chain)
        go.set()
        for reader in readers.values():
            reader.join(60)
        wait_for(
            lambda: not any(admin.stats()[name] for name in ("fetching_bytes", "mapped_items", "leases"))
        )
    return readers


async def on_ground(work: Callable[[Ground], dict[str, Reader]], **options: Any) -> dict[str, Reader]:
    clock, port = SetClock(), free_port()
    with short_directory() as directory:
        device = HeldDevice(directory)
        async with serving(
            directory,
            clock=clock,
            device=device,
            lease=LEASE_SECONDS,
            listen=f"127.0.0.1:{port}",
            unsafe_plaintext_tcp=True,
            unsafe_no_token=True,
            **SMALL,
            **options,
        ):
            return await asyncio.to_thread(work, Ground(directory, port, clock, device, ExitStack()))


async def test_a_device_slower_than_the_lease_brings_right_bytes_or_the_leases_end() -> None:
    readers = await on_ground(read_from_disk, cache=1 << 20)
    ended = {name: reader.outcome() for name, reader in readers.items()}
    assert set(ended.values()) <= {"right", "ended"}, ended
    assert "ended" in ended.values()


@pytest.mark.skipif(bool(why_not_mapped()), reason=why_not_mapped() or "")
@pytest.mark.parametrize("cache", [16 << 20, 1 << 20], ids=["in memory", "on disk"])
async def test_a_reader_slower_than_its_lease_gets_right_bytes_or_the_leases_end(cache: int) -> None:
    readers = await on_ground(read_slowly, cache=cache)
    ended = {name: reader.outcome() for name, reader in readers.items()}
    assert all(reader.right for reader in readers.values()), ended
    # What was mapped in one message is here whole, and says of itself that it is another's now.
    told = {name: how for name, how in ended.items() if how not in ("right", "ended")}
    assert all("map" in name and "unix" in name for name in told), ended
    assert all(reader.wrong == 0 and reader.error is None for reader in readers.values()), ended
    assert "ended" in ended.values(), ended
