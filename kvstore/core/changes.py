"""What comes and goes in the index and the pool, for who tells others: changes as they happen, and all that is held as if it had just
come."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvstore.core.index import HAS_ROWS, HAS_STATE, LIVE, NO_SLOT, ROWS_OVERLAP, Frozen
from kvstore.core.namespaces import NamespaceInfo
from kvstore.core.steps import ITEMS_AT_ONCE, Steps
from kvstore.core.windows import run_far_from_start
from kvstore.events.base import (
    DISK_MEDIUM,
    POOL_MEDIUM,
    BlockRemoved,
    BlockStored,
    StateEvent,
    StateRemoved,
    StateStored,
    short_hash,
)
from kvstore.types import BlockKey, ItemKind, NamespaceDigest, StateSource

if TYPE_CHECKING:
    from kvstore.core.live import Live

CHANGES_MAX = 100_000
"""That wait to be told: some 20 MB."""


class BlockCame(NamedTuple):
    """`parent` None: a prompt's first block, or a block of a keyed namespace."""

    namespace: NamespaceDigest
    key: BlockKey
    parent: BlockKey | None
    block_tokens: int


class BlockWent(NamedTuple):
    namespace: NamespaceDigest
    key: BlockKey


class StateCame(NamedTuple):
    """Fields as those of StateStored."""

    namespace: NamespaceDigest
    key: BlockKey
    source: StateSource
    restorable_tokens: int
    rows_blocks: int = 0
    rows_behind: int = 0


class StateWent(NamedTuple):
    namespace: NamespaceDigest
    key: BlockKey
    source: StateSource


Change = BlockCame | BlockWent | StateCame | StateWent


class Journal:
    """Changes that nobody has been told of, in their order. It never holds anybody up: past `limit` it forgets all of them, says
    `is_lost`, and takes no more until `begin`. It begins so."""

    def __init__(self, limit: int = CHANGES_MAX) -> None:
        self._changes: deque[Change] = deque()
        self._limit = limit
        self.is_lost = True
        self.lost_total = 0
        """How often it has forgotten."""

    def __len__(self) -> int:
        return len(self._changes)

    def begin(self) -> None:
        """From here on: whoever calls this sees all that is held at this moment."""
        self._changes.clear()
        self.is_lost = False

    def note(self, change: Change) -> None:
        if self.is_lost:
            return
        if len(self._changes) >= self._limit:
            self._changes.clear()
            self.is_lost = True
            self.lost_total += 1
            return
        self._changes.append(change)

    def pooled(self, namespace: NamespaceDigest, key: BlockKey, position: int, is_held: bool) -> None:
        """What the pool tells of its states."""
        if is_held:
            self.note(StateCame(namespace, key, StateSource.POOL, position))
        else:
            self.note(StateWent(namespace, key, StateSource.POOL))

    def take(self, limit: int) -> list[Change]:
        """The first changes, at most `limit`; they are its own no more."""
        taken = list(islice(self._changes, limit))
        for _ in taken:
            self._changes.popleft()
        return taken


def state_came(
    info: NamespaceInfo, key: BlockKey, kind: ItemKind, position: int, *, overlap: bool
) -> StateCame:
    """A state on SSD at the end of a block at `position` tokens, or the block's rows, with the overlap or without."""
    if kind is not ItemKind.ROWS:
        return StateCame(info.digest, key, StateSource.CHECKPOINT, position)
    run, behind = run_far_from_start(info.profile, overlap)
    edge = position + behind * info.figures.block_tokens
    return StateCame(info.digest, key, StateSource.ROWS, edge, run, behind)


def state_went(info: NamespaceInfo, key: BlockKey, kind: ItemKind) -> StateWent:
    source = StateSource.ROWS if kind is ItemKind.ROWS else StateSource.CHECKPOINT
    return StateWent(info.digest, key, source)


