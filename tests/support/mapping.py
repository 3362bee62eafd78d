"""A session's end of shared memory, by hand: what it is told on its connection, and the bytes that Map names."""

from __future__ import annotations

import json
import mmap
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.v1 import cache_pb2 as pb
from tests.e2e.service_raw import Raw

LINE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Shown:
    """One row of a MapReply."""

    kind: int
    index: int
    extent: int
    offset: int
    length: int
    slot: int
    generation: int
    crc32: int
    lineage: int


@dataclass(eq=False)
class Mapped:
    """Reads the session connection of `raw`; `memory` are the extents that it was given, mapped for reading."""

    raw: Raw
    memory: dict[int, mmap.mmap] = field(default_factory=dict)
    descriptors: dict[int, int] = field(default_factory=dict)
    _line: bytes = b""
    _arrived: list[int] = field(default_factory=list)

    def listen(self) -> None:
        """Take in all lines that are there."""
        self.raw.socket.setblocking(False)
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(
                    self.raw.socket, LINE_BYTES, 16, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            assert data, "the service hung up"
            self._arrived += descriptors
            *lines, self._line = (self._line + data).split(b"\n")
            for line in lines:
                self._take(json.loads(line))

    def _take(self, said: dict[str, int]) -> None:
        descriptor = self._arrived.pop(0)
        assert os.fstat(descriptor).st_size == said["bytes"]
        assert said["extent"] not in self.memory
        self.descriptors[said["extent"]] = descriptor
        self.memory[said["extent"]] = mmap.mmap(descriptor, said["bytes"], prot=mmap.PROT_READ)

    def map(
        self, lease_id: int, *, first: int = 0, count: int, state: bool = False, timeout: float = 30.0
    ) -> list[Shown]:
        shown: list[Shown] = []
        for reply in self.raw.cache.Map(
            pb.MapRequest(lease_id=lease_id, first_block=first, block_count=count, state=state),
            timeout=timeout,
            metadata=self.raw.metadata,
        ):
            # What the answer names was told before.
            self.listen()
            assert {number for number in reply.extent if number} <= self.memory.keys()
            shown += map(
                Shown,
                reply.kind,
                reply.index,
                reply.extent,
                reply.offset,
                reply.length,
                reply.slot,
                reply.generation,
                reply.crc32,
                reply.lineage,
            )
        return shown

    def payload(self, shown: Shown) -> bytes:
        return self.memory[shown.extent][shown.offset : shown.offset + shown.length]

    def generation(self, shown: Shown) -> int:
        return int.from_bytes(self.memory[shown.extent][8 * shown.slot : 8 * shown.slot + 8], "little")

    def is_current(self, shown: Shown) -> bool:
        return self.generation(shown) == shown.generation

    def close(self) -> None:
        for descriptor in [*self.descriptors.values(), *self._arrived]:
            os.close(descriptor)
        self.descriptors.clear()
        self._arrived.clear()


def header_of(shown: Shown) -> pb.ItemHeader:
    return pb.ItemHeader(kind=shown.kind, index=shown.index, length=shown.length, crc32=shown.crc32)


def extents_of(shown: Sequence[Shown]) -> set[int]:
    return {each.extent for each in shown}
