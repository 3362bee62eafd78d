"""Leases, and the reading of what they protect."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from types import TracebackType
from typing import Any, Self, cast

from kvstore.errors import (
    DamagedBytes,
    InvalidArgument,
    LimitExceeded,
    MemoryUnavailable,
    UnknownLease,
)
from kvstore.profile.layout import SLICES_MAX, layer_slices
from kvstore.types import StateSource
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.link import Connection, Link
from kvstore_client.mapped import MappedItem
from kvstore_client.mapping import mapped_items, private_item
from kvstore_client.memory import Memory
from kvstore_client.messages import count
from kvstore_client.profiles import Profiles
from kvstore_client.reading import Frames, cut_block, read_items, read_slices
from kvstore_client.values import FetchedItem, FetchedSlice, Plan
from kvstore_client.wanted import Place, Sliced, Whole, state_places

BLOCKS_MAX = 1 << 24


class Lease:
    """Protection of what one plan reads, for `seconds` from the lookup on. Belongs to the session that it was given in.

    Leaving the context releases it. Forgetting it is safe: it ends with the session or at its deadline.
    """

    def __init__(
        self,
        link: Link,
        connection: Connection,
        profiles: Profiles,
        *,
        lease_id: int,
        seconds: float,
        namespace: bytes,
        plan: Plan,
    ) -> None:
        self.id = lease_id
        self.seconds = seconds
        self.state_at = plan.state_at
        self._link = link
        self._connection = connection
        self._profiles = profiles
        self._namespace = namespace
        self._plan = plan
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
        self._link.hint(self._connection, "Release", pb.ReleaseRequest(lease_id=self.id))

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
        _check_asked(first_block, block_count, state=state)
        places = self._state_places(wanted=state)
        request = pb.FetchRequest(
            lease_id=self.id, first_block=first_block, block_count=block_count, state=state
        )
        frames = self._stream("Fetch", request, items=block_count + len(places))
        return read_items(frames, Whole(first_block, block_count, places), verify=verify)

    def map(self, *, first_block: int, block_count: int, state: bool, verify: bool) -> Iterator[MappedItem]:
        """See CacheClient.map."""
        _check_asked(first_block, block_count, state=state)
        wanted = Whole(first_block, block_count, self._state_places(wanted=state))
        memory = self._connection.session.memory
        if memory.refused:
            return self._fetched(wanted, 0, len(wanted), verify=verify)
        request = pb.MapRequest(
            lease_id=self.id, first_block=first_block, block_count=block_count, state=state
        )
        replies = self._stream("Map", request, items=len(wanted))
        return self._mapped(replies, wanted, memory, verify=verify)

    def _mapped(
        self, replies: Generator[pb.MapReply, None, None], wanted: Whole, memory: Memory, *, verify: bool
    ) -> Generator[MappedItem, None, None]:
        seen = 0
        with closing(replies):
            try:
                for reply in replies:
                    items = mapped_items(reply, wanted, seen, find=memory.find, verify=verify)
                    for begin, end in _runs(items):
                        if items[begin] is None:
                            yield from self._fetched(wanted, seen + begin, seen + end, verify=verify)
                        else:
                            yield from cast("list[MappedItem]", items[begin:end])
                    seen += len(items)
            except MemoryUnavailable:
                memory.refused = True
        if seen == len(wanted):
            return
        if not memory.refused:
            raise DamagedBytes(
                "the map ended early", field="items", value=seen, allowed=f"{len(wanted)} items"
            )
        yield from self._fetched(wanted, seen, len(wanted), verify=verify)

    def _fetched(
        self, wanted: Whole, begin: int, end: int, *, verify: bool
    ) -> Generator[MappedItem, None, None]:
        """Numbers [begin, end) of the wanted items by one Fetch, which brings the state's items all or none."""
        blocks = max(min(end, wanted.block_count) - begin, 0)
        items = self.fetch(
            first_block=wanted.first_block + begin if blocks else 0,
            block_count=blocks,
            state=end > wanted.block_count,
            verify=verify,
        )
        return _private_items(items, min(begin, wanted.block_count), begin, end)

    def fetch_slices(
        self, *, first_block: int, block_count: int, state: bool, slices: int, verify: bool
    ) -> Iterator[FetchedItem | FetchedSlice]:
        """See CacheClient.fetch_slices."""
        _check_asked(first_block, block_count)
        if not 2 <= slices <= SLICES_MAX:
            raise InvalidArgument(
                "not a number of slices", field="slices", value=slices, allowed=f"2 to {SLICES_MAX}"
            )
        places = self._state_places(wanted=state)
        cuts = layer_slices(self._profiles.get(self._namespace), slices)
        request = pb.FetchRequest(
            lease_id=self.id, first_block=first_block, block_count=block_count, state=state, slices=slices
        )
        frames = self._stream("Fetch", request, items=len(places) + block_count)
        wanted = Sliced(first_block, block_count, cuts, places)
        return self._slices_or_whole(frames, wanted, verify=verify)

    def _slices_or_whole(
        self, frames: Frames, wanted: Sliced, *, verify: bool
    ) -> Iterator[FetchedItem | FetchedSlice]:
        begun = False
        with closing(read_slices(frames, wanted, verify=verify)) as found:
            try:
                for each in found:
                    begun = True
                    yield each
                return
            except LimitExceeded:
                if begun:
                    raise
        # The service has no room for a sliced fetch. Cut here, slices come when all has come.
        whole = self.fetch(
            first_block=wanted.first_block,
            block_count=wanted.block_count,
            state=bool(wanted.state),
            verify=verify,
        )
        items = list(whole)
        yield from items[wanted.block_count :]
        for number, cut in enumerate(wanted.slices):
            for item in items[: wanted.block_count]:
                yield cut_block(item, number, cut)

    def _stream(
        self, name: str, request: pb.FetchRequest | pb.MapRequest, *, items: int
    ) -> Generator[Any, None, None]:
        link, connection = self._link, self._connection
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
        timeout = link.deadlines.fetch + items * link.deadlines.fetch_per_item
        return link.stream(connection, name, request, timeout=timeout)

    def _state_places(self, *, wanted: bool) -> tuple[Place, ...]:
        if not wanted:
            return ()
        rows = self._plan.state_source is StateSource.ROWS
        return state_places(self._plan, self._profiles.get(self._namespace) if rows else None)


def _runs(items: Sequence[MappedItem | None]) -> Iterator[tuple[int, int]]:
    """Where neighbours that are mapped, or that are not, begin and end."""
    begin = 0
    # The rule is one run of all of them, which is found without a step for each.
    while begin < len(items):
        if None not in items:
            end = len(items)
        else:
            mapped = items[begin] is not None
            end = begin + 1
            while end < len(items) and (items[end] is not None) is mapped:
                end += 1
        yield begin, end
        begin = end


def _private_items(
    items: Iterator[FetchedItem], first: int, begin: int, end: int
) -> Generator[MappedItem, None, None]:
    """Numbers [begin, end) of items that are counted from `first` on."""
    with closing(cast("Generator[FetchedItem, None, None]", items)) as found:
        for number, item in enumerate(found, first):
            if begin <= number < end:
                yield private_item(item)


def _check_asked(first_block: int, block_count: int, *, state: bool = False) -> None:
    count("first_block", first_block)
    count("block_count", block_count, most=BLOCKS_MAX)
    if not (block_count or state):
        raise InvalidArgument(
            "nothing is asked for", field="block_count", value=0, allowed="a block or the state"
        )
