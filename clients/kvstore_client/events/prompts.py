"""Tokens for events that have none: who sees prompts knows which tokens a block key stands for, and the store does not."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from kvstore.errors import InvalidArgument
from kvstore.events.base import BlockStored, Event
from kvstore.prefix import block_keys


class NotedBlock(NamedTuple):
    """`parent` None: a prompt's first block."""

    parent: bytes | None
    tokens: tuple[int, ...]


class PromptBook:
    """The tokens of the blocks of one namespace's latest prompts, at most `limit_blocks`, least recently seen out first. Any number of
    threads may call.

    For indexers that hash tokens themselves: a router's side or a worker notes the prompts it sees, and a `Relay` passes the store's
    events on with their tokens.
    """

    def __init__(self, namespace: bytes, *, block_tokens: int, limit_blocks: int = 100_000) -> None:
        """`namespace`: its digest. `block_tokens`: tokens of a block, as its profile has them."""
        if block_tokens < 1 or limit_blocks < 1:
            raise InvalidArgument(
                "counts are positive",
                field="block_tokens, limit_blocks",
                value=f"{block_tokens}, {limit_blocks}",
            )
        self.namespace = namespace
        self.block_tokens = block_tokens
        self._limit = limit_blocks
        self._blocks: OrderedDict[bytes, NotedBlock] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._blocks)

    def note(self, tokens: Sequence[int]) -> list[bytes]:
        """A prompt, from its first token on; the keys of its whole blocks."""
        size = self.block_tokens
        keys: list[bytes] = list(block_keys(self.namespace, tokens, block_tokens=size))
        with self._lock:
            before = None
            for number, key in enumerate(keys):
                if key not in self._blocks:
                    own = tuple(tokens[number * size : (number + 1) * size])
                    self._blocks[key] = NotedBlock(before, own)
                before = key
            # Parents are seen last, so that they stay as long as their children.
            for key in reversed(keys):
                self._blocks.move_to_end(key)
            while len(self._blocks) > self._limit:
                self._blocks.popitem(last=False)
        return keys

    def get(self, key: bytes) -> NotedBlock | None:
        """None for a block of no prompt that is remembered."""
        with self._lock:
            return self._blocks.get(key)

    def described(self, event: Event) -> Event:
        """The event with the tokens of all its blocks, or as it is, where one of them is not known or it is of another namespace."""
        if not isinstance(event, BlockStored) or event.namespace != self.namespace:
            return event
        known = [block for block in map(self.get, event.block_keys) if block is not None]
        if not known or len(known) != len(event.block_keys):
            return event
        return replace(event, token_ids=tuple(token for block in known for token in block.tokens))
