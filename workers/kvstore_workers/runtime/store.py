"""The prefix store as one worker sees it: one namespace, opened when first needed and again after a restart."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TypeVar, cast

import grpc

from kvstore.clock import Clock
from kvstore.errors import DamagedBytes, KvstoreError, Unavailable, UnknownNamespace
from kvstore.prefix.identity import NamespaceIdentity
from kvstore.profile.layout import layer_slices
from kvstore.types import BytesLike, Exactness, Lineage
from kvstore_client.client import CacheClient, Lookup
from kvstore_client.flight import Flight
from kvstore_client.handoff import HandoffTake
from kvstore_client.lease import Lease
from kvstore_client.reservation import Reservation
from kvstore_client.values import Costs, FetchedItem, FetchedSlice, Plan, ReserveItem
from kvstore_workers.runtime.need import WantedItem, block_items, state_items
from kvstore_workers.runtime.rates import Rates

log = logging.getLogger(__name__)

STORE_FAILURES = (KvstoreError, grpc.RpcError)
"""What a worker takes for 'the store has nothing': anything else is a fault of the program and is raised."""

EAGER = Costs(
    seconds_per_layer_token=1.0,
    seconds_per_ssd_byte=1e-15,
    seconds_per_memory_byte=1e-15,
    seconds_per_fetch=1e-15,
    assumed=True,
)
"""Prices at which a plan reads every block that is held: restoring always runs fewer layer-tokens than computing."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fetched:
    """Blocks in order from the first, and what the plan's window state is made of, if that was asked for. Checked
    against the profile's sizes."""

    blocks: tuple[BytesLike, ...]
    state: tuple[BytesLike, ...]
    seconds: float


class PrefixStore:
    """One namespace of a cache. May be used from several threads; every call raises STORE_FAILURES when it fails."""

    def __init__(
        self,
        cache: CacheClient,
        identity: NamespaceIdentity,
        *,
        name: str,
        policy: str = "",
        clock: Clock,
        rates: Rates | None = None,
    ) -> None:
        self._cache = cache
        self._identity = identity
        self._name = name
        self._policy = policy
        self._clock = clock
        self._lock = threading.Lock()
        self._is_open = False
        # For the log only: threads that race write a line twice at worst.
        self._is_away = False
        self.profile = identity.profile
        self.root = bytes(identity.digest())
        self.rates = rates if rates is not None else Rates()

    @property
    def namespace(self) -> bytes:
        """The namespace's digest once the store has confirmed it, else empty."""
        return self.root if self._is_open else b""

    def open(self) -> None:
        """Make the namespace known if this has not been done yet. GEOMETRY_MISMATCH when its name is another's."""
        with self._lock:
            if self._is_open:
                return
            opened = self._cache.open_namespace(self._identity, name=self._name, policy=self._policy)
            assert opened.digest == self.root, "the client refuses a service that digests differently"
            if self._policy and opened.policy != self._policy:
                log.warning(
                    "the namespace has the policy %s, and keeps it: %s counts for a new one only",
                    opened.policy,
                    self._policy,
                )
            self._is_open = True

    def lookup(
        self,
        keys: Sequence[bytes],
        *,
        prompt_tokens: int,
        costs: Costs | None = None,
        exactness: Exactness | None = None,
        announce: bool = False,
        wait_seconds: float = 0.0,
    ) -> Lookup:
        """A leased plan. `costs` None: this worker's measured ones. See CacheClient.lookup for the rest."""
        costs = self.rates.costs() if costs is None else costs
        return self._opened(
            lambda: self._cache.lookup(
                self.root,
                keys,
                prompt_tokens=prompt_tokens,
                costs=costs,
                lease=True,
                exactness=exactness,
                announce=announce,
                wait_seconds=wait_seconds,
            )
        )

    def fetch(
        self, looked_up: Lookup, *, blocks: int, with_state: bool, check: Callable[[], None]
    ) -> Fetched:
        """The first `blocks` blocks under the lookup's lease, and with `with_state` the plan's window state.

        `check` is called after each item and may raise to give up. DamagedBytes for anything missing, of another size,
        out of order, or of BOUNDED lineage under an EXACT plan.
        """
        lease = _lease(looked_up)
        plan = looked_up.plan
        state = state_items(plan, self.profile) if with_state else ()
        wanted = [*block_items(self.profile, blocks), *state]
        began = self._clock.monotonic()
        first_at: float | None = None
        payloads: list[BytesLike] = []
        # Closed at once when this is given up: the service then stops reading.
        fetch = self._cache.fetch(lease, first_block=0, block_count=blocks, state=bool(state))
        with closing(cast("Generator[FetchedItem, None, None]", fetch)) as items:
            for item in items:
                payloads.append(_checked(item, wanted, len(payloads), exact=_is_exact(plan)))
                first_at = self._clock.monotonic() if first_at is None else first_at
                check()
        if len(payloads) != len(wanted):
            raise DamagedBytes(
                "the fetch ended early", field="items", value=len(payloads), allowed=f"{len(wanted)} items"
            )
        ended = self._clock.monotonic()
        if first_at is not None:
            rest = sum(memoryview(payload).nbytes for payload in payloads[1:])
            self.note_fetch(plan, began=began, first_at=first_at, ended=ended, rest_bytes=rest)
        return Fetched(tuple(payloads[:blocks]), tuple(payloads[blocks:]), ended - began)

    def fetch_slices(
        self, looked_up: Lookup, *, blocks: int, slices: int, check: Callable[[], None]
    ) -> Iterator[tuple[int | None, BytesLike]]:
        """The same bytes as `fetch`, so that the first layers are complete first: the window state's items as
        (None, payload), then slice 0 of every block as (0, bytes), slice 1 of every block, and so on."""
        lease = _lease(looked_up)
        plan = looked_up.plan
        state = state_items(plan, self.profile)
        cuts = layer_slices(self.profile, slices)
        exact = _is_exact(plan)
        taken = 0
        fetch = self._cache.fetch_slices(
            lease, first_block=0, block_count=blocks, state=bool(state), slices=slices
        )
        with closing(cast("Generator[FetchedItem | FetchedSlice, None, None]", fetch)) as items:
            for item in items:
                if isinstance(item, FetchedItem):
                    yield None, _checked(item, state, taken, exact=exact)
                else:
                    number, index = divmod(taken - len(state), blocks)
                    cut = cuts[number]
                    yield number, _checked_slice(item, number, index, cut.end - cut.offset, exact=exact)
                taken += 1
                check()
        if taken != len(state) + blocks * len(cuts):
            raise DamagedBytes(
                "the fetch ended early",
                field="items",
                value=taken,
                allowed=f"{len(state) + blocks * len(cuts)} items",
            )

    def reserve(self, items: Sequence[ReserveItem]) -> Reservation:
        return self._opened(lambda: self._cache.reserve(self.root, items))

    def leave(self, *, position: int, payload: bytes, note: bytes, takes: int, lineage: Lineage) -> bytes:
        """Leave a state for `takes` other workers; their ticket."""
        return self._opened(
            lambda: self._cache.put_handoff(
                self.root, position=position, payload=payload, note=note, takes=takes, lineage=lineage
            )
        )

    def drop(self, ticket: bytes) -> bool:
        """Drop a handoff that nobody will take. Whether it was there. Failing is no failure: it ends by itself."""
        try:
            return self._opened(lambda: self._cache.drop_handoff(self.root, ticket))
        except STORE_FAILURES as error:
            log.info("a handoff is left to its deadline: %s", error)
            return False

    def take(self, ticket: bytes) -> HandoffTake:
        return self._opened(lambda: self._cache.take_handoff(self.root, ticket))

    def release(self, looked_up: Lookup) -> None:
        """End the lookup's lease. A lease that can't be ended now ends by itself, so failing is no failure."""
        if looked_up.lease is not None:
            try:
                looked_up.lease.release()
            except STORE_FAILURES as error:
                log.info("a lease is left to its deadline: %s", error)

    def end_flight(self, flight: Flight) -> None:
        """Say that this worker computes no more of what it announced. Failing is no failure: it ends by itself."""
        try:
            flight.end()
        except STORE_FAILURES as error:
            log.info("a flight is left to its deadline: %s", error)

    def confirm(self, take: HandoffTake) -> None:
        """End a take for good. One that can't be confirmed now goes back by itself, so failing is no failure."""
        try:
            take.confirm()
        except STORE_FAILURES as error:
            log.info("a handoff is left to its deadline: %s", error)

    def close(self) -> None:
        self._cache.close()

    def _opened(self, call: Callable[[], T]) -> T:
        """`call` with the namespace open; a service that has started again on an empty directory is told it again."""
        try:
            self.open()
            try:
                result = call()
            except UnknownNamespace:
                with self._lock:
                    self._is_open = False
                self.open()
                result = call()
        except Unavailable as error:
            if not self._is_away:
                self._is_away = True
                log.warning("the store is away, going on without it: %s", error)
            raise
        if self._is_away:
            self._is_away = False
            log.warning("the store is back")
        return result

    def note_fetch(self, plan: Plan, *, began: float, first_at: float, ended: float, rest_bytes: int) -> None:
        """Note how long a fetch took: times are monotonic seconds, `rest_bytes` came after the first item."""
        self.rates.fetched(
            first_seconds=first_at - began,
            rest_seconds=ended - first_at,
            rest_bytes=rest_bytes,
            from_memory=plan.chosen.bytes_memory >= plan.chosen.bytes_ssd,
        )


