"""The gRPC servers of one service: the unix socket with everything, and TCP, if asked for, with what other machines may
call. They share their servicers."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvstore.errors import ConfigError
from kvstore.service.admin_servicer import AdminServicer
from kvstore.service.cache_servicer import CacheServicer
from kvstore.service.engine import Engine
from kvstore.service.tcp import TcpEnd, others_may_read
from kvstore.service.tokens import TokenCheck, keep_metadata_out_of_the_log
from kvstore.v1 import cache_pb2, cache_pb2_grpc

log = logging.getLogger(__name__)

SENT_BYTES_MAX = 64 << 20
RECEIVED_BYTES_MIN = 4 << 20
RECEIVED_BYTES_PER_KEY = 128
"""A request is as large as one Reserve call with the most items that are allowed, each of about 90 bytes. A message is
parsed in the event loop's thread, and two bytes in it can become a whole item: 64 MiB of them took seconds and 3 GB."""

CALLS_MAX = 8192

CALLS_PER_CONNECTION_MAX = 1024
CONNECTIONS_BESIDE = 64
CONNECTIONS_PER_SESSION = 2
HANDSHAKE_SECONDS_MAX = 10.0
PING_AFTER_SECONDS = 8.0
PING_SECONDS_MAX = 5.0
"""A cable that was cut ends a session, and gives back what it held, within the two together. Clients may ping as well."""
CLIENT_PING_SECONDS_MIN = 4.0

CACHE = cache_pb2.DESCRIPTOR.services_by_name["Cache"].full_name
ADMIN = cache_pb2.DESCRIPTOR.services_by_name["Admin"].full_name


class Listeners:
    """`tcp` None: nothing on TCP."""

    def __init__(self, engine: Engine, *, socket: Path, tcp: TcpEnd | None) -> None:
        self._engine = engine
        self._socket = socket
        self._tcp = tcp
        self._health = health.aio.HealthServicer()
        self._servers: list[grpc.aio.Server] = []

    async def start(self) -> None:
        """Listen on both, and answer health: not serving. ConfigError where a place cannot be had."""
        await self.set_serving(False)
        cache = CacheServicer(self._engine)
        local = self._local_server(cache)
        remote = None if self._tcp is None else self._tcp_server(cache, self._tcp)
        await local.start()
        self._servers.append(local)
        self._socket.chmod(0o600)
        if remote is not None:
            await remote.start()
            self._servers.append(remote)

    async def stop(self, seconds: float) -> None:
        """No new calls; those under way have so long. Stopping twice does nothing."""
        await asyncio.gather(*(server.stop(seconds) for server in self._servers))

    async def set_serving(self, is_serving: bool) -> None:
        answer = health_pb2.HealthCheckResponse
        for service in ("", CACHE, ADMIN):
            await self._health.set(service, answer.SERVING if is_serving else answer.NOT_SERVING)

    def _local_server(self, cache: CacheServicer) -> grpc.aio.Server:
        server = grpc.aio.server(options=self._message_limits(), maximum_concurrent_rpcs=CALLS_MAX)
        self._add(server, cache, CACHE, ADMIN)
        admin = AdminServicer(self._engine, on_drain=lambda: self.set_serving(False))
        cast(Any, cache_pb2_grpc).add_AdminServicer_to_server(admin, server)
        try:
            server.add_insecure_port(f"unix:{self._socket}")
        except RuntimeError as error:
            raise ConfigError(
                "the socket cannot be made: something else has that name, or the directory takes no new files",
                field="socket",
                value=self._socket,
            ) from error
        return server

    def _tcp_server(self, cache: CacheServicer, end: TcpEnd) -> grpc.aio.Server:
        engine = self._engine
        keep_metadata_out_of_the_log()
        checks = []
        if end.tokens is not None:
            checks.append(TokenCheck(end.tokens, counts=engine.counts, monotonic=engine.time.monotonic))
        server = grpc.aio.server(
            interceptors=checks,
            options=[*self._message_limits(), *_tcp_options(engine.config.sessions)],
            maximum_concurrent_rpcs=CALLS_MAX,
        )
        self._add(server, cache, CACHE)
        try:
            if end.pair is None:
                port = server.add_insecure_port(end.address())
            else:
                keys = [(end.pair.key, end.pair.certificate)]
                port = server.add_secure_port(end.address(), grpc.ssl_server_credentials(keys))
        except RuntimeError as error:
            raise ConfigError(
                "cannot listen there: the port is another's, or the host is not this machine's",
                field="listen",
                value=end.address(),
                allowed="HOST:PORT of this machine that is free; port 0 for any",
            ) from error
        if end.pair is not None and others_may_read(engine.config.tls_key):
            log.warning("the key %s may be read by others than this user", engine.config.tls_key)
        level = logging.INFO if end.pair and end.tokens else logging.WARNING
        log.log(level, "listening on tcp://%s (%s)", end.address(port), end.about)
        return server

    def _add(self, server: grpc.aio.Server, cache: CacheServicer, *services: str) -> None:
        """What both have, and a list of `services` for who asks what is there."""
        # Before and after: the first handler of a name counts where all are generic, and the last where some are registered.
        raw = {"Fetch": _fetch_handler(cache)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(CACHE, raw),))
        cast(Any, cache_pb2_grpc).add_CacheServicer_to_server(cache, server)
        server.add_registered_method_handlers(CACHE, raw)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        reflection.enable_server_reflection((*services, health.SERVICE_NAME, reflection.SERVICE_NAME), server)

    def _message_limits(self) -> list[tuple[str, Any]]:
        received = max(RECEIVED_BYTES_MIN, RECEIVED_BYTES_PER_KEY * self._engine.config.keys)
        return [
            ("grpc.max_send_message_length", SENT_BYTES_MAX),
            ("grpc.max_receive_message_length", received),
        ]


def _fetch_handler(cache: CacheServicer) -> Any:
    """It answers with frames that are finished: see `wire_frame`."""
    return grpc.unary_stream_rpc_method_handler(
        cache.Fetch, request_deserializer=cache_pb2.FetchRequest.FromString, response_serializer=None
    )


def _tcp_options(sessions: int) -> list[tuple[str, Any]]:
    def milliseconds(seconds: float) -> int:
        return int(seconds * 1000)

    return [
        # Two services on one port would share its connections without a word.
        ("grpc.so_reuseport", 0),
        ("grpc.max_concurrent_streams", CALLS_PER_CONNECTION_MAX),
        ("grpc.max_allowed_incoming_connections", CONNECTIONS_PER_SESSION * sessions + CONNECTIONS_BESIDE),
        ("grpc.server_handshake_timeout_ms", milliseconds(HANDSHAKE_SECONDS_MAX)),
        ("grpc.keepalive_time_ms", milliseconds(PING_AFTER_SECONDS)),
        ("grpc.keepalive_timeout_ms", milliseconds(PING_SECONDS_MAX)),
        # The limit above alone was seen to do nothing: a ping may go unanswered for a minute.
        ("grpc.http2.ping_timeout_ms", milliseconds(PING_SECONDS_MAX)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", milliseconds(CLIENT_PING_SECONDS_MIN)),
    ]
