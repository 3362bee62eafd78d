"""A dock is lent to the service, and what it says that it has written there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvstore.errors import DamagedBytes, MemoryUnavailable
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.checks import matches
from kvstore_client.dock import Dock
from kvstore_client.link import Connection, Link


class Landed(NamedTuple):
    """Of one block: how long it is, 0 where it is missing, and its writer's checksums."""

    length: int
    crc32: int
    xxh3_64: int
    has_xxh3: bool


def lend(link: Link, connection: Connection, dock: Dock, lock: int) -> None:
    """Hand the dock over for this session. MemoryUnavailable, or what the service says of such a file; OSError where it cannot be
    passed."""
    memory = connection.session.memory
    assert memory is not None, "a dock is lent over a connection that passes memory"
    timeout = link.deadlines.control
    reply = link.call(connection, "OpenDock", pb.OpenDockRequest(), timeout=timeout)
    way = memory.take_way(reply.dock)
    if way is None:
        raise MemoryUnavailable("the way for a dock's descriptor was lost", field="dock", value=reply.dock)
    with way:
        dock.send(way)
        link.call(
            connection,
            "TakeDock",
            pb.TakeDockRequest(dock=reply.dock, bytes=dock.bytes, lock=lock),
            timeout=timeout,
        )


def checked(replies: Iterable[pb.FetchDockReply], targets: Sequence[memoryview]) -> list[bool]:
    """Whether what lies in each target now is its block, by its writer's checksum. DamagedBytes unless the messages tell of each target
    once, in order."""
    found: list[bool] = []
    for reply in replies:
        lists = (reply.length[:], reply.crc32[:], reply.xxh3_64[:], reply.has_xxh3[:])
        count = len(lists[0])
        if any(len(each) != count for each in lists) or count > len(targets) - len(found):
            raise DamagedBytes(
                "a message tells of other blocks than were asked for",
                field="blocks",
                value=[len(each) for each in lists],
                allowed=f"lists of one length, {len(targets) - len(found)} at most",
            )
        headers = map(Landed._make, zip(*lists, strict=True))
        found += [_is_landed(header, targets[len(found) + at]) for at, header in enumerate(headers)]
    if len(found) != len(targets):
        raise DamagedBytes(
            "the call ended early", field="blocks", value=len(found), allowed=f"{len(targets)} blocks"
        )
    return found


def _is_landed(header: Landed, target: memoryview) -> bool:
    return 0 < header.length <= target.nbytes and matches(target.cast("B")[: header.length], header)
