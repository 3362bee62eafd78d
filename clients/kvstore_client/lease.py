"""Leases, and the reading of what they protect."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from types import TracebackType
from typing import Self

from kvstore.errors import InvalidArgument, KvstoreError, LimitExceeded, MemoryUnavailable, UnknownLease
from kvstore.profile.base import Profile
from kvstore.profile.layout import SLICES_MAX, layer_slices
from kvstore.types import StateSource
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.dock import Dock
from kvstore_client.failures import was_answered
from kvstore_client.fetching import Fetching
from kvstore_client.landing import checked, lend
from kvstore_client.link import Connection, Link
from kvstore_client.link_base import ConnectionBase, LinkBase
from kvstore_client.map_runs import Gap, Mapping
from kvstore_client.mapped import MappedItem
from kvstore_client.mapping import private_item
from kvstore_client.messages import count
from kvstore_client.profiles import Profiles
from kvstore_client.reading import Frames, cut_items, read_slices
from kvstore_client.values import FetchedItem, FetchedSlice, Plan
from kvstore_client.wanted import Sliced, Whole, state_places

BLOCKS_MAX = 1 << 24


class Protection:
    """What the service has promised to keep, and what may be asked for under it. Nothing here waits."""

    def __init__(
        self,
        link: LinkBase,
        connection: ConnectionBase,
        reply: pb.LookupReply | pb.ContainsReply,
        *,
        namespace: bytes,
        plan: Plan,
    ) -> None:
        self.id: int = reply.lease_id
        self.seconds: float = reply.lease_seconds
        self.state_at = plan.state_at
        self._deadlines = link.deadlines
        self._session = connection
        self._namespace = namespace
        self._plan = plan
        self._released = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}(id={self.id}, seconds={self.seconds:g}, released={self._released})"

    @property
    def _release_request(self) -> pb.ReleaseRequest:
        return pb.ReleaseRequest(lease_id=self.id)

    def _needs_profile(self, *, state: bool) -> bool:
        """Whether what the state is made of is counted in the profile's blocks."""
        return state and self._plan.state_source is StateSource.ROWS

    def _whole(self, first_block: int, block_count: int, profile: Profile | None, *, state: bool) -> Whole:
        return Whole(first_block, block_count, state_places(self._plan, profile) if state else ())

    def _sliced(
        self, first_block: int, block_count: int, profile: Profile, *, state: bool, slices: int
    ) -> Sliced:
        places = state_places(self._plan, profile) if state else ()
        return Sliced(first_block, block_count, layer_slices(profile, slices), places)

    def _map_request(self, wanted: Whole) -> pb.MapRequest:
        return pb.MapRequest(
            lease_id=self.id,
            first_block=wanted.first_block,
            block_count=wanted.block_count,
            state=bool(wanted.state),
        )

    def _slices_request(self, wanted: Sliced, slices: int) -> pb.FetchRequest:
        return pb.FetchRequest(
            lease_id=self.id,
            first_block=wanted.first_block,
            block_count=wanted.block_count,
            state=bool(wanted.state),
            slices=slices,
        )

    def _seconds_for(self, wanted: Whole | Sliced) -> float:
        """How long a call that brings these may take; UnknownLease where there is nothing to ask under any more."""
        if self._released:
            raise UnknownLease(
                "the lease was released", field="lease_id", value=self.id, allowed="a new lookup"
            )
        if not self._session.usable():
            raise UnknownLease(
                "the lease ended with its session; the service has ended it or started again",
                field="lease_id",
                value=self.id,
                allowed="a new lookup",
            )
        items = wanted.block_count + len(wanted.state)
        return self._deadlines.fetch + items * self._deadlines.fetch_per_item


