"""A service in a thread of its caller's process, reached without sockets: for tests, simulation and embedding."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self

from kvstore.clock import Clock, SystemClock
from kvstore.config import ServiceConfig
from kvstore.errors import ConfigError, InvalidArgument, KvstoreError, Unavailable
from kvstore.service.admin_servicer import AdminServicer
from kvstore.service.cache_servicer import CacheServicer
from kvstore.service.engine import Engine
from kvstore.service.inprocess_calls import NO_SERVICE, Call, Handler, Status
from kvstore.service.inprocess_channel import AwaitedChannel, BlockingChannel
from kvstore.service.listening import ADMIN, CACHE
from kvstore.service.server import run_service

NewLoop = Callable[[], asyncio.AbstractEventLoop]


class InProcessService:
    """One service on `config.dir`, with an event loop and threads of its own. Used as a context manager it serves inside.

    kvstore_client.InProcessAddress(service) is the address for clients, of threads and of tasks. What they send and get are
    the message objects themselves: whoever changes one after it was sent changes what the other end sees, and no limit on a
    message's size holds. Map, OpenArena and OpenDock are refused as MemoryUnavailable, since a session without a socket has no way
    for descriptors; clients fetch then.

    What would be for others, as `config.listen`, is refused: nothing is on a socket but the metrics page, if asked for. The
    process's umask, limits, signals and collector stay as they are, except that the collector rests while a store is loaded.
    `clock` times deadlines of calls, and all that the service times; timers are the loop's.
    """

    def __init__(
        self, config: ServiceConfig, *, clock: Clock | None = None, new_loop: NewLoop = asyncio.new_event_loop
    ) -> None:
        for field in ("listen", "health", "sockets", "otlp"):
            if value := getattr(config, field):
                raise ConfigError(
                    "a service in a process takes calls from that process only",
                    field=field,
                    value=value,
                    allowed="none; `kvstore serve` listens",
                )
        self._config = config
        self._clock = SystemClock() if clock is None else clock
        self._new_loop = new_loop
        self._running: _Running | None = None

    def start(self) -> Self:
        """Ready on return. KvstoreError where it cannot start; InvalidArgument where it runs."""
        if self._running is not None:
            raise InvalidArgument(
                "the service runs", field="service", value="running", allowed="a stopped one"
            )
        running = _Running(self._config, self._clock, self._new_loop)
        running.start()
        self._running = running
        return self

    def stop(self, *, grace: bool = True) -> None:
        """As after a stop signal; without `grace` nobody is waited for: sessions and calls end. Stopping twice
        does nothing. What ended the service before its time is raised here."""
        running, self._running = self._running, None
        if running is not None:
            running.stop(grace=grace)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # ---- for clients ----------------------------------------------------------------------------------------

    def open_session(self) -> Future[InProcessSession]:
        """A session, which has no socket; Unavailable or LimitExceeded."""
        opened: Future[InProcessSession] = Future()
        running = self._running
        if running is None or not running.post(running.begin_session, opened):
            opened.set_exception(_unavailable())
        return opened

    def channel(self) -> BlockingChannel:
        """For threads. It belongs to this start of the service."""
        return BlockingChannel(self._running or _NOWHERE)

    def async_channel(self) -> AwaitedChannel:
        """The same for the running loop's tasks."""
        return AwaitedChannel(self._running or _NOWHERE)


class InProcessSession:
    """An open session; what it held goes back when it is closed, or forgotten."""

    memory = None
    """There is none to map."""

    def __init__(
        self, *, number: str, boot: str, ended: asyncio.Future[None], end: Callable[[], object]
    ) -> None:
        self.number = number
        self.boot = boot
        self._ended = ended
        self._end = weakref.finalize(self, end)
        self._end.atexit = False

    def alive(self) -> bool:
        """False once either end has ended it. Waits for nothing; any thread may ask."""
        return self._end.alive and not self._ended.done()

    def close(self) -> None:
        """Closing twice does nothing."""
        self._end()


def _unavailable() -> Unavailable:
    return Unavailable(NO_SERVICE.details, field="address", value="in-process")


