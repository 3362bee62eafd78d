"""Keys of a prompt's blocks in one piece of memory, as calls carry them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

from kvstore.errors import InvalidArgument
from kvstore.types import KEY_BYTES, BlockKey


class JoinedKeys(Sequence[BlockKey]):
    """The keys in `joined`, 32 bytes each, first block first. A key is made when it is asked for, so that a prompt of
    thousands of blocks costs its bytes only."""

    __slots__ = ("joined",)

    def __init__(self, joined: bytes) -> None:
        """InvalidArgument for bytes that do not divide into whole keys."""
        if len(joined) % KEY_BYTES:
            raise InvalidArgument(
                "keys do not divide into whole keys",
                field="keys",
                value=f"{len(joined)} bytes",
                allowed=f"a multiple of {KEY_BYTES} bytes",
            )
        self.joined = joined

    def __len__(self) -> int:
        return len(self.joined) // KEY_BYTES

    @overload
    def __getitem__(self, index: int) -> BlockKey: ...
    @overload
    def __getitem__(self, index: slice) -> JoinedKeys: ...

    def __getitem__(self, index: int | slice) -> BlockKey | JoinedKeys:
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            if step == 1 and stop - start == len(self):
                return self
            if step != 1:
                return JoinedKeys(b"".join(self[each] for each in range(start, stop, step)))
            return JoinedKeys(self.joined[start * KEY_BYTES : stop * KEY_BYTES])
        if index < 0:
            index += len(self)
        at = index * KEY_BYTES
        if not 0 <= at < len(self.joined):
            raise IndexError(f"key {index} of {len(self)}")
        return BlockKey(self.joined[at : at + KEY_BYTES])

    def __iter__(self) -> Iterator[BlockKey]:
        joined = self.joined
        return (BlockKey(joined[at : at + KEY_BYTES]) for at in range(0, len(joined), KEY_BYTES))

    def __repr__(self) -> str:
        return f"JoinedKeys({len(self)} keys)"