class Lease(Protection):
    """Protection of what one plan reads, for `seconds` from the lookup on. Belongs to the session that it was given in.

    Leaving the context releases it. Forgetting it is safe: it ends with the session or at its deadline.
    """

    def __init__(
        self,
        link: Link,
        connection: Connection,
        profiles: Profiles,
        reply: pb.LookupReply | pb.ContainsReply,
        *,
        namespace: bytes,
        plan: Plan,
    ) -> None:
        super().__init__(link, connection, reply, namespace=namespace, plan=plan)
        self._link = link
        self._connection = connection
        self._profiles = profiles
        self._lock = threading.Lock()

    def release(self) -> None:
        """End the lease. Releasing again, or after the service has gone, does nothing: what cannot be said to the
        service it knows by the session's end or the lease's deadline."""
        with self._lock:
            if self._released:
                return
            self._released = True
        self._link.hint(self._connection, "Release", self._release_request)

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
        check_asked(first_block, block_count, state=state)
        return self._fetch(self._wanted(first_block, block_count, state=state), verify=verify)

    def _wanted(self, first_block: int, block_count: int, *, state: bool) -> Whole:
        profile = self._profiles.get(self._namespace) if self._needs_profile(state=state) else None
        return self._whole(first_block, block_count, profile, state=state)

    def _fetch(self, wanted: Whole, *, verify: bool) -> Generator[FetchedItem, None, None]:
        timeout = self._seconds_for(wanted)
        return self._link.fetch(self._connection, Fetching(self.id, wanted, verify=verify), timeout=timeout)

    def map(self, *, first_block: int, block_count: int, state: bool, verify: bool) -> Iterator[MappedItem]:
        """See CacheClient.map."""
        check_asked(first_block, block_count, state=state)
        wanted = self._wanted(first_block, block_count, state=state)
        memory = self._connection.session.memory
        if memory is None or memory.refused:
            return self._fetched(Gap(0, len(wanted)), wanted, verify=verify)
        timeout = self._seconds_for(wanted)
        replies = self._link.stream(self._connection, "Map", self._map_request(wanted), timeout=timeout)
        return self._mapped(replies, Mapping(wanted, memory, verify=verify))

    def _mapped(
        self, replies: Generator[pb.MapReply, None, None], mapping: Mapping
    ) -> Generator[MappedItem, None, None]:
        with closing(replies):
            try:
                for reply in replies:
                    for run in mapping.feed(reply):
                        if isinstance(run, Gap):
                            yield from self._fetched(run, mapping.wanted, verify=mapping.verify)
                        else:
                            yield from run
            except MemoryUnavailable:
                mapping.memory.refused = True
        rest = mapping.rest()
        if rest is not None:
            yield from self._fetched(rest, mapping.wanted, verify=mapping.verify)

    def _fetched(self, gap: Gap, wanted: Whole, *, verify: bool) -> Generator[MappedItem, None, None]:
        part, first = gap.part_of(wanted)
        return _private_items(self._fetch(part, verify=verify), first, gap.begin, gap.end)

    def fetch_into(self, dock: Dock, targets: Sequence[memoryview]) -> list[bool] | None:
        """Let the service write the lease's first blocks to these places, each of which lies in the dock. Whether what lies there now
        is the block's, with its writer's checksum. None where the service has not this dock; nothing has been asked for then.

        Raises as `fetch`. Nothing is written to a target after this has returned or raised, though the service may have been
        given up: then it is waited for until it has ended writing, or has ended, or the client is closed.
        """
        memory = self._connection.session.memory
        places = [dock.place_of(target) for target in targets]
        if memory is None or None in places:
            return None
        lock = memory.dock.lock_of(dock, lambda each, byte: lend(self._link, self._connection, each, byte))
        if lock is None:
            return None
        timeout = self._seconds_for(Whole(0, len(targets), ()))
        request = pb.FetchDockRequest(
            lease_id=self.id, offset=[place for place in places if place is not None]
        )
        try:
            replies = self._link.stream(self._connection, "FetchDock", request, timeout=timeout)
            with closing(replies):
                return checked(replies, targets)
        except BaseException as error:
            # Who has said nothing may be writing still.
            is_over = isinstance(error, KvstoreError) and was_answered(error)
            if not is_over or isinstance(error, MemoryUnavailable):
                memory.dock.refuse()
            if not is_over:
                dock.shut(lock, lambda: self._link.is_closed)
            raise

    def fetch_slices(
        self, *, first_block: int, block_count: int, state: bool, slices: int, verify: bool
    ) -> Iterator[FetchedItem | FetchedSlice]:
        """See CacheClient.fetch_slices."""
        check_asked(first_block, block_count)
        check_slices(slices)
        profile = self._profiles.get(self._namespace)
        wanted = self._sliced(first_block, block_count, profile, state=state, slices=slices)
        timeout = self._seconds_for(wanted)
        request = self._slices_request(wanted, slices)
        frames = self._link.stream(self._connection, "Fetch", request, timeout=timeout)
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
        yield from cut_items(list(self._fetch(wanted.whole(), verify=verify)), wanted)


def _private_items(
    items: Generator[FetchedItem, None, None], first: int, begin: int, end: int
) -> Generator[MappedItem, None, None]:
    """Numbers [begin, end) of items that are counted from `first` on."""
    with closing(items) as found:
        for number, item in enumerate(found, first):
            if begin <= number < end:
                yield private_item(item)


def check_slices(slices: int) -> None:
    if not 2 <= slices <= SLICES_MAX:
        raise InvalidArgument(
            "not a number of slices", field="slices", value=slices, allowed=f"2 to {SLICES_MAX}"
        )


def check_asked(first_block: int, block_count: int, *, state: bool = False) -> None:
    count("first_block", first_block)
    count("block_count", block_count, most=BLOCKS_MAX)
    if not (block_count or state):
        raise InvalidArgument(
            "nothing is asked for", field="block_count", value=0, allowed="a block or the state"
        )