def _lease(looked_up: Lookup) -> Lease:
    if looked_up.lease is None:
        raise DamagedBytes("the plan reads blocks but came without a lease", field="lease", value=0)
    return looked_up.lease


def _is_exact(plan: Plan) -> bool:
    return plan.exactness is Exactness.EXACT


def _checked(item: FetchedItem, wanted: Sequence[WantedItem], place: int, *, exact: bool) -> BytesLike:
    if place >= len(wanted):
        raise DamagedBytes(
            "more items than asked for", field="items", value=place + 1, allowed=f"{len(wanted)} items"
        )
    expected = wanted[place]
    name = f"{item.kind.name.lower()} {item.index}"
    if (item.kind, item.index) != (expected.kind, expected.index):
        raise DamagedBytes("items out of order", field="item", value=name, allowed=str(expected))
    return _checked_bytes(name, item.payload, item.lineage, expected.length, exact=exact)


def _checked_slice(item: FetchedSlice, number: int, index: int, length: int, *, exact: bool) -> BytesLike:
    name = f"slice {item.slice} of block {item.index}"
    if (item.slice, item.index) != (number, index):
        raise DamagedBytes(
            "items out of order", field="item", value=name, allowed=f"slice {number} of block {index}"
        )
    return _checked_bytes(name, item.payload, item.lineage, length, exact=exact)


def _checked_bytes(
    name: str, payload: BytesLike | None, lineage: Lineage | None, length: int, *, exact: bool
) -> BytesLike:
    if payload is None:
        raise DamagedBytes("an item turned out missing", field="item", value=name)
    if len(payload) != length:
        raise DamagedBytes(
            f"{name} has another size", field="length", value=len(payload), allowed=f"{length} bytes"
        )
    if exact and lineage is not Lineage.EXACT:
        raise DamagedBytes(f"{name} is approximate under an exact plan", field="lineage", value=lineage)
    return payload
