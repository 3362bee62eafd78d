"""Each call with one answer: the message, how long it may take, and what its answer means. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from kvstore.errors import GeometryMismatch, InvalidArgument, KvstoreError
from kvstore.prefix.identity import NamespaceIdentity
from kvstore.types import BytesLike, Exactness, Lineage
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.checks import crc32
from kvstore_client.handoff_frames import handoff_frames
from kvstore_client.messages import count, from_namespace, joined_keys, to_costs, to_reserve_item
from kvstore_client.values import (
    Cleared,
    Costs,
    Deadlines,
    DroppedStates,
    Erased,
    Eviction,
    MemoryBudgets,
    OpenedNamespace,
    ReserveItem,
    Tenant,
)

OWNER_MAX = 128
HANDOFF_TAKES_MAX = (1 << 32) - 1
DRAIN_SECONDS_MAX = 86_400.0
WAIT_SECONDS_MAX = 3600.0
_TIERS = {"both": pb.STATE_TIER_UNSPECIFIED, "pool": pb.STATE_TIER_POOL, "ssd": pb.STATE_TIER_SSD}

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Call(Generic[T_co]):
    """`request`: a message, or an iterator of messages. `timeout`: seconds. `parse` makes the value of the answer.
    `repeatable`: it may run twice, with another session. `again`: in the same session too, where nobody knows whether it did.
    `names_boot`: the answer says which service process gave it."""

    name: str
    request: Any
    timeout: float
    parse: Callable[[Any], T_co]
    repeatable: bool = False
    again: bool = False
    names_boot: bool = False


def check_owner(owner: str) -> str:
    if not (0 < len(owner) <= OWNER_MAX and owner.isascii() and owner.isprintable()):
        raise InvalidArgument(
            "not an owner",
            field="owner",
            value=owner,
            allowed=f"1 to {OWNER_MAX} printable ASCII characters",
        )
    return owner


# ---- reading and writing ------------------------------------------------------------------------------------


def open_namespace(
    deadlines: Deadlines, identity: NamespaceIdentity, *, name: str, policy: str
) -> Call[OpenedNamespace]:
    request = pb.OpenNamespaceRequest(
        name=name,
        profile=pb.Profile(name=identity.profile.name, geometry=identity.profile.geometry()),
        weights_revision=identity.weights_revision,
        numerics=identity.numerics,
        adapter=identity.adapter,
        tenant_salt=identity.tenant_salt,
        policy=policy,
    )

    def parse(reply: pb.Namespace) -> OpenedNamespace:
        opened = from_namespace(reply)
        if opened.digest != identity.digest():
            # Keys are chained from our digest: with another one, nothing would ever be found, and nobody would say why.
            raise GeometryMismatch(
                "the service digests this identity differently; use a client and a service of one version",
                field="digest",
                value=opened.digest,
                allowed=identity.digest().hex(),
            )
        return opened

    return Call("OpenNamespace", request, deadlines.control, parse, repeatable=True)


def lookup(
    deadlines: Deadlines,
    namespace: bytes,
    keys: Sequence[bytes],
    *,
    prompt_tokens: int,
    costs: Costs | None,
    lease: bool,
    exactness: Exactness | None,
    announce: bool,
    wait_seconds: float,
) -> Call[pb.LookupReply]:
    if not 0 <= wait_seconds <= WAIT_SECONDS_MAX:
        raise InvalidArgument(
            "not a time to wait",
            field="wait_seconds",
            value=wait_seconds,
            allowed=f"0 to {WAIT_SECONDS_MAX:g}",
        )
    request = pb.LookupRequest(
        namespace=namespace,
        keys=joined_keys(keys),
        prompt_tokens=count("prompt_tokens", prompt_tokens),
        costs=to_costs(costs),
        lease=lease,
        exactness=pb.EXACTNESS_UNSPECIFIED if exactness is None else exactness.value,
        announce=announce,
        wait_seconds=wait_seconds,
        assumed_costs=costs is not None and costs.assumed,
    )
    # A lease of the answer that was lost ends at its deadline; a flight would keep others waiting until then.
    timeout = deadlines.lookup + wait_seconds
    return Call("Lookup", request, timeout, _same, repeatable=True, again=not announce)


def contains(
    deadlines: Deadlines, namespace: bytes, keys: Sequence[bytes], *, use: bool, lease: bool
) -> Call[pb.ContainsReply]:
    request = pb.ContainsRequest(namespace=namespace, keys=joined_keys(keys), use=use, lease=lease)

    def parse(reply: pb.ContainsReply) -> pb.ContainsReply:
        if len(reply.held) != len(keys):
            raise KvstoreError(
                "the service's answer to Contains is not understood",
                field="held",
                value=len(reply.held),
                allowed=f"{len(keys)}, one per key",
            )
        return reply

    return Call("Contains", request, deadlines.lookup, parse, repeatable=True, again=True)


def reserve(deadlines: Deadlines, namespace: bytes, items: Sequence[ReserveItem]) -> Call[pb.ReserveReply]:
    request = pb.ReserveRequest(
        namespace=namespace, items=[to_reserve_item(i, item) for i, item in enumerate(items)]
    )
    return Call("Reserve", request, deadlines.control, _same)


# ---- handoffs -----------------------------------------------------------------------------------------------


def put_handoff(
    deadlines: Deadlines,
    namespace: bytes,
    *,
    position: int,
    payload: BytesLike,
    takes: int,
    seconds: float,
    note: bytes,
    lineage: Lineage,
) -> Call[bytes]:
    header = pb.HandoffHeader(
        namespace=namespace,
        position=count("position", position),
        length=len(memoryview(payload).cast("B")),
        crc32=crc32(payload),
        takes=count("takes", takes, most=HANDOFF_TAKES_MAX),
        seconds=seconds,
        note=note,
        lineage=f"LINEAGE_{lineage.name}",
    )
    return Call(
        "PutHandoff", handoff_frames(header, payload), deadlines.handoff, lambda reply: bytes(reply.ticket)
    )


def drop_handoff(deadlines: Deadlines, namespace: bytes, ticket: bytes) -> Call[bool]:
    request = pb.DropHandoffRequest(namespace=namespace, ticket=ticket)
    return Call("DropHandoff", request, deadlines.control, lambda reply: bool(reply.was_here))


# ---- administration -----------------------------------------------------------------------------------------


def stats(deadlines: Deadlines) -> Call[pb.StatsReply]:
    return Call("Stats", pb.StatsRequest(), deadlines.admin, _same, repeatable=True, names_boot=True)


def clear(deadlines: Deadlines, namespace: bytes) -> Call[Cleared]:
    request = pb.ClearRequest(namespace=namespace)
    return Call("Clear", request, deadlines.admin, lambda reply: Cleared(reply.blocks, reply.states))


def drain(deadlines: Deadlines, seconds: float) -> Call[int]:
    if not 0 <= seconds <= DRAIN_SECONDS_MAX:
        raise InvalidArgument(
            "not a time to drain", field="seconds", value=seconds, allowed=f"0 to {DRAIN_SECONDS_MAX:g}"
        )
    request = pb.DrainRequest(seconds=seconds)
    return Call("Drain", request, deadlines.admin + seconds, lambda reply: int(reply.left_open))


def set_policy(deadlines: Deadlines, namespace: bytes, policy: str) -> Call[OpenedNamespace]:
    request = pb.SetPolicyRequest(namespace=namespace, policy=policy)
    return Call("SetPolicy", request, deadlines.admin, from_namespace)


def drop_states(
    deadlines: Deadlines, namespace: bytes, tier: Literal["both", "pool", "ssd"]
) -> Call[DroppedStates]:
    if tier not in _TIERS:
        raise InvalidArgument("no such tier", field="tier", value=tier, allowed=", ".join(_TIERS))
    request = pb.DropStatesRequest(namespace=namespace, tier=_TIERS[tier])
    return Call(
        "DropStates", request, deadlines.admin, lambda reply: DroppedStates(reply.dropped, reply.kept)
    )


def set_memory(deadlines: Deadlines, cache: int | None, pool: int | None) -> Call[MemoryBudgets]:
    request = pb.SetMemoryRequest(
        cache=None if cache is None else count("cache", cache),
        pool=None if pool is None else count("pool", pool),
    )
    return Call(
        "SetMemory",
        request,
        deadlines.admin,
        lambda reply: MemoryBudgets(
            reply.cache_budget, reply.cache_allocated, reply.pool_budget, reply.pool_held
        ),
    )


def set_eviction(deadlines: Deadlines, policy: str) -> Call[Eviction]:
    return Call(
        "SetEviction",
        pb.SetEvictionRequest(policy=policy),
        deadlines.admin,
        lambda reply: Eviction(reply.policy, tuple(reply.policies)),
    )


def namespaces(deadlines: Deadlines) -> Call[list[OpenedNamespace]]:
    return Call(
        "ListNamespaces",
        pb.ListNamespacesRequest(),
        deadlines.admin,
        lambda reply: [from_namespace(each) for each in reply.namespaces],
    )


def tenants(deadlines: Deadlines) -> Call[list[Tenant]]:
    return Call(
        "ListTenants",
        pb.ListTenantsRequest(),
        deadlines.admin,
        lambda reply: [_tenant(each) for each in reply.tenants],
    )


def _tenant(each: pb.Tenant) -> Tenant:
    return Tenant(
        each.tenant,
        each.namespaces,
        each.held_bytes,
        each.promised_bytes,
        each.quota if each.HasField("quota") else None,
        each.in_flight_bytes,
        each.in_flight if each.HasField("in_flight") else None,
        each.erasing,
    )


def erased(reply: pb.EraseTenantReply) -> Erased:
    return Erased(reply.blocks, reply.states, reply.files_left, reply.overwritten_bytes, reply.done)


def _same(reply: Any) -> Any:
    return reply
