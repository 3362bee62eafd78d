"""Keys to slots, per namespace, and the numbering of slots."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kvstore.types import BlockKey

SHARDS = 64

# A bytes object of 32 (33 of its own) in its size class.
KEY_OBJECT_BYTES = 80


def shard_of(key: bytes) -> int:
    """Python's own seeded hash: it places a key in this process and is never stored. Keys chosen to collide do not."""
    return hash(key) % SHARDS


def shards_of(keys: list[bytes]) -> NDArray[np.uint16]:
    """`shard_of` each of them, without a step of the interpreter's for each."""
    hashes = np.fromiter(map(hash, keys), np.int64, count=len(keys))
    return (hashes % SHARDS).astype(np.uint16)


class SlotNumbers:
    """Slot = row x SHARDS + shard of the key, so that a dict holds rows only.

    All shards' dicts then share one int object per row where each block would need its own of 32 bytes, and growing one
    dict of many stops the event loop for a fraction of a millisecond where one large dict would stop it for tens.
    """

    def __init__(self) -> None:
        self.rows: list[int] = []
        self._next = [0] * SHARDS
        self._free = [array("i") for _ in range(SHARDS)]

    def __len__(self) -> int:
        """Slots in use."""
        return sum(self._next) - sum(map(len, self._free))

    def take(self, shard: int) -> int:
        """A slot that is not in use; its row may be one past `rows`, which then grows."""
        if self._free[shard]:
            return self._free[shard].pop() * SHARDS + shard
        row = self._next[shard]
        self._next[shard] = row + 1
        if row == len(self.rows):
            self.rows.append(row)
        return row * SHARDS + shard

    def take_many(self, shard: int, count: int) -> int:
        """The first of `count` rows in a row that were never in use."""
        first = self._next[shard]
        self._next[shard] = first + count
        self.rows.extend(range(len(self.rows), first + count))
        return first

    def give_back(self, slot: int) -> None:
        row, shard = divmod(slot, SHARDS)
        self._free[shard].append(row)

    def free(self) -> list[int]:
        """Slots that were in use and are not now."""
        return [row * SHARDS + shard for shard, rows in enumerate(self._free) for row in rows]

    def memory_bytes(self) -> int:
        return sys.getsizeof(self.rows) + 32 * len(self.rows) + sum(map(sys.getsizeof, self._free))


class KeyTable:
    """Key to slot for one namespace. Whole keys, compared whole."""

    __slots__ = ("_numbers", "_shards")

    def __init__(self, numbers: SlotNumbers) -> None:
        self._numbers = numbers
        self._shards: list[dict[bytes, int]] = [{} for _ in range(SHARDS)]

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    def find(self, key: bytes) -> int:
        """The slot, or -1."""
        shard = hash(key) % SHARDS
        row = self._shards[shard].get(key, -1)
        return row if row < 0 else row * SHARDS + shard

    def add(self, key: bytes) -> int:
        """The slot of a key that is not here yet."""
        shard = shard_of(key)
        slot = self._numbers.take(shard)
        self._shards[shard][key] = self._numbers.rows[slot // SHARDS]
        return slot

    def fill(self, shard: int, keys: list[bytes]) -> slice:
        """Add keys of one shard that are not here yet; their slots, in the order given."""
        first = self._numbers.take_many(shard, len(keys))
        end = first + len(keys)
        self._shards[shard].update(zip(keys, self._numbers.rows[first:end], strict=True))
        return slice(first * SHARDS + shard, end * SHARDS, SHARDS)

    def remove(self, key: bytes, slot: int) -> None:
        del self._shards[slot % SHARDS][key]
        self._numbers.give_back(slot)

    def items(self) -> Iterator[tuple[BlockKey, int]]:
        for number, shard in enumerate(self._shards):
            for key, row in shard.items():
                yield BlockKey(key), row * SHARDS + number

    def memory_bytes(self) -> int:
        return sum(map(sys.getsizeof, self._shards)) + len(self) * KEY_OBJECT_BYTES
