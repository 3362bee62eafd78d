"""Between the wire's messages and the client's values."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.errors import InvalidArgument, KvstoreError
from kvstore.prefix.joined import JoinedKeys
from kvstore.types import KEY_BYTES, Exactness, StateSource
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.values import Alternative, Costs, Coverage, OpenedNamespace, Plan, ReserveItem, SaveStates

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
    if len(joined) != len(keys) * KEY_BYTES or any(len(key) != KEY_BYTES for key in keys):
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
    try:
        plan = Plan(
            prompt_tokens=message.prompt_tokens,
            chosen=_from_alternative(message.chosen),
            runner_up=_from_alternative(message.runner_up) if message.HasField("runner_up") else None,
            exactness=Exactness(pb.Exactness.Name(message.exactness)),
            save_states=SaveStates(
                pool=tuple(message.save_states.pool),
                ssd=tuple(message.save_states.ssd),
                output_edge_pool=message.save_states.output_edge_pool,
                output_edge_ssd=message.save_states.output_edge_ssd,
                every_tokens=message.save_states.every_tokens,
                rows=message.save_states.rows,
                rows_overlap=message.save_states.rows_overlap,
            ),
            blocks_missing=message.blocks_missing,
        )
    except ValueError as error:
        raise KvstoreError(f"the service sent a plan that is not understood: {error}") from error
    rebuilt = plan.state_source in (StateSource.REPLAY, StateSource.NONE)
    if (
        not plan.replay_from <= plan.compute_from <= max(plan.prompt_tokens - 1, 0)
        or (plan.state_source is StateSource.NONE and plan.compute_from != 0)
        or (not rebuilt and plan.state_at != plan.replay_from)
    ):
        raise KvstoreError("the service sent a plan that breaks its laws", field="plan", value=plan.chosen)
    return plan


def _from_alternative(message: pb.Alternative) -> Alternative:
    return Alternative(
        compute_from=message.compute_from,
        state_source=StateSource(pb.StateSource.Name(message.state_source)),
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
