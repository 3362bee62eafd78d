"""Between the wire's messages and the client's values."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.errors import InvalidArgument, KvstoreError
from kvstore.prefix.joined import JoinedKeys
from kvstore.types import KEY_BYTES, Exactness, StateSource
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.values import Alternative, Costs, Coverage, OpenedNamespace, Plan, ReserveItem, SaveStates

_EXACTNESS = {pb.Exactness.Value(each): each for each in Exactness}
_SOURCES = {pb.StateSource.Value(each): each for each in StateSource}

COUNT_MAX = (1 << 64) - 1
TILE_TOKENS_MAX = (1 << 32) - 1


def count(name: str, value: int, *, most: int = COUNT_MAX) -> int:
    """`value` if the wire can carry it, else InvalidArgument."""
    if not 0 <= value <= most:
        raise InvalidArgument(
            f"not a {name}", field=name, value=value, allowed=f"a whole number from 0 to {most}"
        )
    return value


def joined_keys(keys: Sequence[bytes]) -> bytes:
    """The keys one after another; InvalidArgument naming the first that has another length, since the service could
    not tell where it begins."""
    if isinstance(keys, JoinedKeys):
        return keys.joined
    joined = b"".join(keys)
    if not set(map(len, keys)) <= {KEY_BYTES}:
        index = next(i for i, key in enumerate(keys) if len(key) != KEY_BYTES)
        raise InvalidArgument(
            "not a block key", field=f"keys[{index}]", value=keys[index], allowed=f"{KEY_BYTES} bytes"
        )
    return joined


def to_costs(costs: Costs | None) -> pb.Costs:
    if costs is None:
        return pb.Costs()
    return pb.Costs(
        seconds_per_layer_token=costs.seconds_per_layer_token,
        seconds_per_ssd_byte=costs.seconds_per_ssd_byte,
        seconds_per_memory_byte=costs.seconds_per_memory_byte,
        seconds_per_fetch=costs.seconds_per_fetch,
        seconds_per_index_entry=costs.seconds_per_index_entry,
        tile_tokens=count("tile_tokens", costs.tile_tokens, most=TILE_TOKENS_MAX),
    )


def from_costs(message: pb.Costs) -> Costs:
    return Costs(
        seconds_per_layer_token=message.seconds_per_layer_token,
        seconds_per_ssd_byte=message.seconds_per_ssd_byte,
        seconds_per_memory_byte=message.seconds_per_memory_byte,
        seconds_per_fetch=message.seconds_per_fetch,
        seconds_per_index_entry=message.seconds_per_index_entry,
        tile_tokens=message.tile_tokens,
    )


def to_reserve_item(index: int, item: ReserveItem) -> pb.ReserveItem:
    return pb.ReserveItem(
        kind=pb.ItemKind.Name(item.kind),
        key=item.key,
        parent=item.parent,
        position=count(f"items[{index}].position", item.position),
        length=count(f"items[{index}].length", item.length),
        to_pool=item.to_pool,
        to_ssd=item.to_ssd,
        lineage=f"LINEAGE_{item.lineage.name}",
    )


def from_namespace(message: pb.Namespace) -> OpenedNamespace:
    return OpenedNamespace(
        digest=message.digest,
        name=message.name,
        profile_name=message.profile.name,
        policy=message.policy,
        block_tokens=message.block_tokens,
        block_bytes=message.block_bytes,
        state_bytes=message.state_bytes,
        states_share_tokens=message.states_share_tokens,
        states_share_states=message.states_share_states,
        policy_too_large=message.policy_too_large,
        geometry=message.profile.geometry,
    )


def from_coverage(message: pb.Coverage) -> Coverage:
    return Coverage(
        blocks=message.blocks,
        pool_states=tuple(message.pool_states),
        checkpoints=tuple(message.checkpoints),
        rows=tuple(message.rows),
        rows_overlap=tuple(message.rows_overlap),
        branch_at=message.branch_at,
    )


def from_plan(message: pb.RestorePlan) -> Plan:
    """KvstoreError for a plan that breaks its own laws: following it would give wrong states."""
    saves = message.save_states
    try:
        plan = Plan(
            prompt_tokens=message.prompt_tokens,
            chosen=_from_alternative(message.chosen),
            runner_up=_from_alternative(message.runner_up) if message.HasField("runner_up") else None,
            exactness=_EXACTNESS[message.exactness],
            save_states=SaveStates(
                pool=tuple(saves.pool),
                ssd=tuple(saves.ssd),
                output_edge_pool=saves.output_edge_pool,
                output_edge_ssd=saves.output_edge_ssd,
                every_tokens=saves.every_tokens,
                rows=saves.rows,
                rows_overlap=saves.rows_overlap,
            ),
            blocks_missing=message.blocks_missing,
        )
    except KeyError as error:
        raise KvstoreError(f"the service sent a plan that is not understood: value {error}") from error
    way = plan.chosen
    source = way.state_source
    rebuilt = source is StateSource.REPLAY or source is StateSource.NONE
    if (
        not way.replay_from <= way.compute_from <= max(plan.prompt_tokens - 1, 0)
        or (source is StateSource.NONE and way.compute_from != 0)
        or (not rebuilt and way.state_at != way.replay_from)
    ):
        raise KvstoreError("the service sent a plan that breaks its laws", field="plan", value=plan.chosen)
    return plan


def _from_alternative(message: pb.Alternative) -> Alternative:
    return Alternative(
        compute_from=message.compute_from,
        state_source=_SOURCES[message.state_source],
        state_at=message.state_at,
        replay_from=message.replay_from,
        replay_layer_tokens=message.replay_layer_tokens,
        bytes_ssd=message.bytes_ssd,
        bytes_memory=message.bytes_memory,
        seconds=message.seconds,
        index_entries=message.index_entries,
        read_seconds=message.read_seconds,
        replay_seconds=message.replay_seconds,
        compute_seconds=message.compute_seconds,
    )
