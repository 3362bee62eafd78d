"""A tier of rows of host memory: lookups, stores and loads that are handed to helper threads, and what came of them."""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from kvstore.clock import Clock
from kvstore.errors import KvstoreError
from kvstore.prefix.opaque import OpaqueKey
from kvstore.types import BytesLike
from kvstore_vllm.identity import opaque_key
from kvstore_vllm.lane import Lane
from kvstore_vllm.lookups import Lookups, Question, Verdict
from kvstore_vllm.settings import TierSettings
from kvstore_vllm.touches import Touches

log = logging.getLogger(__name__)

T = TypeVar("T")

LOAD_BYTES = 64 << 20
"""Of rows that one lease covers."""
TOUCH_SECONDS = 10.0
TOUCHES_AT_ONCE = 256
PAUSE_SECONDS = 0.0001
"""Yielding without a pause is no use: who asks for the interpreter is woken, finds it taken again, and asks anew, for ever."""
END_SECONDS = 2.0
"""How long the engine's end waits for each thread once its calls were broken off."""


class RowStore(Protocol):
    """What helper threads call: see kvstore_client.KeyedStore."""

    def contains(self, keys: Sequence[OpaqueKey], *, use: bool = False) -> tuple[bool, ...]: ...
    def get_into(self, targets: Sequence[tuple[OpaqueKey, memoryview | bytearray]]) -> tuple[bool, ...]: ...
    def put(self, items: Sequence[tuple[OpaqueKey, BytesLike]]) -> tuple[bool, ...]: ...


class Job(NamedTuple):
    """Rows to be loaded or stored, the first one of the prompt first."""

    number: int
    is_load: bool
    keys: Sequence[bytes]
    rows: Sequence[memoryview]
    since: float


class Finished(NamedTuple):
    """`done`: the keys whose rows were loaded, or are held now. A load succeeds with all of them; a store unless it failed: a
    key that another engine is just storing is left to that one."""

    job: Job
    success: bool
    done: Sequence[bytes]
    seconds: float
    error: KvstoreError | None = None


class _Ask(NamedTuple):
    questions: Sequence[Question]
    touched: Sequence[bytes]


class _Answer(NamedTuple):
    answers: Sequence[tuple[Question, bool]]
    error: KvstoreError | None


