"""A process that serves one socket: health, reflection, readiness, and an orderly end on SIGTERM."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvstore.errors import ConfigError
from kvstore_workers.runtime.address import CHANNEL_OPTIONS, claim
from kvstore_workers.runtime.health import WATCHERS_MAX, Health
from kvstore_workers.runtime.room import Room

log = logging.getLogger(__name__)

DRAIN_SECONDS = 10.0
"""How long requests under way may go on once their process is told to end, unless it is told otherwise."""

END_SECONDS = 1.0
"""For what is under way when that time is over: to be told, and to give back what it holds."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

SPARE_THREADS = 8
"""For checks, reflection and refusals, beside a thread for each request that may run or wait, and for each who watches health."""


class Server:
    """A gRPC server on a unix socket of mode 0600. Not started by its constructor."""

    def __init__(self, path: Path, *, requests: int, name: str) -> None:
        """`requests`: streaming calls that may be open at once. `name`: of the option that gave `path`, for errors."""
        self._path = path
        self._name = name
        threads = requests + SPARE_THREADS + WATCHERS_MAX
        self._executor = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="grpc")
        self.grpc = grpc.server(self._executor, options=CHANNEL_OPTIONS)
        self._health = Health()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)

    def start(self, services: Sequence[str]) -> None:
        """Listen and answer; ConfigError when the socket can't be made. `services`: full names, for reflection."""
        claim(self._path, name=self._name)
        names = (
            *services,
            health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
            reflection.SERVICE_NAME,
        )
        reflection.enable_server_reflection(names, self.grpc)
        # Nobody else may connect in the moment between the socket's birth and a later chmod.
        before = os.umask(0o177)
        try:
            bound = self.grpc.add_insecure_port(f"unix:{self._path}")
        except RuntimeError as error:
            raise ConfigError(f"cannot listen: {error}", field=self._name, value=self._path) from error
        finally:
            os.umask(before)
        if not bound:
            raise ConfigError("cannot listen", field=self._name, value=self._path)
        self.grpc.start()
        self._health.say(health_pb2.HealthCheckResponse.SERVING, services=services)

    def drain(self) -> None:
        """Say NOT_SERVING; calls are answered as before."""
        self._health.say(health_pb2.HealthCheckResponse.NOT_SERVING)

    def stop(self, *, seconds: float = END_SECONDS) -> None:
        """Refuse new calls, give those under way `seconds`, then end them; the socket is gone afterwards."""
        self._health.say(health_pb2.HealthCheckResponse.NOT_SERVING)
        self.grpc.stop(seconds).wait()
        self._executor.shutdown(wait=True)
        self._path.unlink(missing_ok=True)


def serve_until_told(
    server: Server,
    *,
    services: Sequence[str],
    ready: str,
    room: Room,
    grace: float = DRAIN_SECONDS,
) -> None:
    """Start, say `ready` in one line on stderr, and wait for SIGTERM or SIGINT. Then `room` lets nobody in any more, so
    that new requests are refused with DRAINING, and those inside have `grace` seconds."""
    # Before the first client can see us, since one may tell us to stop right away.
    with _stop_signals() as told:
        server.start(services)
        print(ready, file=sys.stderr, flush=True)
        told()
    server.drain()
    room.drain()
    if not room.wait_until_empty(seconds=grace):
        log.warning("%d requests were not done within %g s and are ended", room.inside, grace)
    server.stop()


@contextmanager
def _stop_signals() -> Iterator[Callable[[], None]]:
    """Inside, what is given waits for SIGTERM or SIGINT; one that came before it is called counts.

    Through a pipe, and not by an Event that a handler sets: a signal that another thread receives does not wake a main thread
    that waits for a lock, and one that comes while the main thread is inside the Event's own lock would wait for that for ever.
    """
    heard, said = os.pipe()
    os.set_blocking(said, False)

    def wait() -> None:
        while os.read(heard, 1)[0] not in STOP_SIGNALS:
            pass

    before = signal.set_wakeup_fd(said, warn_on_full_buffer=False)
    for number in STOP_SIGNALS:
        signal.signal(number, _only_wakes)
    try:
        yield wait
    finally:
        signal.set_wakeup_fd(before)
        os.close(said)
        os.close(heard)


def _only_wakes(number: int, frame: FrameType | None) -> None:
    """Who is woken knows what to do."""
