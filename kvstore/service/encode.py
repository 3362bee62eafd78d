"""Between wire messages and values. Nothing is decided here but whether a message is well formed."""

from __future__ import annotations

from kvstore.core import NamespaceInfo
from kvstore.errors import InvalidArgument, LimitExceeded, ProfileError
from kvstore.plan.base import Alternative, Costs, RestorePlan
from kvstore.profile.base import Profile
from kvstore.types import KEY_BYTES, Exactness, ItemKind, Lineage, StateSource
from kvstore.v1 import cache_pb2 as pb

MAX_COST_SECONDS = 1e6

_SOURCES: dict[StateSource, pb.StateSource] = {
    StateSource.POOL: pb.POOL,
    StateSource.CHECKPOINT: pb.CHECKPOINT,
    StateSource.ROWS: pb.ROWS,
    StateSource.REPLAY: pb.REPLAY,
    StateSource.NONE: pb.NONE,
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
    """The caller's rates; what is zero is ours."""
    own = Costs()
    values = {}
    for field in (
        "seconds_per_layer_token",
        "seconds_per_ssd_byte",
        "seconds_per_memory_byte",
        "seconds_per_fetch",
        "seconds_per_index_entry",
    ):
        value = take_seconds(getattr(message, field), field=f"costs.{field}", high=MAX_COST_SECONDS)
        values[field] = value or getattr(own, field)
    return Costs(**values)


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


def put_lineage(lineage: Lineage) -> pb.Lineage:
    return pb.Lineage.LINEAGE_EXACT if lineage is Lineage.EXACT else pb.Lineage.LINEAGE_BOUNDED


def put_namespace(info: NamespaceInfo) -> pb.Namespace:
    profile = info.profile
    return pb.Namespace(
        name=info.name,
        digest=info.digest,
        profile=put_profile(profile),
        policy=str(info.policy),
        block_tokens=profile.block_tokens,
        block_bytes=profile.block_bytes,
        state_bytes=profile.state_bytes,
    )
