"""Leases, and the reading of what they protect, on an event loop."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from types import TracebackType
from typing import Self

from kvstore.errors import LimitExceeded, MemoryUnavailable
from kvstore.profile.base import Profile
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.aio.link import AsyncConnection, AsyncLink
from kvstore_client.fetching import Fetching
from kvstore_client.lease import Protection, check_asked, check_slices
from kvstore_client.map_runs import Gap, Mapping
from kvstore_client.mapped import MappedItem
from kvstore_client.mapping import private_item
from kvstore_client.reading import ItemReader, cut_items, item_or_slice
from kvstore_client.values import FetchedItem, FetchedSlice, Plan
from kvstore_client.wanted import Sliced, Whole

AskProfile = Callable[[bytes], Awaitable[Profile]]


class AsyncLease(Protection):
    """As kvstore_client.Lease."""

    def __init__(
        self,
        link: AsyncLink,
        connection: AsyncConnection,
        profile_of: AskProfile,
        reply: pb.LookupReply | pb.ContainsReply,
        *,
        namespace: bytes,
        plan: Plan,
    ) -> None:
        super().__init__(link, connection, reply, namespace=namespace, plan=plan)
        self._link = link
        self._connection = connection
        self._profile_of = profile_of

    async def release(self) -> None:
        """As Lease.release."""
        if self._released:
            return
        self._released = True
        await self._link.hint(self._connection, "Release", self._release_request)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.release()

    async def fetch(
        self, *, first_block: int, block_count: int, state: bool, verify: bool
    ) -> AsyncGenerator[FetchedItem, None]:
        """See CacheClient.fetch."""
        check_asked(first_block, block_count, state=state)
        wanted = await self._wanted(first_block, block_count, state=state)
        async with aclosing(self._fetch(wanted, verify=verify)) as items:
            async for item in items:
                yield item

    async def _wanted(self, first_block: int, block_count: int, *, state: bool) -> Whole:
        profile = await self._profile_of(self._namespace) if self._needs_profile(state=state) else None
        return self._whole(first_block, block_count, profile, state=state)

    def _fetch(self, wanted: Whole, *, verify: bool) -> AsyncGenerator[FetchedItem, None]:
        timeout = self._seconds_for(wanted)
        return self._link.fetch(self._connection, Fetching(self.id, wanted, verify=verify), timeout=timeout)

    async def map(
        self, *, first_block: int, block_count: int, state: bool, verify: bool
    ) -> AsyncGenerator[MappedItem, None]:
        """See CacheClient.map."""
        check_asked(first_block, block_count, state=state)
        wanted = await self._wanted(first_block, block_count, state=state)
        memory = self._connection.session.memory
        if memory is None or memory.refused:
            found = self._fetched(Gap(0, len(wanted)), wanted, verify=verify)
        else:
            found = self._mapped(Mapping(wanted, memory, verify=verify))
        async with aclosing(found):
            async for item in found:
                yield item

    async def _mapped(self, mapping: Mapping) -> AsyncGenerator[MappedItem, None]:
        wanted = mapping.wanted
        timeout = self._seconds_for(wanted)
        replies = self._link.stream(self._connection, "Map", self._map_request(wanted), timeout=timeout)
        async with aclosing(replies):
            try:
                async for reply in replies:
                    for run in mapping.feed(reply):
                        if isinstance(run, Gap):
                            async with aclosing(self._fetched(run, wanted, verify=mapping.verify)) as items:
                                async for item in items:
                                    yield item
                        else:
                            for item in run:
                                yield item
            except MemoryUnavailable:
                mapping.memory.refused = True
        rest = mapping.rest()
        if rest is not None:
            async with aclosing(self._fetched(rest, wanted, verify=mapping.verify)) as items:
                async for item in items:
                    yield item

    async def _fetched(self, gap: Gap, wanted: Whole, *, verify: bool) -> AsyncGenerator[MappedItem, None]:
        part, number = gap.part_of(wanted)
        async with aclosing(self._fetch(part, verify=verify)) as items:
            async for item in items:
                if gap.begin <= number < gap.end:
                    yield private_item(item)
                number += 1

    async def fetch_slices(
        self, *, first_block: int, block_count: int, state: bool, slices: int, verify: bool
    ) -> AsyncIterator[FetchedItem | FetchedSlice]:
        """See CacheClient.fetch_slices."""
        check_asked(first_block, block_count)
        check_slices(slices)
        profile = await self._profile_of(self._namespace)
        wanted = self._sliced(first_block, block_count, profile, state=state, slices=slices)
        begun = False
        try:
            async with aclosing(self._slices(wanted, slices, verify=verify)) as found:
                async for each in found:
                    begun = True
                    yield each
            return
        except LimitExceeded:
            if begun:
                raise
        # The service has no room for a sliced fetch. Cut here, slices come when all has come.
        for each in cut_items([item async for item in self._fetch(wanted.whole(), verify=verify)], wanted):
            yield each

    async def _slices(
        self, wanted: Sliced, slices: int, *, verify: bool
    ) -> AsyncGenerator[FetchedItem | FetchedSlice, None]:
        timeout = self._seconds_for(wanted)
        request = self._slices_request(wanted, slices)
        reader = ItemReader(wanted, verify=verify)
        frames = self._link.stream(self._connection, "Fetch", request, timeout=timeout)
        async with aclosing(frames):
            async for frame in frames:
                for found in reader.feed(frame):
                    yield item_or_slice(found)
        reader.finish()
