"""Between wire messages and values. Nothing is decided here but whether a message is well formed."""

from __future__ import annotations

from dataclasses import fields

from kvstore.core import Core, LookupResult, NamespaceInfo
from kvstore.errors import InvalidArgument, LimitExceeded, ProfileError
from kvstore.plan.base import Alternative, Costs, Coverage, RestorePlan
from kvstore.profile.base import MAX_BLOCK_TOKENS, Profile
from kvstore.types import KEY_BYTES, Checks, Exactness, ItemKind, Lineage, StateSource
from kvstore.v1 import cache_pb2 as pb

MAX_COST_SECONDS = 1e6

COVERAGE_EDGES = 256
"""Edges of each kind that a reply names."""

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


def split_keys(joined: bytes, *, most: int) -> list[bytes]:
    """LimitExceeded before anything is made of more than `most` keys."""
    if len(joined) > most * KEY_BYTES:
        raise LimitExceeded(
            "the prompt is too long for one lookup",
            field="keys",
            value=len(joined) // KEY_BYTES,
            allowed=f"{most}",
        )
    if len(joined) % KEY_BYTES:
        raise InvalidArgument(
            "keys do not divide into whole keys",
            field="keys",
            value=f"{len(joined)} bytes",
            allowed=f"a multiple of {KEY_BYTES} bytes",
        )
    return [joined[i : i + KEY_BYTES] for i in range(0, len(joined), KEY_BYTES)]


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


def take_seconds(value: float, *, field: str, high: float) -> float:
    """A finite time from 0 to `high`."""
    if not 0.0 <= value <= high:
        raise InvalidArgument(
            "not a time that can be used", field=field, value=value, allowed=f"0 to {high:g} seconds"
        )
    return value


def take_costs(message: pb.Costs) -> Costs:
    """The caller's rates; zero where it knows none."""
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


def put_costs(costs: Costs) -> pb.Costs:
    rates = {name: getattr(costs, name) for name in _RATES}
    return pb.Costs(**rates, tile_tokens=costs.tile_tokens)


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
        return Profile.from_geometry(message.name, message.geometry)
    except ProfileError as error:
        raise InvalidArgument(f"the profile cannot be used: {error}") from error


def put_profile(profile: Profile) -> pb.Profile:
    return pb.Profile(name=profile.name, geometry=profile.geometry())


def _put_alternative(value: Alternative) -> pb.Alternative:
    return pb.Alternative(
        compute_from=value.compute_from,
        state_source=_SOURCES[value.state_source],
        state_at=value.state_at,
        replay_from=value.replay_from,
        replay_layer_tokens=value.replay_layer_tokens,
        bytes_ssd=value.bytes_ssd,
        bytes_memory=value.bytes_memory,
        seconds=value.seconds,
        index_entries=value.index_entries,
        read_seconds=value.read_seconds,
        replay_seconds=value.replay_seconds,
        compute_seconds=value.compute_seconds,
    )


def put_plan(plan: RestorePlan) -> pb.RestorePlan:
    save = plan.save_states
    return pb.RestorePlan(
        prompt_tokens=plan.prompt_tokens,
        chosen=_put_alternative(plan.chosen),
        runner_up=None if plan.runner_up is None else _put_alternative(plan.runner_up),
        exactness=_EXACTNESS[plan.exactness],
        save_states=pb.SaveStates(
            pool=save.pool,
            ssd=save.ssd,
            output_edge_pool=save.output_edge_pool,
            output_edge_ssd=save.output_edge_ssd,
            every_tokens=save.every_tokens,
            rows=save.rows,
            rows_overlap=save.rows_overlap,
        ),
        blocks_missing=plan.blocks_missing,
    )


def put_coverage(coverage: Coverage) -> pb.Coverage:
    """With the deepest COVERAGE_EDGES of each kind."""
    return pb.Coverage(
        blocks=coverage.blocks,
        pool_states=coverage.pool_states[-COVERAGE_EDGES:],
        checkpoints=coverage.checkpoints[-COVERAGE_EDGES:],
        rows=coverage.rows[-COVERAGE_EDGES:],
        rows_overlap=coverage.rows_overlap[-COVERAGE_EDGES:],
        branch_at=coverage.branch_at,
    )


def put_lookup(found: LookupResult, *, lease_seconds: float) -> pb.LookupReply:
    """All of the reply that the core's answer decides; what is in flight is left unset."""
    return pb.LookupReply(
        plan=put_plan(found.plan),
        lease_id=found.lease_id or 0,
        lease_seconds=lease_seconds if found.lease_id else 0.0,
        blocks_held=found.coverage.blocks,
        coverage=put_coverage(found.coverage),
        costs=put_costs(found.costs),
    )


def put_lineage(lineage: Lineage) -> pb.Lineage:
    return pb.Lineage.LINEAGE_EXACT if lineage is Lineage.EXACT else pb.Lineage.LINEAGE_BOUNDED


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
