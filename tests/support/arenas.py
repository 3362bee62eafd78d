"""A session's arena by hand: what a client of the contract does with it, and what none should."""

from __future__ import annotations

import json
import mmap
import os
import socket
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.v1 import cache_pb2 as pb
from tests.e2e.service_raw import Raw

LINE_BYTES = 4096


@dataclass(eq=False)
class OpenedArena:
    """`memory` is mapped for reading and writing."""

    raw: Raw
    number: int
    descriptor: int
    memory: mmap.mmap

    def put(self, offset: int, payload: bytes) -> None:
        self.memory[offset : offset + len(payload)] = payload

    def write(self, reservation_id: int, items: Sequence[tuple[int, int, bytes]]) -> pb.WriteReply:
        """Items as (place in the reserve call, offset, payload), of which the checksums are."""
        reply: pb.WriteReply = self.raw.call("WriteArena", arena_request(reservation_id, items))
        return reply

    def close(self) -> None:
        self.memory.close()
        os.close(self.descriptor)


def arena_request(reservation_id: int, items: Sequence[tuple[int, int, bytes]]) -> pb.WriteArenaRequest:
    return pb.WriteArenaRequest(
        reservation_id=reservation_id,
        items=[
            pb.WriteItem(item=index, length=len(payload), crc32=zlib.crc32(payload))
            for index, _, payload in items
        ],
        offset=[offset for _, offset, _ in items],
    )


def told(raw: Raw) -> tuple[dict[str, int], int]:
    """The next line of the session connection, and the descriptor that came with it."""
    data, [descriptor], _, _ = socket.recv_fds(raw.socket, LINE_BYTES, 4, socket.MSG_CMSG_CLOEXEC)
    line: dict[str, int] = json.loads(data)
    return line, descriptor


def open_arena(raw: Raw, size: int) -> OpenedArena:
    reply = raw.call("OpenArena", pb.OpenArenaRequest(bytes=size))
    line, descriptor = told(raw)
    assert line == {"arena": reply.arena, "bytes": reply.bytes}
    assert os.fstat(descriptor).st_size == reply.bytes >= size
    return OpenedArena(raw, reply.arena, descriptor, mmap.mmap(descriptor, reply.bytes))
