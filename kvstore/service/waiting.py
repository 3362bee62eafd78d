"""Waiting for a client, never longer than its session or its deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from kvstore.errors import KvstoreError, UnknownSession
from kvstore.service.session import Session

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
