"""A gateway's process: built from options, served until told to end. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.clock import SystemClock
from kvstore.v1 import worker_pb2, worker_pb2_grpc
from kvstore_workers.runtime.address import open_channel, socket_path
from kvstore_workers.runtime.gateway import GatewayServicer
from kvstore_workers.runtime.server import Server, serve_until_told


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    listen: str
    prefill: str
    decode: str
    requests: int = 64


def serve_gateway(options: GatewayOptions) -> None:
    """Serve until SIGTERM or SIGINT. ConfigError for addresses that do not do; the workers may come later."""
    path = socket_path(options.listen, name="--listen")
    prefill = socket_path(options.prefill, name="--prefill")
    decode = socket_path(options.decode, name="--decode")
    server = Server(path, requests=options.requests, name="--listen")
    with open_channel(prefill) as to_prefill, open_channel(decode) as to_decode:
        servicer = GatewayServicer(to_prefill, to_decode, limit=options.requests, clock=SystemClock())
        worker_pb2_grpc.add_GatewayServicer_to_server(servicer, server.grpc)
        services = [worker_pb2.DESCRIPTOR.services_by_name["Gateway"].full_name]
        ready = f"kvstore gateway: ready on unix:{path}; prefill unix:{prefill}, decode unix:{decode}"
        serve_until_told(server, services=services, ready=ready, draining=lambda: None)
