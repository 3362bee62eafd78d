"""The gRPC servers of one service: the unix socket with everything, and TCP, if asked for, with what other machines may
call. They share their servicers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from kvstore.errors import ConfigError
from kvstore.service.admin_servicer import AdminServicer
from kvstore.service.cache_servicer import CacheServicer
from kvstore.service.callers import CallerCheck
from kvstore.service.engine import Engine
from kvstore.service.handlers import handlers
from kvstore.service.logs import JSON, naming
from kvstore.service.probe_servicer import ProbeServicer
from kvstore.service.process import others_may_read
from kvstore.service.spans import Spans
from kvstore.service.tcp import TcpEnd, Trust
from kvstore.service.tokens import keep_metadata_out_of_the_log
from kvstore.v1 import cache_pb2

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
HANDSHAKE_SECONDS_MAX = 5.0
PING_AFTER_SECONDS = 8.0
PING_SECONDS_MAX = 5.0
"""A cable that was cut ends a session, and gives back what it held, within the two together. Clients may ping as well."""
CLIENT_PING_SECONDS_MIN = 4.0

PROBES_AT_ONCE = 16
PROBE_IDLE_SECONDS_MAX = 10.0
LIVENESS = "liveness"
"""The name under which health says SERVING from the moment that it answers until the end, also while the index is loaded
and while the service drains: a service that is to be left alone and is not to get calls."""

CACHE = cache_pb2.DESCRIPTOR.services_by_name["Cache"].full_name
ADMIN = cache_pb2.DESCRIPTOR.services_by_name["Admin"].full_name


class Doors(Protocol):
    """The ways into one service, for calls and for sessions."""

    async def start(self) -> None:
        """Take calls. ConfigError where a way in cannot be had."""

    async def stop(self, seconds: float) -> None:
        """No new calls; those under way have so long. Stopping twice does nothing."""

    async def set_serving(self, is_serving: bool) -> None:
        """What who watches over the service is told."""

    async def open_to_sessions(self) -> None: ...

    def close_to_sessions(self) -> None:
        """No new ones; those that are open stay. Closing twice, or what was not opened, does nothing."""


class Listeners:
    """The doors that are sockets. `tcp` None: no calls on TCP; `probes` None: no health in plaintext there."""

    def __init__(
        self,
        engine: Engine,
        socket: Path,
        session_socket: Path,
        *,
        tcp: TcpEnd | None,
        probes: tuple[str, int] | None = None,
        spans: Spans | None = None,
    ) -> None:
        self._engine = engine
        self._socket = socket
        self._session_socket = session_socket
        self._sessions: asyncio.Server | None = None
        self._tcp = tcp
        self._probes = probes
        self._spans = spans
        self._health = health.aio.HealthServicer()
        self._servers: list[grpc.aio.Server] = []

    async def start(self) -> None:
        """And answer health: not serving."""
        await self.set_serving(False)
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        if self._probes is not None:
            probed = self._probe_server(*self._probes)
            await probed.start()
            self._servers.append(probed)
        cache = CacheServicer(self._engine)
        admin = AdminServicer(self._engine, on_drain=lambda: self.set_serving(False))
        local = self._local_server(cache, admin)
        remote = None if self._tcp is None else self._tcp_server(cache, admin, self._tcp)
        await local.start()
        self._servers.append(local)
        self._socket.chmod(0o600)
        if remote is not None:
            await remote.start()
            self._servers.append(remote)

    async def open_to_sessions(self) -> None:
        self._sessions = await asyncio.get_running_loop().create_unix_server(
            self._engine.sessions.connection, str(self._session_socket)
        )
        self._session_socket.chmod(0o600)

    def close_to_sessions(self) -> None:
        if self._sessions is not None:
            self._sessions.close()

    async def stop(self, seconds: float) -> None:
        await asyncio.gather(*(server.stop(seconds) for server in self._servers))

    async def set_serving(self, is_serving: bool) -> None:
        answer = health_pb2.HealthCheckResponse
        for service in ("", CACHE, ADMIN):
            await self._health.set(service, answer.SERVING if is_serving else answer.NOT_SERVING)

    def _local_server(self, cache: CacheServicer, admin: AdminServicer) -> grpc.aio.Server:
        options = [*self._message_limits(), *_connection_limits(self._engine.config.sessions)]
        server = grpc.aio.server(options=options, maximum_concurrent_rpcs=CALLS_MAX)
        self._add(server, ("Cache", cache), ("Admin", admin))
        try:
            server.add_insecure_port(f"unix:{self._socket}")
        except RuntimeError as error:
            raise ConfigError(
                "the socket cannot be made: something else has that name, or the directory takes no new files",
                field="socket",
                value=self._socket,
            ) from error
        return server

    def _tcp_server(self, cache: CacheServicer, admin: AdminServicer, end: TcpEnd) -> grpc.aio.Server:
        engine = self._engine
        keep_metadata_out_of_the_log()
        check = CallerCheck(
            lambda: self._trust(end).access,
            counts=engine.counts,
            monotonic=engine.time.monotonic,
            on_admin=(lambda name, context: None) if engine.audit is None else engine.audit.refused,
        )
        server = grpc.aio.server(
            interceptors=[check],
            options=[*self._message_limits(), *_tcp_options(engine.config.sessions)],
            maximum_concurrent_rpcs=CALLS_MAX,
        )
        served: list[tuple[str, object]] = [("Cache", cache)]
        if end.trust.access.admin is not None:
            served.append(("Admin", admin))
        self._add(server, *served)
        try:
            if end.trust.pair is None:
                port = server.add_insecure_port(end.address())
            else:
                port = server.add_secure_port(end.address(), _credentials(lambda: self._trust(end)))
        except RuntimeError as error:
            raise ConfigError(
                "cannot listen there: the port is another's, or the host is not this machine's",
                field="listen",
                value=end.address(),
                allowed="HOST:PORT of this machine that is free; port 0 for any",
            ) from error
        if end.trust.pair is not None and others_may_read(Path(engine.config.tls_key).stat()):
            log.warning("the key %s may be read by others than this user", engine.config.tls_key)
        level = logging.INFO if end.is_safe else logging.WARNING
        log.log(level, "listening on tcp://%s (%s)", end.address(port), end.about)
        return server

    def _trust(self, end: TcpEnd) -> Trust:
        """As the files say now."""
        reloading = self._engine.reloading
        return end.trust if reloading is None else reloading.trust

    def _probe_server(self, host: str, port: int) -> grpc.aio.Server:
        """Health alone: who watches over machines has no token, and speaks no TLS."""
        server = grpc.aio.server(
            options=[
                *_connection_limits(self._engine.config.sessions),
                ("grpc.max_connection_idle_ms", _milliseconds(PROBE_IDLE_SECONDS_MAX)),
                ("grpc.so_reuseport", 0),
                ("grpc.max_concurrent_streams", PROBES_AT_ONCE),
            ],
            maximum_concurrent_rpcs=PROBES_AT_ONCE,
        )
        health_pb2_grpc.add_HealthServicer_to_server(ProbeServicer(self._health), _ByName(server))
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(
                "cannot listen there: the port is another's, or the host is not this machine's",
                field="health",
                value=address,
                allowed="HOST:PORT of this machine that is free",
            ) from error
        return server

    def _add(self, server: grpc.aio.Server, *services: tuple[str, object]) -> None:
        """The services of the contract, each with its servicer, health, and a list for who asks what is there."""
        by_name = _ByName(server)
        for name, servicer in services:
            found = handlers(name, servicer, around=self._audited if name == "Admin" else self._around)
            full_name = cache_pb2.DESCRIPTOR.services_by_name[name].full_name
            by_name.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(full_name, found),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, by_name)
        listed = [cache_pb2.DESCRIPTOR.services_by_name[name].full_name for name, _ in services]
        names = (*listed, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection_pb2_grpc.add_ServerReflectionServicer_to_server(
            reflection.aio.ReflectionServicer(names), by_name
        )

    def _around(self, name: str, method: Any) -> Any:
        around = self._engine.slow.around(name, method)
        if self._engine.config.log_format == JSON:
            # Lines for people do not name the call.
            around = naming(name, around)
        return around if self._spans is None else self._spans.around(name, around)

    def _audited(self, name: str, method: Any) -> Any:
        around = self._around(name, method)
        return around if self._engine.audit is None else self._engine.audit.around(name, around)

    def _message_limits(self) -> list[tuple[str, Any]]:
        received = max(RECEIVED_BYTES_MIN, RECEIVED_BYTES_PER_KEY * self._engine.config.keys)
        return [
            ("grpc.max_send_message_length", SENT_BYTES_MAX),
            ("grpc.max_receive_message_length", received),
        ]


class _ByName:
    """A server as generated code adds handlers to it: all of them are found by their names, and none is registered. gRPC
    waits for the next call of each registered method by itself, and begins to wait for all of them anew after every call:
    with forty methods that took about 30 us of each."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        self._server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service: str, handlers: object) -> None:
        """They have been added by name."""


