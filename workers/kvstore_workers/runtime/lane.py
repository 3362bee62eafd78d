"""One thread that runs requests one after another, and the stream that carries a request's events out of it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Generic, TypeVar

from kvstore.errors import Draining, LimitExceeded
from kvstore_workers.runtime.stop import Stop, Stopped

EVENTS_MAX = 256
"""Events that wait for a slow reader; past it the work waits for the reader."""

READER_SECONDS = 30.0
"""How long the work waits for a reader that takes nothing; then the request is given up, since others wait too."""

T = TypeVar("T")
E = TypeVar("E")


class EventStream(Generic[E]):
    """Events of one request, written by the threads that work for it and read by one other. Ends with the work's own
    error, if any."""

    def __init__(self, *, events_max: int = EVENTS_MAX, reader_seconds: float = READER_SECONDS) -> None:
        self.stop = Stop()
        self._events_max = events_max
        self._reader_seconds = reader_seconds
        self._changed = threading.Condition()
        self._events: deque[E] = deque()
        self._ended = False
        self._error: BaseException | None = None

    def cancel(self) -> None:
        """The reader has gone: the work ends at its next step, or never begins."""
        self.stop.set()
        with self._changed:
            self._changed.notify_all()

    def __iter__(self) -> Iterator[E]:
        """Each event as it comes; raises what the work raised. Stopped after `cancel`."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._events or self._ended or self.stop.is_set)
                if self.stop.is_set:
                    raise Stopped
                if not self._events:
                    if self._error is not None:
                        raise self._error
                    return
                event = self._events.popleft()
                self._changed.notify_all()
            yield event

    def put(self, event: E) -> None:
        """Add an event. Stopped when the reader has gone, LIMIT_EXCEEDED when it takes nothing for too long."""
        with self._changed:
            has_room = self._changed.wait_for(
                lambda: len(self._events) < self._events_max or self.stop.is_set, timeout=self._reader_seconds
            )
            if self.stop.is_set:
                raise Stopped
            if not has_room:
                raise LimitExceeded(
                    "the reader takes no events",
                    field="events",
                    value=len(self._events),
                    allowed=f"{self._events_max} waiting for at most {self._reader_seconds:g} s",
                )
            self._events.append(event)
            self._changed.notify_all()

    def end(self, error: BaseException | None = None) -> None:
        """No further event comes. The first end counts."""
        with self._changed:
            if self._ended:
                return
            self._ended = True
            self._error = error
            self._changed.notify_all()


class Lane:
    """All torch work of a process, in one thread: a thread's number of workers, and so its bits, stay the same.

    The queue has no limit of its own: whoever runs work here is in a Room.
    """

    def __init__(self, *, events_max: int = EVENTS_MAX, reader_seconds: float = READER_SECONDS) -> None:
        self._events_max = events_max
        self._reader_seconds = reader_seconds
        self._lock = threading.Lock()
        self._draining = False
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` in the lane's thread and wait for its result."""
        return self._executor.submit(function).result()

    def run(self, work: Callable[[Stop], Generator[E, None, None]]) -> EventStream[E]:
        """Queue `work`; its events come out of the stream. DRAINING is raised at once."""
        with self._lock:
            if self._draining:
                raise Draining(
                    "this worker is shutting down", field="worker", value="draining", allowed="another worker"
                )
        stream: EventStream[E] = EventStream(events_max=self._events_max, reader_seconds=self._reader_seconds)
        self._executor.submit(self._pump, work, stream)
        return stream

    def drain(self) -> None:
        """Take no more requests; those that were taken go on."""
        with self._lock:
            self._draining = True

    def close(self) -> None:
        """Take no more requests and wait for the thread's end; cancel streams first that should not go on."""
        self.drain()
        self._executor.shutdown(wait=True)

    def _pump(self, work: Callable[[Stop], Generator[E, None, None]], stream: EventStream[E]) -> None:
        error: BaseException | None = None
        try:
            stream.stop.check()
            with closing(work(stream.stop)) as events:
                for event in events:
                    stream.put(event)
        except BaseException as raised:  # noqa: BLE001 -- handed to the reader, who raises it
            error = raised
        stream.end(error)