class RowTier:
    """All methods but those of helper threads are the scheduler's, one thread at a time, and none of them waits for anything but `drain` and
    `shutdown`; `finished` pauses for a moment. No call of the store's is made outside of helper threads, and each ends by its own deadlines.

    A job is reported once, when nothing of it touches its rows any more. What the store fails to do is a MISS, a failed load
    or a refused store, and is counted.
    """

    def __init__(
        self,
        store: RowStore,
        rows: memoryview,
        *,
        row_bytes: int,
        settings: TierSettings,
        clock: Clock,
        close: Callable[[], None],
    ) -> None:
        """`rows`: the engine's host memory, a row after the other; `close` breaks off the calls that are under way."""
        self._store = store
        self._memory = rows.cast("B")
        self._row_bytes = row_bytes
        self._settings = settings
        self._clock = clock
        self._close = close
        self._lookups = Lookups(patience_seconds=settings.lookup_seconds, most=settings.lookup_keys)
        self._touches = Touches(every_seconds=TOUCH_SECONDS, most=settings.lookup_keys)
        self._open: dict[int, Job] = {}
        self._answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[Finished] = queue.SimpleQueue()
        self._counts: Counter[str] = Counter()
        self._failing = False
        self._pause = threading.Event()
        self._rows_at_once = max(1, settings.batch_bytes // row_bytes)
        self._asking: Lane[_Ask] = Lane(
            "ask",
            self._ask,
            self._not_asked,
            weigh=lambda ask: len(ask.questions) + len(ask.touched),
            most_weight=2 * settings.lookup_keys,
        )
        self._loading: Lane[Job] = Lane(
            "load",
            self._load,
            self._not_done,
            weigh=lambda job: len(job.keys),
            most_weight=settings.load_rows,
            threads=settings.load_threads,
        )
        self._storing: Lane[Job] = Lane(
            "store",
            self._keep,
            self._not_done,
            weigh=lambda job: len(job.keys),
            most_weight=settings.store_rows,
            batch_weight=self._rows_at_once,
        )

    # ---- the scheduler's side -------------------------------------------------------------------------------

    def lookup(self, key: bytes, request: str) -> Verdict:
        if not self._answers.empty():
            self._take_answers()
        return self._lookups.verdict(key, request, self._clock.monotonic())

    def touch(self, keys: Iterable[bytes]) -> None:
        self._touches.used(keys, self._clock.monotonic())

    def request_ended(self, request: str) -> None:
        self._lookups.request_ended(request)

    def step_ended(self) -> None:
        """Ask what came up in this step."""
        self._take_answers()
        questions = self._lookups.take_questions()
        touched = self._touches.take(self._clock.monotonic(), most=TOUCHES_AT_ONCE)
        if questions or touched:
            ask = _Ask(questions, touched)
            if not self._asking.offer(ask):
                self._counts["keys_refused"] += len(questions)
                self._lookups.answered((question, False) for question in questions)

    def load(self, number: int, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        self._submit(number, keys, rows, is_load=True)

    def store(self, number: int, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        self._submit(number, keys, rows, is_load=False)

    def finished(self) -> list[Finished]:
        """Jobs that have ended since the last call. Keys of a failed load are a MISS from then on.

        While anything is under way this takes PAUSE_SECONDS, in which helper threads have the interpreter: an engine that has
        nothing else to do steps round and round, and they would get it every 5 ms only, several times for each row.
        """
        if self.has_work or self._asking.is_busy:
            self._pause.wait(PAUSE_SECONDS)
        found: list[Finished] = []
        while (each := _next(self._finished)) is not None:
            self._settle(each)
            found.append(each)
        return found

    @property
    def has_work(self) -> bool:
        """Whether something is under way that the engine has not been told of, or waits for a step's end."""
        return bool(self._open) or self._lookups.has_questions

    def drain(self) -> None:
        """Drop jobs that have not begun, and wait for those that have: `finished` then tells of all."""
        for lane in (self._loading, self._storing):
            lane.cancel()
            lane.wait_idle()

    def shutdown(self) -> None:
        """What is being stored has a while to end; everything else is broken off. Nothing touches the rows afterwards."""
        self._loading.cancel()
        if not self._storing.wait_idle(self._settings.shutdown_seconds):
            log.warning("the engine ends before all was stored; what was not is not kept")
        self._close()
        for lane in (self._asking, self._loading, self._storing):
            if not lane.close(END_SECONDS):
                log.warning("a call to the service outlives the engine's end")
        # The engine unmaps its pool next, which no view may be left of.
        self._open.clear()
        while _next(self._finished) is not None:
            pass
        self._memory.release()

    def take_counts(self) -> dict[str, int]:
        """What has happened since the last call."""
        lookups = self._lookups
        self._counts["keys_late"] += lookups.late
        self._counts["keys_refused"] += lookups.refused
        lookups.late = lookups.refused = 0
        counts, self._counts = self._counts, Counter()
        return {name: count for name, count in counts.items() if count}

    # ---- inside: the scheduler's thread ---------------------------------------------------------------------

    def _submit(self, number: int, keys: Sequence[bytes], rows: Sequence[int], *, is_load: bool) -> None:
        assert number not in self._open, "a job's number is given once"
        views = [self._row(int(row)) for row in rows]
        job = Job(number, is_load, tuple(keys), views, self._clock.monotonic())
        assert len(job.keys) == len(views), "a row for each key"
        self._open[number] = job
        lane = self._loading if is_load else self._storing
        if not lane.offer(job):
            self._counts["rows_load_refused" if is_load else "rows_store_refused"] += len(views)
            self._finished.put(Finished(job, False, (), 0.0))

    def _row(self, row: int) -> memoryview:
        begin = row * self._row_bytes
        view = self._memory[begin : begin + self._row_bytes]
        assert row >= 0, "rows are counted from 0"
        assert len(view) == self._row_bytes, "the row lies in the pool"
        return view

    def _settle(self, each: Finished) -> None:
        job = self._open.pop(each.job.number)
        name = "rows_loaded" if job.is_load else "rows_stored"
        self._counts[name] += len(each.done)
        if job.is_load and not each.success:
            done = set(each.done)
            missed = [key for key in job.keys if key not in done]
            self._counts["rows_load_failed"] += len(missed)
            self._lookups.load_failed(missed)
        elif not each.success:
            self._counts["rows_store_failed"] += len(job.keys) - len(each.done)
        self._note(each.error)

    def _take_answers(self) -> None:
        while (answer := _next(self._answers)) is not None:
            self._counts["keys_asked"] += len(answer.answers)
            self._counts["keys_held"] += sum(is_held for _, is_held in answer.answers)
            self._lookups.answered(answer.answers)
            self._note(answer.error)

    def _note(self, error: KvstoreError | None) -> None:
        """Say it once when it begins, and once when it is over."""
        if error is not None:
            self._counts["calls_failed"] += 1
            if not self._failing:
                log.warning("kvstore fails; what it does not answer is a miss: %s", error)
        elif self._failing:
            log.warning("kvstore answers again")
        self._failing = error is not None

    # ---- inside: helper threads -----------------------------------------------------------------------------

    def _ask(self, asks: Sequence[_Ask]) -> None:
        for ask in asks:
            held: Sequence[bool] = (False,) * len(ask.questions)
            error: KvstoreError | None = None
            try:
                if ask.questions:
                    held = self._store.contains([opaque_key(question.key) for question in ask.questions])
                if ask.touched:
                    self._store.contains([opaque_key(key) for key in ask.touched], use=True)
            except KvstoreError as failure:
                error = failure
            finally:
                self._answers.put(_Answer(list(zip(ask.questions, held, strict=True)), error))

    def _not_asked(self, asks: Sequence[_Ask]) -> None:
        for ask in asks:
            self._answers.put(_Answer([(question, False) for question in ask.questions], None))

    def _load(self, jobs: Sequence[Job]) -> None:
        at_once = max(1, LOAD_BYTES // self._row_bytes)
        for job in jobs:
            done: list[bytes] = []
            error: KvstoreError | None = None
            try:
                for first in range(0, len(job.keys), at_once):
                    keys, rows = job.keys[first : first + at_once], job.rows[first : first + at_once]
                    got = self._store.get_into(list(zip(map(opaque_key, keys), rows, strict=True)))
                    done += [key for key, is_here in zip(keys, got, strict=True) if is_here]
            except KvstoreError as failure:
                error = failure
            finally:
                self._end(job, len(done) == len(job.keys), done, error)

    def _keep(self, jobs: Sequence[Job]) -> None:
        """Jobs that wait together are stored together: one sync for all."""
        rows = {key: row for job in jobs for key, row in zip(job.keys, job.rows, strict=True)}
        keys = list(rows)
        held: set[bytes] = set()
        tried: set[bytes] = set()
        error: KvstoreError | None = None
        try:
            for first in range(0, len(keys), self._rows_at_once):
                part = keys[first : first + self._rows_at_once]
                kept = self._store.put([(opaque_key(key), rows[key]) for key in part])
                held.update(key for key, is_held in zip(part, kept, strict=True) if is_held)
                tried.update(part)
        except KvstoreError as failure:
            error = failure
        finally:
            for job in jobs:
                done = [key for key in job.keys if key in held]
                self._end(job, tried.issuperset(job.keys), done, error)
                error = None

    def _end(self, job: Job, success: bool, done: Sequence[bytes], error: KvstoreError | None) -> None:
        self._finished.put(Finished(job, success, done, self._clock.monotonic() - job.since, error))

    def _not_done(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._end(job, False, (), None)


def _next(given: queue.SimpleQueue[T]) -> T | None:
    """Who calls is the only one who takes, so that what is there stays there; an exception each step would cost more."""
    return None if given.empty() else given.get_nowait()
