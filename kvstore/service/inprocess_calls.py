"""Calls to a service in the same process: its servicers' coroutines run in its loop with the caller's own messages. No
sockets, and nothing is serialised, but for the frames of Fetch, which the service makes as they go over a wire."""

from __future__ import annotations

import asyncio
import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Iterator
from typing import Any, NamedTuple, NoReturn, Protocol

import grpc
import grpc.aio

from kvstore.clock import Clock

WAITING_MAX = 4
"""Answers of one call that its caller has not taken yet; the service waits then."""

Metadata = tuple[tuple[str, str], ...]
Handler = Callable[[Any, Any], Awaitable[Any]]
"""A servicer's method: of a request, or None where requests come one after another, and a context."""


class Status(NamedTuple):
    code: grpc.StatusCode
    details: str = ""
    trailing: Metadata = ()


_DONE = Status(grpc.StatusCode.OK)
_CANCELLED = Status(grpc.StatusCode.CANCELLED, "cancelled by its caller")
_LATE = Status(grpc.StatusCode.DEADLINE_EXCEEDED, "the call's time is over")
_BROKEN = Status(grpc.StatusCode.INTERNAL, "the call broke off in the service; its log says why")
NO_SERVICE = Status(grpc.StatusCode.UNAVAILABLE, "no service runs in this process")


class CallFailed(grpc.RpcError):
    """What a call raises that did not end well; with the methods that gRPC's have."""

    def __init__(self, status: Status) -> None:
        super().__init__(f"{status.code.name}: {status.details}")
        self._status = status

    def code(self) -> grpc.StatusCode:
        return self._status.code

    def details(self) -> str:
        return self._status.details

    def trailing_metadata(self) -> Any:
        return self._status.trailing


class Where(Protocol):
    """The service that calls run in."""

    @property
    def clock(self) -> Clock: ...

    def post(self, step: Callable[..., object], *given: object) -> bool:
        """Run it soon in the service's loop, from any thread; False where there is none any more."""

    def handler(self, method: str) -> Handler | None:
        """Of the call `/service/name`; None where it is not served."""

    def began(self, call: Call, task: asyncio.Task[None]) -> None:
        """The service ends it if it is still there when it goes."""


class Call(ABC):
    """One call, begun in the caller's thread. What ends it first counts; any thread may end it."""

    def __init__(
        self,
        where: Where,
        method: str,
        request: Any,
        *,
        is_stream: bool,
        timeout: float | None,
        metadata: Metadata,
        parse: Callable[[bytes], Any],
    ) -> None:
        """`is_stream`: `request` is an iterable of requests. `timeout`: seconds; None: no limit."""
        self.metadata = metadata
        self._where = where
        self._request = request
        self._is_stream = is_stream
        self._timeout = timeout
        self._deadline = None if timeout is None else where.clock.monotonic() + timeout
        self._parse = parse
        self._lock = threading.Lock()
        self._answers: deque[Any] = deque()
        self._status: Status | None = None
        # In the service's loop only.
        self._task: asyncio.Task[None] | None = None
        self._room: asyncio.Future[None] | None = None
        if not where.post(self._begin, method):
            self.end(NO_SERVICE)

    # ---- the caller's side: any thread --------------------------------------------------------------------------

    def end(self, status: Status) -> bool:
        """Whether this has ended it."""
        with self._lock:
            if self._status is not None:
                return False
            self._status = status
        self._where.post(self._stop)
        self._notify()
        return True

    def cancel(self) -> bool:
        return self.end(_CANCELLED)

    def done(self) -> bool:
        with self._lock:
            return self._status is not None and not self._answers

    def _take(self) -> Any:
        """The next answer; the status where there is none to come; None where it has yet to come."""
        with self._lock:
            if self._status is not None and self._status.code is grpc.StatusCode.CANCELLED:
                return self._status
            if not self._answers:
                return self._status
            answer = self._answers.popleft()
            has_room = len(self._answers) == WAITING_MAX - 1
        if has_room:
            self._where.post(self._go_on)
        return answer

    def _opened(self, answer: Any) -> Any:
        """An answer as its caller is to have it. Raises CallFailed for a status."""
        if isinstance(answer, Status):
            raise CallFailed(answer)
        return self._parse(answer) if isinstance(answer, bytes) else answer

    def _left(self) -> float | None:
        """Seconds."""
        return None if self._deadline is None else max(0.0, self._deadline - self._where.clock.monotonic())

    @abstractmethod
    def _notify(self) -> None:
        """Something is there to be taken."""

    # ---- the service's side: its loop ---------------------------------------------------------------------------

    async def write(self, answer: Any) -> None:
        """Waits while the caller has WAITING_MAX answers to take. CancelledError where it has gone."""
        while True:
            with self._lock:
                if self._status is not None:
                    raise asyncio.CancelledError
                if len(self._answers) < WAITING_MAX:
                    self._answers.append(answer)
                    break
                self._room = asyncio.get_running_loop().create_future()
            await self._room
        self._notify()

    def check_wanted(self) -> None:
        """CancelledError where the caller has gone."""
        with self._lock:
            if self._status is not None:
                raise asyncio.CancelledError

    def _go_on(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def _begin(self, method: str) -> None:
        handler = self._where.handler(method)
        if handler is None:
            self.end(Status(grpc.StatusCode.UNIMPLEMENTED, f"{method} is not served"))
            return
        loop = asyncio.get_running_loop()
        left = self._left()
        timer = None if left is None else loop.call_later(left, self.end, _LATE)
        self._task = loop.create_task(self._serve(handler))
        self._task.add_done_callback(lambda _: timer.cancel() if timer is not None else None)
        self._where.began(self, self._task)

    async def _serve(self, handler: Handler) -> None:
        requests = _Requests(self._request, self.end) if self._is_stream else None
        try:
            answer = await handler(None if self._is_stream else self._request, Context(self, requests))
            if answer is not None:
                await self.write(answer)
            self.end(_DONE)
        except _Aborted as error:
            self.end(error.status)
        except asyncio.CancelledError:
            self.end(_CANCELLED)
        finally:
            # What is said here is heard where nothing was said before.
            self.end(_BROKEN)
            if requests is not None:
                requests.close()

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()


class _Aborted(Exception):
    def __init__(self, status: Status) -> None:
        super().__init__(status.details)
        self.status = status


class Context:
    """What handlers ask of grpc.aio.ServicerContext."""

    def __init__(self, call: Call, requests: _Requests | None) -> None:
        self._call = call
        self._requests = requests

    def invocation_metadata(self) -> Metadata:
        return self._call.metadata

    def peer(self) -> str:
        return "in-process"

    async def send_initial_metadata(self, metadata: object) -> None:
        """There is nothing to send: CancelledError where the caller has gone, as gRPC finds out by sending."""
        self._call.check_wanted()

    async def read(self) -> Any:
        return grpc.aio.EOF if self._requests is None else await self._requests.next()

    async def write(self, answer: Any) -> None:
        await self._call.write(answer)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing: Metadata = ()) -> NoReturn:
        raise _Aborted(Status(code, details, trailing))


