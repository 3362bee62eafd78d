"""Stores finished blocks and states in the background, while the model goes on computing."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

from kvstore.errors import KvstoreError, LimitExceeded, ParentMissing
from kvstore.types import ItemKind, Lineage
from kvstore_client.values import ReserveItem, ReserveOutcome
from kvstore_workers.runtime.store import STORE_FAILURES, PrefixStore
from kvstore_workers.runtime.trace import Trace
from kvstore_workers.runtime.values import StoreReport

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterLimits:
    """queue_bytes: payloads that wait or are being written; past it a block is given up, since computing never waits.
    batch_items, batch_bytes: one reservation at most. in_flight_tries, in_flight_seconds: how often, and after which
    pause, a block is asked for again that another writer has claimed."""

    queue_bytes: int = 256 << 20
    batch_items: int = 16
    batch_bytes: int = 4 << 20
    in_flight_tries: int = 5
    in_flight_seconds: float = 0.05


class Fate(Enum):
    STORED = auto()
    HELD = auto()
    FAILED = auto()


class StoreRun:
    """What one request stores: blocks in chain order, each followed by the state at its end, if that is kept.

    After the first block that could not be stored the rest of the run is given up, since a block is held only while
    its parent is. The next run starts afresh. Made by `Writer.begin`.
    """

    def __init__(self, offer: Callable[[Entry], None], trace: Trace) -> None:
        self.trace = trace
        self._offer = offer
        self._changed = threading.Condition()
        self._report = StoreReport()
        self._waiting = 0
        self._takes_more = True
        self._gave_up = False
        self._complete = False
        self._on_end: Callable[[], None] | None = None
        self._fault: Exception | None = None

    # ---- the request's side ------------------------------------------------------------------------------------

    @property
    def report(self) -> StoreReport:
        with self._changed:
            return self._report

    def put_block(
        self, *, key: bytes, parent: bytes, position: int, payload: bytes, lineage: Lineage
    ) -> None:
        """Hand over the block that ends at `position`. Never waits."""
        item = ReserveItem(
            kind=ItemKind.BLOCK,
            key=key,
            parent=parent,
            position=position,
            length=len(payload),
            lineage=lineage,
        )
        self._offer(Entry(self, item, payload))

    def put_state(
        self, *, key: bytes, position: int, payload: bytes, to_pool: bool, to_ssd: bool, lineage: Lineage
    ) -> None:
        """Hand over the state at the end of the block `key`, which is held or was handed over before. Never waits."""
        item = ReserveItem(
            kind=ItemKind.STATE,
            key=key,
            position=position,
            length=len(payload),
            to_pool=to_pool,
            to_ssd=to_ssd,
            lineage=lineage,
        )
        self._offer(Entry(self, item, payload))

    def put_rows(self, *, key: bytes, position: int, payload: bytes, lineage: Lineage) -> None:
        """Hand over the window rows of the block `key`, which was handed over before. Never waits."""
        item = ReserveItem(
            kind=ItemKind.ROWS,
            key=key,
            position=position,
            length=len(payload),
            to_ssd=True,
            lineage=lineage,
        )
        self._offer(Entry(self, item, payload))

    def complete(self, on_end: Callable[[], None]) -> None:
        """Nothing more is handed over; `on_end` is called when all of it is stored or given up, which may be now."""
        with self._changed:
            self._complete = True
            self._on_end = on_end
        self._end_if_over()

    def flush(self, *, seconds: float) -> StoreReport:
        """Wait until all that was handed over is stored or given up, at most `seconds`; the report at that moment.

        Raises what a fault of the program has raised in the writer.
        """
        with self._changed:
            in_time = self._changed.wait_for(lambda: self._waiting == 0, timeout=seconds)
            if self._fault is not None:
                raise self._fault
            if in_time or self._report.failure:
                return self._report
            return replace(self._report, failure=f"DEADLINE: not stored within {seconds:g} s")

    def note_failure(self, reason: str) -> None:
        """Something else of this request could not be left in the store; what is handed over is stored all the same."""
        with self._changed:
            if not self._report.failure:
                self._report = replace(self._report, failure=reason)

    # ---- the writer's side -------------------------------------------------------------------------------------

    @property
    def takes_more(self) -> bool:
        with self._changed:
            return self._takes_more

    @property
    def gave_up(self) -> bool:
        with self._changed:
            return self._gave_up

    def waits(self, item: ReserveItem) -> None:
        """Count `item` as handed over and not settled."""
        with self._changed:
            self._waiting += 1
            if item.kind is ItemKind.BLOCK:
                self._report = replace(self._report, blocks_pending=self._report.blocks_pending + 1)

    def settle(self, item: ReserveItem, fate: Fate) -> None:
        """What became of an item that `waits` counted."""
        with self._changed:
            self._waiting -= 1
            report = self._report
            if item.kind is ItemKind.BLOCK:
                report = replace(report, blocks_pending=report.blocks_pending - 1)
            self._report = _counted(report, item, fate)
            self._changed.notify_all()
        self._end_if_over()

    def _end_if_over(self) -> None:
        with self._changed:
            over = self._complete and self._waiting == 0
            on_end, self._on_end = (self._on_end, None) if over else (None, self._on_end)
        if on_end is not None:
            on_end()

    def cut(self, error: BaseException) -> None:
        """Take no further item; those that wait are stored. The first reason is the one that is reported."""
        with self._changed:
            self._takes_more = False
        self.note_failure(describe(error))

    def give_up(self, error: BaseException) -> None:
        """Take no further item, and store none of those that wait."""
        with self._changed:
            self._gave_up = True
        self.cut(error)

    def crash(self, error: Exception) -> None:
        """Give up because of a fault of the program, which `flush` raises."""
        self.give_up(error)
        with self._changed:
            self._fault = self._fault or error


@dataclass(frozen=True, slots=True)
class Entry:
    run: StoreRun
    item: ReserveItem
    payload: bytes


class Writer:
    """One thread that stores runs, a batch at a time, in the order in which they were handed over."""

    def __init__(self, store: PrefixStore, *, limits: WriterLimits | None = None) -> None:
        self._store = store
        self._limits = limits if limits is not None else WriterLimits()
        self._changed = threading.Condition()
        self._queue: deque[Entry] = deque()
        self._queued_bytes = 0
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="store-writer", daemon=True)
        self._thread.start()

    def begin(self, trace: Trace) -> StoreRun:
        return StoreRun(self._offer, trace)

    def close(self, *, seconds: float) -> bool:
        """Store what waits, for at most `seconds`, and end the thread; True when it has ended."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _offer(self, entry: Entry) -> None:
        run, size = entry.run, len(entry.payload)
        run.waits(entry.item)
        with self._changed:
            room = self._limits.queue_bytes - self._queued_bytes
            if not self._closing and run.takes_more and size <= room:
                self._queue.append(entry)
                self._queued_bytes += size
                self._changed.notify_all()
                return
        if size > room:
            error = LimitExceeded(
                "the writer's queue is full", field="size", value=size, allowed=f"{room} bytes now"
            )
            # Without a block those after it are not held; states and rows only save work.
            if entry.item.kind is ItemKind.BLOCK:
                run.cut(error)
            else:
                run.note_failure(describe(error))
        run.settle(entry.item, Fate.FAILED)

    # ---- the thread --------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (batch := self._next_batch()) is not None:
            self._store_batch(batch)
            with self._changed:
                self._queued_bytes -= sum(len(entry.payload) for entry in batch)

    def _next_batch(self) -> list[Entry] | None:
        """Neighbours of one run from the queue's head; waits for the first. None when closing and empty.

        No item is in a batch twice: a state that first goes to one tier and at the end to the other too takes a second.
        """
        limits = self._limits
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            if not self._queue:
                return None
            batch = [self._queue.popleft()]
            size = len(batch[0].payload)
            named = {_name(batch[0])}
            while self._queue and len(batch) < limits.batch_items and self._queue[0].run is batch[0].run:
                size += len(self._queue[0].payload)
                if size > limits.batch_bytes or _name(self._queue[0]) in named:
                    break
                named.add(_name(self._queue[0]))
                batch.append(self._queue.popleft())
            return batch

    def _store_batch(self, batch: Sequence[Entry]) -> None:
        """Store one run's entries; every one of them is settled on return."""
        run = batch[0].run
        left = list(batch)
        try:
            for attempt in range(self._limits.in_flight_tries):
                if run.gave_up or not left:
                    break
                if attempt:
                    self._pause()
                self._try_batch(run, left)
            if left and not run.gave_up:
                run.give_up(
                    LimitExceeded(
                        "another writer does not finish a block",
                        field="position",
                        value=left[0].item.position,
                        allowed=f"{self._limits.in_flight_tries} tries",
                    )
                )
        except STORE_FAILURES as error:
            log.warning("storing failed, the rest of the request is not stored: %s", describe(error))
            run.give_up(error)
        except Exception as error:
            log.exception("a fault in the writer")
            run.crash(error)
        for entry in left:
            run.settle(entry.item, Fate.FAILED)

    def _try_batch(self, run: StoreRun, left: list[Entry]) -> None:
        """Store a prefix of `left` and remove what is settled from it; what remains waits for another writer.

        ParentMissing when a block's parent is not held. On any error `left` holds what is not settled.
        """
        size = sum(entry.item.length for entry in left)
        # Ends before anything is settled: who waits for the last item takes the spans then.
        with (
            run.trace.span("store", "writer", items=len(left), bytes=size),
            self._store.reserve([entry.item for entry in left]) as reservation,
        ):
            outcomes = list(reservation.outcomes)
            granted = list(reservation.granted)
            lost: set[int] = set()
            if granted:
                reservation.write({index: left[index].payload for index in granted})
                lost = set(reservation.commit().left_out)
        if lost:
            run.note_failure(
                "PARENT_MISSING: some of what was written is not held: its parent was lost meanwhile, or it is leased as "
                "approximate"
            )
        settled: list[tuple[Entry, Fate]] = []
        missing: Entry | None = None
        for index, (entry, outcome) in enumerate(zip(list(left), outcomes, strict=True)):
            is_block = entry.item.kind is ItemKind.BLOCK
            if is_block and outcome is ReserveOutcome.IN_FLIGHT:
                break
            if is_block and outcome is ReserveOutcome.PARENT_MISSING:
                missing = entry
                break
            settled.append((entry, _fate(outcome, is_lost=index in lost)))
        del left[: len(settled)]
        for entry, fate in settled:
            run.settle(entry.item, fate)
        if missing is not None:
            raise ParentMissing(
                "the block before is not held (any more)", field="position", value=missing.item.position
            )

    def _pause(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing, timeout=self._limits.in_flight_seconds)


