"""Spans of a client's calls for OpenTelemetry, for who asks for them; nothing of it is imported otherwise."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from kvstore.errors import InvalidArgument

Metadata = tuple[tuple[str, str], ...]

_tracer: Any = None


def trace_calls(provider: Any = None) -> None:
    """From now on each call of this process's clients is a span, a child of the one that its caller is in, and its context
    goes to the service, whose own span is a child of it. `provider`: a TracerProvider; None, the one that is set for the
    process. InvalidArgument where opentelemetry-api is not installed."""
    global _tracer  # noqa: PLW0603 -- one choice for the process, as OpenTelemetry's own is
    try:
        from opentelemetry import trace
    except ImportError as error:
        raise InvalidArgument(
            "spans need a package that is not there",
            field="opentelemetry-api",
            value="missing",
            allowed="pip install 'kvstore[otel]'",
        ) from error
    _tracer = trace.get_tracer("kvstore.client", tracer_provider=provider)


class CallSpan:
    """Of the call `name`, which sends `metadata`: nothing unless calls are traced. It is not made the current one, so that a
    generator may have it open while its caller does something else."""

    __slots__ = ("_metadata", "_name", "_span")

    def __init__(self, name: str, metadata: Metadata) -> None:
        self._name = name
        self._metadata = metadata
        self._span: Any = None

    @property
    def is_open(self) -> bool:
        return self._span is not None

    def begin(self) -> Metadata:
        """What the call is to send."""
        if _tracer is None:
            return self._metadata
        from opentelemetry import propagate, trace

        self._span = _tracer.start_span(
            f"kvstore.v1.{self._name}",
            kind=trace.SpanKind.CLIENT,
            attributes={"rpc.system": "grpc", "rpc.method": self._name},
        )
        sent: dict[str, str] = {}
        propagate.inject(sent, context=trace.set_span_in_context(self._span))
        return (*self._metadata, *sent.items())

    def end(self, error: BaseException | None = None) -> None:
        if self._span is None:
            return
        if isinstance(error, Exception):
            from opentelemetry.trace import Status, StatusCode

            self._span.record_exception(error)
            self._span.set_status(Status(StatusCode.ERROR, str(error)))
        self._span.end()

    def __enter__(self) -> Metadata:
        return self.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(error)
