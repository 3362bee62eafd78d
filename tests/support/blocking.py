"""The asynchronous client behind the synchronous one's face, so that the same tests hold for both."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import os
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from types import TracebackType
from typing import Any, Self

from kvstore_client.aio import (
    AsyncContained,
    AsyncFlight,
    AsyncHandoffTake,
    AsyncLease,
    AsyncLookup,
    AsyncReservation,
)

_HANDLES = (AsyncLease, AsyncFlight, AsyncHandoffTake, AsyncReservation)


class LoopThread:
    """An event loop that runs in a thread of its own."""

    def __init__(self, new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
        self.loop = new_loop()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self.loop.run_forever, name="test-loop")
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        if os.getpid() != self._pid:
            # Threads do not survive a fork.
            return asyncio.run(coroutine)
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class Blocking:
    """`inner`, each of whose methods blocks until its coroutine is done."""

    def __init__(self, inner: Any, thread: LoopThread) -> None:
        self._inner = inner
        self._thread = thread

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not inspect.isroutine(found):
            return found

        def call(*args: Any, **named: Any) -> Any:
            answer = found(*(_inside(arg) for arg in args), **named)
            if inspect.iscoroutine(answer):
                return self._wrapped(self._thread.run(answer))
            if inspect.isasyncgen(answer):
                return self._items(answer)
            return answer

        return call

    def _items(self, items: AsyncGenerator[Any, None]) -> Generator[Any, None, None]:
        async def following() -> list[Any]:
            return [item async for item in _first(items)]

        try:
            while found := self._thread.run(following()):
                yield found[0]
        finally:
            self._thread.run(items.aclose())

    def _wrapped(self, answer: Any) -> Any:
        if isinstance(answer, _HANDLES):
            return Blocking(answer, self._thread)
        if isinstance(answer, AsyncLookup):
            granted = {
                name: None if (one := getattr(answer, name)) is None else Blocking(one, self._thread)
                for name in ("lease", "flight")
            }
            return dataclasses.replace(answer, **granted)  # type: ignore[arg-type]
        if isinstance(answer, AsyncContained) and answer.lease is not None:
            return dataclasses.replace(answer, lease=Blocking(answer.lease, self._thread))  # type: ignore[arg-type]
        return answer

    def __enter__(self) -> Self:
        self._thread.run(self._inner.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.run(self._inner.__aexit__(kind, error, trace))

    def __repr__(self) -> str:
        return repr(self._inner)


def _inside(value: Any) -> Any:
    return value._inner if isinstance(value, Blocking) else value


async def _first(items: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """The next of them, and no more: without closing them."""
    try:
        yield await anext(items)
    except StopAsyncIteration:
        return