def all_held(live: Live) -> Steps[list[Change], None]:
    """All that is held when the first step begins, as changes: parents before children, each chain in one piece, states last. What
    comes and goes after that is not looked at."""
    frozen = live.index.frozen()
    infos = {info.number: info for info in live.namespaces.all()}
    pooled = [
        StateCame(info.digest, key, StateSource.POOL, position)
        for info in infos.values()
        for key, position in live.pool.keys(info.digest)
    ]
    yield []
    begins, follows = yield from _chains(frozen)
    keys, parent, number, space = frozen.keys, frozen.parent, frozen.number, frozen.space
    part: list[Change] = []
    for begin in begins:
        info, slot = infos[space[begin]], begin
        digest, size = info.digest, info.figures.block_tokens
        above = None if parent[begin] == NO_SLOT else BlockKey(keys[parent[begin]])
        while slot != NO_SLOT:
            key = BlockKey(keys[slot])
            part.append(BlockCame(digest, key, above, size))
            above, slot = key, follows[slot]
            if len(part) >= ITEMS_AT_ONCE:
                yield part
                part = []
    for flag, kind in ((HAS_STATE, ItemKind.STATE), (HAS_ROWS, ItemKind.ROWS)):
        for slot in _slots_with(frozen.flags, flag):
            info = infos[space[slot]]
            position = (number[slot] + 1) * info.figures.block_tokens
            overlap = bool(frozen.flags[slot] & ROWS_OVERLAP)
            part.append(state_came(info, BlockKey(keys[slot]), kind, position, overlap=overlap))
            if len(part) >= ITEMS_AT_ONCE:
                yield part
                part = []
    for first in range(0, len(pooled), ITEMS_AT_ONCE):
        yield [*part, *pooled[first : first + ITEMS_AT_ONCE]]
        part = []
    yield part


def _chains(frozen: Frozen) -> Steps[list[Change], tuple[array[int], array[int]]]:
    """(Slots that chains begin with, those nearer to a root first; for each slot the next one of its chain, or NO_SLOT.) A chain goes on
    through blocks with one child. That of its first block's parent begins nearer to the root."""
    slots = np.frombuffer(_slots_with(frozen.flags, LIVE), np.int32)
    parent = np.frombuffer(frozen.parent, np.int32)
    above = parent[slots]
    yield []
    inner = above != NO_SLOT
    counts = np.bincount(above[inner], minlength=len(parent))
    yield []
    only = np.full(len(parent), NO_SLOT, np.int32)
    only[above[inner]] = slots[inner]
    only[counts != 1] = NO_SLOT
    yield []
    begins = slots[~inner | (counts[above] != 1)]
    order = np.argsort(np.frombuffer(frozen.number, np.int32)[begins], kind="stable")
    return array("i", begins[order].tobytes()), array("i", only.tobytes())


def _slots_with(flags: bytes, flag: int) -> array[int]:
    marks = np.frombuffer(flags, np.uint8) & np.uint8(flag)
    return array("i", np.flatnonzero(marks).astype(np.int32).tobytes())


def block_events(changes: Sequence[Change]) -> list[BlockStored | BlockRemoved]:
    """Events of one namespace's blocks among `changes`, in their order; blocks of one chain that follow one another share an event."""
    events: list[BlockStored | BlockRemoved] = []
    run: list[BlockCame] = []
    left: list[BlockWent] = []
    for change in changes:
        if isinstance(change, BlockCame):
            if left:
                events.append(_removed(left))
                left = []
            if run and change.parent != run[-1].key:
                events.append(_stored(run))
                run = []
            run.append(change)
        elif isinstance(change, BlockWent):
            if run:
                events.append(_stored(run))
                run = []
            left.append(change)
    if run:
        events.append(_stored(run))
    if left:
        events.append(_removed(left))
    return events


def state_events(changes: Sequence[Change]) -> list[StateEvent]:
    """Events of states among `changes`, in their order."""
    events: list[StateEvent] = []
    for change in changes:
        if isinstance(change, StateCame):
            digest, key, source, tokens, run, behind = change
            events.append(
                StateStored(
                    namespace=digest,
                    block_key=key,
                    source=source,
                    restorable_tokens=tokens,
                    rows_blocks=run,
                    rows_behind=behind,
                    medium=_medium(source),
                )
            )
        elif isinstance(change, StateWent):
            digest, key, source = change
            events.append(
                StateRemoved(namespace=digest, block_key=key, source=source, medium=_medium(source))
            )
    return events


def _stored(run: Sequence[BlockCame]) -> BlockStored:
    first = run[0]
    keys = tuple(each.key for each in run)
    return BlockStored(
        block_hashes=tuple(map(short_hash, keys)),
        parent_block_hash=None if first.parent is None else short_hash(first.parent),
        block_size=first.block_tokens,
        medium=DISK_MEDIUM,
        namespace=first.namespace,
        block_keys=keys,
        parent_block_key=first.parent,
    )


def _removed(left: Sequence[BlockWent]) -> BlockRemoved:
    keys = tuple(each.key for each in left)
    return BlockRemoved(
        block_hashes=tuple(map(short_hash, keys)),
        medium=DISK_MEDIUM,
        namespace=left[0].namespace,
        block_keys=keys,
    )


def _medium(source: StateSource) -> str:
    return POOL_MEDIUM if source is StateSource.POOL else DISK_MEDIUM
