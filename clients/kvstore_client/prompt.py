"""A prompt that grows from turn to turn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvstore.prefix.joined import JoinedKeys
from kvstore.prefix.keys import KeyChain
from kvstore_client.values import OpenedNamespace


class PromptKeys:
    """Keys of one prompt's whole blocks. What was appended once is never hashed again, and `keys` is what lookup takes as it
    is, so that a turn costs its new tokens and one copy of the keys' bytes. For one thread."""

    def __init__(self, namespace: OpenedNamespace) -> None:
        self.namespace = namespace.digest
        self._chain = KeyChain(namespace.digest, block_tokens=namespace.block_tokens)

    def extend(self, tokens: Iterable[int], *, extras: Mapping[int, bytes] | None = None) -> JoinedKeys:
        """Append tokens; the keys of the blocks that they completed. `extras` and refusals as KeyChain.extend."""
        return JoinedKeys(b"".join(self._chain.extend(tokens, extras=extras)))

    @property
    def keys(self) -> JoinedKeys:
        """Of the whole blocks so far, first block first; the same object until a block is completed."""
        return self._chain.joined

    @property
    def token_count(self) -> int:
        """All tokens, also those of the block that is not whole."""
        return self._chain.token_count

    def parent(self, index: int) -> bytes:
        """What block `index` names as the one before it: the key of that, or the namespace's digest."""
        return self.keys[index - 1] if index else self.namespace
