"""Leases, and the reading of what they protect."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from kvstore.errors import DamagedBytes, Draining, InvalidArgument, Unavailable, UnknownLease, UnknownSession
from kvstore.types import ItemKind, Lineage
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.checks import matches
from kvstore_client.framing import ItemJoiner
from kvstore_client.link import Connection, Link
from kvstore_client.messages import count
from kvstore_client.values import FetchedItem, Plan

BLOCKS_MAX = 1 << 24


class Lease:
    """Protection of what one plan reads, for `seconds` from the lookup on. Belongs to the session that it was given in.

    Leaving the context releases it. Forgetting it is safe: it ends with the session or at its deadline.
    """

    def __init__(
        self, link: Link, connection: Connection, *, lease_id: int, seconds: float, state_at: int
    ) -> None:
        self.id = lease_id
        self.seconds = seconds
        self.state_at = state_at
        self._link = link
        self._connection = connection
        self._released = False
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Lease(id={self.id}, seconds={self.seconds:g}, released={self._released})"

    def release(self) -> None:
        """End the lease. Releasing again, or after the service has gone, does nothing: what cannot be said to the
        service it knows by the session's end or the lease's deadline."""
        with self._lock:
            if self._released:
                return
            self._released = True
        if not self._connection.usable():
            return
        try:
            self._link.call(
                self._connection,
                "Release",
                pb.ReleaseRequest(lease_id=self.id),
                timeout=self._link.deadlines.release,
            )
        except (Unavailable, UnknownSession, UnknownLease, Draining):
            return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def fetch(
        self, *, first_block: int, block_count: int, state: bool, verify: bool
    ) -> Iterator[FetchedItem]:
        """See CacheClient.fetch."""
        link, connection = self._link, self._connection
        count("first_block", first_block)
        count("block_count", block_count, most=BLOCKS_MAX)
        if not (block_count or state):
            raise InvalidArgument(
                "nothing is asked for", field="block_count", value=0, allowed="a block or the state"
            )
        if self._released:
            raise UnknownLease(
                "the lease was released", field="lease_id", value=self.id, allowed="a new lookup"
            )
        if not connection.usable():
            raise UnknownLease(
                "the lease ended with its session; the service has ended it or started again",
                field="lease_id",
                value=self.id,
                allowed="a new lookup",
            )
        request = pb.FetchRequest(
            lease_id=self.id, first_block=first_block, block_count=block_count, state=state
        )
        timeout = link.deadlines.fetch + (block_count + state) * link.deadlines.fetch_per_item
        frames = link.stream(connection, "Fetch", request, timeout=timeout)
        wanted = Wanted(first_block, block_count, self.state_at if state else None)
        return read_items(frames, wanted, verify=verify)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The items that a fetch asks for, in the order in which they come: blocks, then the state at `state_at`."""

    first_block: int
    block_count: int
    state_at: int | None

    def __len__(self) -> int:
        return self.block_count + (self.state_at is not None)

    def item(self, place: int) -> tuple[ItemKind, int]:
        """(kind, index) of the item that comes as number `place`."""
        if place < self.block_count:
            return ItemKind.BLOCK, self.first_block + place
        assert self.state_at is not None
        return ItemKind.STATE, self.state_at


def read_items(
    frames: Generator[pb.ItemFrame, None, None], wanted: Wanted, *, verify: bool
) -> Iterator[FetchedItem]:
    """Each wanted item as soon as it is complete and, with `verify`, as its checksum has been found right.

    DamagedBytes where the frames are not exactly the wanted items in their order, or bytes do not have their checksum;
    what was yielded before is good. `frames` is closed at the end, whatever the end.
    """
    seen = 0
    with closing(frames):
        joiner: ItemJoiner[pb.ItemHeader] = ItemJoiner()
        for frame in frames:
            for header, payload in joiner.feed(frame.items, frame.data):
                if seen == len(wanted):
                    raise DamagedBytes(
                        "an item came that nobody asked for", field="index", value=header.index
                    )
                yield _checked(header, payload, wanted.item(seen), verify=verify)
                seen += 1
        joiner.finish()
        if seen != len(wanted):
            raise DamagedBytes(
                "the stream ended early", field="items", value=seen, allowed=f"{len(wanted)} items"
            )


def _checked(
    header: pb.ItemHeader, payload: bytes, expected: tuple[ItemKind, int], *, verify: bool
) -> FetchedItem:
    kind, index = expected
    if int(header.kind) != kind or header.index != index:
        raise DamagedBytes(
            "an item came in another's place",
            field="item",
            value=f"kind {header.kind} index {header.index}",
            allowed=f"kind {int(kind)} index {index}",
        )
    if header.missing:
        return FetchedItem(kind=kind, index=index, payload=None, lineage=None)
    if header.lineage not in (pb.LINEAGE_EXACT, pb.LINEAGE_BOUNDED):
        raise DamagedBytes(
            "an item has no lineage", field="lineage", value=header.lineage, allowed="EXACT or BOUNDED"
        )
    if verify and not matches(payload, header):
        raise DamagedBytes(
            "an item does not have its checksum", field="item", value=f"{kind.name.lower()} {index}"
        )
    return FetchedItem(kind=kind, index=index, payload=payload, lineage=Lineage(header.lineage))


def lease_of(link: Link, connection: Connection, reply: pb.LookupReply, plan: Plan) -> Lease | None:
    if reply.lease_id == 0:
        return None
    return Lease(
        link, connection, lease_id=reply.lease_id, seconds=reply.lease_seconds, state_at=plan.state_at
    )
