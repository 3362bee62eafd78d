"""Between wire messages and values. Nothing is decided here but whether a message is well formed."""

from __future__ import annotations

from dataclasses import fields
from functools import lru_cache

from kvstore.core import Core, LookupResult, NamespaceInfo
from kvstore.errors import InvalidArgument, LimitExceeded, ProfileError
from kvstore.plan.base import Alternative, Costs, Coverage, RestorePlan
from kvstore.prefix.joined import JoinedKeys
from kvstore.profile.base import MAX_BLOCK_TOKENS, Profile
from kvstore.profile.keyed import profile_of
from kvstore.types import KEY_BYTES, Checks, Durability, Exactness, ItemKind, Lineage, StateSource
from kvstore.v1 import cache_pb2 as pb

MAX_COST_SECONDS = 1e6

COVERAGE_EDGES = 256
"""Edges of each kind that a reply names."""

COSTS_KEPT = 256
"""Different rates of callers, and of plans, that are not read and written anew."""

_RATES = tuple(field.name for field in fields(Costs) if field.name != "tile_tokens")

_SOURCES: dict[StateSource, pb.StateSource] = {
    StateSource.POOL: pb.POOL,
    StateSource.CHECKPOINT: pb.CHECKPOINT,
    StateSource.ROWS: pb.ROWS,
    StateSource.REPLAY: pb.REPLAY,
    StateSource.NONE: pb.NONE,
}
_KINDS: dict[ItemKind, pb.ItemKind] = {
    ItemKind.BLOCK: pb.BLOCK,
    ItemKind.STATE: pb.STATE,
    ItemKind.ROWS: pb.WINDOW_ROWS,
}
_EXACTNESS: dict[Exactness, pb.Exactness] = {Exactness.EXACT: pb.EXACT, Exactness.BOUNDED: pb.BOUNDED}


def take_digest(value: bytes, *, field: str = "namespace") -> bytes:
    if len(value) != KEY_BYTES:
        raise InvalidArgument(
            f"a {field} of {len(value)} bytes",
            field=field,
            value=value,
            allowed=f"{KEY_BYTES} bytes",
        )
    return value


def split_keys(joined: bytes, *, most: int) -> JoinedKeys:
    """LimitExceeded before anything is made of more than `most` keys."""
    if len(joined) > most * KEY_BYTES:
        raise LimitExceeded(
            "the prompt is too long for one lookup",
            field="keys",
            value=len(joined) // KEY_BYTES,
            allowed=f"{most}",
        )
    return JoinedKeys(joined)


def take_kind(value: int, *, field: str) -> ItemKind:
    try:
        return ItemKind(value)
    except ValueError:
        raise InvalidArgument(
            "unknown item kind", field=field, value=value, allowed="BLOCK (1), STATE (2) or WINDOW_ROWS (6)"
        ) from None


def put_kind(kind: ItemKind) -> pb.ItemKind:
    return _KINDS[kind]


def take_lineage(value: int, *, field: str) -> Lineage:
    try:
        return Lineage(value)
    except ValueError:
        raise InvalidArgument(
            "unknown lineage",
            field=field,
            value=value,
            allowed="LINEAGE_EXACT (1) or LINEAGE_BOUNDED (2)",
        ) from None


def take_durability(value: int) -> Durability:
    """Unspecified is DURABLE: who does not ask is promised no less."""
    if value == pb.DURABILITY_UNSPECIFIED:
        return Durability.DURABLE
    try:
        return Durability(value)
    except ValueError:
        raise InvalidArgument(
            "unknown durability", field="durability", value=value, allowed="DURABLE (1) or ACCEPTED (2)"
        ) from None


def take_seconds(value: float, *, field: str, high: float) -> float:
    """A finite time from 0 to `high`."""
    if not 0.0 <= value <= high:
        raise InvalidArgument(
            "not a time that can be used", field=field, value=value, allowed=f"0 to {high:g} seconds"
        )
    return value


def take_costs(message: pb.Costs) -> Costs:
    """The caller's rates; zero where it knows none."""
    # A caller's rates are the same for many calls.
    return _costs_of(message.SerializeToString())


@lru_cache(COSTS_KEPT)
def _costs_of(serialized: bytes) -> Costs:
    message = pb.Costs.FromString(serialized)
    if message.tile_tokens > MAX_BLOCK_TOKENS:
        raise InvalidArgument(
            "not a tile",
            field="costs.tile_tokens",
            value=message.tile_tokens,
            allowed=f"0 to {MAX_BLOCK_TOKENS} tokens",
        )
    rates = {
        name: take_seconds(getattr(message, name), field=f"costs.{name}", high=MAX_COST_SECONDS)
        for name in _RATES
    }
    return Costs(**rates, tile_tokens=message.tile_tokens)


# By identity: plan after plan is priced with the same object, and hashing it looks at all rates.
_written: dict[int, tuple[Costs, pb.Costs]] = {}


def put_costs(costs: Costs) -> pb.Costs:
    """To be copied, not changed."""
    known = _written.get(id(costs))
    if known is not None:
        return known[1]
    rates = {name: getattr(costs, name) for name in _RATES}
    message = pb.Costs(**rates, tile_tokens=costs.tile_tokens)
    if len(_written) >= COSTS_KEPT:
        _written.clear()
    _written[id(costs)] = costs, message
    return message


