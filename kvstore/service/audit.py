"""The audit log: a line of JSON for each admin call, who made it, with which arguments, and how it ended."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from kvstore.errors import Unauthenticated
from kvstore.service.callers import LOCAL, current_caller
from kvstore.service.session import SESSION_METADATA, Sessions
from kvstore.service.status import Context, refusal_of_call

log = logging.getLogger(__name__)

NAME = "audit.log"
BYTES_MIN, BYTES_MAX = 64 << 10, 1 << 20
BUDGET_SHARE = 256
"""The file, and the one before it, each take at most this part of the disk budget."""

LINES_WAITING_MAX = 1000
TEXT_CHARS_MAX = 200

ASKING = frozenset({"Stats", "ListNamespaces", "ListTenants"})
ASKING_EVERY_SECONDS = 60.0
"""Who looks at figures each second gets a line a minute, which says how many calls it stands for."""

Handler = Callable[[Any, Any], Awaitable[Any]]


def bytes_for(budget_bytes: int) -> int:
    return max(BYTES_MIN, min(BYTES_MAX, budget_bytes // BUDGET_SHARE))


class AuditLog:
    """Appends to `file`, for this user alone, from a thread of its own: nobody waits for it. Past `bytes_max` the file takes the
    place of `<file>.1`. What cannot be written is counted and told in the service's log."""

    def __init__(
        self,
        file: Path,
        *,
        bytes_max: int,
        wall: Callable[[], float],
        sessions: Sessions,
        counts: Counter[str],
    ) -> None:
        self._file = file
        self._bytes_max = bytes_max
        self._wall = wall
        self._sessions = sessions
        self._counts = counts
        self._thread = ThreadPoolExecutor(1, "kvstore-audit")
        self._waiting = 0
        self._asked: dict[tuple[str, str], tuple[float, int]] = {}

    def around(self, name: str, method: Handler) -> Handler:
        """The same method; each of its calls is noted at its end."""

        async def call(request: Any, context: Context) -> Any:
            begin, outcome = self._wall(), "cancelled"
            try:
                answer = await method(request, context)
                outcome = "ok"
                return answer
            except Exception:
                outcome = refusal_of_call()
                raise
            finally:
                seldom = name in ASKING and outcome == "ok"
                self._note(name, arguments_of(request), self._who(context), outcome, begin, seldom=seldom)

        return call

    def refused(self, name: str, context: Context) -> None:
        """A call of nobody that is known. Many of them, from wherever, share a line a minute."""
        who = {"caller": "unknown", "address": str(context.peer())}
        told = Unauthenticated.code
        self._note(name, {}, who, told, self._wall(), seldom=True, alike={"caller": "unknown"})

    async def close(self) -> None:
        """Return when all is written."""
        await asyncio.to_thread(self._thread.shutdown)

    # ---- inside -------------------------------------------------------------------------------------------------

    def _who(self, context: Context) -> dict[str, object]:
        caller = current_caller()
        if caller is not LOCAL:
            return {"caller": caller.name, "address": str(context.peer())}
        # Nobody else reaches the socket; which process it is its session says.
        metadata = dict(context.invocation_metadata() or ())
        session = self._sessions.find(str(metadata.get(SESSION_METADATA, "")))
        return {"uid": os.geteuid(), "pid": None if session is None else session.pid}

    def _note(
        self,
        name: str,
        arguments: Mapping[str, object],
        who: Mapping[str, object],
        outcome: str,
        begin: float,
        *,
        seldom: bool,
        alike: Mapping[str, object] | None = None,
    ) -> None:
        """`seldom`: at most a line a minute for calls of this name by the same caller, or by callers that are `alike`."""
        calls = self._calls(name, who if alike is None else alike, begin) if seldom else 1
        if not calls:
            return
        when = dt.datetime.fromtimestamp(begin, dt.UTC).isoformat(timespec="milliseconds")
        line = {
            "time": when,
            **who,
            "call": name,
            "arguments": arguments,
            "outcome": outcome,
            "seconds": round(self._wall() - begin, 3),
        }
        if calls > 1:
            line["calls"] = calls
        self._put(json.dumps(line) + "\n")

    def _calls(self, name: str, who: Mapping[str, object], now: float) -> int:
        """How many calls a line stands for now; 0: none yet."""
        key = name, json.dumps(who)
        told, untold = self._asked.pop(key, (now - ASKING_EVERY_SECONDS, 0))
        due = abs(now - told) >= ASKING_EVERY_SECONDS
        self._asked[key] = (now, 0) if due else (told, untold + 1)
        if len(self._asked) > LINES_WAITING_MAX:
            del self._asked[next(iter(self._asked))]
        return untold + 1 if due else 0

    def _put(self, line: str) -> None:
        if self._waiting >= LINES_WAITING_MAX:
            self._failed(line, "too many lines wait for the disk")
            return
        self._waiting += 1
        done = self._thread.submit(self._write, line)
        loop = asyncio.get_running_loop()
        done.add_done_callback(lambda over: _in_loop(loop, lambda: self._written(line, over.exception())))

    def _written(self, line: str, error: BaseException | None) -> None:
        self._waiting -= 1
        if error is not None:
            self._failed(line, str(error))

    def _failed(self, line: str, why: str) -> None:
        self._counts["audit_failed_total"] += 1
        log.error("the audit log lacks a line (%s): %s", why, line.rstrip())

    def _write(self, line: str) -> None:
        """In the thread."""
        data = line.encode()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self._file, flags, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            if size + len(data) > self._bytes_max:
                self._file.replace(self._file.with_name(f"{self._file.name}.1"))
                fresh = os.open(self._file, flags, 0o600)
                os.close(descriptor)
                descriptor, size = fresh, 0
            written = os.write(descriptor, data)
            if written < len(data):
                # The next line would be one with what there is of this one, and neither could be read.
                os.ftruncate(descriptor, size)
                raise OSError(f"{written} of {len(data)} bytes were written")
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)


def _in_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(call)


def arguments_of(request: Any) -> dict[str, object]:
    """The fields that were given, for people: bytes in hex, nothing longer than TEXT_CHARS_MAX."""
    if not isinstance(request, Message):
        return {"unreadable": True}
    found: dict[str, object] = {}
    for field, value in request.ListFields():
        shown = value.hex() if isinstance(value, bytes) else value
        found[field.name] = shown if isinstance(shown, (bool, int, float)) else str(shown)[:TEXT_CHARS_MAX]
    return found
