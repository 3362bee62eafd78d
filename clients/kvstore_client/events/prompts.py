"""Tokens for events that have none: who sees prompts knows which tokens a block key stands for, and the store does not."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

from kvstore.errors import InvalidArgument
from kvstore.events.base import BlockStored, Event
from kvstore.prefix import block_keys


class PromptBook:
    """The tokens of the blocks of one namespace's latest prompts, at most `limit_blocks`, least recently seen out first.

    For indexers that hash tokens themselves: a router's side or a worker notes the prompts it sees, completes a store's events with
    their tokens, and passes them on. Not thread-safe.
    """

    def __init__(self, namespace: bytes, *, block_tokens: int, limit_blocks: int = 100_000) -> None:
        """`namespace`: its digest. `block_tokens`: tokens of a block, as its profile has them."""
        if block_tokens < 1 or limit_blocks < 1:
            raise InvalidArgument(
                "counts are positive",
                field="block_tokens, limit_blocks",
                value=f"{block_tokens}, {limit_blocks}",
            )
        self._namespace = namespace
        self._block_tokens = block_tokens
        self._limit = limit_blocks
        self._tokens: OrderedDict[bytes, tuple[int, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tokens)

    def note(self, tokens: Sequence[int]) -> None:
        """A prompt, from its first token on."""
        size = self._block_tokens
        for number, key in enumerate(block_keys(self._namespace, tokens, block_tokens=size)):
            self._tokens[key] = tuple(tokens[number * size : (number + 1) * size])
            self._tokens.move_to_end(key)
        while len(self._tokens) > self._limit:
            self._tokens.popitem(last=False)

    def described(self, event: Event) -> Event:
        """The event with the tokens of all its blocks, or as it is, where one of them is not known or it is of another namespace."""
        if not isinstance(event, BlockStored) or event.namespace != self._namespace:
            return event
        known = [self._tokens.get(key) for key in event.block_keys]
        tokens = [token for block in known if block is not None for token in block]
        if not known or None in known:
            return event
        return replace(event, token_ids=tuple(tokens))
