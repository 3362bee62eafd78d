"""The commit pipeline over a real log on a simulated device: order, failures, making room."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import random
import re
import time
import zlib
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from kvstore.clock import ManualClock
from kvstore.core import CommitReport
from kvstore.errors import DeviceError, KvstoreError, LimitExceeded, NoSpace, Unavailable
from kvstore.service.room import CLEAN_AGAIN_SECONDS
from kvstore.service.writer import Writer
from kvstore.store import Place, Record, RecordKind, RecordLog, Wanted, open_log
from kvstore.store.device import DeviceFile, device_error
from kvstore.testing.sim_device import SimDevice
from kvstore.types import BlockKey, BytesLike, Checks, Lineage, NamespaceDigest
from tests.support.long import long

SEED = 7
SEGMENT_BYTES = 1 << 20
NAMESPACE = NamespaceDigest(b"n" * 32)


def record(name: str, size: int = 10_000) -> Record:
    key = hashlib.sha256(name.encode()).digest()
    payload = hashlib.shake_256(key).digest(size)
    return Record(
        RecordKind.BLOCK,
        NAMESPACE,
        BlockKey(key),
        BlockKey(NAMESPACE),
        32,
        Lineage.EXACT,
        payload,
        Checks(zlib.crc32(payload)),
    )


@dataclass
class Shelf:
    """What the writer decides with and publishes to: everything visible by key, oldest first."""

    places: dict[bytes, Place] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    evictable: bool = True

    async def evict(self, need_bytes: int) -> list[Place]:
        gone: list[Place] = []
        while self.evictable and self.places and sum(place.length for place in gone) < need_bytes:
            gone.append(self.places.pop(next(iter(self.places))))
        return gone

    async def moved(self, segment_id: int, moves: dict[Place, Place]) -> list[Place]:
        for key, place in self.places.items():
            if place.segment_id == segment_id:
                self.places[key] = moves.pop(place)
        return list(moves.values())

    def left(self, places: Sequence[Place]) -> None:
        assert not set(places) & set(self.places.values()), "what is visible is needed"


@dataclass
class Commit:
    shelf: Shelf
    name: str
    given: Sequence[Record]

    async def records(self) -> Sequence[Record]:
        return self.given

    async def publish(self, places: Sequence[Place | None]) -> CommitReport:
        self.shelf.order.append(self.name)
        for each, place in zip(self.given, places, strict=True):
            if place is not None:
                self.shelf.places[each.key] = place
        return CommitReport([], [], 0)


@dataclass
class Rig:
    device: SimDevice
    log: RecordLog
    shelf: Shelf
    writer: Writer
    clock: ManualClock

    async def commit(self, name: str, records: Sequence[Record]) -> CommitReport:
        return await self.writer.commit(Commit(self.shelf, name, records))

    def read(self, each: Record) -> BytesLike | None:
        [payload] = self.log.read([Wanted(self.shelf.places[each.key], each.key, RecordKind.BLOCK)])
        return payload

    def counts(self) -> dict[str, int]:
        return dict(self.log.counters())


@asynccontextmanager
async def rig(
    *,
    budget_bytes: int = 64 << 20,
    gather_bytes: int = 1 << 20,
    gather_seconds: float = 0.05,
    device: SimDevice | None = None,
    segment_bytes: int = SEGMENT_BYTES,
    wear: int = 0,
) -> AsyncIterator[Rig]:
    device = SimDevice(SEED) if device is None else device
    clock = ManualClock()
    with ThreadPoolExecutor(1) as executor:
        log, _ = open_log(
            "sim", budget_bytes=budget_bytes, segment_bytes=segment_bytes, clock=clock, device=device
        )
        shelf = Shelf()
        writer = Writer(
            log,
            shelf,
            executor=executor,
            segment_bytes=segment_bytes,
            gather_bytes=gather_bytes,
            gather_seconds=gather_seconds,
            wear_bytes_per_day=wear,
            clock=clock,
        )
        running = asyncio.create_task(writer.run())
        yield Rig(device, log, shelf, writer, clock)
        writer.stop()
        await asyncio.wait_for(running, 20)
        log.close()


async def test_commits_that_wait_together_share_a_sync_and_are_published_in_order() -> None:
    async with rig() as made:
        names = [f"c{i}" for i in range(10)]
        await asyncio.gather(*(made.commit(name, [record(name)]) for name in names))
        assert made.shelf.order == names
        assert made.counts()["syncs"] == 1
        assert all(made.read(record(name)) == record(name).payload for name in names)


async def test_a_commit_larger_than_one_append_is_written_in_parts() -> None:
    async with rig() as made:
        records = [record(f"r{i}", 100_000) for i in range(40)]
        await made.commit("large", records)
        assert made.counts()["syncs"] >= 4
        assert all(made.read(each) == each.payload for each in records)


async def test_a_failed_append_fails_its_commits_and_no_others() -> None:
    async with rig(gather_seconds=0.0) as made:
        await made.commit("before", [record("before")])
        made.device.fail_at(made.device.calls + 1, DeviceError("no"))
        with pytest.raises(DeviceError):
            await made.commit("failed", [record("failed")])
        await made.commit("after", [record("after")])
        assert made.shelf.order == ["before", "failed", "after"]
        assert [made.read(record(name)) == record(name).payload for name in ("before", "after")] == [
            True,
            True,
        ]
        assert record("failed").key not in made.shelf.places


async def test_every_failing_call_leaves_a_pipeline_that_works() -> None:
    """For each call of the scenario in turn: it fails, what was acknowledged is there, and the next commit succeeds."""
    async with rig() as made:
        start = made.device.calls
        await scenario(made)
        calls = made.device.calls - start
    assert calls > 5
    for number in range(1, calls + 1):
        async with rig() as made:
            made.device.fail_at(made.device.calls + number, DeviceError(f"call {number}"))
            acknowledged = await scenario(made)
            made.device.heal()
            await made.commit("after", [record("after")])
            for each in [*acknowledged, record("after")]:
                assert made.read(each) == each.payload, f"call {number} of {calls}"


async def scenario(made: Rig) -> list[Record]:
    acknowledged: list[Record] = []
    for name in ("a", "b", "c"):
        records = [record(f"{name}{i}", 150_000) for i in range(4)]
        try:
            await made.commit(name, records)
        except KvstoreError:
            continue
        acknowledged += records
    return acknowledged


async def test_a_caller_that_goes_away_does_not_stop_its_commit() -> None:
    async with rig() as made:
        caller = asyncio.create_task(made.commit("gone", [record("gone")]))
        await asyncio.sleep(0)
        caller.cancel()
        await made.commit("next", [record("next")])
        assert made.shelf.order == ["gone", "next"]
        assert made.read(record("gone")) == record("gone").payload


async def test_a_full_disk_evicts_the_oldest_and_keeps_the_budget() -> None:
    async with rig(budget_bytes=8 << 20, gather_seconds=0.0) as made:
        made.device.watch = lambda device: check_budget(device, 8 << 20)
        records = [record(f"r{i}", 50_000) for i in range(400)]
        for each in records:
            await made.commit("r", [each])
        held = [each.key in made.shelf.places for each in records]
        # The newest are there without a gap.
        assert held == sorted(held)
        assert sum(held) * 50_000 > 4 << 20
        assert all(
            made.read(each) == each.payload for each, is_held in zip(records, held, strict=True) if is_held
        )


def check_budget(device: SimDevice, budget_bytes: int) -> None:
    assert device.total_allocated() <= budget_bytes, f"seed {SEED}"


async def test_a_full_disk_from_which_nothing_may_go_refuses_and_recovers() -> None:
    async with rig(budget_bytes=8 << 20, gather_seconds=0.0) as made:
        made.shelf.evictable = False

        async def fill() -> None:
            for number in range(400):
                await made.commit("r", [record(f"r{number}", 50_000)])

        with pytest.raises(NoSpace, match="disk="):
            await fill()
        assert len(made.shelf.places) > 50
        assert made.read(record("r0", 50_000)) == record("r0", 50_000).payload
        made.shelf.evictable = True
        await made.commit("again", [record("again")])


class FullDevice(SimDevice):
    """A file system on which others leave `room_bytes` for us. `remaps`: writing over old blocks takes new ones, as where
    nothing is overwritten in place."""

    room_bytes = 1 << 40
    remaps = False

    def create(self, name: str, *, bulk: bool = False) -> DeviceFile:
        if name.startswith("segment-") and self.total_allocated() + SEGMENT_BYTES > self.room_bytes:
            raise NoSpace("no space left on device")
        return super().create(name, bulk=bulk)

    def rename(self, old: str, new: str) -> None:
        if (
            self.remaps
            and old.startswith("spare-")
            and self.total_allocated() > self.room_bytes - SEGMENT_BYTES
        ):
            raise NoSpace("no space left on device")
        super().rename(old, new)


async def test_a_file_system_that_others_have_filled_costs_old_blocks_or_a_refusal_and_heals() -> None:
    device = FullDevice(SEED)
    async with rig(device=device, gather_seconds=0.0) as made:
        for number in range(40):
            await made.commit("r", [record(f"r{number}", 100_000)])
        device.room_bytes = device.total_allocated()
        for number in range(40):
            await made.commit("new", [record(f"new{number}", 100_000)])
        assert record("r0", 100_000).key not in made.shelf.places
        assert made.read(record("new39", 100_000)) == record("new39", 100_000).payload
        made.shelf.evictable = False

        async def fill() -> None:
            for number in range(40):
                await made.commit("more", [record(f"more{number}", 100_000)])

        with pytest.raises(NoSpace, match="no space left"):
            await fill()
        assert made.read(record("new39", 100_000)) == record("new39", 100_000).payload
        device.room_bytes = 1 << 40
        await fill()


async def test_others_who_take_every_byte_that_is_freed_do_not_empty_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = FullDevice(SEED)
    device.remaps = True
    async with rig(device=device, gather_seconds=0.0) as made:
        for number in range(40):
            await made.commit("r", [record(f"r{number}", 100_000)])
        device.room_bytes = device.total_allocated()
        give_back = made.writer.room.give_back_a_segment

        async def give_back_to_others() -> bool:
            given = await give_back()
            device.room_bytes = device.total_allocated()
            return given

        monkeypatch.setattr(made.writer.room, "give_back_a_segment", give_back_to_others)
        refused = 0
        for number in range(60):
            try:
                await made.commit("new", [record(f"new{number}", 100_000)])
            except NoSpace:
                refused += 1
        assert refused > 30
        assert len(made.shelf.places) > 20
        assert made.read(record("r39", 100_000)) == record("r39", 100_000).payload
        device.room_bytes = 1 << 40
        await made.commit("after", [record("after", 100_000)])


async def test_on_a_full_file_system_writing_goes_on_in_the_files_that_the_store_has() -> None:
    """Others take every byte that leaves a file; what is evicted gives the next segment its file, and they get none."""
    device = FullDevice(SEED)
    async with rig(device=device, gather_seconds=0.0) as made:
        for number in range(40):
            await made.commit("r", [record(f"r{number}", 100_000)])
        device.room_bytes = device.total_allocated()
        device.watch = lambda device: setattr(device, "room_bytes", device.total_allocated())
        for number in range(60):
            await made.commit("new", [record(f"new{number}", 100_000)])
        assert made.read(record("new59", 100_000)) == record("new59", 100_000).payload
        assert made.counts()["recycled_segments"] > 3


async def test_a_small_commit_is_not_refused_for_a_large_one_beside_it() -> None:
    async with rig(budget_bytes=4 << 20, gather_bytes=700_000) as made:
        made.shelf.evictable = False

        async def fill() -> None:
            for number in range(100):
                await made.commit("fill", [record(f"fill{number}", 100_000)])

        with pytest.raises(NoSpace):
            await fill()
        room = made.log.room_bytes()
        assert room >= 5_000, room
        large, small = await asyncio.gather(
            made.commit("large", [record("large", 600_000)]),
            made.commit("small", [record("small", 2_000)]),
            return_exceptions=True,
        )
        assert isinstance(large, NoSpace)
        assert isinstance(small, CommitReport)


async def test_records_cleaned_before_they_are_published_are_published_where_they_went() -> None:
    """Half of everything is dead, so that room is won by cleaning while a commit of many parts is under way."""
    async with rig(budget_bytes=8 << 20, gather_seconds=0.0) as made:
        made.shelf.evictable = False
        kept = []
        for number in range(45):
            each = record(f"r{number}", 100_000)
            await made.commit("r", [each])
            if number % 2:
                made.writer.room.discard([made.shelf.places.pop(each.key)])
            else:
                kept.append(each)
        large = [record(f"large{i}", 100_000) for i in range(24)]
        await made.commit("large", large)
        assert made.counts()["cleaned_bytes"] > 0
        assert all(made.read(each) == each.payload for each in [*kept, *large])


async def test_what_a_batch_has_published_already_is_followed_when_a_later_part_cleans_its_segment() -> None:
    async with rig(budget_bytes=8 << 20, gather_bytes=900_000, gather_seconds=0.01) as made:
        made.shelf.evictable = False
        for number in range(45):
            await made.commit("r", [record(f"r{number}", 100_000)])
        # A segment of which nothing lives but what the batch's first commit adds to it.
        for number in range(8):
            await made.commit("dead", [record(f"dead{number}", 100_000)])
            made.writer.room.discard([made.shelf.places.pop(record(f"dead{number}", 100_000).key)])
        small, large = [record("small", 100_000)], [record(f"large{i}", 750_000) for i in range(2)]
        await asyncio.gather(made.commit("small", small), made.commit("large", large))
        assert made.shelf.order[-2:] == ["small", "large"]
        assert made.counts()["cleaned_bytes"] == 100_000
        assert all(made.read(each) == each.payload for each in [*small, *large])


async def test_what_is_discarded_while_it_moves_is_dead_in_its_new_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with rig(budget_bytes=8 << 20, gather_seconds=0.0) as made:
        made.shelf.evictable = False
        for number in range(40):
            await made.commit("r", [record(f"r{number}", 100_000)])
        for number in range(0, 40, 2):
            made.writer.room.discard([made.shelf.places.pop(record(f"r{number}", 100_000).key)])
        thrown_away: list[bytes] = []
        clean = made.log.clean

        def clean_slowly(segment_id: int) -> dict[Place, Place]:
            moves = clean(segment_id)
            # The copies are made, and nobody has heard of them yet.
            key = next(key for key, place in made.shelf.places.items() if place in moves)
            thrown_away.append(key)
            made.writer.room.discard([made.shelf.places.pop(key)])
            return moves

        monkeypatch.setattr(made.log, "clean", clean_slowly)
        for number in range(40):
            await made.commit("new", [record(f"new{number}", 100_000)])
        assert thrown_away
        await made.writer.alone(made.writer.room.survey)
        assert made.log.space().live == sum(place.length for place in made.shelf.places.values())


async def test_a_segment_that_could_not_be_copied_is_tried_again_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with rig(budget_bytes=8 << 20, gather_seconds=0.0) as made:
        made.shelf.evictable = False
        for number in range(40):
            await made.commit("r", [record(f"r{number}", 100_000)])
        for number in range(0, 40, 2):
            made.writer.room.discard([made.shelf.places.pop(record(f"r{number}", 100_000).key)])
        tried: list[int] = []
        clean = made.log.clean

        def clean_nothing(segment_id: int) -> dict[Place, Place]:
            tried.append(segment_id)
            raise DeviceError("the device is away")

        monkeypatch.setattr(made.log, "clean", clean_nothing)
        stored = refused = 0
        while refused < 10:
            try:
                await made.commit("new", [record(f"new{stored}", 100_000)])
                stored += 1
            except NoSpace:
                refused += 1
        assert len(tried) == len(set(tried)) > 0
        monkeypatch.setattr(made.log, "clean", clean)
        with pytest.raises(NoSpace):
            await made.commit("new", [record(f"new{stored}", 100_000)])
        made.clock.advance(CLEAN_AGAIN_SECONDS)
        await made.commit("new", [record(f"new{stored}", 100_000)])
        assert made.counts()["cleaned_bytes"] > 0


async def test_a_segment_whose_cleaning_won_nothing_is_not_cleaned_twice() -> None:
    """Nothing may be evicted, and what is dead lies thin: commits are refused for space, and for nothing else."""
    chance = random.Random(SEED)
    async with rig(budget_bytes=6 << 20, gather_seconds=0.0) as made:
        made.shelf.evictable = False
        refused = 0
        for number in range(400):
            try:
                await made.commit("r", [record(f"r{number}", chance.choice([9_000, 100_000, 250_000]))])
            except NoSpace:
                refused += 1
                for key in chance.sample(list(made.shelf.places), len(made.shelf.places) // 6):
                    made.writer.room.discard([made.shelf.places.pop(key)])
        assert refused
        assert made.counts()["cleaned_bytes"] > 0


async def test_what_is_dead_is_won_back_before_a_write_is_refused() -> None:
    """Nothing may be evicted: all room is won by cleaning, out of segments of which some hold copies and are small."""
    chance = random.Random(SEED)
    async with rig(budget_bytes=16 << 20, gather_seconds=0.0) as made:
        made.shelf.evictable = False
        dead = []
        for number in range(600):
            try:
                await made.commit("r", [record(f"r{number}", chance.choice([9_000, 100_000]))])
            except NoSpace:
                dead.append(made.log.space().dead)
                for key in chance.sample(list(made.shelf.places), len(made.shelf.places) // 10):
                    made.writer.room.discard([made.shelf.places.pop(key)])
        assert dead
        assert max(dead) < 5 << 20


async def test_while_a_segment_is_cleaned_nothing_is_settled_until_the_moves_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with rig(budget_bytes=8 << 20, gather_seconds=0.0) as made:
        made.shelf.evictable = False
        for number in range(40):
            await made.commit("r", [record(f"r{number}", 100_000)])
        for number in range(0, 40, 2):
            made.writer.room.discard([made.shelf.places.pop(record(f"r{number}", 100_000).key)])
        watched: list[tuple[asyncio.Task[bool], Place, bytes]] = []
        loop = asyncio.get_running_loop()
        clean = made.log.clean

        async def settle(key: bytes) -> bool:
            await made.writer.room.settled()
            [payload] = made.log.read([Wanted(made.shelf.places[key], BlockKey(key), RecordKind.BLOCK)])
            return payload is not None

        def watch(moves: dict[Place, Place]) -> None:
            key, place = next((key, place) for key, place in made.shelf.places.items() if place in moves)
            watched.append((loop.create_task(settle(key)), place, key))

        def clean_watched(segment_id: int) -> dict[Place, Place]:
            moves = clean(segment_id)
            # The old copies are gone, and nobody has heard of the new ones.
            loop.call_soon_threadsafe(watch, moves)
            return moves

        monkeypatch.setattr(made.log, "clean", clean_watched)
        for number in range(30):
            await made.commit("new", [record(f"new{number}", 100_000)])
        assert watched
        for task, place, key in watched:
            assert made.log.read([Wanted(place, BlockKey(key), RecordKind.BLOCK)]) == [None]
            assert await task


async def test_jobs_alone_run_between_commits_and_carry_their_errors() -> None:
    async with rig(gather_seconds=10.0) as made:
        seen: list[str] = []

        async def look() -> None:
            seen.extend(made.shelf.order)
            raise NoSpace("as asked")

        first = asyncio.create_task(made.commit("one", [record("one")]))
        await asyncio.sleep(0)
        with pytest.raises(NoSpace, match="as asked"):
            await made.writer.alone(look)
        await first
        assert seen == ["one"]


async def test_after_a_stop_nothing_is_taken_and_everything_earlier_is_done() -> None:
    async with rig() as made:
        earlier = [asyncio.create_task(made.commit(f"c{i}", [record(f"c{i}")])) for i in range(5)]
        await asyncio.sleep(0)
        made.writer.stop()
        with pytest.raises(Unavailable):
            await made.commit("late", [record("late")])
        await asyncio.gather(*earlier)
        assert len(made.shelf.order) == 5


PAGED_PAYLOAD_BYTES = 18 * 4096 - 736
"""Of a record that fills its pages, as a block of V4-Flash does."""


@pytest.mark.parametrize(("skew", "keys"), [(0.8, 3000), long(1.1, 3000), long(0.0, 2000)])
async def test_under_steady_eviction_a_byte_stored_costs_the_drive_at_most_a_quarter_more(
    skew: float, keys: int
) -> None:
    """A cache far smaller than what is asked for: hits keep some blocks of every segment, and all room is won back."""
    chance = random.Random(SEED)
    weights = [1 / (rank + 1) ** skew for rank in range(keys)]
    async with rig(budget_bytes=64 << 20, segment_bytes=4 << 20, gather_seconds=0.0) as made:
        made.device.watch = None
        before: dict[str, int] = {}
        for number, chosen in enumerate(chance.choices(range(keys), weights, k=6000)):
            if number == 2000:
                before = made.counts()
            each = record(f"k{chosen}", PAGED_PAYLOAD_BYTES)
            place = made.shelf.places.pop(each.key, None)
            if place is not None:
                # Used again: it leaves last.
                made.shelf.places[each.key] = place
            else:
                await made.commit("k", [each])
        after = made.counts()
        written, stored, copied = (
            after[name] - before[name] for name in ("written_bytes", "appended_bytes", "cleaned_bytes")
        )
        assert copied > 0.1 * stored
        assert written <= 1.25 * stored, (written / stored, f"seed {SEED}")
        made.log.check_integrity()


async def test_with_the_drives_budget_used_up_writes_are_refused_by_name_and_reads_go_on() -> None:
    async with rig(gather_seconds=0.0, wear=4 << 30) as made:

        async def fill() -> None:
            for number in range(400):
                await made.commit("r", [record(f"r{number}", 100_000)])

        with pytest.raises(LimitExceeded, match=r"wear=100000; .*a day") as refused:
            await fill()
        wait = re.search(r"come back in (\d+) s", str(refused.value))
        assert wait is not None
        assert made.read(record("r0", 100_000)) == record("r0", 100_000).payload
        with pytest.raises(LimitExceeded):
            made.writer.check_wear(100_000)
        made.clock.advance(int(wait[1]))
        await made.commit("again", [record("again", 100_000)])
        assert made.writer.wear_refused_total == 2


class SickDevice(SimDevice):
    """While `error` is set every change fails with it; reads go on."""

    error: KvstoreError | None = None

    def failure(self, *, changes: bool = False) -> BaseException | None:
        return self.error if changes and self.error else super().failure(changes=changes)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO])
async def test_a_sick_device_is_a_refusal_by_name_and_writing_comes_back_with_its_health(code: int) -> None:
    device = SickDevice(SEED)
    async with rig(budget_bytes=16 << 20, device=device, gather_seconds=0.0) as made:
        for number in range(160):
            await made.commit("r", [record(f"r{number}", 100_000)])
        held = len(made.shelf.places)
        device.error = device_error(OSError(code, "as asked"), action="write", path="a file")
        for number in range(20):
            begun = time.monotonic()
            with pytest.raises((NoSpace, DeviceError), match=r"write a file"):
                await made.commit("new", [record(f"new{number}", 100_000)])
            assert time.monotonic() - begun < 1
            newest = record("r159", 100_000)
            assert made.read(newest) == newest.payload
        # Nothing is thrown away for a device that takes nothing.
        assert len(made.shelf.places) > held * 0.7
        device.error = None
        await made.commit("after", [record("after", 100_000)])
        assert made.read(record("after", 100_000)) == record("after", 100_000).payload
        await made.writer.alone(made.writer.room.survey)
        made.log.check_integrity()
