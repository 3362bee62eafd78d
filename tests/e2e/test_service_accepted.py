"""Commits that are answered before they are durable, on a device whose syncs are the test's to end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from kvstore.errors import DamagedBytes, DeviceError
from kvstore.memory import why_not_mapped
from kvstore.types import Durability
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1 import cache_pb2_grpc
from kvstore_client import CacheClient, Committed, OpenedNamespace, Reservation, ReserveOutcome
from kvstore_client.write_messages import write_frames
from tests.support.calls import look
from tests.support.chains import Chain, identity_of
from tests.support.service import short_directory
from tests.support.serving import SyncHeldDevice, serving

pytestmark = pytest.mark.skipif(bool(why_not_mapped()), reason=why_not_mapped() or "there is such memory")

BLOCKS = 6


@dataclass
class Rig:
    """A namespace of `profile` is open. Calls of clients are made in threads: the service runs in the test's loop."""

    directory: Path
    device: SyncHeldDevice
    writer: CacheClient
    other: CacheClient
    space: OpenedNamespace

    async def store(
        self,
        client: CacheClient,
        chain: Chain,
        durability: Durability,
        *,
        first: int = 0,
        last: int | None = None,
        state: bool = False,
    ) -> Committed:
        items = [chain.block_item(i) for i in range(first, len(chain.keys) if last is None else last)]
        if state:
            items.append(chain.state_item(first + len(items) - 1, to_pool=True))

        def work() -> Committed:
            with client.reserve(chain.namespace.digest, items) as reservation:
                reservation.write({i: chain.payload(items[i]) for i in reservation.granted})
                return reservation.commit(durability)

        return await asyncio.to_thread(work)

    async def figures(self) -> dict[str, float]:
        return await asyncio.to_thread(self.other.stats)

    async def held(self, chain: Chain) -> int:
        """Blocks that another client finds; asserts that it gets their bytes, both ways."""

        def work() -> int:
            found = look(self.other, chain)
            if found.lease is None:
                return 0
            with found.lease:
                items = chain.fetch(self.other, found)
                assert all(item.payload is not None for item in items)
                mapped = self.other.map(
                    found.lease, first_block=0, block_count=found.blocks_held, state=False
                )
                for number, item in enumerate(mapped):
                    room = bytearray(chain.namespace.block_bytes)
                    assert item.copy_to(room)
                    assert bytes(room) == chain.payload(chain.block_item(number))
            return found.blocks_held

        return await asyncio.to_thread(work)


@asynccontextmanager
async def rig(profile: str = "tiny", *, cache: int = 64 << 20) -> AsyncIterator[Rig]:
    with short_directory() as directory:
        directory.mkdir()
        device = SyncHeldDevice(directory)
        try:
            async with serving(directory, device=device, cache=cache):

                def clients() -> tuple[CacheClient, CacheClient, OpenedNamespace]:
                    writer, other = (CacheClient(directory, owner=name) for name in ("writer", "other"))
                    return writer, other, writer.open_namespace(identity_of(profile), name="n")

                writer, other, space = await asyncio.to_thread(clients)
                try:
                    yield Rig(directory, device, writer, other, space)
                finally:
                    device.let_go(device.error)
                    await asyncio.to_thread(lambda: (writer.close(), other.close()))
        finally:
            device.let_go()


@pytest.mark.parametrize("profile", ["tiny", "flash-slim"])
async def test_it_is_read_by_others_before_it_is_durable_and_after(profile: str) -> None:
    async with rig(profile) as made:
        chain = Chain.of(made.space, BLOCKS, seed=1)
        made.device.hold()
        done = await made.store(made.writer, chain, Durability.ACCEPTED, state=True)
        assert (done.items, done.durability) == (BLOCKS + 1, Durability.ACCEPTED)
        assert await made.held(chain) == BLOCKS
        figures = await made.figures()
        assert (figures["blocks"], figures["accepted_blocks"]) == (0, BLOCKS)
        assert (figures["states_ssd"], figures["accepted_states"]) == (0, 1)
        assert figures["accepted_bytes"] == done.bytes
        with await asyncio.to_thread(
            made.other.reserve, made.space.digest, [chain.block_item(0)]
        ) as reservation:
            assert reservation.outcomes == (ReserveOutcome.IN_FLIGHT,)
        made.device.let_go()
        after = Chain.of(made.space, 1, seed=2)
        # Commits are published in the order in which they came.
        assert (await made.store(made.other, after, Durability.DURABLE)).items == 1
        figures = await made.figures()
        assert (figures["blocks"], figures["accepted_blocks"]) == (BLOCKS + 1, 0)
        assert (figures["states_ssd"], figures["accepted_bytes"]) == (1, 0)
        assert figures["log_read_records_total"] == 0
        assert await made.held(chain) == BLOCKS
        assert (await made.figures())["staged_bytes"] == 0


