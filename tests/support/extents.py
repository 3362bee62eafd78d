"""Memory as a service would share it, without the service: for tests of who reads it."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence

from kvstore.memory.extent import Extent, whole_pages
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.checks import make_checks

Item = tuple[int, int, Extent | None, int]
"""Kind, index, the extent (None: not mapped) and the slot."""


def line(said: object) -> bytes:
    return json.dumps(said).encode() + b"\n"


def filled(number: int, payloads: Sequence[bytes], *, gap: int = 40) -> Extent:
    """An extent of one slot for each payload, which begins `gap` bytes behind the slot's beginning."""
    longest = max(map(len, payloads))
    slot_bytes = whole_pages(gap + longest)
    extent = Extent(number, domain="", slot_bytes=slot_bytes, slots=len(payloads))
    for slot, payload in zip(extent.slots, payloads, strict=True):
        extent.step(slot.index)
        slot.begin, slot.length = gap, len(payload)
        slot.payload[:] = payload
        extent.step(slot.index)
    return extent


def refill(extent: Extent, index: int, payload: bytes) -> None:
    """Another's bytes in a slot, as the service puts them there when nobody leases it."""
    extent.step(index)
    extent.slots[index].length = len(payload)
    extent.slots[index].payload[:] = payload
    extent.step(index)


def give(connection: socket.socket, extent: Extent) -> None:
    """Tell a session of it, as the service does."""
    said = line({"extent": extent.number, "bytes": extent.bytes})
    socket.send_fds(connection, [said], [extent.descriptor])


def map_reply(items: Sequence[Item]) -> pb.MapReply:
    """The answer that names these items."""
    reply = pb.MapReply()
    for kind, index, extent, number in items:
        slot = None if extent is None else extent.slots[number]
        checks = make_checks(b"" if slot is None else slot.payload)
        reply.extent.append(0 if extent is None else extent.number)
        reply.offset.append(0 if slot is None else slot.offset)
        reply.length.append(0 if slot is None else slot.length)
        reply.slot.append(number)
        reply.generation.append(0 if slot is None else slot.generation)
        reply.crc32.append(checks.crc32)
        reply.xxh3_64.append(checks.xxh3_64)
        reply.has_xxh3.append(checks.has_xxh3)
        reply.lineage.append(pb.LINEAGE_EXACT)
        reply.kind.append(pb.ItemKind.Name(kind))
        reply.index.append(index)
    return reply


def lone_extent(number: int = 1, payload: bytes = b"payload") -> Extent:
    return filled(number, [payload, payload])
