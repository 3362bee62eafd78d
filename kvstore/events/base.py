"""KV events as values. `wire` gives them the form in which they travel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvstore.types import StateSource

BlockHash = int | bytes
"""As an event names a block: 64 bits of its key as a number, or the bytes of a key."""

POOL_MEDIUM = "CPU"
DISK_MEDIUM = "STORAGE"


def short_hash(key: bytes) -> int:
    """The last 8 bytes of a block key as a big-endian number: what indexers that know only 64 bits are told. Two blocks may
    share it, so it is never a key of anything here."""
    return int.from_bytes(key[-8:], "big")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored:
    """Blocks that are held now, each the next one's parent.

    `block_keys`, where they are known, are the whole keys of `block_hashes`, in order; `namespace` is their namespace's digest.
    `parent_block_hash` is None for a prompt's first block. `block_size`: tokens of one block. `token_ids`: of all of them, or
    none where the sender has no tokens. `more`: whatever other fields came along, by name.
    """

    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None = None
    token_ids: tuple[int, ...] = ()
    block_size: int = 0
    medium: str | None = None
    namespace: bytes | None = None
    block_keys: tuple[bytes, ...] = ()
    parent_block_key: bytes | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRemoved:
    """Blocks that are held no more; each comes before its parent. Fields as those of BlockStored."""

    block_hashes: tuple[BlockHash, ...]
    medium: str | None = None
    namespace: bytes | None = None
    block_keys: tuple[bytes, ...] = ()
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllBlocksCleared:
    """Nothing is held, of one namespace or, where that is None, of any: what is follows."""

    namespace: bytes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StateStored:
    """The window state at the end of a block is held: a prompt that begins with the block's chain can be resumed at
    `restorable_tokens`.

    `source`: POOL, CHECKPOINT or ROWS. With ROWS what is held is the rows of one block, and a resume at `restorable_tokens` needs
    those of `rows_blocks` blocks, this one the last, or of all from the prompt's first where those are fewer; the resume lies
    `rows_behind` blocks after this one's end. Both are 0 for other sources.
    """

    namespace: bytes
    block_key: bytes
    source: StateSource
    restorable_tokens: int
    rows_blocks: int = 0
    rows_behind: int = 0
    medium: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRemoved:
    """That state, or those rows, are held no more."""

    namespace: bytes
    block_key: bytes
    source: StateSource
    medium: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownEvent:
    """One of a kind that this reader does not know; to be passed over."""

    type: str
    fields: Mapping[str, Any]


StateEvent = StateStored | StateRemoved
Event = BlockStored | BlockRemoved | AllBlocksCleared | StateEvent | UnknownEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Events that were sent together. `sequence`: its number in its sender's stream, one more than the batch's before it. `ts`:
    wall seconds of the sender. `missed`: batches right before this one that were lost for good, so that what a reader has put together is
    not what is held until the next AllBlocksCleared."""

    sequence: int
    ts: float
    events: tuple[Event, ...]
    data_parallel_rank: int | None = None
    missed: int = 0
