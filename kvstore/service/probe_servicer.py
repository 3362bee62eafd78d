"""Health for who asks once: what watches over machines."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc


class ProbeServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # it has no types
    """Check alone. A Watch lasts as long as its caller wants: a few of them, by anybody, and no probe would be answered,
    for which a cluster ends the service."""

    def __init__(self, answers: health.aio.HealthServicer) -> None:
        self._answers = answers

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> Any:  # noqa: N802 -- gRPC names it
        return await self._answers.Check(request, context)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:  # noqa: N802 -- gRPC names it
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "only Check is here")