async def test_a_durable_child_is_acknowledged_when_what_it_follows_is_durable() -> None:
    async with rig() as made:
        chain = Chain.of(made.space, BLOCKS, seed=1)
        made.device.hold()
        await made.store(made.writer, chain, Durability.ACCEPTED, last=4)
        child = asyncio.create_task(made.store(made.other, chain, Durability.DURABLE, first=4))
        grandchild = Chain.of(made.space, BLOCKS, seed=3)
        assert (await made.store(made.writer, grandchild, Durability.ACCEPTED)).items == BLOCKS
        assert not child.done()
        assert await made.held(chain) == 4
        made.device.let_go()
        done = await child
        assert (done.items, done.durability) == (2, Durability.DURABLE)
        assert (await made.figures())["accepted_lost_total"] == 0
        assert await made.held(chain) == BLOCKS


async def test_a_sync_that_fails_takes_back_what_was_accepted_and_it_can_be_stored_again() -> None:
    async with rig() as made:
        before, chain = (Chain.of(made.space, BLOCKS, seed=seed) for seed in (1, 2))
        await made.store(made.writer, before, Durability.DURABLE)
        made.device.hold()
        await made.store(made.writer, chain, Durability.ACCEPTED, last=4)
        found = await asyncio.to_thread(look, made.other, chain)
        assert found.blocks_held == 4
        assert found.lease is not None
        child = asyncio.create_task(made.store(made.other, chain, Durability.DURABLE, first=4))
        while (await made.figures())["uploads"] != 2:
            continue
        made.device.let_go(DeviceError("the sync failed"))
        with pytest.raises(DeviceError):
            await child
        left = await asyncio.to_thread(
            lambda: list(made.other.fetch(found.lease, first_block=0, block_count=4, state=False))
        )
        assert [item.payload for item in left] == [None] * 4
        assert await made.held(chain) == 0
        assert await made.held(before) == BLOCKS
        figures = await made.figures()
        assert (figures["accepted_lost_total"], figures["accepted_bytes"]) == (4, 0)
        made.device.error = None
        assert (await made.store(made.writer, chain, Durability.ACCEPTED)).items == BLOCKS
        assert await made.held(chain) == BLOCKS


async def test_after_a_write_that_failed_a_writer_is_told_until_one_succeeds() -> None:
    async with rig() as made:
        chain, after = (Chain.of(made.space, BLOCKS, seed=seed) for seed in (1, 2))
        made.device.hold()
        assert (await made.store(made.writer, chain, Durability.ACCEPTED)).durability is Durability.ACCEPTED
        made.device.let_go(DeviceError("the sync failed"))
        while (await made.figures())["uploads"]:
            continue
        for _ in range(2):
            with pytest.raises(DeviceError):
                await made.store(made.writer, chain, Durability.ACCEPTED)
        made.device.error = None
        assert (await made.store(made.writer, chain, Durability.ACCEPTED)).durability is Durability.DURABLE
        assert (await made.store(made.writer, after, Durability.ACCEPTED)).durability is Durability.ACCEPTED


async def test_a_clear_takes_it_and_it_does_not_come_back() -> None:
    async with rig() as made:
        chain = Chain.of(made.space, BLOCKS, seed=1)
        made.device.hold()
        await made.store(made.writer, chain, Durability.ACCEPTED)
        clear = asyncio.create_task(asyncio.to_thread(made.other.clear, made.space.digest))
        made.device.let_go()
        assert (await clear).blocks == BLOCKS
        assert await made.held(chain) == 0
        figures = await made.figures()
        assert (figures["accepted_bytes"], figures["reservations"], figures["staged_bytes"]) == (0, 0, 0)


async def test_a_writer_that_is_faster_than_the_disk_waits_and_is_not_refused() -> None:
    async with rig("flash-slim") as made:
        # A ninth of the session's share of what may be on its way in, each.
        chains = [Chain.of(made.space, 8, seed=seed) for seed in range(10)]
        made.device.hold()
        answered = 0
        for chain in chains:
            task = asyncio.create_task(made.store(made.writer, chain, Durability.ACCEPTED))
            while not task.done() and not (await made.figures())["accepted_as_durable_total"]:
                continue
            if not task.done():
                break
            assert (await task).durability is Durability.ACCEPTED
            assert await made.held(chain) == 8
            answered += 1
        assert answered == 4
        assert (await made.figures())["staging_refused_total"] == 0
        made.device.let_go()
        last = await task
        assert (last.items, last.durability) == (8, Durability.DURABLE)


@asynccontextmanager
async def accepting_rig(*, cache: int = 64 << 20) -> AsyncIterator[Rig]:
    """A rig of large blocks whose writer's last commit was answered before it was durable, and is durable now."""
    async with rig("flash-slim", cache=cache) as made:
        done = await made.store(made.writer, Chain.of(made.space, 1, seed=100), Durability.ACCEPTED)
        assert done.durability is Durability.ACCEPTED
        while (await made.figures())["uploads"]:
            continue
        assert (await made.figures())["accepted_copied_bytes_total"] == made.space.block_bytes
        yield made


