"""One trace from a caller's span over the client's to the service's, at a collector."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from kvstore.errors import ConfigError, InvalidArgument, UnknownNamespace
from kvstore.service.spans import Spans
from kvstore_client import CacheClient, spans
from tests.support.service import running_service

Require = Callable[[str, bool, str], None]
IS_THERE = importlib.util.find_spec("opentelemetry") is not None


@pytest.fixture
def otel(require: Require) -> None:
    require("otel", IS_THERE, "the packages of kvstore[otel] are not installed")


@pytest.fixture
def traced() -> Iterator[Callable[[Any], None]]:
    yield spans.trace_calls
    spans._tracer = None


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Its address, and the spans that it has been sent."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    taken: list[Any] = []

    class Taker(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            data = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                import gzip

                data = gzip.decompress(data)
            for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
                names = {each.key: each.value.string_value for each in resource.resource.attributes}
                assert names["service.name"] == "kvstore"
                taken.extend(span for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *given: Any) -> None:
            """Nothing: it is what the test looks at."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Taker)
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", taken
    finally:
        server.shutdown()
        server.server_close()
        serving.join()


def test_a_call_is_a_span_of_its_caller_in_the_client_and_in_the_service(
    otel: None, traced: Callable[[Any], None]
) -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    traced(provider)
    with collector() as (address, taken):
        with running_service(otlp=address) as service:
            with (
                provider.get_tracer("engine").start_as_current_span("request") as outer,
                CacheClient(service.directory, owner="t") as client,
            ):
                client.stats()
                with pytest.raises(UnknownNamespace):
                    client.lookup(b"\0" * 32, [], prompt_tokens=1)
            assert service.stop() == 0
        ours = {span.name: span for span in kept.get_finished_spans()}
        theirs = {span.name: span for span in taken}
    assert {"kvstore.v1.Stats", "kvstore.v1.Lookup", "request"} <= ours.keys()
    trace_id = outer.get_span_context().trace_id
    for name in ("kvstore.v1.Stats", "kvstore.v1.Lookup"):
        assert ours[name].parent.span_id == outer.get_span_context().span_id
        assert theirs[name].trace_id == trace_id.to_bytes(16, "big")
        assert theirs[name].parent_span_id == ours[name].context.span_id.to_bytes(8, "big")
    assert not ours["kvstore.v1.Lookup"].status.is_ok
    assert theirs["kvstore.v1.Lookup"].status.code == 2


def test_a_collector_that_is_away_holds_up_nobody(otel: None) -> None:
    with running_service(otlp="http://127.0.0.1:1") as service:
        with CacheClient(service.directory, owner="t") as client:
            client.stats()
        assert service.stop() == 0


def test_a_collectors_address_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="an URL, as in http://collector:4318"):
        Spans("collector:4318")


def test_without_the_packages_who_asks_for_spans_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch, traced: Callable[[Any], None]
) -> None:
    for name in ("opentelemetry", "opentelemetry.trace", "opentelemetry.propagate"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'kvstore\[otel\]'"):
        Spans("http://127.0.0.1:1")
    with pytest.raises(InvalidArgument, match=r"pip install 'kvstore\[otel\]'"):
        traced(None)
