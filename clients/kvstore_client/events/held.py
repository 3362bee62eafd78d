"""What a store holds, put together from its events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvstore.events.base import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    StateRemoved,
    StateStored,
)
from kvstore.types import StateSource


class HeldBlocks:
    """The blocks and states of all namespaces of one store, as its events tell. Not thread-safe.

    A router that has a prompt's tokens computes its keys as a client does (`kvstore.prefix.block_keys`, from the namespace's digest on)
    and asks how far it is held. Of events without namespace and whole keys, which engines send, nothing is kept.
    """

    def __init__(self) -> None:
        self._blocks: dict[bytes, set[bytes]] = {}
        self._states: dict[bytes, dict[tuple[bytes, StateSource], StateStored]] = {}

    def apply(self, events: Iterable[Event]) -> None:
        """Take in the events of a batch, in the order of the batches. To hear of something twice changes nothing."""
        for event in events:
            match event:
                case BlockStored(namespace=bytes() as namespace):
                    self._blocks.setdefault(namespace, set()).update(event.block_keys)
                case BlockRemoved(namespace=bytes() as namespace):
                    self._blocks.get(namespace, set()).difference_update(event.block_keys)
                case StateStored():
                    states = self._states.setdefault(event.namespace, {})
                    states[event.block_key, event.source] = event
                case StateRemoved():
                    self._states.get(event.namespace, {}).pop((event.block_key, event.source), None)
                case AllBlocksCleared(namespace=None):
                    self._blocks.clear()
                    self._states.clear()
                case AllBlocksCleared(namespace=bytes() as namespace):
                    self._blocks.pop(namespace, None)
                    self._states.pop(namespace, None)

    def namespaces(self) -> list[bytes]:
        """Digests of those that have blocks."""
        return [digest for digest, keys in self._blocks.items() if keys]

    def keys(self, namespace: bytes) -> frozenset[bytes]:
        """Of all blocks that are held of a namespace."""
        return frozenset(self._blocks.get(namespace, ()))

    def states(self, namespace: bytes) -> frozenset[tuple[bytes, StateSource]]:
        """(Key of the block at whose end it is, source) of all states that are held of a namespace."""
        return frozenset(self._states.get(namespace, ()))

    def blocks_held(self, namespace: bytes, keys: Sequence[bytes]) -> int:
        """How many of a prompt's blocks, from the first on, are held; `keys` are those of the prompt."""
        held = self._blocks.get(namespace, ())
        for count, key in enumerate(keys):
            if key not in held:
                return count
        return len(keys)

    def restorable_tokens(self, namespace: bytes, keys: Sequence[bytes]) -> int:
        """The longest prefix, in tokens, at whose end a resume finds a window state without replaying one; 0 where there is none. The store's
        own plan may do better by a replay, and may find a state unfit for who wants exact bytes."""
        states = self._states.get(namespace)
        if not states:
            return 0
        held = self.blocks_held(namespace, keys)
        for count in range(held, 0, -1):
            key = keys[count - 1]
            for source in (StateSource.POOL, StateSource.CHECKPOINT):
                if (state := states.get((key, source))) is not None:
                    return state.restorable_tokens
            if tokens := self._restorable_from_rows(states, keys, count):
                return tokens
        return 0

    def _restorable_from_rows(
        self, states: dict[tuple[bytes, StateSource], StateStored], keys: Sequence[bytes], count: int
    ) -> int:
        """At the end of block `count`, or 0."""
        # Rows may end some blocks before the resume; how many, each of them says.
        for last in range(count, max(count - ROWS_BEHIND_MAX, 1) - 1, -1):
            state = states.get((keys[last - 1], StateSource.ROWS))
            if state is None or last + state.rows_behind != count:
                continue
            first = max(last - state.rows_blocks, 0)
            if all((key, StateSource.ROWS) in states for key in keys[first:last]):
                return state.restorable_tokens
        return 0


ROWS_BEHIND_MAX = 8
"""Blocks between the last rows that a resume reads and the resume: no profile has more."""