class _Requests:
    """The requests of one call, each made when it is asked for, in a thread: what makes them is the caller's."""

    def __init__(self, requests: Iterable[Any], fail: Callable[[Status], object]) -> None:
        self._requests = iter(requests)
        self._fail = fail
        self._loop = asyncio.get_running_loop()
        self._asked: queue.SimpleQueue[asyncio.Future[Any] | None] = queue.SimpleQueue()
        # A caller whose requests never come must not keep its process from ending.
        threading.Thread(target=self._make, name="kvstore-requests", daemon=True).start()

    async def next(self) -> Any:
        """grpc.aio.EOF at their end."""
        asked = self._loop.create_future()
        self._asked.put(asked)
        return await asked

    def close(self) -> None:
        self._asked.put(None)

    def _make(self) -> None:
        while (asked := self._asked.get()) is not None:
            try:
                made = next(self._requests, grpc.aio.EOF)
            except Exception as error:  # noqa: BLE001 -- of the caller's making: it ends the call, and says why
                self._fail(Status(grpc.StatusCode.UNKNOWN, f"the requests failed: {error!r}"))
                return
            if self._loop.is_closed():
                return
            self._loop.call_soon_threadsafe(_answer, asked, made)


def _answer(asked: asyncio.Future[Any], made: Any) -> None:
    if not asked.done():
        asked.set_result(made)


class BlockingCall(Call):
    """As gRPC's for threads: iterate over it, or wait for its `result`."""

    def __init__(self, *given: Any, **named: Any) -> None:
        self._changed = threading.Condition()
        super().__init__(*given, **named)

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _next(self, seconds: float | None) -> Any:
        """None where nothing came within `seconds`."""
        found: list[Any] = []

        def has_come() -> bool:
            found[:] = [self._take()]
            return found[0] is not None

        with self._changed:
            self._changed.wait_for(has_come, seconds)
        return found[0]

    def result(self, timeout: float | None = None) -> Any:
        """grpc.FutureTimeoutError where it has not come after so many seconds, though its own time is not over."""
        left = self._left()
        answer = self._next(left if timeout is None else timeout if left is None else min(timeout, left))
        if answer is None:
            if not self._is_late():
                raise grpc.FutureTimeoutError
            self.end(_LATE)
            answer = self._next(0)
        return self._opened(answer)

    def _is_late(self) -> bool:
        return self._left() == 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        answer = self._next(self._left())
        if answer is None:
            self.end(_LATE)
            answer = self._next(0)
        if answer == _DONE:
            raise StopIteration
        return self._opened(answer)


class AwaitedCall(Call):
    """As gRPC's for tasks: iterate over it, or await it."""

    def __init__(self, *given: Any, **named: Any) -> None:
        self._caller = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        super().__init__(*given, **named)

    def _notify(self) -> None:
        # A loop that was closed with calls under way waits for none of them.
        if not self._caller.is_closed():
            self._caller.call_soon_threadsafe(self._changed.set)

    async def _next(self) -> Any:
        try:
            async with asyncio.timeout(self._left()):
                while True:
                    self._changed.clear()
                    if (answer := self._take()) is not None:
                        return answer
                    await self._changed.wait()
        except TimeoutError:
            self.end(_LATE)
            return self._take()
        except asyncio.CancelledError:
            self.cancel()
            raise

    async def _result(self) -> Any:
        return self._opened(await self._next())

    def __await__(self) -> Generator[Any, None, Any]:
        return self._result().__await__()

    async def read(self) -> Any:
        """The next answer; grpc.aio.EOF after the last."""
        answer = await self._next()
        return grpc.aio.EOF if answer == _DONE else self._opened(answer)

    async def __aiter__(self) -> AsyncIterator[Any]:
        while (answer := await self.read()) is not grpc.aio.EOF:
            yield answer
