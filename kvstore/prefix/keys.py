"""Block keys: a chain of SHA-256 digests over tokens, rooted in the namespace digest.

key(i) = SHA-256(domain tag, key(i-1), token ids as little-endian u32, number of extra fields,
                 then per extra field: offset in the block u32, length u32, bytes)
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Mapping

from kvstore.errors import InvalidArgument
from kvstore.prefix.joined import JoinedKeys
from kvstore.types import KEY_BYTES, BlockKey

BLOCK_DOMAIN = b"kvstore.block.v1"

MAX_TOKEN_ID = 2**32 - 1

_NO_EXTRAS = struct.pack("<I", 0)


class KeyChain:
    """Keys of one token run, made as the tokens come. Only whole blocks have keys; the rest waits for more tokens."""

    def __init__(self, root: bytes, *, block_tokens: int) -> None:
        """`root` is the namespace digest, or the key of the block that the run continues."""
        if not isinstance(root, bytes) or len(root) != KEY_BYTES:
            raise InvalidArgument(
                "a chain starts from a digest",
                field="root",
                value=root if isinstance(root, bytes) else repr(root),
                allowed=f"{KEY_BYTES} bytes",
            )
        if not isinstance(block_tokens, int) or block_tokens < 1:
            raise InvalidArgument(
                "a block holds tokens", field="block_tokens", value=block_tokens, allowed=">= 1"
            )
        self._block_tokens = block_tokens
        self._last = root
        self._made = bytearray()
        self._joined: JoinedKeys | None = None
        self._open = array("I")
        self._open_extras: dict[int, bytes] = {}

    @property
    def keys(self) -> list[BlockKey]:
        """Keys of the whole blocks so far, first block first; a new list each time."""
        return list(self.joined)

    @property
    def joined(self) -> JoinedKeys:
        """The same as calls take them; the same object until a block is completed."""
        if self._joined is None:
            self._joined = JoinedKeys(bytes(self._made))
        return self._joined

    @property
    def token_count(self) -> int:
        return self._count * self._block_tokens + len(self._open)

    @property
    def _count(self) -> int:
        return len(self._made) // KEY_BYTES

    def extend(self, tokens: Iterable[int], *, extras: Mapping[int, bytes] | None = None) -> list[BlockKey]:
        """Append tokens; returns the keys of the blocks that they completed.

        `extras` says what tokens alone do not: position of a token in the whole run -> digest of the content (image,
        audio) that begins there. Blocks before it keep their keys; its own block and all after it differ. InvalidArgument,
        and nothing changed, for a token outside 0..2^32-1 or an extra outside the tokens of this call.
        """
        fresh = _as_u32(tokens)
        start = self.token_count
        added = _check_extras(extras, start, start + len(fresh))
        self._open.extend(fresh)
        self._open_extras.update(added)
        size = self._block_tokens
        whole = len(self._open) // size
        if not whole:
            return []
        made = self._seal(whole)
        self._open = self._open[whole * size :]
        self._made += b"".join(made)
        self._joined = None
        sealed = self._count * size
        self._open_extras = {
            position: value for position, value in self._open_extras.items() if position >= sealed
        }
        return made

    def _seal(self, whole: int) -> list[BlockKey]:
        little = self._open
        if sys.byteorder == "big":
            little = array("I", self._open)
            little.byteswap()
        step = self._block_tokens * 4
        data = memoryview(little).cast("B")
        extras = self._extras_by_block(self._count)
        parent = self._last
        made: list[BlockKey] = []
        sha256 = hashlib.sha256
        for number in range(whole):
            hasher = sha256(BLOCK_DOMAIN + parent)
            hasher.update(data[number * step : (number + 1) * step])
            hasher.update(extras.get(number, _NO_EXTRAS) if extras else _NO_EXTRAS)
            parent = hasher.digest()
            made.append(BlockKey(parent))
        self._last = parent
        return made

    def _extras_by_block(self, first_block: int) -> dict[int, bytes]:
        """Encoded extra fields per block, counted from `first_block`."""
        fields: dict[int, list[tuple[int, bytes]]] = {}
        for position in sorted(self._open_extras):
            block, offset = divmod(position, self._block_tokens)
            fields.setdefault(block - first_block, []).append((offset, self._open_extras[position]))
        return {
            block: struct.pack("<I", len(found))
            + b"".join(struct.pack("<II", at, len(value)) + value for at, value in found)
            for block, found in fields.items()
        }


def block_keys(
    root: bytes, tokens: Iterable[int], *, block_tokens: int, extras: Mapping[int, bytes] | None = None
) -> list[BlockKey]:
    """Keys of the whole blocks of `tokens`, first block first; see KeyChain.extend for extras and refusals."""
    return KeyChain(root, block_tokens=block_tokens).extend(tokens, extras=extras)


def _as_u32(tokens: Iterable[int]) -> array[int]:
    if isinstance(tokens, array) and tokens.typecode == "I":
        return tokens
    # array() takes bytes and text for machine words, which is not what anyone who passes them here means.
    if isinstance(tokens, (bytes, bytearray, str)):
        raise InvalidArgument(
            "tokens are numbers", field="tokens", value=type(tokens).__name__, allowed="a sequence of ints"
        )
    values = tokens if hasattr(tokens, "__len__") else list(tokens)
    try:
        return array("I", values)
    except (TypeError, OverflowError, ValueError):
        for index, token in enumerate(values):
            try:
                array("I", (token,))
            except (TypeError, OverflowError, ValueError):
                raise InvalidArgument(
                    "not a token id",
                    field=f"tokens[{index}]",
                    value=repr(token),
                    allowed=f"a whole number from 0 to {MAX_TOKEN_ID}",
                ) from None
        raise


def _check_extras(extras: Mapping[int, bytes] | None, first: int, end: int) -> dict[int, bytes]:
    if not extras:
        return {}
    for position, value in extras.items():
        if not isinstance(position, int) or not first <= position < end:
            raise InvalidArgument(
                "an extra belongs to a token of this call",
                field="extras",
                value=position,
                allowed=f"positions {first} to {end - 1}",
            )
        if not isinstance(value, bytes) or not value:
            raise InvalidArgument(
                "an extra has content",
                field=f"extras[{position}]",
                value=repr(value),
                allowed="bytes, at least one",
            )
    return dict(extras)


assert array("I").itemsize == 4, "token ids are hashed as 32-bit words"