class _Running:
    """One start, in its thread. Its methods are for other threads, but those that `post` runs."""

    def __init__(self, config: ServiceConfig, clock: Clock, new_loop: NewLoop) -> None:
        self.clock = clock
        self._config = config
        self._loop = new_loop()
        # Reentrant: a forgotten session may be ended by the collector inside.
        self._lock = threading.RLock()
        self._gone = False
        self._stop = asyncio.Event()
        self._ready: Future[None] = Future()
        self._doors: _InProcessDoors | None = None
        self._main: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="kvstore-service")
        self._failure: BaseException | None = None

    # ---- other threads --------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()
        try:
            self._ready.result()
        except BaseException:
            self._thread.join()
            raise

    def stop(self, *, grace: bool) -> None:
        self.post(self._stop.set if grace else self._cancel)
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def post(self, step: Callable[..., object], *given: object) -> bool:
        """See inprocess_calls.Where."""
        with self._lock:
            if self._gone:
                return False
            self._loop.call_soon_threadsafe(step, *given)
            return True

    # ---- the loop's thread ----------------------------------------------------------------------------------

    def begin_session(self, opened: Future[InProcessSession]) -> None:
        if not opened.set_running_or_notify_cancel():
            return
        if self._doors is None or not self._doors.is_open:
            opened.set_exception(_unavailable())
            return
        try:
            opened.set_result(self._begin_session(self._doors.engine))
        except KvstoreError as error:
            opened.set_exception(error)

    def _begin_session(self, engine: Engine) -> InProcessSession:
        sessions = engine.sessions
        session = sessions.begin(os.getpid(), lambda: sessions.end(session))
        return InProcessSession(
            number=session.id,
            boot=sessions.boot.hex(),
            ended=session.ended,
            end=lambda: self.post(sessions.end, session),
        )

    def handler(self, method: str) -> Handler | None:
        return None if self._doors is None else self._doors.handler(method)

    def began(self, call: Call, task: asyncio.Task[None]) -> None:
        assert self._doors is not None, "a handler was found"
        self._doors.began(call, task)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                try:
                    runner.run(self._serve())
                finally:
                    # Before the loop is closed: after it nobody can be told.
                    with self._lock:
                        self._gone = True
                    # What was posted until then.
                    self._loop.run_until_complete(asyncio.sleep(0))
        except asyncio.CancelledError:
            self._end(_unavailable())
        except BaseException as error:  # noqa: BLE001 -- raised in the thread that starts or stops the service
            self._end(error)
        else:
            self._end(_unavailable())

    def _end(self, error: BaseException) -> None:
        if not self._ready.done():
            self._ready.set_exception(error)
        elif not isinstance(error, Unavailable):
            self._failure = error

    async def _serve(self) -> None:
        self._main = asyncio.current_task()
        await run_service(
            self._config,
            clock=self.clock,
            ready=lambda: self._ready.set_result(None),
            stop=self._stop,
            doors=self._make_doors,
        )

    def _make_doors(self, engine: Engine) -> _InProcessDoors:
        self._doors = _InProcessDoors(engine)
        return self._doors

    def _cancel(self) -> None:
        if self._main is not None:
            self._main.cancel()


class _Nowhere:
    """Where calls go while no service runs."""

    clock: Clock = SystemClock()

    def post(self, step: Callable[..., object], *given: object) -> bool:
        return False

    def handler(self, method: str) -> Handler | None:
        return None

    def began(self, call: Call, task: asyncio.Task[None]) -> None:
        raise AssertionError("no call begins here")


_NOWHERE = _Nowhere()


class _InProcessDoors:
    """The doors of a service that has no sockets; see listening.Doors. The loop's thread only."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.is_open = False
        self._servicers: dict[str, Any] = {
            CACHE: CacheServicer(engine),
            ADMIN: AdminServicer(engine, on_drain=lambda: self.set_serving(False)),
        }
        self._calls: dict[asyncio.Task[None], Call] = {}
        self._takes_calls = False

    def handler(self, method: str) -> Handler | None:
        _, service, name = method.split("/")
        servicer = self._servicers.get(service) if self._takes_calls else None
        found: Handler | None = getattr(servicer, name, None)
        return found

    def began(self, call: Call, task: asyncio.Task[None]) -> None:
        self._calls[task] = call
        task.add_done_callback(lambda _: self._calls.pop(task, None))

    async def start(self) -> None:
        self._takes_calls = True

    async def stop(self, seconds: float) -> None:
        self._takes_calls = False
        if self._calls:
            await asyncio.wait(list(self._calls), timeout=seconds)
        going = Status(NO_SERVICE.code, "the service is going")
        for call in list(self._calls.values()):
            call.end(going)
        if self._calls:
            await asyncio.wait(list(self._calls))

    async def set_serving(self, is_serving: bool) -> None:
        """Nobody watches but who started it."""

    async def open_to_sessions(self) -> None:
        self.is_open = True

    def close_to_sessions(self) -> None:
        self.is_open = False
