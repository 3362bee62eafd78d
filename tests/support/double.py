"""A stand-in for the service that answers what the real one never would: for tests of how a client takes it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from kvstore.v1 import cache_pb2 as pb
from kvstore.v1 import cache_pb2_grpc as rpc

BOOT = "b0" * 16


def hello(number: int, *, boot: str = BOOT) -> bytes:
    return json.dumps({"protocol": 1, "session": f"{number:032x}", "boot": boot}).encode() + b"\n"


class ServiceDouble:
    """Both sockets in `directory`. `greet` gives the hello of the n-th session (None: say nothing, b"": hang up);
    `answers` maps a method's name to what answers a call: called with (request or iterator, context)."""

    def __init__(
        self,
        directory: Path,
        *,
        greet: Callable[[int], bytes | None] = hello,
        answers: dict[str, Any] | None = None,
    ) -> None:
        self.answers = answers or {}
        self.sessions: list[socket.socket] = []
        self.calls: list[tuple[str, str]] = []
        self._greet = greet
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(directory / "session.sock"))
        self._listener.listen()
        self._thread = threading.Thread(target=self._accept, name="double-sessions")
        self._thread.start()
        self._pool = ThreadPoolExecutor(4)
        self._server = grpc.server(self._pool)
        rpc.add_CacheServicer_to_server(self._servicer(rpc.CacheServicer), self._server)
        rpc.add_AdminServicer_to_server(self._servicer(rpc.AdminServicer), self._server)
        self._server.add_insecure_port(f"unix:{directory / 'kvstore.sock'}")
        self._server.start()

    def _servicer(self, base: type) -> Any:
        servicer = base()
        for name in [name for name in vars(base) if not name.startswith("_")]:
            setattr(servicer, name, self._method(name))
        return servicer

    def _method(self, name: str) -> Callable[[Any, grpc.ServicerContext], Any]:
        def method(request: Any, context: grpc.ServicerContext) -> Any:
            self.calls.append((name, dict(context.invocation_metadata()).get("kvstore-session", "")))
            return self.answers[name](request, context)

        return method

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.sessions.append(connection)
            line = self._greet(len(self.sessions))
            if line == b"":
                connection.close()
            elif line is not None:
                connection.sendall(line)

    def end_sessions(self) -> None:
        for connection in self.sessions:
            connection.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        self.end_sessions()
        self._server.stop(0).wait()
        self._pool.shutdown()


def refuse(context: grpc.ServicerContext, code: grpc.StatusCode, name: str, message: str) -> None:
    """End the call as the service does."""
    context.set_trailing_metadata((("kvstore-error", name),))
    context.abort(code, message)


def no_plan(prompt_tokens: int = 0) -> pb.LookupReply:
    """The answer of an empty store."""
    none = pb.Alternative(state_source=pb.NONE)
    return pb.LookupReply(plan=pb.RestorePlan(prompt_tokens=prompt_tokens, chosen=none, exactness=pb.EXACT))


@contextmanager
def service_double(directory: Path, **options: Any) -> Iterator[ServiceDouble]:
    double = ServiceDouble(directory, **options)
    try:
        yield double
    finally:
        double.close()