async def test_a_writer_that_was_answered_early_once_writes_straight_to_where_others_read() -> None:
    async with accepting_rig() as made:
        chain = Chain.of(made.space, BLOCKS, seed=1)
        made.device.hold()
        done = await made.store(made.writer, chain, Durability.ACCEPTED)
        assert (done.items, done.durability) == (BLOCKS, Durability.ACCEPTED)
        assert await made.held(chain) == BLOCKS
        assert (await made.figures())["accepted_copied_bytes_total"] == made.space.block_bytes
        made.device.let_go()
        await made.store(made.other, Chain.of(made.space, 1, seed=2), Durability.DURABLE)
        figures = await made.figures()
        assert (figures["accepted_bytes"], figures["staged_bytes"]) == (0, 0)
        assert await made.held(chain) == BLOCKS
        # What was put together there is what lies on the disk.
        read, damaged = await asyncio.to_thread(_verified, made.directory)
        assert read >= (1 + BLOCKS + 1) * made.space.block_bytes
        assert damaged == []


async def test_a_sync_that_fails_takes_back_what_came_straight_and_its_memory_is_used_again() -> None:
    async with accepting_rig(cache=6 << 20) as made:
        chain = Chain.of(made.space, BLOCKS, seed=1)
        for seed in range(3):
            chain = Chain.of(made.space, BLOCKS, seed=seed)
            made.device.hold()
            assert (
                await made.store(made.writer, chain, Durability.ACCEPTED)
            ).durability is Durability.ACCEPTED
            made.device.let_go(DeviceError("the sync failed"))
            while (await made.figures())["uploads"]:
                continue
            assert await made.held(chain) == 0
            made.device.error = None
            # One that succeeds, after which the writer is answered early again.
            await made.store(made.writer, Chain.of(made.space, 1, seed=50 + seed), Durability.ACCEPTED)
        figures = await made.figures()
        assert (figures["accepted_lost_total"], figures["staged_bytes"]) == (3 * BLOCKS, 0)
        assert (await made.store(made.writer, chain, Durability.ACCEPTED)).items == BLOCKS
        assert await made.held(chain) == BLOCKS


@pytest.mark.parametrize("end", ["abort", "durable", "damaged"])
async def test_memory_that_was_begun_for_what_is_not_answered_early_goes_back(end: str) -> None:
    async with accepting_rig(cache=6 << 20) as made:
        # Of twice as many as memory has room for.
        for seed in range(5):
            chain = Chain.of(made.space, BLOCKS, seed=seed)
            if end == "durable":
                await made.store(made.writer, Chain.of(made.space, 1, seed=60 + seed), Durability.ACCEPTED)
                done = await made.store(made.writer, chain, Durability.DURABLE)
                assert done.durability is Durability.DURABLE
            else:
                await asyncio.to_thread(_left_behind, made, chain, end)
        assert (await made.figures())["staged_bytes"] == 0
        chain = Chain.of(made.space, BLOCKS, seed=9)
        assert (await made.store(made.writer, chain, Durability.ACCEPTED)).durability is Durability.ACCEPTED
        assert await made.held(chain) == BLOCKS


def _verified(directory: Path) -> tuple[int, list[pb.Damage]]:
    """Bytes on the disk, all of which were read, and what of them was found damaged."""
    with grpc.insecure_channel(f"unix:{directory / 'kvstore.sock'}") as channel:
        replies = list(cache_pb2_grpc.AdminStub(channel).Verify(pb.VerifyRequest(), timeout=20))
    assert replies[-1].done
    return replies[-1].bytes, [damage for reply in replies for damage in reply.damages]


def _left_behind(made: Rig, chain: Chain, end: str) -> None:
    """All bytes of a reservation are sent, the last of them with a wrong checksum if asked for, and then it is given up."""
    items = [chain.block_item(number) for number in range(BLOCKS)]
    with made.writer.reserve(made.space.digest, items) as reservation:
        if end == "damaged":
            with pytest.raises(DamagedBytes):
                _send_damaged(reservation, {n: chain.payload(items[n]) for n in reservation.granted})
        else:
            reservation.write({number: chain.payload(items[number]) for number in reservation.granted})
        assert reservation.abort()


def _send_damaged(reservation: Reservation, payloads: dict[int, bytes]) -> None:
    frames = list(write_frames(reservation.id, sorted(payloads.items())))
    last = next(frame for frame in reversed(frames) if frame.items)
    last.items[-1].xxh3_64 ^= 1
    reservation._link.call(reservation._connection, "Write", iter(frames), timeout=20)


async def test_without_room_in_memory_it_is_answered_when_it_is_durable() -> None:
    async with rig("flash-slim", cache=1 << 20) as made:
        chain = Chain.of(made.space, BLOCKS, seed=1)
        done = await made.store(made.writer, chain, Durability.ACCEPTED)
        assert (done.items, done.durability) == (BLOCKS, Durability.DURABLE)
        figures = await made.figures()
        assert (figures["accepted_as_durable_total"], figures["accepted_items_total"]) == (1, 0)
        assert figures["blocks"] == BLOCKS