def _name(entry: Entry) -> tuple[ItemKind, bytes]:
    return entry.item.kind, entry.item.key


def _fate(outcome: ReserveOutcome, *, is_lost: bool) -> Fate:
    if outcome is ReserveOutcome.GRANTED:
        return Fate.FAILED if is_lost else Fate.STORED
    # A state that another writer has in flight will be held without us.
    return Fate.FAILED if outcome is ReserveOutcome.PARENT_MISSING else Fate.HELD


def _counted(report: StoreReport, item: ReserveItem, fate: Fate) -> StoreReport:
    stored = fate is Fate.STORED
    report = replace(report, bytes_stored=report.bytes_stored + (item.length if stored else 0))
    if item.kind is ItemKind.ROWS:
        return replace(
            report,
            rows_stored=report.rows_stored + stored,
            states_failed=report.states_failed + (fate is Fate.FAILED),
        )
    if item.kind is ItemKind.STATE:
        return replace(
            report,
            states_stored=report.states_stored + stored,
            states_failed=report.states_failed + (fate is Fate.FAILED),
        )
    return replace(
        report,
        blocks_stored=report.blocks_stored + stored,
        blocks_held_already=report.blocks_held_already + (fate is Fate.HELD),
        blocks_failed=report.blocks_failed + (fate is Fate.FAILED),
    )


def describe(error: BaseException) -> str:
    """An error as one line: its wire name, or its class, and its words."""
    name = error.code if isinstance(error, KvstoreError) else type(error).__name__
    return f"{name}: {error}"[:500]
