"""The Prometheus page, the figures of Stats under `kvstore_*`, and the status page, over a small HTTP server of their own."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
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
NOT_ASKED_SO = b"asked by a host name that is not known here: use an address, or start the service with --metrics-hosts\n"

HOSTS_MAX = 64
PRIVATE_NAMES = (".localhost", ".local", ".internal", ".svc", ".cluster.local")
"""Nobody can have a name in the public system that ends so, or one without a dot."""


def split_address(text: str, *, field: str = "metrics") -> tuple[str, int]:
    """(host, port) of HOST:PORT, with brackets around an IPv6 host."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise ConfigError(
            "not an address", field=field, value=text, allowed="HOST:PORT, as in 127.0.0.1:9464 or [::1]:9464"
        )
    return host, int(port)


def split_hosts(text: str) -> frozenset[str]:
    """Host names with commas between them, in small letters."""
    names = [name.strip().lower() for name in text.split(",") if name.strip()]
    for name in names:
        if not re.fullmatch(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*", name) or len(name) > 253:
            raise ConfigError(
                "not a host name", field="metrics_hosts", value=name, allowed="names with commas between them"
            )
    if len(names) > HOSTS_MAX:
        raise ConfigError(
            "too many host names", field="metrics_hosts", value=len(names), allowed=f"{HOSTS_MAX} at most"
        )
    return frozenset(names)


def is_ours(host: str, known: frozenset[str]) -> bool:
    """Whether a request whose Host header says this may be answered. A page of anybody's, in a browser that may reach this port,
    can have its own name point here, and would read what is shown; it has no address for a name, none of the `known` ones,
    and none that only private networks give."""
    name = host.strip().lower()
    name = name.partition("]")[0] + "]" if name.startswith("[") else name.partition(":")[0]
    name = name.removesuffix(".")
    with suppress(ValueError):
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
        return True
    return bool(name) and (name in known or "." not in name or name.endswith(PRIVATE_NAMES))


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
    "accepted_copied_bytes_total": "bytes that were copied once more to be seen before they were durable, since they had not come there",
    "accepted_as_durable_total": "commits that asked to be answered before they were durable, and were not: no room for it",
    "accepted_lost_total": "blocks and states that were visible and never became durable: their write failed, or what they follow was damaged",
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
    "events_batches_total": "batches of KV events that were sent",
    "events_told_total": "blocks and states of which KV events told that they came or went, snapshots included",
    "events_snapshots_total": "how often KV events told all that is held",
    "events_lost_total": "how often changes came faster than KV events told of them; a snapshot followed",
    "events_answers_total": "answers to readers that had missed KV events",
    "events_answers_refused_total": "questions for missed KV events that were unreadable, or too many at once",
    "events_waiting": "changes that KV events have not told yet",
    "events_kept_bytes": "KV events that are kept for readers that miss some",
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
    the event loop's thread. `hosts`: names in small letters by which it may be asked, besides those that `is_ours` allows."""

    def __init__(
        self,
        snapshot: Callable[[], Mapping[str, float]],
        status: Callable[[], Mapping[str, Any]],
        *,
        hosts: frozenset[str] = frozenset(),
    ) -> None:
        self._hosts = hosts
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Figures(snapshot))
        self._pages: dict[bytes, tuple[str, Callable[[], bytes]]] = {
            b"/": ("text/html; charset=utf-8", page),
            b"/status.json": ("application/json", lambda: json.dumps(status()).encode()),
            b"/metrics": (CONTENT_TYPE_LATEST, lambda: generate_latest(registry)),
        }
        self._server: asyncio.Server | None = None
        self._open = 0
        self._silent: dict[asyncio.StreamWriter, None] = {}
        """Those that have not sent a whole request yet, the one that has had longest for it first."""

    async def start(self, address: str) -> None:
        host, port = split_address(address)
        self._hosts |= {host.lower()}
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
                if self._open > CONNECTIONS_MAX and not self._hang_up():
                    await _answer(writer, "503 Service Unavailable", "text/plain", b"too many connections\n")
                    return
                self._silent[writer] = None
                head = await reader.readuntil(b"\r\n\r\n")
                self._silent.pop(writer, None)
                if not all(is_ours(name, self._hosts) for name in _hosts_of(head)):
                    await _answer(writer, "421 Misdirected Request", "text/plain", NOT_ASKED_SO)
                    return
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
            self._silent.pop(writer, None)
            writer.close()

    def _hang_up(self) -> bool:
        """On who has said nothing for longest: whoever does ask is not to wait for those that do not. False where all ask."""
        for writer in self._silent:
            del self._silent[writer]
            writer.transport.abort()
            return True
        return False


def _hosts_of(head: bytes) -> list[str]:
    """What the Host headers say, of which there is one; none in what no browser sends."""
    lines = head.decode("latin-1").split("\r\n")[1:]
    return [
        value
        for name, colon, value in (line.partition(":") for line in lines)
        if name.strip().lower() == "host"
    ]


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
