"""The one who asked a gateway, and all that is under way for it: ended together when it goes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import grpc

from kvstore.clock import Clock
from kvstore_workers.runtime.stop import Stopped

REQUEST_SECONDS = 3600.0
"""How long a request may take where its caller sets no deadline."""


class Call(Protocol):
    """A call under way to a worker."""

    def cancel(self) -> object: ...


class Caller:
    """Any thread that works for the caller may use it. `deadline` is in monotonic seconds."""

    def __init__(self, context: grpc.ServicerContext, clock: Clock) -> None:
        self._clock = clock
        left = context.time_remaining()
        self.deadline = clock.monotonic() + (REQUEST_SECONDS if left is None else min(left, REQUEST_SECONDS))
        self._lock = threading.Lock()
        self._gone = False
        self._on_leave: dict[object, Callable[[], object]] = {}
        if not context.add_callback(self.leave):
            self.leave()

    @property
    def gone(self) -> bool:
        return self._gone

    def check(self) -> None:
        """Stopped when the caller has gone."""
        if self._gone:
            raise Stopped

    def seconds_left(self, at_most: float = REQUEST_SECONDS) -> float:
        return max(min(self.deadline - self._clock.monotonic(), at_most), 0.0)

    def leave(self) -> None:
        """Nobody waits for the answer any more: calls under way end, waits are woken. May be told any number of times."""
        with self._lock:
            self._gone = True
            told = list(self._on_leave.values())
        for tell in told:
            tell()

    @contextmanager
    def waking(self, wake: Callable[[], object]) -> Iterator[None]:
        """Inside, `wake` is called, from another thread, when the caller leaves. Stopped if it has left already."""
        key = object()
        with self._lock:
            self.check()
            self._on_leave[key] = wake
        try:
            yield
        finally:
            with self._lock:
                del self._on_leave[key]

    @contextmanager
    def holding(self, call: Call) -> Iterator[None]:
        """Inside, the call ends when the caller leaves: what it then raises becomes Stopped. It has ended afterwards."""
        try:
            with self.waking(call.cancel):
                yield
        except (grpc.RpcError, grpc.FutureCancelledError):
            self.check()
            raise
        finally:
            call.cancel()