def take_exactness(value: int) -> Exactness | None:
    """None where the caller leaves it to the model's profile."""
    if value == pb.EXACTNESS_UNSPECIFIED:
        return None
    for exactness, known in _EXACTNESS.items():
        if known == value:
            return exactness
    raise InvalidArgument(
        "unknown exactness",
        field="exactness",
        value=value,
        allowed="0 (unspecified), EXACT (1) or BOUNDED (2)",
    )


def take_profile(message: pb.Profile) -> Profile:
    if not message.name:
        raise InvalidArgument(
            "no profile given", field="profile.name", value="", allowed="1 to 128 characters"
        )
    try:
        return profile_of(message.name, message.geometry)
    except ProfileError as error:
        raise InvalidArgument(f"the profile cannot be used: {error}") from error


def put_profile(profile: Profile) -> pb.Profile:
    return pb.Profile(name=profile.name, geometry=profile.geometry())


def _put_alternative(value: Alternative, out: pb.Alternative) -> None:
    # Half of these are mostly zero, which a message says without being told; to ask costs less than to tell it.
    (
        compute_from,
        source,
        state_at,
        replay_from,
        replay_layer_tokens,
        bytes_ssd,
        bytes_memory,
        out.seconds,
        index_entries,
        read_seconds,
        replay_seconds,
        compute_seconds,
    ) = value
    out.state_source = _SOURCES[source]
    if compute_from:
        out.compute_from = compute_from
    if state_at:
        out.state_at = state_at
    if replay_from:
        out.replay_from = replay_from
    if replay_layer_tokens:
        out.replay_layer_tokens = replay_layer_tokens
    if bytes_ssd:
        out.bytes_ssd = bytes_ssd
    if bytes_memory:
        out.bytes_memory = bytes_memory
    if index_entries:
        out.index_entries = index_entries
    if read_seconds:
        out.read_seconds = read_seconds
    if replay_seconds:
        out.replay_seconds = replay_seconds
    if compute_seconds:
        out.compute_seconds = compute_seconds


def put_plan(plan: RestorePlan, out: pb.RestorePlan) -> None:
    out.prompt_tokens = plan.prompt_tokens
    _put_alternative(plan.chosen, out.chosen)
    if plan.runner_up is not None:
        _put_alternative(plan.runner_up, out.runner_up)
    out.exactness = _EXACTNESS[plan.exactness]
    save, kept = plan.save_states, out.save_states
    # Set even where it says nothing.
    kept.output_edge_pool = save.output_edge_pool
    if save.pool:
        kept.pool.extend(save.pool)
    if save.ssd:
        kept.ssd.extend(save.ssd)
    if save.output_edge_ssd:
        kept.output_edge_ssd = True
    if save.every_tokens:
        kept.every_tokens = save.every_tokens
    if save.rows:
        kept.rows = True
    if save.rows_overlap:
        kept.rows_overlap = True
    if plan.blocks_missing:
        out.blocks_missing = plan.blocks_missing


def put_coverage(coverage: Coverage, out: pb.Coverage) -> None:
    """With the deepest COVERAGE_EDGES of each kind."""
    out.blocks = coverage.blocks
    if coverage.pool_states:
        out.pool_states.extend(coverage.pool_states[-COVERAGE_EDGES:])
    if coverage.checkpoints:
        out.checkpoints.extend(coverage.checkpoints[-COVERAGE_EDGES:])
    if coverage.rows:
        out.rows.extend(coverage.rows[-COVERAGE_EDGES:])
    if coverage.rows_overlap:
        out.rows_overlap.extend(coverage.rows_overlap[-COVERAGE_EDGES:])
    if coverage.branch_at:
        out.branch_at = coverage.branch_at


def put_lookup(found: LookupResult, *, lease_seconds: float) -> pb.LookupReply:
    """All of the reply that the core's answer decides; what is in flight is left unset."""
    reply = pb.LookupReply()
    # Given by name to the constructor a message takes four times as long.
    reply.costs.CopyFrom(put_costs(found.costs))
    put_plan(found.plan, reply.plan)
    put_coverage(found.coverage, reply.coverage)
    reply.blocks_held = found.coverage.blocks
    if found.lease_id:
        reply.lease_id = found.lease_id
        reply.lease_seconds = lease_seconds
    return reply


def put_lineage(lineage: Lineage) -> pb.Lineage:
    return pb.Lineage.LINEAGE_EXACT if lineage is Lineage.EXACT else pb.Lineage.LINEAGE_BOUNDED


def put_durability(durability: Durability) -> pb.Durability:
    return pb.ACCEPTED if durability is Durability.ACCEPTED else pb.DURABLE


def put_namespace(info: NamespaceInfo, core: Core) -> pb.Namespace:
    """`core` tells what its share of the disk holds of the namespace's states."""
    profile = info.profile
    return pb.Namespace(
        name=info.name,
        digest=info.digest,
        profile=put_profile(profile),
        policy=str(info.policy),
        block_tokens=profile.block_tokens,
        block_bytes=profile.block_bytes,
        state_bytes=profile.state_bytes,
        states_share_tokens=core.share_tokens(info),
        states_share_states=core.share_states(info),
        policy_too_large=not core.policy_fits(info),
    )


def take_checks(item: pb.WriteItem) -> Checks:
    return Checks(item.crc32, item.xxh3_64 if item.has_xxh3 else 0, item.has_xxh3)
