"""The standard health service for servers whose handlers run in threads.

The library's own sends to who watches under a lock that the end of another Watch waits for, in the one thread that could tell
that the sending is done: two watchers at the wrong moment, and the process never answers anybody again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import grpc
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc

from kvstore_workers.runtime.answering import refuse
from kvstore_workers.runtime.room import Room

WATCHERS_MAX = 32
"""Watch calls that may be open at once, each of which has a thread; one more is refused."""


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """NOT_SERVING until `say`. Nothing is sent while its lock is held."""

    def __init__(self) -> None:
        self._room = Room(WATCHERS_MAX, what="health service")
        self._changed = threading.Condition()
        self._said: dict[str, int] = {"": pb.HealthCheckResponse.NOT_SERVING}

    def say(self, status: int, *, services: Sequence[str] = ()) -> None:
        """A HealthCheckResponse's `status` holds from now on for the process, for `services`, and for those that were named before."""
        with self._changed:
            self._said = dict.fromkeys((*self._said, *services), status)
            self._changed.notify_all()

    def Check(  # noqa: N802 -- gRPC's name
        self, request: pb.HealthCheckRequest, context: grpc.ServicerContext
    ) -> pb.HealthCheckResponse:
        status = self._status(request.service)
        if status is None:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r} here")
        return pb.HealthCheckResponse(status=status)

    def Watch(  # noqa: N802 -- gRPC's name
        self, request: pb.HealthCheckRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.HealthCheckResponse]:
        """What holds now, and each change, until the call's end."""
        try:
            with self._room:
                # False where it has ended already, and then nobody would wake this up.
                if not context.add_callback(self._wake):
                    return
                said: int | None = None
                while (status := self._next(request.service, said, context.is_active)) is not None:
                    said = status
                    yield pb.HealthCheckResponse(status=status)
        except Exception as error:  # noqa: BLE001 -- becomes a status, and is logged where it is unexpected
            refuse(context, error, method="Health.Watch")

    def _status(self, service: str) -> int | None:
        with self._changed:
            return self._said.get(service)

    def _next(self, service: str, said: int | None, goes_on: Callable[[], bool]) -> int | None:
        """The first status that is not `said`; None where the call has ended."""

        def now() -> int:
            unknown: int = pb.HealthCheckResponse.SERVICE_UNKNOWN
            return self._said.get(service, unknown)

        with self._changed:
            self._changed.wait_for(lambda: now() != said or not goes_on())
            return now() if goes_on() else None

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()
