"""The prefix store as one worker sees it: one namespace, opened when first needed and again after a restart."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TypeVar, cast

import grpc

from kvstore.clock import Clock
from kvstore.errors import DamagedBytes, KvstoreError, UnknownNamespace
from kvstore.prefix.identity import NamespaceIdentity
from kvstore.types import ItemKind, Lineage
from kvstore_client.client import CacheClient, Lookup
from kvstore_client.handoff import HandoffTake
from kvstore_client.reservation import Reservation
from kvstore_client.values import Costs, FetchedItem, Plan, ReserveItem
from kvstore_workers.runtime.rates import Rates

log = logging.getLogger(__name__)

STORE_FAILURES = (KvstoreError, grpc.RpcError)
"""What a worker takes for 'the store has nothing': anything else is a fault of the program and is raised."""

EAGER = Costs(
    seconds_per_layer_token=1.0,
    seconds_per_ssd_byte=1e-15,
    seconds_per_memory_byte=1e-15,
    seconds_per_fetch=1e-15,
)
"""Prices at which a plan reads every block that is held: restoring always runs fewer layer-tokens than computing."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fetched:
    """Blocks in order from the first, and the state if one was asked for. Checked against the profile's sizes."""

    blocks: tuple[bytes, ...]
    state: bytes | None
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
            self._is_open = True

    def lookup(self, keys: Sequence[bytes], *, prompt_tokens: int, costs: Costs | None = None) -> Lookup:
        """A leased plan. `costs` None: this worker's measured ones."""
        costs = self.rates.costs() if costs is None else costs
        return self._opened(
            lambda: self._cache.lookup(self.root, keys, prompt_tokens=prompt_tokens, costs=costs, lease=True)
        )

    def fetch(
        self, looked_up: Lookup, *, blocks: int, state_at: int | None, check: Callable[[], None]
    ) -> Fetched:
        """The first `blocks` blocks under the lookup's lease, and the state at `state_at` unless None.

        `check` is called after each item and may raise to give up. DamagedBytes for anything missing, of another size,
        out of order, or of BOUNDED lineage under an EXACT plan.
        """
        lease = looked_up.lease
        if lease is None:
            raise DamagedBytes("the plan reads blocks but came without a lease", field="lease", value=0)
        block_bytes = self.profile.block_bytes
        wanted = [(ItemKind.BLOCK, index, block_bytes) for index in range(blocks)]
        if state_at is not None:
            wanted.append((ItemKind.STATE, state_at, self.profile.state_bytes))
        began = self._clock.monotonic()
        first_at: float | None = None
        payloads: list[bytes] = []
        # Closed at once when this is given up: the service then stops reading.
        fetch = self._cache.fetch(lease, first_block=0, block_count=blocks, state=state_at is not None)
        with closing(cast("Generator[FetchedItem, None, None]", fetch)) as items:
            for item in items:
                first_at = self._clock.monotonic() if first_at is None else first_at
                payloads.append(_checked(item, wanted, len(payloads)))
                check()
        if len(payloads) != len(wanted):
            raise DamagedBytes(
                "the fetch ended early", field="items", value=len(payloads), allowed=f"{len(wanted)} items"
            )
        ended = self._clock.monotonic()
        self._note(looked_up.plan, payloads, began=began, first_at=first_at, ended=ended)
        state = payloads.pop() if state_at is not None else None
        return Fetched(tuple(payloads), state, ended - began)

    def reserve(self, items: Sequence[ReserveItem]) -> Reservation:
        return self._opened(lambda: self._cache.reserve(self.root, items))

    def leave(self, *, position: int, payload: bytes, note: bytes) -> bytes:
        """Leave a state for one other worker; its ticket."""
        return self._opened(
            lambda: self._cache.put_handoff(self.root, position=position, payload=payload, note=note)
        )

    def take(self, ticket: bytes) -> HandoffTake:
        return self._opened(lambda: self._cache.take_handoff(self.root, ticket))

    def release(self, looked_up: Lookup) -> None:
        """End the lookup's lease. A lease that can't be ended now ends by itself, so failing is no failure."""
        if looked_up.lease is not None:
            try:
                looked_up.lease.release()
            except STORE_FAILURES as error:
                log.info("a lease is left to its deadline: %s", error)

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
        self.open()
        try:
            return call()
        except UnknownNamespace:
            with self._lock:
                self._is_open = False
            self.open()
            return call()

    def _note(
        self, plan: Plan, payloads: Sequence[bytes], *, began: float, first_at: float | None, ended: float
    ) -> None:
        if first_at is None:
            return
        self.rates.fetched(
            first_seconds=first_at - began,
            rest_seconds=ended - first_at,
            rest_bytes=sum(len(payload) for payload in payloads[1:]),
            from_memory=plan.chosen.bytes_memory >= plan.chosen.bytes_ssd,
        )


def _checked(item: FetchedItem, wanted: Sequence[tuple[ItemKind, int, int]], place: int) -> bytes:
    if place >= len(wanted):
        raise DamagedBytes(
            "more items than asked for", field="items", value=place + 1, allowed=f"{len(wanted)} items"
        )
    kind, index, length = wanted[place]
    name = f"{item.kind.name.lower()} {item.index}"
    if (item.kind, item.index) != (kind, index):
        raise DamagedBytes(
            "items out of order", field="item", value=name, allowed=f"{kind.name.lower()} {index}"
        )
    if item.payload is None:
        raise DamagedBytes("an item turned out missing", field="item", value=name)
    if len(item.payload) != length:
        raise DamagedBytes(
            f"{name} has another size", field="length", value=len(item.payload), allowed=f"{length} bytes"
        )
    if item.lineage is not Lineage.EXACT:
        raise DamagedBytes(f"{name} is approximate under an exact plan", field="lineage", value=item.lineage)
    return item.payload
