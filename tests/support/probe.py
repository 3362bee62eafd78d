"""How long others wait meanwhile: health, asked for again and again, and the service's own count of its loop's gaps."""

from __future__ import annotations

import threading
import time
from typing import Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

LOADED = 10.0
"""A bound in the contract is for a machine of its own. Where tests share a few processors with others, and probes an interpreter
with what they measure, an answer may take so many times as long before it is held for a fault of the service."""


class Probe:
    """Asks for health every `period_seconds` in a thread of its own. `slowest_seconds`: of the answers so far."""

    def __init__(self, target: str, *, period_seconds: float = 0.05) -> None:
        self._target = target
        self._period = period_seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.answers = 0
        self.slowest_seconds = 0.0
        self.errors: list[str] = []

    def _run(self) -> None:
        with grpc.insecure_channel(self._target, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while not self._over.wait(self._period):
                begin = time.monotonic()
                try:
                    reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=20)
                except grpc.RpcError as error:
                    self.errors.append(str(error))
                    continue
                if reply.status != health_pb2.HealthCheckResponse.SERVING:
                    self.errors.append(str(reply))
                self.slowest_seconds = max(self.slowest_seconds, time.monotonic() - begin)
                self.answers += 1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
