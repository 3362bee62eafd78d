"""Interpreters that have imported what a program needs and fork a process for each start of it: one costs milliseconds, not an
import of everything. What is started so is a process like any other, with a number of its own, killed and waited for by it."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

SERVICE = (
    "kvstore.cli.serve",
    "kvstore.cli.admin",
    "kvstore.cli.disk",
    "kvstore.cli.plan",
    "kvstore.cli.profiles",
    # What `serve` imports when it is asked to: most of what a start costs.
    "kvstore.service.server",
    "uvloop",
)
WORKERS = (
    "torch",
    "grpc._server",
    "kvstore_workers.cli",
    "kvstore_workers.runtime.process",
    "kvstore_workers.runtime.gateway_process",
)

# One thread, no channel, no lock held: a child begins in a state that it could have come to by itself. A program is run where a
# script would be, so that it ends as a script ends. The kernel kills children with it (PR_SET_PDEATHSIG, 1), and it ends with
# the tests' process, whose end closes its input.
_FORKER = """
import ctypes, gc, importlib, json, os, signal, sys

def main():
    say = os.dup(1)
    os.dup2(2, 1)
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    forker = os.getpid()
    for line in sys.stdin.buffer:
        order = json.loads(line)
        if "wait" in order:
            answer = os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                os.close(say)
                become(order, forker)
                return order["program"]
        os.write(say, f"{answer}\\n".encode())
    os._exit(0)

def become(order, forker):
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != forker:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["folder"])
    appending = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    for number, path in enumerate((os.devnull, order["output"], order["errors"])):
        opened = os.open(path, appending if number else os.O_RDONLY, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = open(0, closefd=False)
    sys.argv = ["-c", *order["arguments"]]

exec(compile(main(), "<program>", "exec"), {"__name__": "__main__"})
"""


class Started:
    """A process that a Warm started, as subprocess.Popen shows one: `pid`, `returncode`, poll, wait, send_signal."""

    def __init__(self, pid: int, warm: Warm) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._warm = warm
        self._descriptor = os.pidfd_open(pid)

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        """subprocess.TimeoutExpired where it has not ended by then."""
        status = self._ended(timeout)
        if status is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self._descriptor, number)

    def _ended(self, seconds: float | None) -> int | None:
        if self.returncode is None:
            poller = select.poll()
            poller.register(self._descriptor, select.POLLIN)
            if poller.poll(None if seconds is None else seconds * 1000):
                self.returncode = self._warm.ask({"wait": self.pid})
                os.close(self._descriptor)
        return self.returncode


class Warm:
    """An interpreter that has imported `modules`, begun with the first start. Its children get environment and folder as they
    are here at their start; they are in the network namespace and under the limits that hold here at the first one."""

    def __init__(self, *modules: str) -> None:
        self._modules = modules
        self._lock = threading.Lock()
        self._forker: subprocess.Popen[bytes] | None = None

    def start(
        self,
        program: str,
        arguments: Sequence[str],
        *,
        output: Path,
        errors: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Started:
        """`python -c PROGRAM ARGUMENTS` that reads nothing and appends what it writes to those files."""
        pid = self.ask(
            {
                "program": program,
                "arguments": list(arguments),
                "environment": dict(os.environ if environment is None else environment),
                "folder": str(Path.cwd()),
                "output": str(output.absolute()),
                "errors": str((errors or output).absolute()),
            }
        )
        return Started(pid, self)

    def run(
        self,
        program: str,
        arguments: Sequence[str],
        *,
        seconds: float,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """What it wrote, and its exit status. Killed, and subprocess.TimeoutExpired, where it has not ended by then."""
        with TemporaryDirectory(prefix="kv-") as folder:
            output, errors = Path(folder) / "output", Path(folder) / "errors"
            process = self.start(program, arguments, output=output, errors=errors, environment=environment)
            try:
                status = process.wait(seconds)
            finally:
                process.send_signal(signal.SIGKILL)
                process.wait()
            return subprocess.CompletedProcess(arguments, status, output.read_text(), errors.read_text())

    def ask(self, order: dict[str, Any]) -> int:
        with self._lock:
            if self._forker is None:
                self._forker = subprocess.Popen(
                    [sys.executable, "-c", _FORKER, *self._modules],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
                atexit.register(self._end)
            assert self._forker.stdin is not None
            assert self._forker.stdout is not None
            self._forker.stdin.write(json.dumps(order).encode() + b"\n")
            self._forker.stdin.flush()
            answer = self._forker.stdout.readline()
            assert answer, f"the interpreter that starts processes has ended with {self._forker.wait()}"
            return int(answer)

    def _end(self) -> None:
        assert self._forker is not None
        with self._forker:
            pass


@cache
def warm(modules: tuple[str, ...]) -> Warm:
    """The one of this process for all who need the same."""
    return Warm(*modules)
