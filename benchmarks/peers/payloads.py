"""The bytes that are stored, and whether they came back."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
import xxhash

CHUNK = 64 << 20


class Payloads:
    """`count` blocks of `block_bytes` random bytes, which nothing compresses, at page boundaries; and as much room to read
    them into. `memory`: where both are to lie, without gaps."""

    def __init__(
        self,
        count: int,
        block_bytes: int,
        *,
        seed: int,
        memory: tuple[memoryview, memoryview] | None = None,
    ) -> None:
        self.count, self.block_bytes = count, block_bytes
        self.stride = block_bytes
        if memory is None:
            self.stride = -(-block_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
            size = count * self.stride
            memory = memoryview(mmap.mmap(-1, size)), memoryview(mmap.mmap(-1, size))
        self.source, self.room = memory
        chance = np.random.default_rng(seed)
        for first in range(0, len(self.source), CHUNK):
            part = self.source[first : first + CHUNK]
            part[:] = chance.bytes(len(part))
        self.blocks = self._cut(self.source)
        self.rooms = self._cut(self.room)
        self._sums = [xxhash.xxh3_64_intdigest(block) for block in self.blocks]

    def check(self, number: int) -> None:
        """Compare the checksum of what lies in the room; ValueError where it differs."""
        if xxhash.xxh3_64_intdigest(self.rooms[number]) != self._sums[number]:
            raise ValueError(f"block {number} did not come back as it was stored")

    def blank(self) -> None:
        """Let nothing lie in the room that could pass for a block."""
        for first in range(0, len(self.room), CHUNK):
            part = np.frombuffer(self.room[first : first + CHUNK], np.uint8)
            part[:] = 0xA5

    def wrong(self) -> int:
        """How many rooms do not hold their block, all bytes compared."""
        return sum(
            not np.array_equal(np.frombuffer(room, np.uint8), np.frombuffer(block, np.uint8))
            for room, block in zip(self.rooms, self.blocks, strict=True)
        )

    def _cut(self, memory: memoryview) -> Sequence[memoryview]:
        return [memory[at : at + self.block_bytes] for at in range(0, self.count * self.stride, self.stride)]


def address_of(memory: memoryview) -> int:
    """Of its first byte; the memory is writable and stays alive as long as the address is used."""
    return int(np.frombuffer(memory, np.uint8).ctypes.data)
