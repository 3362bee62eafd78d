"""A worker's process: built from options, served until told to end."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from pathlib import Path

import torch

from kvstore.clock import SystemClock
from kvstore.errors import ConfigError, Unavailable
from kvstore.prefix.identity import NamespaceIdentity
from kvstore.profile.registry import get_profile
from kvstore.v1 import worker_pb2, worker_pb2_grpc
from kvstore_client.client import CacheClient
from kvstore_client.values import Deadlines
from kvstore_workers.model.config import ModelConfig
from kvstore_workers.model.model import Model
from kvstore_workers.model.rates import measure_rates
from kvstore_workers.model.selfcheck import SelfCheck, numerics, self_check
from kvstore_workers.runtime.engine import FLUSH_SECONDS, Engine
from kvstore_workers.runtime.lane import Lane
from kvstore_workers.runtime.options import WorkerOptions, cache_address, check_options, check_policy
from kvstore_workers.runtime.rates import Rates
from kvstore_workers.runtime.room import Room
from kvstore_workers.runtime.server import DRAIN_SECONDS, Server, serve_until_told
from kvstore_workers.runtime.servicers import DecodeServicer, Desk, Identity, PrefillServicer, WorkerServicer
from kvstore_workers.runtime.store import PrefixStore
from kvstore_workers.runtime.writer import Writer

log = logging.getLogger(__name__)

_TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def serve_worker(options: WorkerOptions) -> None:
    """Serve until SIGTERM or SIGINT. KvstoreError when an option, the model or the store's namespace does not do."""
    path = check_options(options)
    with ExitStack() as ending:
        lane = Lane()
        desk = Desk(Room(options.requests, what="worker"), lane, SystemClock())
        ending.callback(lane.close)
        model, check, numbers = lane.call(lambda: _prepare(options))
        rates = Rates()
        store = _open_store(options, model, numbers, rates)
        writer: Writer | None = None
        if store is not None:
            # So that the first plan has this machine's own prices.
            measured = lane.call(lambda: measure_rates(model))
            rates.prime(
                layer_token=measured.seconds_per_layer_token,
                index_entry=measured.seconds_per_index_entry,
                spread=measured.density_spread,
            )
            ending.callback(store.close)
            writer = Writer(store)
            ending.callback(_close_writer, writer)
        name = f"{options.role} {os.getpid()}"
        engine = Engine(model, store=store, writer=writer, clock=SystemClock(), name=name)
        server = Server(path, requests=options.requests, name="--listen")
        services = _add_services(server, Identity(options.role, numbers, check.bit_equal), engine, desk)
        ready = (
            f"kvstore worker {options.role}: ready on unix:{path}; {_about(options, model, check, numbers)}"
        )
        serve_until_told(server, services=services, ready=ready, room=desk.room, grace=options.grace)


def _close_writer(writer: Writer) -> None:
    if not writer.close(seconds=DRAIN_SECONDS):
        log.warning("some blocks were not stored within %g s and are given up", DRAIN_SECONDS)


def _prepare(options: WorkerOptions) -> tuple[Model, SelfCheck, str]:
    """The model, checked; in the lane's thread, which is the one that will run it."""
    if options.threads:
        torch.set_num_threads(options.threads)
    device, dtype = _device(options.device), _TORCH_DTYPES[options.dtype]
    if options.checkpoint:
        # Named alike wherever the folder lies: the name is part of what decides whether bytes may be shared.
        model = Model.load(Path(options.checkpoint), device=device, dtype=dtype)
    else:
        config = ModelConfig.for_profile(get_profile(options.profile))
        model = Model.random(config, seed=options.seed, device=device, dtype=dtype)
    check = self_check(model)
    return model, check, numerics(model, bit_equal=check.bit_equal)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError("the model runs on cpu and cuda")
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"this device can't be used: {reason}", field="--device", value=name, allowed="cpu, cuda, cuda:N"
        ) from error
    return device


def _open_store(options: WorkerOptions, model: Model, numbers: str, rates: Rates) -> PrefixStore | None:
    """None without a cache directory. A service that is not there yet is a warning: the namespace is opened later."""
    if not options.cache:
        return None
    check_policy(options.policy, model.profile)
    identity = NamespaceIdentity(
        profile=model.profile,
        weights_revision=model.weights_revision,
        numerics=numbers,
        tenant_salt=options.tenant_salt,
    )
    # The label must be another one wherever the identity is: a service knows each label with one identity only.
    name = options.namespace or f"{model.profile.name}-{identity.digest().hex()[:12]}"
    # A commit that takes longer than a request waits for it would only hold up the writer's next batch.
    deadlines = Deadlines(commit=FLUSH_SECONDS)
    cache = CacheClient(
        cache_address(options), owner=f"worker-{options.role}-{os.getpid()}", deadlines=deadlines
    )
    store = PrefixStore(cache, identity, name=name, policy=options.policy, clock=SystemClock(), rates=rates)
    try:
        store.open()
    except Unavailable as error:
        log.warning("no store for now, computing everything until it comes: %s", error)
    return store


def _add_services(server: Server, identity: Identity, engine: Engine, desk: Desk) -> list[str]:
    """Register a worker's services; their full names."""
    if identity.role == "prefill":
        worker_pb2_grpc.add_PrefillServicer_to_server(PrefillServicer(engine, desk), server.grpc)
    else:
        worker_pb2_grpc.add_DecodeServicer_to_server(DecodeServicer(engine, desk), server.grpc)
    worker_pb2_grpc.add_WorkerServicer_to_server(WorkerServicer(identity, engine, desk.room), server.grpc)
    names = worker_pb2.DESCRIPTOR.services_by_name
    return [names[identity.role.capitalize()].full_name, names["Worker"].full_name]


def _about(options: WorkerOptions, model: Model, check: SelfCheck, numbers: str) -> str:
    """What the line that says 'ready' adds about the model, its self-check and the store."""
    if check.bit_equal:
        bits = f"self-check passed, equal bits promised (decode tile {check.decode_tile})"
    else:
        failed = ", ".join(name for name, passed in check.details.items() if not passed)
        bits = f"self-check FAILED, equal bits not promised ({failed})"
    store = f"store {options.cache}" if options.cache else "no store"
    return (
        f"profile {model.profile.name}, weights {model.weights_revision}; {bits}; numerics {numbers}; {store}"
    )
