"""A helper process that has imported the store and forks a child per job: a round costs milliseconds, not a start of
the interpreter, a child may be killed at any moment, and one that the processor ends takes nobody along.

Jobs are functions of `kvstore.chaos` that take (arguments, opened) and return something JSON can say; they call
`opened()` when the interesting part begins. The helper has one thread, no store and no grpc.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from kvstore.chaos.base import ChaosFailed, Check, undisturbed

Job = Callable[[dict[str, Any], Callable[[], None]], Any]

_PACKAGE = "kvstore.chaos."
_PR_SET_PDEATHSIG = 1
_LIMIT_SECONDS = 120.0
_CHECK_SECONDS = 0.1
_OPENED = b"\x01"
_STDIN = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended: status as in `subprocess` (negative: the signal), what the job returned, and its complaint.
    `killed`: by us, at the moment asked for. `late`: it had not ended by the limit."""

    status: int
    result: Any
    complaint: str
    killed: bool
    late: bool

    @property
    def trouble(self) -> str:
        """Why this end was not one that was asked for; empty otherwise."""
        if self.late:
            return f"did not end within {_LIMIT_SECONDS:g} s"
        if self.status == 0 or self.killed:
            return ""
        last = self.complaint.strip().splitlines()[-1:] or ["without a word"]
        how = f"signal {-self.status}" if self.status < 0 else f"status {self.status}"
        return f"ended with {how}: {last[0]}"


class Nursery:
    """A context manager; jobs run one at a time. Whatever happens, no child outlives it. check: called while a job is
    waited for; when it raises, leaving the context ends that job."""

    def __init__(self, check: Check = undisturbed) -> None:
        self._check = check

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvstore.chaos.nursery"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        return self

    def run(
        self,
        job: Job,
        arguments: dict[str, Any],
        *,
        kill_after: float | None = None,
        since_opened: bool = True,
        dies_by_itself: bool = False,
    ) -> Ended:
        """Run one job in a child of its own. kill_after: SIGKILL so many seconds after it called `opened`, or after its
        beginning. dies_by_itself: the job kills its own process, which then counts as asked for."""
        order = {
            "module": job.__module__,
            "name": job.__name__,
            "arguments": arguments,
            "kill_after": kill_after,
            "since_opened": since_opened,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        while not select.select([self._process.stdout], [], [], _CHECK_SECONDS)[0]:
            self._check()
        line = self._process.stdout.readline()
        if not line:
            raise ChaosFailed("the helper process that runs jobs has died; start again")
        answer = json.loads(line)
        status = answer["status"]
        killed = answer["killed"] or (dies_by_itself and status == -signal.SIGKILL)
        return Ended(status, answer["result"], answer["complaint"], killed, answer["late"])

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        finally:
            if self._process.stdout is not None:
                self._process.stdout.close()


def _serve() -> None:
    _die_with_parent()
    for line in sys.stdin.buffer:
        order = json.loads(line)
        if not order["module"].startswith(_PACKAGE):
            raise ValueError(f"jobs are functions of {_PACKAGE}*, not {order['module']}")
        work: Job = getattr(importlib.import_module(order["module"]), order["name"])
        answer = _raise_child(work, order["arguments"], order["kill_after"], order["since_opened"])
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _raise_child(
    work: Job, arguments: dict[str, Any], kill_after: float | None, since_opened: bool
) -> dict[str, Any]:
    said, say = os.pipe()
    complained, complain = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(said)
        os.close(complained)
        _live(work, arguments, say, complain)
    os.close(say)
    os.close(complain)
    heard, killed, late = _attend(pid, (said, complained), kill_after, since_opened)
    os.close(said)
    os.close(complained)
    _, status = os.waitpid(pid, 0)
    text = heard[said].removeprefix(_OPENED)
    return {
        "status": os.waitstatus_to_exitcode(status),
        "result": json.loads(text) if text and not killed and not late else None,
        "complaint": heard[complained].decode(errors="replace"),
        "killed": killed,
        "late": late,
    }


def _attend(
    pid: int, pipes: tuple[int, int], kill_after: float | None, since_opened: bool
) -> tuple[dict[int, bytes], bool, bool]:
    """Listen to a child until it has gone, and kill it when its time has come, or nobody waits for it any more: (what
    came by each pipe, killed, late)."""
    heard = dict.fromkeys(pipes, b"")
    begun = time.monotonic()
    limit = begun + _LIMIT_SECONDS
    kill_at = begun + kill_after if kill_after is not None and not since_opened else None
    killed = late = False
    listening, asking = list(pipes), [_STDIN]
    while listening:
        until = min(limit, kill_at) if kill_at is not None and not killed else limit
        ready, _, _ = select.select([*listening, *asking], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            late = until == limit
            killed = not late
            os.kill(pid, signal.SIGKILL)
            limit += 10.0
        if _STDIN in ready:
            # Nothing comes by it before this job is answered, but its end.
            asking, killed = [], True
            os.kill(pid, signal.SIGKILL)
        for pipe in set(ready) - {_STDIN}:
            piece = os.read(pipe, 1 << 16)
            if not piece:
                listening.remove(pipe)
            heard[pipe] += piece
        if kill_after is not None and kill_at is None and heard[pipes[0]].startswith(_OPENED):
            kill_at = time.monotonic() + kill_after
    return heard, killed, late


def _live(work: Job, arguments: dict[str, Any], say: int, complain: int) -> None:
    """The child: never returns."""
    status = 1
    try:
        _die_with_parent()
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        os.dup2(complain, 2)
        write = os.write

        def opened() -> None:
            write(say, _OPENED)

        result = json.dumps(work(arguments, opened)).encode()
        while result:
            result = result[write(say, result) :]
        status = 0
    except BaseException:  # noqa: BLE001 - told to the helper, and this process ends
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    _serve()
