"""The wire form of KV events, as plain values for msgpack: vLLM's, and two kinds of our own.

A batch is the array [ts, events, data_parallel_rank]; engines of some versions send it as a map of these names. An event is a map
with its kind as `type`, or, from older engines, an array that begins with the kind and has the fields in order. Maps are written,
both are read. Fields that are not in vLLM's events are ignored by readers that do not know them:

    namespace         on all: 32 bytes, the digest of the namespace
    block_keys        on BlockStored and BlockRemoved: the whole keys, joined, 32 bytes each; block_hashes are `short_hash` of them
    parent_block_key  on BlockStored: 32 bytes, or nil where the first block is a prompt's first

StateStored and StateRemoved are ours. Readers with a closed list of kinds refuse a whole batch for one that is not on it, so they come in
batches of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvstore.errors import InvalidArgument
from kvstore.events.base import (
    AllBlocksCleared,
    Batch,
    BlockHash,
    BlockRemoved,
    BlockStored,
    Event,
    StateRemoved,
    StateStored,
    UnknownEvent,
    short_hash,
)
from kvstore.types import KEY_BYTES, StateSource

BATCH_BYTES_MAX = 64 << 20
"""Of one batch on the wire; a longer one is not read."""

_ORDER = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
"""Fields of events in array form."""

_SOURCES = {source.value: source for source in (StateSource.POOL, StateSource.CHECKPOINT, StateSource.ROWS)}


def batch_value(events: Sequence[Event], *, ts: float, data_parallel_rank: int | None = None) -> list[Any]:
    """What msgpack is to write for a batch."""
    return [ts, [event_value(event) for event in events], data_parallel_rank]


def event_value(event: Event) -> dict[str, Any]:
    """What msgpack is to write for an event: a map, whose names are the same for every reader."""
    match event:
        case BlockStored():
            own = {
                "type": "BlockStored",
                "block_hashes": list(event.block_hashes),
                "parent_block_hash": event.parent_block_hash,
                "token_ids": list(event.token_ids),
                "block_size": event.block_size,
                "lora_id": None,
                "medium": event.medium,
                "lora_name": None,
            }
            if event.block_keys:
                own["block_keys"] = b"".join(event.block_keys)
                own["parent_block_key"] = event.parent_block_key
        case BlockRemoved():
            own = {
                "type": "BlockRemoved",
                "block_hashes": list(event.block_hashes),
                "medium": event.medium,
            }
            if event.block_keys:
                own["block_keys"] = b"".join(event.block_keys)
        case AllBlocksCleared():
            own = {"type": "AllBlocksCleared"}
        case StateStored():
            own = {
                "type": "StateStored",
                "block_hash": short_hash(event.block_key),
                "block_key": event.block_key,
                "source": event.source.value,
                "restorable_tokens": event.restorable_tokens,
                "medium": event.medium,
            }
            if event.rows_blocks:
                own |= {"rows_blocks": event.rows_blocks, "rows_behind": event.rows_behind}
        case StateRemoved():
            own = {
                "type": "StateRemoved",
                "block_hash": short_hash(event.block_key),
                "block_key": event.block_key,
                "source": event.source.value,
                "medium": event.medium,
            }
        case UnknownEvent():
            return {"type": event.type, **event.fields}
    if event.namespace is not None:
        own["namespace"] = event.namespace
    if isinstance(event, BlockStored | BlockRemoved):
        own |= event.more
    return own


def batch_of(value: Any, *, sequence: int, missed: int = 0) -> Batch:
    """The batch that `value`, as msgpack has read it, stands for. InvalidArgument where it is none."""
    if isinstance(value, Mapping):
        value = [value.get("ts"), value.get("events"), value.get("data_parallel_rank")]
    if not isinstance(value, list | tuple) or len(value) < 2:
        raise _bad("batch", value, "[ts, events, data_parallel_rank]")
    ts, events, rank = value[0], value[1], value[2] if len(value) > 2 else None
    if not isinstance(ts, int | float) or not isinstance(events, list | tuple):
        raise _bad("batch", value, "a time and a list of events")
    return Batch(
        sequence=sequence,
        ts=float(ts),
        events=tuple(event_of(each) for each in events),
        data_parallel_rank=rank if isinstance(rank, int) else None,
        missed=missed,
    )


def event_of(value: Any) -> Event:
    """The event that `value` stands for, in either form. InvalidArgument where a kind that is known lacks what it needs."""
    if isinstance(value, Mapping):
        fields = {str(name): each for name, each in value.items()}
        kind = fields.pop("type", None)
    elif isinstance(value, list | tuple) and value:
        kind, rest = value[0], value[1:]
        order = _ORDER.get(kind, ()) if isinstance(kind, str) else ()
        fields = {**dict(zip(order, rest, strict=False)), **dict(_numbered(rest, len(order)))}
    else:
        raise _bad("event", value, "a map or an array with a kind")
    if not isinstance(kind, str):
        raise _bad("type", kind, "the name of a kind of event")
    read = _READERS.get(kind)
    return UnknownEvent(type=kind, fields=fields) if read is None else read(fields)


def _numbered(rest: Sequence[Any], known: int) -> list[tuple[str, Any]]:
    """What an array has behind the fields that are known, by its place."""
    return [(f"field_{place}", each) for place, each in enumerate(rest[known:], known + 1)]


def _block_stored(fields: dict[str, Any]) -> Event:
    return BlockStored(
        block_hashes=(hashes := _hashes(fields.pop("block_hashes", None))),
        parent_block_hash=_parent(fields.pop("parent_block_hash", None)),
        token_ids=_tokens(fields.pop("token_ids", ())),
        block_size=_count("block_size", fields.pop("block_size", 0)),
        medium=_text("medium", fields.pop("medium", None)),
        namespace=_key("namespace", fields.pop("namespace", None)),
        block_keys=_keys(fields.pop("block_keys", b""), len(hashes)),
        parent_block_key=_key("parent_block_key", fields.pop("parent_block_key", None)),
        more={name: each for name, each in fields.items() if each is not None},
    )


def _block_removed(fields: dict[str, Any]) -> Event:
    return BlockRemoved(
        block_hashes=(hashes := _hashes(fields.pop("block_hashes", None))),
        medium=_text("medium", fields.pop("medium", None)),
        namespace=_key("namespace", fields.pop("namespace", None)),
        block_keys=_keys(fields.pop("block_keys", b""), len(hashes)),
        more={name: each for name, each in fields.items() if each is not None},
    )


def _cleared(fields: dict[str, Any]) -> Event:
    return AllBlocksCleared(namespace=_key("namespace", fields.get("namespace")))


def _state_stored(fields: dict[str, Any]) -> Event:
    return StateStored(
        namespace=_needed("namespace", fields),
        block_key=_needed("block_key", fields),
        source=_source(fields.get("source")),
        restorable_tokens=_count("restorable_tokens", fields.get("restorable_tokens")),
        rows_blocks=_count("rows_blocks", fields.get("rows_blocks", 0)),
        rows_behind=_count("rows_behind", fields.get("rows_behind", 0)),
        medium=_text("medium", fields.get("medium")),
    )


def _state_removed(fields: dict[str, Any]) -> Event:
    return StateRemoved(
        namespace=_needed("namespace", fields),
        block_key=_needed("block_key", fields),
        source=_source(fields.get("source")),
        medium=_text("medium", fields.get("medium")),
    )


_READERS = {
    "BlockStored": _block_stored,
    "BlockRemoved": _block_removed,
    "AllBlocksCleared": _cleared,
    "StateStored": _state_stored,
    "StateRemoved": _state_removed,
}


def _hashes(value: Any) -> tuple[BlockHash, ...]:
    if not isinstance(value, list | tuple) or not all(_is_hash(each) for each in value):
        raise _bad("block_hashes", value, "a list of numbers or of bytes")
    return tuple(value)


def _is_hash(value: Any) -> bool:
    return isinstance(value, int | bytes) and not isinstance(value, bool)


def _parent(value: Any) -> BlockHash | None:
    if value is not None and not _is_hash(value):
        raise _bad("parent_block_hash", value, "a number, bytes, or nothing")
    parent: BlockHash | None = value
    return parent


def _tokens(value: Any) -> tuple[int, ...]:
    # Pairs of a token and its follower come from engines with some draft models; they are no tokens of a block.
    if isinstance(value, list | tuple) and all(isinstance(each, int) for each in value):
        return tuple(value)
    if isinstance(value, list | tuple):
        return ()
    raise _bad("token_ids", value, "a list of numbers")


def _count(field: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _bad(field, value, "a number, 0 or more")
    return value


def _text(field: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise _bad(field, value, "a text or nothing")
    return value


def _key(field: str, value: Any) -> bytes | None:
    if value is not None and (not isinstance(value, bytes) or len(value) != KEY_BYTES):
        raise _bad(field, value, f"{KEY_BYTES} bytes or nothing")
    return value


def _needed(field: str, fields: Mapping[str, Any]) -> bytes:
    value = _key(field, fields.get(field))
    if value is None:
        raise _bad(field, None, f"{KEY_BYTES} bytes")
    return value


def _keys(value: Any, count: int) -> tuple[bytes, ...]:
    if not isinstance(value, bytes) or len(value) not in (0, count * KEY_BYTES):
        raise _bad("block_keys", value, f"{KEY_BYTES} bytes for each of block_hashes, or none")
    return tuple(value[at : at + KEY_BYTES] for at in range(0, len(value), KEY_BYTES))


def _source(value: Any) -> StateSource:
    if value not in _SOURCES:
        raise _bad("source", value, ", ".join(_SOURCES))
    return _SOURCES[value]


def _bad(field: str, value: Any, allowed: str) -> InvalidArgument:
    return InvalidArgument("not a KV event as it is sent", field=field, value=value, allowed=allowed)
