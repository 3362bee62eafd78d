"""The Admin service: each call decoded, done, encoded."""

# ruff: noqa: N802 -- the methods have the names of the wire contract
from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import asdict

from kvstore.core import NamespaceInfo
from kvstore.errors import InvalidArgument
from kvstore.policy import EVICTION_POLICIES, make_policy
from kvstore.service import encode
from kvstore.service.engine import Engine
from kvstore.service.figures import VERSION, figures
from kvstore.service.memory_budget import MemoryBudget
from kvstore.service.status import Context, answering
from kvstore.service.turns import by_turns
from kvstore.service.verifying import Progress, Verifying
from kvstore.types import Tier
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1 import cache_pb2_grpc

DRAIN_SECONDS_MAX = 3600.0

_TIERS: dict[int, Tier | None] = {
    pb.StateTier.STATE_TIER_UNSPECIFIED: None,
    pb.StateTier.STATE_TIER_POOL: Tier.POOL,
    pb.StateTier.STATE_TIER_SSD: Tier.SSD,
}


class AdminServicer(cache_pb2_grpc.AdminServicer):
    """`on_drain` is awaited when a drain begins: health then says NOT_SERVING."""

    def __init__(self, engine: Engine, *, on_drain: Callable[[], Awaitable[None]]) -> None:
        self._engine = engine
        self._on_drain = on_drain
        self._verifying = Verifying(engine)
        self._memory = MemoryBudget(engine.config.parts, engine.reader.memory, engine.core.pool)

    def check_ready(self) -> None:
        self._engine.check_ready()

    @answering
    async def Stats(self, request: pb.StatsRequest, context: Context) -> pb.StatsReply:
        return pb.StatsReply(
            values=figures(self._engine),
            boot=self._engine.boot.hex(),
            version=VERSION,
            buffered_because=self._engine.log.buffered_because,
        )

    @answering
    async def Clear(self, request: pb.ClearRequest, context: Context) -> pb.ClearReply:
        cleared = await self._engine.clear(
            encode.take_digest(request.namespace) if request.namespace else None
        )
        return pb.ClearReply(blocks=cleared.blocks, states=cleared.states)

    @answering
    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainReply:
        seconds = encode.take_seconds(request.seconds, field="seconds", high=DRAIN_SECONDS_MAX)
        await self._on_drain()
        return pb.DrainReply(left_open=await self._engine.drain(seconds))

    @answering
    async def Verify(self, request: pb.VerifyRequest, context: Context) -> None:
        async with aclosing(self._verifying.run(request.bytes_per_second)) as steps:
            async for progress in steps:
                await context.write(_put_progress(progress))

    @answering
    async def SetPolicy(self, request: pb.SetPolicyRequest, context: Context) -> pb.Namespace:
        digest = encode.take_digest(request.namespace)
        return self._put(await self._engine.registry.set_policy(digest, request.policy))

    @answering
    async def DropStates(self, request: pb.DropStatesRequest, context: Context) -> pb.DropStatesReply:
        if request.tier not in _TIERS:
            raise InvalidArgument(
                "unknown tier", field="tier", value=request.tier, allowed="0 (both), 1 (pool), 2 (SSD)"
            )
        dropped = await self._engine.drop_states(
            encode.take_digest(request.namespace) if request.namespace else None, _TIERS[request.tier]
        )
        return pb.DropStatesReply(dropped=dropped.dropped, kept=dropped.kept)

    @answering
    async def SetMemory(self, request: pb.SetMemoryRequest, context: Context) -> pb.Memory:
        budgets = await self._memory.change(
            cache=request.cache if request.HasField("cache") else None,
            pool=request.pool if request.HasField("pool") else None,
        )
        return pb.Memory(**asdict(budgets))

    @answering
    async def SetEviction(self, request: pb.SetEvictionRequest, context: Context) -> pb.Eviction:
        core = self._engine.core
        if request.policy:
            policy = make_policy(request.policy, field="policy")
            await by_turns(core.switching_eviction(policy))
        return pb.Eviction(policy=core.eviction_name, policies=EVICTION_POLICIES)

    @answering
    async def ListTenants(self, request: pb.ListTenantsRequest, context: Context) -> pb.ListTenantsReply:
        return pb.ListTenantsReply(tenants=[self._tenant(each) for each in self._engine.core.tenants()])

    def _tenant(self, tenant: str) -> pb.Tenant:
        engine = self._engine
        held, promised = engine.core.tenant_bytes(tenant)
        limits = engine.tenants.limits(tenant)
        return pb.Tenant(
            tenant=tenant,
            namespaces=engine.core.tenant_namespaces(tenant),
            held_bytes=held,
            promised_bytes=promised,
            quota=limits.quota,
            in_flight_bytes=engine.tenants.in_flight(tenant),
            in_flight=limits.in_flight,
            erasing=engine.erasing.is_erasing(tenant),
        )

    @answering
    async def EraseTenant(self, request: pb.EraseTenantRequest, context: Context) -> None:
        async with aclosing(self._engine.erasing.run(request.tenant)) as steps:
            async for progress in steps:
                await context.write(
                    pb.EraseTenantReply(
                        blocks=progress.blocks,
                        states=progress.states,
                        files_left=progress.files_left,
                        overwritten_bytes=progress.overwritten,
                        done=progress.done,
                    )
                )

    @answering
    async def ListNamespaces(
        self, request: pb.ListNamespacesRequest, context: Context
    ) -> pb.ListNamespacesReply:
        return pb.ListNamespacesReply(namespaces=[self._put(info) for info in self._engine.core.namespaces()])

    def _put(self, info: NamespaceInfo) -> pb.Namespace:
        return encode.put_namespace(info, self._engine.core)


def _put_progress(progress: Progress) -> pb.VerifyReply:
    return pb.VerifyReply(
        records=progress.records,
        bytes=progress.bytes,
        bytes_total=progress.bytes_total,
        damages=[
            pb.Damage(segment=place.segment_id, offset=place.offset, length=place.length, key=key, what=what)
            for place, key, what in progress.damages
        ],
        done=progress.done,
    )