def _credentials(trust: Callable[[], Trust]) -> grpc.ServerCredentials:
    """Asked for at each handshake, in a thread of gRPC's: a certificate that was replaced is shown from the next one on."""
    shown = first = trust()

    def changed() -> Any:
        """None where gRPC has it already."""
        nonlocal shown
        before, shown = shown, trust()
        is_same = (before.pair, before.client_ca) == (shown.pair, shown.client_ca)
        return None if is_same else _shown(shown)

    return grpc.dynamic_ssl_server_credentials(
        _shown(first), changed, require_client_authentication=first.client_ca is not None
    )


def _shown(trust: Trust) -> grpc.ServerCertificateConfiguration:
    assert trust.pair is not None, "what is served with TLS is not served without it"
    return grpc.ssl_server_certificate_configuration(
        [(trust.pair.key, trust.pair.certificate)], root_certificates=trust.client_ca
    )


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)


def _connection_limits(sessions: int) -> list[tuple[str, Any]]:
    """Who only connects takes no more descriptors than sessions with their calls would."""
    return [
        ("grpc.max_allowed_incoming_connections", CONNECTIONS_PER_SESSION * sessions + CONNECTIONS_BESIDE),
        ("grpc.server_handshake_timeout_ms", _milliseconds(HANDSHAKE_SECONDS_MAX)),
    ]


def _tcp_options(sessions: int) -> list[tuple[str, Any]]:
    return [
        *_connection_limits(sessions),
        # Two services on one port would share its connections without a word.
        ("grpc.so_reuseport", 0),
        ("grpc.max_concurrent_streams", CALLS_PER_CONNECTION_MAX),
        ("grpc.keepalive_time_ms", _milliseconds(PING_AFTER_SECONDS)),
        ("grpc.keepalive_timeout_ms", _milliseconds(PING_SECONDS_MAX)),
        # The limit above alone was seen to do nothing: a ping may go unanswered for a minute.
        ("grpc.http2.ping_timeout_ms", _milliseconds(PING_SECONDS_MAX)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", _milliseconds(CLIENT_PING_SECONDS_MIN)),
    ]
