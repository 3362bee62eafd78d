"""What a tenant may see and take, where the parts of a service meet: namespaces by their callers, reads, and quotas of the
disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvstore.core import Lease, NamespaceInfo, unknown_namespace
from kvstore.errors import Forbidden, LimitExceeded
from kvstore.prefix.identity import NamespaceIdentity
from kvstore.service.callers import current_caller
from kvstore.service.turns import by_turns, in_parts

if TYPE_CHECKING:
    from kvstore.service.engine import Engine

READ_AHEAD_BYTES = 32 << 20
"""Of one fetch on its way at once: two batches of the reader's."""

EVICTED_SHARE = 64
"""A tenant over its quota lets go of at least this part of it, so that its blocks are seldom looked through."""


def namespace_of_caller(engine: Engine, digest: bytes) -> NamespaceInfo:
    """Another tenant's is refused in the words of one that is not there."""
    info = engine.core.find_namespace(digest)
    # The same steps for both, so that the time says nothing either.
    if info is None or not current_caller().may_use(info.tenant):
        engine.counts["unknown_namespaces_total"] += 1
        raise unknown_namespace(digest)
    return info


def check_tenant_of_caller(engine: Engine, tenant: str) -> None:
    """Forbidden where the call's token, or certificate, is not good for this tenant."""
    if not current_caller().may_use(tenant):
        engine.counts["tenant_forbidden_total"] += 1
        raise Forbidden(
            "the token, or certificate, of this call is not good for the tenant",
            field="tenant_salt",
            value="(not shown)",
            allowed="the tenants that the service's tenants' file says it is good for",
        )


def check_namespaces(engine: Engine, identity: NamespaceIdentity) -> None:
    """LimitExceeded where it would be one more than its tenant may have."""
    tenant = identity.tenant_salt
    limit = engine.tenants.limits(tenant).namespaces
    if limit is None or engine.core.find_namespace(identity.digest()) is not None:
        return
    count = engine.core.tenant_namespaces(tenant)
    if count >= limit:
        raise LimitExceeded(
            "too many namespaces of the tenant's",
            field="tenant.namespaces",
            value=count + 1,
            allowed=f"{limit}",
        )


@contextmanager
def reading(engine: Engine, lease: Lease, *, block_count: int, state: bool) -> Iterator[None]:
    """What a lease protects is on its way out inside. LimitExceeded past a limit of its tenant's."""
    info = engine.core.namespace(lease.namespace)
    length = min(block_count, lease.blocks) * info.figures.block_bytes
    length += info.figures.state_bytes if state else 0
    engine.tenants.begin(info.tenant, length=length)
    with engine.tenants.moving(info.tenant, min(length, READ_AHEAD_BYTES)):
        yield


async def make_quota(engine: Engine, tenant: str) -> None:
    """What the tenant holds and may write is within its quota on return: its own tails have gone for that, never another's.
    LimitExceeded where that is not enough."""
    quota = engine.tenants.quota(tenant)
    if quota is None:
        return
    held, promised = engine.core.tenant_bytes(tenant)
    over = held + promised - quota
    # A state for the pool alone takes nothing of the disk; without a quota there is nothing that it could be for.
    if over <= 0 and quota:
        return
    if over > 0 and quota and promised <= quota:
        over -= await evict_of(engine, tenant, max(over, quota // EVICTED_SHARE))
    if over > 0 or not quota:
        raise engine.tenants.refuse_quota(tenant, held + promised)


async def keep_quotas(engine: Engine) -> None:
    """Tenants that hold more than their quotas, as after these have changed, let go of their own."""
    if not engine.tenants.has_quotas:
        return
    async for part in in_parts(engine.core.tenants()):
        for tenant in part:
            quota = engine.tenants.quota(tenant)
            held = engine.core.tenant_bytes(tenant)[0]
            if quota is not None and held > quota:
                await evict_of(engine, tenant, held - quota)


async def evict_of(engine: Engine, tenant: str, need_bytes: int) -> int:
    """The payload bytes of the tenant's that left."""
    steps = engine.core.eviction_of(tenant, need_bytes, now_wall=engine.time.wall())
    return await by_turns(steps, engine.discard)
