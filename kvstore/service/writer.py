"""The commit pipeline: one task, one queue, one thread that writes to the log."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from kvstore.clock import Clock, SystemClock
from kvstore.core.base import CommitReport
from kvstore.core.steps import ITEMS_AT_ONCE
from kvstore.errors import KvstoreError, LimitExceeded, NoSpace, Unavailable
from kvstore.service.room import RoomMaker, SpaceDecisions
from kvstore.service.turns import mapped
from kvstore.store.base import Place, Record, RecordLog, Space
from kvstore.store.device import NOT_FOR_WANT_OF_ROOM
from kvstore.store.wear import WearBudget

log = logging.getLogger(__name__)

T = TypeVar("T")

JOBS_MAX = 10_000
NAMESPACES_PER_APPEND_MAX = 64

TOLD_FULL_EVERY_SECONDS = 60.0
KEEP_SECONDS_FIRST, KEEP_SECONDS_MAX = 5.0, 600.0
"""How long nothing is evicted for a full file system after others took what the last eviction gave, doubling."""


class Publisher(Protocol):
    """A commit. Called in the event loop's thread, commit by commit in queue order."""

    async def records(self) -> Sequence[Record]:
        """What is to be durable, parents first. Asked for once, when it is the commit's turn."""

    async def publish(self, places: Sequence[Place | None]) -> CommitReport:
        """Make durable bytes visible. `places` of the records in their order; None for what did not become durable."""


@dataclass(eq=False, slots=True)
class _Commit:
    publisher: Publisher
    done: asyncio.Future[CommitReport]
    records: Sequence[Record] = ()
    payload_bytes: int = 0
    places: list[Place] = field(default_factory=list)
    error: Exception | None = None

    async def prepare(self) -> None:
        try:
            self.records = await self.publisher.records()
        except Exception as error:  # noqa: BLE001 -- carried to the caller; the pipeline serves the next commit
            self.error = error
        self.payload_bytes = sum(await mapped(lambda _, record: bytes_of([record]), self.records))


@dataclass(eq=False, slots=True)
class _Alone:
    work: Callable[[], Awaitable[Any]]
    done: asyncio.Future[Any]


@dataclass(eq=False, slots=True)
class _Stop:
    pass


