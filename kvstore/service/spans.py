"""Spans of calls for OpenTelemetry, where the service is told where to send them."""

from __future__ import annotations

import threading
from typing import Any

from kvstore.errors import ConfigError
from kvstore.service.slowcalls import Handler

PACKAGES = "pip install 'kvstore[otel]'"
LAST_SECONDS = 2.0
TRACE_METADATA = frozenset({"traceparent", "tracestate", "baggage"})


class Spans:
    """Sends a span for each call to `endpoint`, a collector that takes OTLP over HTTP; variables OTEL_* count. They belong
    to the caller's trace where one came with the call. ConfigError where the packages for it are missing."""

    def __init__(self, endpoint: str) -> None:
        if not endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                "not a collector's address",
                field="otlp",
                value=endpoint,
                allowed="an URL, as in http://collector:4318",
            )
        try:
            from opentelemetry import propagate, trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(
                f"spans need packages that are not there: {error.name}",
                field="otlp",
                value=endpoint,
                allowed=PACKAGES,
            ) from error
        resource = Resource.create()
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            # Not named by OTEL_SERVICE_NAME.
            resource = resource.merge(Resource({"service.name": "kvstore"}))
        self._provider = TracerProvider(resource=resource)
        self._exporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/") + "/v1/traces")
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("kvstore.service")
        self._extract = propagate.extract
        self._kind = trace.SpanKind.SERVER

    def around(self, name: str, handler: Handler) -> Handler:
        """The same handler, inside a span; what it raises is in the span."""

        async def call(request: Any, context: Any) -> Any:
            sent = {key: value for key, value in context.invocation_metadata() or () if key in TRACE_METADATA}
            with self._tracer.start_as_current_span(
                f"kvstore.v1.{name}",
                context=self._extract(sent),
                kind=self._kind,
                attributes={"rpc.system": "grpc", "rpc.method": name},
            ):
                return await handler(request, context)

        return call

    def end(self) -> None:
        """Send what waits. Blocks for little more than LAST_SECONDS where nobody takes it."""
        # What ends the exporter's own patience with a collector that is away; a time for the flush itself does nothing.
        impatience = threading.Timer(LAST_SECONDS, self._exporter.shutdown)
        impatience.start()
        self._provider.shutdown()
        impatience.cancel()


def spans_to(endpoint: str) -> Spans | None:
    """None for an empty endpoint."""
    return Spans(endpoint) if endpoint else None
