"""The processes of a demo: started, watched, killed with -9 on request, and stopped by their own ids."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kvstore.clock import Clock, SystemClock
from kvstore.errors import ConfigError, KvstoreError, Unavailable
from kvstore.profile.registry import get_profile
from kvstore.service.process import MAX_SOCKET_PATH_BYTES

START_SECONDS = 90.0
STOP_SECONDS = 15.0
_PROBE_SECONDS = 0.5

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.initial_reconnect_backoff_ms", 20),
    ("grpc.min_reconnect_backoff_ms", 20),
    ("grpc.max_reconnect_backoff_ms", 100),
)


PROMPT_TOKENS = 65_536

DISK_BYTES = 2 << 30

# Its end follows ours, however that comes (PR_SET_PDEATHSIG, 1); it may have come before that was said.
_PROGRAM = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))
if os.getppid() != int(sys.argv.pop(1)):
    sys.exit(1)
from kvstore.cli.main import main
sys.exit(main())
"""


def open_channel(address: str) -> grpc.Channel:
    return grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)


@dataclass
class Running:
    name: str
    popen: subprocess.Popen[bytes]
    log: Path


class Cluster:
    """A cache service, a prefill worker, a decode worker, a gateway, and a worker that has no store.

    Everything lives below one temporary directory that goes when the cluster is closed.
    """

    def __init__(
        self,
        *,
        profile: str,
        seed: int,
        threads: int,
        prompt_tokens: int = PROMPT_TOKENS,
        clock: Clock | None = None,
    ) -> None:
        """`prompt_tokens`: the longest prompt; the disk budget holds its window rows in the states' share."""
        self._clock = clock or SystemClock()
        self._home = _short_directory()
        self.root = Path(self._home.name)
        self.cache = self.root / "cache"
        self._model = ["--profile", profile, "--seed", str(seed), "--threads", str(threads)]
        rows = get_profile(profile).rows_overlap_block_bytes // get_profile(profile).block_tokens
        disk = max(DISK_BYTES, 4 * prompt_tokens * rows)
        self._serve = ["serve", "--dir", str(self.cache), "--disk", str(disk)]
        self._serve += ["--prompt-tokens", str(prompt_tokens)]
        self._running: dict[str, Running] = {}
        self.kills = 0

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _undisturbed():
            for name in ("gateway", "prefill", "decode", "reference", "service"):
                self._stop(name)
            self._home.cleanup()

    def address(self, name: str) -> str:
        return f"unix:{self.cache / 'kvstore.sock'}" if name == "service" else f"unix:{self.root / name}.sock"

    def start_all(self) -> None:
        """All five, side by side; returns when each says that it serves."""
        self._launch("service", self._serve)
        self._launch("reference", ["worker", "decode", "--listen", self.address("reference"), *self._model])
        self._wait("service")
        for role in ("prefill", "decode"):
            self._launch(
                role,
                ["worker", role, "--listen", self.address(role), "--cache", str(self.cache), *self._model],
            )
        self._launch(
            "gateway",
            [
                "gateway",
                "--listen",
                self.address("gateway"),
                "--prefill",
                self.address("prefill"),
                "--decode",
                self.address("decode"),
            ],
        )
        for name in ("reference", "prefill", "decode", "gateway"):
            self._wait(name)

    def kill_service(self) -> None:
        """SIGKILL, and the wait until the process is gone."""
        running = self._running["service"]
        running.popen.kill()
        running.popen.wait(STOP_SECONDS)
        self.kills += 1

    def restart_service(self) -> None:
        self._running.pop("service").popen.wait(STOP_SECONDS)
        self._launch("service", self._serve)
        self._wait("service")

    def _launch(self, name: str, args: Sequence[str]) -> None:
        log = self.root / f"{name}.log"
        # An interrupt between a process's birth and its place in our list would leave it behind.
        with _undisturbed(), log.open("ab") as sink:
            popen = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(os.getpid()), *args],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
            )
            self._running[name] = Running(name, popen, log)

    def _wait(self, name: str) -> None:
        """Until the health service says SERVING; raises with the log's end when the process ends first."""
        running = self._running[name]
        deadline = self._clock.monotonic() + START_SECONDS
        with open_channel(self.address(name)) as channel:
            while self._clock.monotonic() < deadline:
                code = running.popen.poll()
                if code is not None:
                    raise KvstoreError(f"{name} ended at its start with code {code}: {self.log_end(name)}")
                if _serving(channel):
                    return
        raise Unavailable(f"{name} did not serve within {START_SECONDS:.0f} s: {self.log_end(name)}")

    def log_end(self, name: str) -> str:
        """The last lines that the process wrote."""
        lines = self._running[name].log.read_text(errors="replace").strip().splitlines()
        return " | ".join(lines[-3:]) if lines else "it wrote nothing"

    def _stop(self, name: str) -> None:
        running = self._running.pop(name, None)
        if running is None:
            return
        if running.popen.poll() is None:
            running.popen.send_signal(signal.SIGTERM)
            try:
                running.popen.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                running.popen.kill()
        running.popen.wait(STOP_SECONDS)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Signals that end the demo wait until the end of this; for the main thread."""
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    before = {number: signal.signal(number, note) for number in ENDING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        raise KeyboardInterrupt


def _short_directory() -> tempfile.TemporaryDirectory[str]:
    """Where the user's temporary files go, or in /tmp where the paths of sockets would become too long."""
    for parent in (None, "/tmp"):
        try:
            home = tempfile.TemporaryDirectory(prefix="kvstore-demo-", dir=parent)
        except OSError as error:
            raise ConfigError(
                f"no temporary directory: {error.strerror}", field="TMPDIR", value=parent or ""
            ) from error
        longest = len(os.fsencode(Path(home.name) / "cache" / "session.sock"))
        if longest <= MAX_SOCKET_PATH_BYTES:
            return home
        home.cleanup()
    raise ConfigError("paths in /tmp are too long for sockets", field="TMPDIR", value="/tmp")


def _serving(channel: grpc.Channel) -> bool:
    """Whether the process behind `channel` serves; waits up to a short time for it to listen."""
    check = health_pb2_grpc.HealthStub(channel).Check
    try:
        reply = check(health_pb2.HealthCheckRequest(), timeout=_PROBE_SECONDS, wait_for_ready=True)
    except grpc.RpcError:
        return False
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
