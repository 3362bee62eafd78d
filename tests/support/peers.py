"""Worker and gateway processes for tests: started by their command, ready by their health, ended by their pid."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.warm import WORKERS, Started, warm

START_SECONDS = 60.0
STOP_SECONDS = 40.0
"""More than the grace that a worker has, and what it takes a busy machine to end it."""
TELL_SECONDS = 5.0

# SIGUSR2 tells where its threads are, for who waits in vain for its end.
_PROGRAM = """
import argparse, faulthandler, signal, sys
faulthandler.register(signal.SIGUSR2, all_threads=True)
from kvstore_workers.cli import register
parser = argparse.ArgumentParser(prog="kvstore")
register(parser.add_subparsers(required=True))
args = parser.parse_args()
sys.exit(args.run(args))
"""

# Long contexts are half of what a worker checks of its model, and no prompt here is long. One that is started fresh checks them.
_WARM_PROGRAM = (
    """
import functools
from kvstore_workers.runtime import process
process.self_check = functools.partial(process.self_check, far=())
"""
    + _PROGRAM
)


def run_command(
    *args: str, seconds: float = START_SECONDS, fresh: bool = False
) -> subprocess.CompletedProcess[str]:
    """A command that ends by itself: its exit code and what it wrote. `fresh`: by an interpreter that has imported nothing."""
    if not fresh:
        return warm(WORKERS).run(_WARM_PROGRAM, args, seconds=seconds)
    return subprocess.run(
        [sys.executable, "-c", _PROGRAM, *args], capture_output=True, text=True, timeout=seconds, check=False
    )


class Peer:
    """`kvstore ARGS --listen unix:SOCKET`. Used as a context manager it is ready inside, and reaped on leaving."""

    def __init__(self, socket: Path, *args: str) -> None:
        self.socket = socket
        self._args = args
        self._log = socket.with_suffix(".log")
        self._process: Started | None = None

    @property
    def target(self) -> str:
        return f"unix:{self.socket}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "it was not started"
        return self._process.pid

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def start(self) -> Self:
        """Begin; `wait_ready` waits."""
        assert self._process is None, "it runs already"
        self._process = warm(WORKERS).start(
            _WARM_PROGRAM, [*self._args, "--listen", self.target], output=self._log
        )
        return self

    def wait_ready(self) -> Self:
        assert self._process is not None, "it was not started"
        step = 0.25
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise AssertionError(f"{self._args} ended with {self._process.returncode}:\n{self.log}")
            if self._is_serving(step):
                return self
        raise AssertionError(f"{self._args} was not ready within {START_SECONDS:g} s:\n{self.log}")

    def _is_serving(self, seconds: float) -> bool:
        options = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", 20),
            ("grpc.max_reconnect_backoff_ms", 20),
        ]
        with grpc.insecure_channel(self.target, options=options) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(), timeout=seconds, wait_for_ready=True
            )
            try:
                return any(reply.status == health_pb2.HealthCheckResponse.SERVING for reply in watch)
            except grpc.RpcError:
                return False

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None, "it was not started"
        self._process.send_signal(number)

    def wait(self) -> int:
        """The exit status, once it has ended."""
        assert self._process is not None, "it was not started"
        try:
            status = self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"it has not ended: {self._where_it_is()}") from error
        self._process = None
        return status

    def _where_it_is(self) -> str:
        """Its log, with the stacks of its threads at the end."""
        before = len(self.log)
        self.signal(signal.SIGUSR2)
        end = time.monotonic() + TELL_SECONDS
        while len(self.log) == before and time.monotonic() < end:
            os.sched_yield()
        return self.log[-8000:]

    def restart(self) -> Self:
        """Ended, whatever state it is in, and begun again; `wait_ready` waits."""
        if self._process is not None:
            self.kill()
        return self.start()

    def stop(self) -> int:
        self.signal(signal.SIGTERM)
        return self.wait()

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.wait()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self.kill()