class Writer:
    """Everything that changes the log goes through here, one job after another, in the order of arrival.

    Commits that wait together share a sync: up to `gather_bytes`, or those that come within `gather_seconds`. Records
    are written in order, so that a child is never durable before its ancestors, and published in order, so that it is
    never visible before them. A failed append fails the commits that had records in it and no others.

    Jobs are not cancelled with their callers: who goes away does not leave half a commit behind.
    """

    def __init__(
        self,
        store: RecordLog,
        decisions: SpaceDecisions,
        *,
        executor: Executor,
        segment_bytes: int,
        gather_bytes: int,
        gather_seconds: float,
        wear_bytes_per_day: int = 0,
        clock: Clock | None = None,
    ) -> None:
        """wear_bytes_per_day: what the device may take in a day, 0 for no limit, by `clock`, the system's if not given."""
        self._log = store
        self._executor = executor
        self._gather_bytes = gather_bytes
        self._gather_seconds = gather_seconds
        self._queue: asyncio.Queue[_Commit | _Alone | _Stop] = asyncio.Queue()
        self._next: _Commit | _Alone | _Stop | None = None
        self._in_hand: list[_Commit | _Alone] = []
        self._stopping = False
        self._decisions = decisions
        self._batch: Sequence[_Commit] = ()
        self._clock = SystemClock() if clock is None else clock
        self.wear = WearBudget(
            wear_bytes_per_day,
            now=self._clock.monotonic(),
            written=store.counters()["written_bytes"],
        )
        self.room = RoomMaker(
            store,
            self,
            segment_bytes=segment_bytes,
            in_thread=self.in_thread,
            wear=self.wear,
            clock=self._clock,
        )
        self._keep_until = 0.0
        self._told_full_at = -math.inf
        self._keep_seconds = KEEP_SECONDS_FIRST
        self.appends_total = 0
        self.commits_total = 0
        self.failed_commits_total = 0
        self.wear_refused_total = 0

    @property
    def waiting(self) -> int:
        return self._queue.qsize()

    # ---- for callers --------------------------------------------------------------------------------------------

    async def commit(self, publisher: Publisher) -> CommitReport:
        """Make its records durable, then publish. Raises what kept any of them from it; the others are published."""
        return await asyncio.shield(self.submit(publisher))

    def submit(self, publisher: Publisher) -> asyncio.Future[CommitReport]:
        """As `commit`, whose end is the future's. It is nobody's to cancel."""
        job = _Commit(publisher, asyncio.get_running_loop().create_future())
        self._put(job)
        return job.done

    async def alone(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work` after all earlier jobs and beside none. It may use `in_thread` and `append`."""
        job = _Alone(work, asyncio.get_running_loop().create_future())
        self._put(job)
        result: T = await asyncio.shield(job.done)
        return result

    def stop(self) -> None:
        """Refuse new jobs; `run` returns when all earlier ones are done."""
        self._stopping = True
        self._queue.put_nowait(_Stop())

    def check_accepts(self) -> None:
        """Raise unless a job that comes now is taken."""
        if self._stopping:
            raise Unavailable("the service is stopping")
        if self._queue.qsize() >= JOBS_MAX:
            raise LimitExceeded(
                "too many commits are waiting", field="jobs", value=JOBS_MAX + 1, allowed=f"{JOBS_MAX}"
            )

    def check_wear(self, need_bytes: int) -> None:
        """Raise while the drive may not take so many bytes more. Reads are not asked."""
        self.note_wear()
        wait = math.ceil(self.wear.seconds_until(need_bytes))
        if wait > 0:
            self.wear_refused_total += 1
            raise LimitExceeded(
                f"the drive's daily budget for writes is used up for now; reads go on; come back in {wait} s",
                field="wear",
                value=need_bytes,
                allowed=f"{max(0, self.wear.left_bytes)} bytes now, {self.wear.bytes_per_day} a day",
            )

    def note_wear(self) -> None:
        """Bring `wear` up to now."""
        self.wear.note(self._log.counters()["written_bytes"], self._clock.monotonic())

    def _put(self, job: _Commit | _Alone) -> None:
        self.check_accepts()
        # A job whose caller has gone must not warn that nobody read its error.
        job.done.add_done_callback(_mark_read)
        self._queue.put_nowait(job)

    # ---- for the job that runs ----------------------------------------------------------------------------------

    async def in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    async def append(self, records: Sequence[Record]) -> list[Place]:
        """Make room and append, durably. For jobs that run alone, and for the pipeline itself."""
        size = await self._work(len(records), lambda: bytes_of(records))
        await self.room.make(size)
        try:
            places = await self._append(records)
        except NoSpace as error:
            if error.value in NOT_FOR_WANT_OF_ROOM:
                raise
            # Many small records need more than their payloads: a fresh segment has room for any one append.
            await self.room.make(self._log.largest_append_bytes())
            try:
                places = await self._append(records)
            except NoSpace as error:
                places = await self._append_on_a_full_disk(records, error)
        self._keep_seconds = KEEP_SECONDS_FIRST
        self.room.appended(size)
        self.note_wear()
        self.appends_total += 1
        return places

    async def _append(self, records: Sequence[Record]) -> list[Place]:
        def append() -> tuple[list[Place], Space]:
            return self._log.append(records), self._log.space()

        places, self.room.space = await self.in_thread(append)
        return places

    async def _work(self, items: int, work: Callable[[], T]) -> T:
        """Here where it is short, else in the writer's thread."""
        return work() if items <= ITEMS_AT_ONCE else await self.in_thread(work)

    async def _append_on_a_full_disk(self, records: Sequence[Record], error: NoSpace) -> list[Place]:
        """Others have filled the file system, and the budget is not the limit: let a segment go and try once more. Where
        they take that room as well they get no more of it for a while, or all that is stored would go that way."""
        loop = asyncio.get_running_loop()
        is_in_vain = error.value in NOT_FOR_WANT_OF_ROOM or loop.time() < self._keep_until
        if is_in_vain or not await self.room.give_back_a_segment():
            raise error
        if loop.time() >= self._told_full_at + TOLD_FULL_EVERY_SECONDS:
            self._told_full_at = loop.time()
            log.warning(
                "the file system is full though the disk budget is not used up; evicting to go on writing: %s",
                error,
            )
        try:
            return await self._append(records)
        except NoSpace:
            self._keep_until = loop.time() + self._keep_seconds
            self._keep_seconds = min(2 * self._keep_seconds, KEEP_SECONDS_MAX)
            raise

    # ---- what making room asks ----------------------------------------------------------------------------------

    async def evict(self, need_bytes: int) -> list[Place]:
        return await self._decisions.evict(need_bytes)

    async def moved(self, segment_id: int, moves: dict[Place, Place]) -> list[Place]:
        """Records of the commits under way are durable but not published: only this batch knows their places. Those
        that the batch has published already are the others' to follow."""
        for commit in self._batch:
            if not commit.done.done():
                commit.places = [moves.pop(place, place) for place in commit.places]
        return await self._decisions.moved(segment_id, moves)

    def left(self, places: Sequence[Place]) -> None:
        self._decisions.left(places)

    # ---- the task -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """The task. Returns after `stop`, when the queue is empty. However it ends, nobody goes on waiting for it."""
        try:
            while not isinstance(job := await self._take(), _Stop):
                self._in_hand = [job]
                if isinstance(job, _Alone):
                    await self._run_alone(job)
                else:
                    await self._run_commits(await self._gather(job))
        finally:
            self._stopping = True
            self._refuse_all()

    def _refuse_all(self) -> None:
        jobs = [*self._in_hand, self._next]
        while not self._queue.empty():
            jobs.append(self._queue.get_nowait())
        for job in jobs:
            if isinstance(job, (_Commit, _Alone)) and not job.done.done():
                job.done.set_exception(Unavailable("the service is stopping"))

    async def _take(self) -> _Commit | _Alone | _Stop:
        if self._next is not None:
            job, self._next = self._next, None
            return job
        return await self._queue.get()

    async def _run_alone(self, job: _Alone) -> None:
        try:
            result = await job.work()
        except Exception as error:  # noqa: BLE001 -- carried to the caller; the pipeline serves the next job
            job.done.set_exception(error)
        else:
            job.done.set_result(result)

    async def _gather(self, first: _Commit) -> list[_Commit]:
        await first.prepare()
        batch, size = [first], first.payload_bytes
        end = asyncio.get_running_loop().time() + self._gather_seconds
        while size < self._gather_bytes:
            try:
                async with asyncio.timeout_at(end):
                    job = await self._queue.get()
            except TimeoutError:
                break
            if not isinstance(job, _Commit):
                self._next = job
                break
            self._in_hand.append(job)
            await job.prepare()
            batch.append(job)
            size += job.payload_bytes
        return batch

    async def _run_commits(self, batch: list[_Commit]) -> None:
        self._batch = batch
        try:
            count = sum(len(commit.records) for commit in batch)
            for part in await self._work(count, lambda: self._parts(batch)):
                await self._append_part(part)
        except Exception as error:  # noqa: BLE001 -- carried to the callers; the pipeline serves the next batch
            for commit in batch:
                commit.error = commit.error or error
        for commit in batch:
            if not commit.done.done():
                await self._publish(commit)
        self._batch = ()

    def _parts(self, batch: list[_Commit]) -> list[list[tuple[_Commit, list[Record]]]]:
        """The batch cut into appends, in order: each within the limits of one append. In the writer's thread."""
        limit = min(self._gather_bytes, self._log.largest_append_bytes())
        if self.wear.limited:
            limit = min(limit, self.wear.most_bytes)
        parts: list[list[tuple[_Commit, list[Record]]]] = [[]]
        size, namespaces = 0, set[bytes]()
        for commit in batch:
            for record in commit.records:
                length = memoryview(record.payload).nbytes
                namespaces.add(record.namespace)
                if parts[-1] and (size + length > limit or len(namespaces) > NAMESPACES_PER_APPEND_MAX):
                    parts.append([])
                    size, namespaces = 0, {record.namespace}
                if not parts[-1] or parts[-1][-1][0] is not commit:
                    parts[-1].append((commit, []))
                parts[-1][-1][1].append(record)
                size += length
        return [part for part in parts if part]

    async def _append_part(self, part: list[tuple[_Commit, list[Record]]]) -> None:
        """Append what belongs to commits that have not failed, and publish each commit whose last record it was."""
        part = [(commit, records) for commit, records in part if commit.error is None]
        if not part:
            return
        try:
            joined = [record for _, records in part for record in records]
            if self.wear.limited:
                self.check_wear(bytes_of(joined))
            places = await self.append(joined)
        except NoSpace as error:
            if len(part) > 1:
                # Together they may need more than there is; each alone may not.
                for each in part:
                    await self._append_part([each])
                return
            part[0][0].error = error
        except KvstoreError as error:
            for commit, _ in part:
                commit.error = error
        else:
            at = 0
            for commit, records in part:
                commit.places.extend(places[at : at + len(records)])
                at += len(records)
        for commit, _ in part:
            if commit.error is not None or len(commit.places) == len(commit.records):
                await self._publish(commit)

    async def _publish(self, commit: _Commit) -> None:
        missing = len(commit.records) - len(commit.places)
        assert commit.error is not None or not missing, "a commit ends whole or with an error"
        try:
            report = await commit.publisher.publish([*commit.places, *[None] * missing])
        except Exception as error:  # noqa: BLE001 -- carried to the caller; the pipeline serves the next commit
            commit.done.set_exception(error)
            return
        self.room.discard(report.discard)
        self.commits_total += 1
        if commit.error is not None:
            self.failed_commits_total += 1
            commit.done.set_exception(commit.error)
        else:
            commit.done.set_result(report)


def bytes_of(records: Sequence[Record]) -> int:
    """Of all payloads."""
    return sum(memoryview(record.payload).nbytes for record in records)


def _mark_read(done: asyncio.Future[Any]) -> None:
    if not done.cancelled():
        done.exception()
