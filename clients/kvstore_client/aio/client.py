"""The client of one cache service, for programs on an event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from kvstore.clock import Clock, SystemClock
from kvstore.prefix.identity import NamespaceIdentity
from kvstore.profile.base import Profile
from kvstore.types import BytesLike, Exactness, Lineage
from kvstore.v1 import cache_pb2 as pb
from kvstore_client import calls
from kvstore_client.address import Address, parse_address
from kvstore_client.aio.flight import AsyncFlight
from kvstore_client.aio.handoff import AsyncHandoffTake, read_handoff
from kvstore_client.aio.lease import AsyncLease
from kvstore_client.aio.link import AsyncLink
from kvstore_client.aio.reservation import AsyncReservation
from kvstore_client.answers import LookupAnswer, answer_fields
from kvstore_client.calls import check_owner
from kvstore_client.mapped import MappedItem
from kvstore_client.profiles import KnownProfiles
from kvstore_client.prompt import PromptKeys
from kvstore_client.values import (
    NOTHING_PLANNED,
    Cleared,
    Costs,
    Deadlines,
    DroppedStates,
    Erased,
    Eviction,
    FetchedItem,
    FetchedSlice,
    MemoryBudgets,
    OpenedNamespace,
    ReserveItem,
    Tenant,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncLookup(LookupAnswer):
    """As kvstore_client.Lookup."""

    lease: AsyncLease | None
    flight: AsyncFlight | None


@dataclass(frozen=True, slots=True)
class AsyncContained:
    """As Contained."""

    held: tuple[bool, ...]
    lease: AsyncLease | None


class AsyncCacheClient:
    """CacheClient with its methods as coroutines and its iterators as asynchronous ones: same arguments, answers, errors and
    deadlines. Runs under asyncio and uvloop.

    Nothing is opened before the first call. All tasks of one loop may call; a call from another loop, or after a fork,
    raises InvalidArgument. Cancelling a task that waits for a call cancels the call. Close an iterator that is not read to
    its end (contextlib.aclosing), so that the service stops reading. Checksums are made on the loop.
    """

    def __init__(
        self,
        address: str | Path | Address,
        *,
        owner: str,
        token: str | Path | None = None,
        ca: str | Path | None = None,
        insecure: bool = False,
        cert: str | Path | None = None,
        key: str | Path | None = None,
        deadlines: Deadlines | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._link = AsyncLink(
            parse_address(address, token=token, ca=ca, insecure=insecure, cert=cert, key=key),
            owner=check_owner(owner),
            deadlines=deadlines or Deadlines(),
            clock=clock or SystemClock(),
        )
        self._profiles = KnownProfiles()
        self._owner = owner

    def __repr__(self) -> str:
        return f"AsyncCacheClient({str(self._link.address)!r}, owner={self._owner!r}, boot={self.boot})"

    @property
    def boot(self) -> str | None:
        """As CacheClient.boot."""
        return self._link.boot

    async def close(self) -> None:
        """As CacheClient.close."""
        await self._link.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ---- reading --------------------------------------------------------------------------------------------

    async def open_namespace(
        self, identity: NamespaceIdentity, *, name: str, policy: str = ""
    ) -> OpenedNamespace:
        """As CacheClient.open_namespace."""
        call = calls.open_namespace(self._link.deadlines, identity, name=name, policy=policy)
        opened = await self._link.run(call)
        self._profiles.learn(opened.digest, identity.profile)
        return opened

    def prompt(self, namespace: OpenedNamespace) -> PromptKeys:
        """As CacheClient.prompt. Nothing waits here: keys are made on the loop."""
        return PromptKeys(namespace)

    async def lookup(
        self,
        namespace: bytes,
        keys: Sequence[bytes],
        *,
        prompt_tokens: int,
        costs: Costs | None = None,
        lease: bool = True,
        exactness: Exactness | None = None,
        announce: bool = False,
        wait_seconds: float = 0.0,
    ) -> AsyncLookup:
        """As CacheClient.lookup."""
        call = calls.lookup(
            self._link.deadlines,
            namespace,
            keys,
            prompt_tokens=prompt_tokens,
            costs=costs,
            lease=lease,
            exactness=exactness,
            announce=announce,
            wait_seconds=wait_seconds,
        )
        connection, reply = await self._link.run_held(call)
        fields = answer_fields(reply)
        held = flight = None
        if reply.lease_id:
            held = AsyncLease(
                self._link, connection, self._profile_of, reply, namespace=namespace, plan=fields["plan"]
            )
        if reply.flight_id:
            flight = AsyncFlight(self._link, connection, flight_id=reply.flight_id)
        return AsyncLookup(lease=held, flight=flight, **fields)

    async def contains(
        self, namespace: bytes, keys: Sequence[bytes], *, use: bool = False, lease: bool = False
    ) -> AsyncContained:
        """As CacheClient.contains."""
        call = calls.contains(self._link.deadlines, namespace, keys, use=use, lease=lease)
        connection, reply = await self._link.run_held(call)
        held = tuple(mark == 1 for mark in reply.held)
        if not reply.lease_id:
            return AsyncContained(held, None)
        plan = NOTHING_PLANNED
        return AsyncContained(
            held,
            AsyncLease(self._link, connection, self._profile_of, reply, namespace=namespace, plan=plan),
        )

    def fetch(
        self, lease: AsyncLease, *, first_block: int, block_count: int, state: bool, verify: bool = True
    ) -> AsyncIterator[FetchedItem]:
        """As CacheClient.fetch; what is wrong is raised where the first item is awaited."""
        return lease.fetch(first_block=first_block, block_count=block_count, state=state, verify=verify)

    def map(
        self, lease: AsyncLease, *, first_block: int, block_count: int, state: bool, verify: bool = True
    ) -> AsyncIterator[MappedItem]:
        """As CacheClient.map; what is wrong is raised where the first item is awaited."""
        return lease.map(first_block=first_block, block_count=block_count, state=state, verify=verify)

    def fetch_slices(
        self,
        lease: AsyncLease,
        *,
        first_block: int,
        block_count: int,
        state: bool,
        slices: int,
        verify: bool = True,
    ) -> AsyncIterator[FetchedItem | FetchedSlice]:
        """As CacheClient.fetch_slices; what is wrong is raised where the first item is awaited."""
        return lease.fetch_slices(
            first_block=first_block, block_count=block_count, state=state, slices=slices, verify=verify
        )

    # ---- writing --------------------------------------------------------------------------------------------

    async def reserve(self, namespace: bytes, items: Sequence[ReserveItem]) -> AsyncReservation:
        """As CacheClient.reserve. Use the answer as an asynchronous context manager."""
        connection, reply = await self._link.run_held(calls.reserve(self._link.deadlines, namespace, items))
        return AsyncReservation(self._link, connection, items, reply)

    # ---- handoffs -------------------------------------------------------------------------------------------

    async def put_handoff(
        self,
        namespace: bytes,
        *,
        position: int,
        payload: BytesLike,
        takes: int = 1,
        seconds: float = 0,
        note: bytes = b"",
        lineage: Lineage = Lineage.EXACT,
    ) -> bytes:
        """As CacheClient.put_handoff."""
        call = calls.put_handoff(
            self._link.deadlines,
            namespace,
            position=position,
            payload=payload,
            takes=takes,
            seconds=seconds,
            note=note,
            lineage=lineage,
        )
        return await self._link.run(call)

    async def take_handoff(self, namespace: bytes, ticket: bytes) -> AsyncHandoffTake:
        """As CacheClient.take_handoff."""
        connection = await self._link.connection()
        frames = self._link.stream(
            connection,
            "TakeHandoff",
            pb.TakeHandoffRequest(namespace=namespace, ticket=ticket),
            timeout=self._link.deadlines.handoff,
        )
        return AsyncHandoffTake(**await read_handoff(frames), _link=self._link, _connection=connection)

    async def drop_handoff(self, namespace: bytes, ticket: bytes) -> bool:
        """As CacheClient.drop_handoff."""
        return await self._link.run(calls.drop_handoff(self._link.deadlines, namespace, ticket))

    # ---- administration -------------------------------------------------------------------------------------

    async def stats(self) -> dict[str, float]:
        """As CacheClient.stats."""
        return dict((await self._link.run(calls.stats(self._link.deadlines))).values)

    async def buffered_because(self) -> str:
        """As CacheClient.buffered_because."""
        return str((await self._link.run(calls.stats(self._link.deadlines))).buffered_because)

    async def clear(self, namespace: bytes = b"") -> Cleared:
        """As CacheClient.clear."""
        return await self._link.run(calls.clear(self._link.deadlines, namespace))

    async def drain(self, seconds: float) -> int:
        """As CacheClient.drain."""
        return await self._link.run(calls.drain(self._link.deadlines, seconds))

    async def set_policy(self, namespace: bytes, policy: str) -> OpenedNamespace:
        """As CacheClient.set_policy."""
        return await self._link.run(calls.set_policy(self._link.deadlines, namespace, policy))

    async def drop_states(
        self, namespace: bytes = b"", tier: Literal["both", "pool", "ssd"] = "both"
    ) -> DroppedStates:
        """As CacheClient.drop_states."""
        return await self._link.run(calls.drop_states(self._link.deadlines, namespace, tier))

    async def set_memory(self, *, cache: int | None = None, pool: int | None = None) -> MemoryBudgets:
        """As CacheClient.set_memory."""
        return await self._link.run(calls.set_memory(self._link.deadlines, cache, pool))

    async def set_eviction(self, policy: str = "") -> Eviction:
        """As CacheClient.set_eviction."""
        return await self._link.run(calls.set_eviction(self._link.deadlines, policy))

    async def tenants(self) -> list[Tenant]:
        """As CacheClient.tenants."""
        return await self._link.run(calls.tenants(self._link.deadlines))

    async def erase_tenant(self, tenant: str, *, timeout: float = 3600.0) -> AsyncIterator[Erased]:
        """As CacheClient.erase_tenant."""
        self._link.check_served("EraseTenant")
        request = pb.EraseTenantRequest(tenant=tenant)
        replies = self._link.stream(await self._link.connection(), "EraseTenant", request, timeout=timeout)
        async with aclosing(replies):
            async for reply in replies:
                yield calls.erased(reply)

    async def namespaces(self) -> list[OpenedNamespace]:
        """As CacheClient.namespaces."""
        return await self._link.run(calls.namespaces(self._link.deadlines))

    # ---- inside ---------------------------------------------------------------------------------------------

    async def _profile_of(self, namespace: bytes) -> Profile:
        found = self._profiles.known(namespace)
        return self._profiles.learn_from(await self.namespaces(), namespace) if found is None else found
