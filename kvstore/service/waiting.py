"""Waiting for a client, never longer than its session or its deadline."""

from __future__ import annotations

import asyncio
from asyncio import CancelledError
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

from kvstore.errors import KvstoreError, UnknownSession
from kvstore.service.session import SESSION_METADATA, Session

T = TypeVar("T")


async def until_end(
    step: Coroutine[Any, Any, T],
    *,
    session: Session,
    seconds: float | None,
    late: Callable[[], KvstoreError],
) -> T:
    """The result of `step`; UnknownSession where the session ends first; where `seconds` pass first, `late()`. None: they
    do not count.

    The step is cancelled then. A client that stops reading or sending thus cannot hold memory for longer than it
    could have held its lease.
    """
    task = asyncio.ensure_future(step)
    # Where nobody is left to hear of its error, that is no error of ours.
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        either: set[asyncio.Future[Any]] = {task, session.ended}
        limit = None if seconds is None else max(seconds, 0.0)
        await asyncio.wait(either, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if session.ended.done():
            raise UnknownSession(
                "the session ended during the call", field="kvstore-session", value=session.id
            )
        raise late()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=1.0)


class Until:
    """Around many steps of one task, what `until_end` is around one, and each step costs nothing more: UnknownSession where
    the session ends inside, `late()` where `seconds()`, which may grow meanwhile, have passed."""

    def __init__(
        self, *, session: Session, seconds: Callable[[], float], late: Callable[[], KvstoreError]
    ) -> None:
        self._session = session
        self._seconds = seconds
        self._late = late
        self._reason: KvstoreError | None = None

    def __enter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancels = task.cancelling()
        self._session.ended.add_done_callback(self._on_session_end)
        self._wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        self._session.ended.remove_done_callback(self._on_session_end)
        # A caller that went meanwhile has cancelled too, and nobody is left to be told.
        if self._reason is not None and self._task.uncancel() <= self._cancels and kind is CancelledError:
            raise self._reason from error

    def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(max(self._seconds(), 0.0), self._on_time)

    def _on_time(self) -> None:
        if self._seconds() > 0:
            self._wait()
        else:
            self._stop(self._late())

    def _on_session_end(self, _: object) -> None:
        self._stop(
            UnknownSession(
                "the session ended during the call", field=SESSION_METADATA, value=self._session.id
            )
        )

    def _stop(self, reason: KvstoreError) -> None:
        if self._reason is None:
            self._reason = reason
            self._task.cancel()
