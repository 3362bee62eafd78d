"""A gateway's process: built from options, served until told to end. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from kvstore.clock import SystemClock
from kvstore.errors import ConfigError
from kvstore.v1 import worker_pb2, worker_pb2_grpc
from kvstore_workers.runtime.address import open_channel, socket_path
from kvstore_workers.runtime.dispatch import Limits, Pool
from kvstore_workers.runtime.gateway import GatewayServicer
from kvstore_workers.runtime.peer import Peer
from kvstore_workers.runtime.pool import Rule
from kvstore_workers.runtime.room import Room
from kvstore_workers.runtime.server import DRAIN_SECONDS, Server, serve_until_told

START_SECONDS = 30.0
"""Workers that are started with the gateway load their weights meanwhile, and the first requests wait for them."""

WORKERS_MAX = 64
"""Of each role."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """prefill, decode: addresses. requests: that may be in the gateway, those that wait included. The rest as in Rule and
    Limits; grace: seconds that requests under way have when the gateway is told to end."""

    listen: str
    prefill: Sequence[str]
    decode: Sequence[str]
    requests: int = 64
    per_worker: int = 4
    queue: int = 32
    queue_seconds: float = 30.0
    slack: int = 0
    grace: float = DRAIN_SECONDS


def serve_gateway(options: GatewayOptions) -> None:
    """Serve until SIGTERM or SIGINT. ConfigError for addresses that do not do; the workers may come later."""
    path = socket_path(options.listen, name="--listen")
    with ExitStack() as ending:
        prefill = _pool("prefill", options.prefill, options, ending)
        decode = _pool("decode", options.decode, options, ending)
        room = Room(options.requests, what="gateway")
        server = Server(path, requests=options.requests, name="--listen")
        worker_pb2_grpc.add_GatewayServicer_to_server(
            GatewayServicer(prefill, decode, room=room, clock=SystemClock()), server.grpc
        )
        services = [worker_pb2.DESCRIPTOR.services_by_name["Gateway"].full_name]
        ready = f"kvstore gateway: ready on unix:{path}; prefill {prefill}; decode {decode}"
        serve_until_told(server, services=services, ready=ready, room=room, grace=options.grace)


def _pool(role: str, addresses: Sequence[str], options: GatewayOptions, ending: ExitStack) -> Pool:
    """The workers at `addresses`, dialled when first asked; their channels are closed by `ending`."""
    name = f"--{role}"
    if not 1 <= len(addresses) <= WORKERS_MAX:
        raise ConfigError(
            f"bad number of {role} workers", field=name, value=len(addresses), allowed=f"1 to {WORKERS_MAX}"
        )
    paths = [socket_path(address, name=name) for address in addresses]
    for place, path in enumerate(paths):
        if path in paths[:place]:
            raise ConfigError("the same worker twice", field=name, value=path, allowed="each address once")
    peers = [Peer(role, f"unix:{path}", ending.enter_context(open_channel(path))) for path in paths]
    rule = Rule(per_worker=options.per_worker, slack=options.slack)
    # Decode workers do what is left, so that only they are waited for.
    start_seconds = START_SECONDS if role == "decode" else 0.0
    limits = Limits(queue=options.queue, queue_seconds=options.queue_seconds, start_seconds=start_seconds)
    return Pool(role, peers, rule=rule, limits=limits, clock=SystemClock())
