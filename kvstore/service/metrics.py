"""The Prometheus page, the figures of Stats under `kvstore_*`, and the status page, over a small HTTP server of their own."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from kvstore.errors import ConfigError
from kvstore.service.statuspage import PAGE_POLICY, page

log = logging.getLogger(__name__)

REQUEST_BYTES_MAX = 16 << 10
REQUEST_SECONDS_MAX = 5.0
CONNECTIONS_MAX = 64
NOT_HERE = b"only GET of /, /metrics and /status.json is here\n"


def split_address(text: str, *, field: str = "metrics") -> tuple[str, int]:
    """(host, port) of HOST:PORT, with brackets around an IPv6 host."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise ConfigError(
            "not an address", field=field, value=text, allowed="HOST:PORT, as in 127.0.0.1:9464 or [::1]:9464"
        )
    return host, int(port)


HELP = {
    "loop_gap_seconds_max": "longest time that the event loop, and so every call, was held up, of the last two minutes",
    "loop_gap_own_seconds_max": "the longest of it that this process itself was busy, and not the machine with others",
    "loop_gaps_long_total": "how often the event loop was held up for 20 ms or longer",
    "states_ssd": "window states on SSD: whole states and rows of blocks",
    "states_ssd_bytes": "bytes of window states on SSD, rows included",
    "states_ssd_budget_bytes": "the disk's share for window states",
    "rows_ssd": "blocks whose window rows are on SSD",
    "rows_ssd_bytes": "bytes of window rows on SSD",
    "accepted_blocks": "blocks that are visible and not durable yet; not among the blocks",
    "accepted_states": "states and rows on their way to SSD that are visible and not durable yet; not among the states on SSD",
    "accepted_bytes": "bytes of what is visible and not durable yet",
    "accepted_items_total": "items that were visible before they were durable",
    "accepted_bytes_total": "bytes of commits that were answered before they were durable",
    "accepted_as_durable_total": "commits that asked to be answered before they were durable, and were not: no room for it",
    "accepted_lost_total": "blocks and states that were visible and then taken back, since their write failed",
    "ssd_read_seconds_per_byte": "as reads for clients took lately; 0 before the first one",
    "memory_allocated_bytes": "shared memory for recent payloads, which clients may map",
    "memory_held_bytes": "recent payloads in shared memory",
    "memory_items": "recent payloads in shared memory",
    "memory_hits_total": "payloads or parts that were found in shared memory",
    "memory_misses_total": "payloads or parts that were looked for in shared memory and read from the disk",
    "memory_evicted_total": "payloads that left shared memory for others",
    "memory_refused_total": "payloads that shared memory had no room for, since all of it was in use",
    "mapped_items": "payloads that leases keep in shared memory; what two of them keep counts twice",
    "mapped_items_total": "items that clients were shown in shared memory",
    "disk_live_bytes": "payload bytes that somebody may ask for",
    "disk_dead_bytes": "payload bytes of what has left, in segments that still hold something else",
    "disk_padded_bytes": "headers, footers and padding",
    "disk_reserved_bytes": "allocated and not written in this life of the file, spares included",
    "disk_spare_bytes": "files of segments that went, kept for the next ones",
    "disk_other_bytes": "catalogue, ballast, identity and whatever else lies below the directory",
    "direct_io": "1: segments pass by the page cache; 0: the file system refuses that, and Stats says how",
    "device_bytes_per_payload_byte": "all that went to the device since the start, for each byte that was stored",
    "copied_for_hits_bytes_total": "payload bytes copied forward while something else could have been evicted",
    "log_written_bytes_total": "all that went to the device: payloads, headers, padding, footers, copies, catalogue",
    "log_appended_bytes_total": "payload bytes that were stored",
    "log_cleaned_bytes_total": "payload bytes that were copied forward, for hits or for retention",
    "wear_left_bytes": "what the drive may take now of its daily budget for writes",
    "flights": "announcements of sessions that they compute blocks",
    "flight_blocks": "blocks that sessions have announced to compute",
    "flights_waiting": "lookups that wait for blocks of another session's flight",
    "flights_refused_total": "flights that were not opened for want of room",
    "flights_waited_total": "lookups that waited for another session's flight",
    "flights_inherited_total": "flights opened by a lookup whose owner had ended with blocks missing",
    "handoff_takes_out": "handoffs on loan to workers, until they confirm",
    "stored_states_total": "window states that became visible on SSD, rows included",
    "stored_rows_total": "window rows of blocks that became visible on SSD",
    "unauthenticated_total": "calls over TCP without a token or certificate that is known",
    "erasing_files": "segments that may hold bytes of a tenant that is being erased",
    "erasing_stopped": "1: a tenant was being erased, and an error has ended that; it goes on when it is asked for again, or at a start",
    "erased_tenants_total": "tenants whose bytes were forgotten and overwritten",
    "log_overwritten_bytes_total": "zeros written over what was given up while a tenant was erased",
    "audit_failed_total": "admin calls that the audit log lacks, since it could not be written",
    "tenant_forbidden_total": "namespaces not opened for a tenant for whom the call's token or certificate is not good",
    "unknown_namespaces_total": "calls that named a namespace that is not there, or of another tenant",
    "tenant_quota_refused_total": "reservations that did not fit their tenant's quota of the disk",
    "tenant_in_flight_refused_total": "calls refused since too many bytes of their tenant's were on their way",
    "tenant_rate_refused_total": "calls refused since their tenant's rate was used up",
    "quota_evicted_blocks_total": "blocks that left since their own tenant wanted room within its quota",
    "quota_evicted_states_total": "window states that left since their own tenant wanted room within its quota",
    "reload_failing": "1: certificates, tokens or tenants' limits on disk are wrong or gone, and those from before are in use",
    "reloads_total": "times that certificates, tokens and tenants' limits were read anew",
    "reloads_failed_total": "times that they were found wrong or gone, and stayed as they were",
    "plans_rows_total": "lookups whose plan resumes from window rows",
    "retention_attained_share": "blocks that left at their time, of all that left by time or for want of room",
}
"""What the names of the figures alone do not say."""


