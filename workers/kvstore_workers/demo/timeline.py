"""The timeline of a session, in the Chrome trace format: one row per process and thread, one bar per span."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError
from kvstore.v1 import worker_pb2
from kvstore_workers.demo.session import TurnResult

MICROSECONDS = 1e6


def check_trace_target(path: str | None) -> None:
    """ConfigError now for a file that could not be written at the end."""
    if path is None:
        return
    target = Path(path)
    if not path or target.is_dir() or not target.absolute().parent.is_dir():
        raise ConfigError(
            "not a file to write", field="--trace", value=path, allowed="a file in a directory that exists"
        )


def write_trace(path: str, results: Sequence[TurnResult]) -> None:
    """ConfigError when the file can't be written."""
    try:
        Path(path).write_text(json.dumps(chrome_trace([(r.turn.number, r.answer.spans) for r in results])))
    except OSError as error:
        raise ConfigError(f"cannot write the trace: {error.strerror}", field="--trace", value=path) from error


def chrome_trace(turns: Sequence[tuple[int, Sequence[worker_pb2.Span]]]) -> dict[str, Any]:
    """`turns`: (number, spans). A span's track is `process: thread`; times start at the first span."""
    spans = [(number, span) for number, found in turns for span in found]
    start = min((span.start_seconds for _, span in spans), default=0.0)
    processes: dict[str, int] = {}
    threads: dict[str, int] = {}
    events: list[dict[str, Any]] = []
    for number, span in spans:
        process, _, thread = span.track.partition(": ")
        thread = thread or process
        if process not in processes:
            processes[process] = len(processes) + 1
            events.append(_named("process_name", process, pid=processes[process], tid=0))
        if span.track not in threads:
            threads[span.track] = len(threads) + 1
            events.append(_named("thread_name", thread, pid=processes[process], tid=threads[span.track]))
        events.append(
            {
                "name": span.name,
                "cat": thread,
                "ph": "X",
                "ts": (span.start_seconds - start) * MICROSECONDS,
                "dur": span.seconds * MICROSECONDS,
                "pid": processes[process],
                "tid": threads[span.track],
                "args": {"turn": number, **dict(span.detail)},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(kind: str, name: str, *, pid: int, tid: int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
