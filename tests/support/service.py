"""A real service process for tests: started on a short temporary directory, stopped, killed, suspended by its pid."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.warm import SERVICE, Started, warm

START_SECONDS = 30.0
STOP_SECONDS = 20.0

# The kernel kills it with the tests' process, however that ends (PR_SET_PDEATHSIG, 1): a stopped one would stay for ever.
# It follows the thread that starts it, so a test starts fresh ones in its main thread.
PROGRAM = """
import ctypes, json, sys
ctypes.CDLL(None).prctl(1, 9)
from kvstore.config import ServiceConfig
from kvstore.service.server import main_blocking
sys.exit(main_blocking(ServiceConfig(**json.loads(sys.argv[1]))))
"""

SMALL: dict[str, Any] = {
    "disk": 4 << 30,
    "segment": 8 << 20,
    "pool": 16 << 20,
    "handoff": 8 << 20,
    "staging": 64 << 20,
    "cache": 64 << 20,
    "commit_wait": 0.0005,
}
"""Options of a service that starts at once and evicts nothing that a small test stores."""


class ServiceProcess:
    """One service on `directory`; options are those of ServiceConfig over SMALL. `tracer`: a command that runs it, in the
    same process. `before`: Python that its process runs before it imports anything of ours. Used as a context manager it is
    ready inside, and killed and reaped on leaving, whatever state it is in."""

    program = PROGRAM
    """What the interpreter runs, with the options as JSON."""

    def __init__(
        self, directory: Path, *, tracer: Sequence[str] = (), before: str = "", **options: Any
    ) -> None:
        self.directory = directory
        self.options = {**SMALL, **options, "dir": str(directory)}
        self.sockets = Path(options.get("sockets", directory))
        self._tracer = tracer
        self._before = before
        self._log = directory.with_name(directory.name + ".log")
        self._process: subprocess.Popen[bytes] | Started | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "the service was not started"
        return self._process.pid

    @property
    def log(self) -> str:
        """What the service has said on stdout and stderr since the first start."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    @property
    def target(self) -> str:
        return f"unix:{self.sockets / 'kvstore.sock'}"

    def start(self, *, wait: bool = True, fresh: bool = False) -> Self:
        """`fresh`: by an interpreter of its own, which is where its starter's thread is, its network namespace too."""
        assert self._process is None, "the service runs already"
        given = json.dumps(self.options)
        if fresh or self._tracer or self._before or self.program is not PROGRAM:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    [*self._tracer, sys.executable, "-c", self._before + self.program, given],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
        else:
            self._process = warm(SERVICE).start(PROGRAM, [given], output=self._log)
        if wait:
            try:
                self.wait_ready()
            except BaseException:
                # Nobody leaves a context that was not entered.
                if self._process is not None:
                    self.kill()
                raise
        return self

    def wait_ready(self, seconds: float = START_SECONDS) -> None:
        """Until health says SERVING. Raises at once with the log if the process ends before."""
        assert self._process is not None, "the service was not started"
        step = 0.25
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise AssertionError(f"the service ended with {self._process.returncode}:\n{self.log}")
            if self._watch_health(step):
                return
        raise AssertionError(f"the service was not ready within {seconds:g} s:\n{self.log}")

    def _watch_health(self, seconds: float) -> bool:
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

    def stop(self) -> int:
        """SIGTERM; the exit status."""
        return self._end(signal.SIGTERM)

    def kill(self) -> int:
        """SIGKILL; returns when the process is gone."""
        return self._end(signal.SIGKILL)

    def _end(self, number: signal.Signals) -> int:
        assert self._process is not None, "the service was not started"
        process = self._process
        process.send_signal(number)
        try:
            status = process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise AssertionError(
                f"the service did not end within {STOP_SECONDS:g} s of {number.name}:\n{self.log}"
            ) from None
        finally:
            self._process = None
        return status

    def restart(self) -> Self:
        """Kill and start again on the same directory; ready on return."""
        self.kill()
        return self.start()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """SIGSTOP inside, SIGCONT after unless it was killed: the process lives and does not answer."""
        os.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            if self._process is not None:
                os.kill(self.pid, signal.SIGCONT)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self.kill()


@contextmanager
def short_directory() -> Iterator[Path]:
    """A directory whose path leaves room for a socket's name; a test framework's own may not."""
    with tempfile.TemporaryDirectory(prefix="kv-") as folder:
        yield Path(folder) / "s"


@contextmanager
def running_service(**options: Any) -> Iterator[ServiceProcess]:
    """A ready service on a fresh directory; options as in ServiceProcess."""
    with ExitStack() as stack:
        directory = stack.enter_context(short_directory())
        yield stack.enter_context(ServiceProcess(directory, **options))