class _Figures(Collector):
    def __init__(self, snapshot: Callable[[], Mapping[str, float]]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        for name, value in self._snapshot().items():
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield family(f"kvstore_{name}", HELP.get(name, name.replace("_", " ")), value=value)


class MetricsPage:
    """Answers GET of /metrics, of the status page and of the JSON that it fetches. `snapshot` and `status` are called in
    the event loop's thread."""

    def __init__(
        self, snapshot: Callable[[], Mapping[str, float]], status: Callable[[], Mapping[str, Any]]
    ) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Figures(snapshot))
        self._pages: dict[bytes, tuple[str, Callable[[], bytes]]] = {
            b"/": ("text/html; charset=utf-8", page),
            b"/status.json": ("application/json", lambda: json.dumps(status()).encode()),
            b"/metrics": (CONTENT_TYPE_LATEST, lambda: generate_latest(registry)),
        }
        self._server: asyncio.Server | None = None
        self._open = 0

    async def start(self, address: str) -> None:
        host, port = split_address(address)
        try:
            self._server = await asyncio.start_server(self._serve, host, port, limit=REQUEST_BYTES_MAX)
        except OSError as error:
            raise ConfigError(f"cannot listen: {error.strerror}", field="metrics", value=address) from error

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            async with asyncio.timeout(REQUEST_SECONDS_MAX):
                if self._open > CONNECTIONS_MAX:
                    await _answer(writer, "503 Service Unavailable", "text/plain", b"too many connections\n")
                    return
                head = await reader.readuntil(b"\r\n\r\n")
                method, _, rest = head.partition(b" ")
                path = rest.partition(b" ")[0].partition(b"?")[0]
                if method != b"GET" or path not in self._pages:
                    await _answer(writer, "404 Not Found", "text/plain", NOT_HERE)
                else:
                    content_type, body = self._pages[path]
                    await _answer(writer, "200 OK", content_type, body())
        except (
            TimeoutError,
            ConnectionError,
            asyncio.IncompleteReadError,
            asyncio.LimitOverrunError,
        ) as error:
            log.debug("metrics connection ended early: %s", error)
        finally:
            self._open -= 1
            writer.close()


async def _answer(writer: asyncio.StreamWriter, status: str, content_type: str, body: bytes) -> None:
    head = (
        f"HTTP/1.1 {status}",
        f"Content-Type: {content_type}",
        f"Content-Length: {len(body)}",
        f"Content-Security-Policy: {PAGE_POLICY}",
        "X-Content-Type-Options: nosniff",
        "Cache-Control: no-store",
        "Connection: close",
    )
    writer.write("\r\n".join([*head, "", ""]).encode() + body)
    await writer.drain()
