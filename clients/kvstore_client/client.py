"""The client of one cache service."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from kvstore.clock import Clock, SystemClock
from kvstore.prefix.identity import NamespaceIdentity
from kvstore.types import BytesLike, Exactness, Lineage
from kvstore.v1 import cache_pb2 as pb
from kvstore_client import calls
from kvstore_client.address import Address, parse_address
from kvstore_client.answers import LookupAnswer, answer_fields
from kvstore_client.calls import check_owner
from kvstore_client.flight import Flight
from kvstore_client.handoff import HandoffTake, read_handoff
from kvstore_client.lease import Lease
from kvstore_client.link import Link
from kvstore_client.mapped import MappedItem
from kvstore_client.profiles import Profiles
from kvstore_client.prompt import PromptKeys
from kvstore_client.reservation import Reservation
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
class Lookup(LookupAnswer):
    """`lease` is None where it was not asked for or there is nothing to protect. `flight` is None where it was not asked
    for, or another's flight or a limit is in the way."""

    lease: Lease | None
    flight: Flight | None


@dataclass(frozen=True, slots=True)
class Contained:
    """Whether each key is held. `lease` is None where it was not asked for and where nothing is held."""

    held: tuple[bool, ...]
    lease: Lease | None


class CacheClient:
    """Talks to the service at `address`: the directory in which its sockets, kvstore.sock and session.sock, lie, or
    `tcp://host:port` for one on another machine; what parse_address made of either; or InProcessAddress(service) for one in
    this process. `owner` is a name for logs.

    To another machine goes TLS: `ca` is a PEM file of the certificates that the service's must come from, without it the
    system's; `token` is what lets a client in, or a Path of a file that holds it; `cert` and `key` are PEM files of a certificate
    of the client's own, for a service that asks for one. `insecure` leaves TLS out: whoever is on the way reads and changes
    everything. There, administration is refused (but at an address of parse_address with `admin`, whose token is for that
    alone), and `map` brings what `fetch` brings.

    Nothing is opened before the first call. Any number of threads may call. Every call ends by its deadline, with an
    answer or one of kvstore.errors: Unavailable when the service cannot be reached or goes away, which then lets
    further calls fail at once for a short while (see Deadlines), and otherwise what the service refused. The same
    object works again when the service is back. Leases, reservations and takes belong to the service process that
    gave them: after its end they are refused as UnknownLease and UnknownReservation, and releasing them does nothing.

    An object does not survive a fork: in the child its calls raise InvalidArgument; make a new one there.
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
        self._link = Link(
            parse_address(address, token=token, ca=ca, insecure=insecure, cert=cert, key=key),
            owner=check_owner(owner),
            deadlines=deadlines or Deadlines(),
            clock=clock or SystemClock(),
        )
        self._profiles = Profiles(self.namespaces)
        self._owner = owner

    def __repr__(self) -> str:
        return f"CacheClient({str(self._link.address)!r}, owner={self._owner!r}, boot={self.boot})"

    @property
    def boot(self) -> str | None:
        """The boot id of the service that this client is connected to, new at each of its starts; None if to none."""
        return self._link.boot

    def close(self) -> None:
        """End the session: leases, reservations and unconfirmed takes go back, calls under way end as Unavailable."""
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- reading --------------------------------------------------------------------------------------------

    def open_namespace(self, identity: NamespaceIdentity, *, name: str, policy: str = "") -> OpenedNamespace:
        """Make the namespace known, or confirm that it is known with this identity; GeometryMismatch if not with this.
        `policy` counts only where the namespace is new."""
        call = calls.open_namespace(self._link.deadlines, identity, name=name, policy=policy)
        opened = self._link.run(call)
        self._profiles.learn(opened.digest, identity.profile)
        return opened

    def prompt(self, namespace: OpenedNamespace) -> PromptKeys:
        """Keys of a prompt of this namespace that is to grow: extend it each turn, and look up its `keys`."""
        return PromptKeys(namespace)

    def lookup(
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
    ) -> Lookup:
        """How to resume a prompt of `prompt_tokens` tokens whose whole blocks have `keys`, which are sent as they are where
        they come from a PromptKeys (see `prompt`). One call whatever the length.
        With `lease`, what the plan reads is protected; without, the answer promises nothing.

        `exactness` BOUNDED lets approximate bytes and a replay of the last window do too; None: as the model was trained.
        `announce` says that the caller computes what the plan does not restore: others that ask for the same blocks are
        told, and may wait; end the flight when the blocks are stored or given up. With `wait_seconds` the call waits so
        long at most for blocks that others are computing, while that is expected to be sooner than computing them. Both
        need `lease`.
        """
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
        connection, reply = self._link.run_held(call)
        fields = answer_fields(reply)
        held = flight = None
        if reply.lease_id:
            held = Lease(
                self._link, connection, self._profiles, reply, namespace=namespace, plan=fields["plan"]
            )
        if reply.flight_id:
            flight = Flight(self._link, connection, flight_id=reply.flight_id)
        return Lookup(lease=held, flight=flight, **fields)

    def contains(
        self, namespace: bytes, keys: Sequence[bytes], *, use: bool = False, lease: bool = False
    ) -> Contained:
        """Which of these store keys of a keyed namespace are held, at most KEYS_PER_CALL in one call. With `use` they are used
        now; with `lease` they are protected too, and its blocks are those of the keys that are held, in their order. KeyedStore
        does all this, in as many calls as it takes."""
        call = calls.contains(self._link.deadlines, namespace, keys, use=use, lease=lease)
        connection, reply = self._link.run_held(call)
        held = tuple(mark == 1 for mark in reply.held)
        if not reply.lease_id:
            return Contained(held, None)
        return Contained(
            held,
            Lease(self._link, connection, self._profiles, reply, namespace=namespace, plan=NOTHING_PLANNED),
        )

    def fetch(
        self, lease: Lease, *, first_block: int, block_count: int, state: bool, verify: bool = True
    ) -> Iterator[FetchedItem]:
        """The blocks [first_block, first_block + block_count) in order, then what the plan's state is made of if asked for:
        one STATE, or, where the source is ROWS, the window rows of the blocks that rows_needed names. Each is yielded
        when it is complete and verified. Closing the iterator cancels the call.

        An item that turned out gone or damaged in the store has payload None, and those after it still come. Raises
        DamagedBytes when what arrives is not what was sent, UnknownLease when the lease has ended, also half-way.
        `verify=False` gives up the check of the payloads here; the service has checked them when it read them.
        """
        return lease.fetch(first_block=first_block, block_count=block_count, state=state, verify=verify)

    def map(
        self, lease: Lease, *, first_block: int, block_count: int, state: bool, verify: bool = True
    ) -> Iterator[MappedItem]:
        """What `fetch` brings, in its order, where it lies in the service's memory: nothing is copied, and nothing is
        checked before the item is asked to. What cannot lie there comes by Fetch, checked; without such memory everything
        does, and the items are the same to use.

        An item that turned out gone or damaged in the store has payload None. Raises DamagedBytes where the service says
        what cannot be, Unavailable where it breaks the session's rules, and otherwise as `fetch`. `verify=False` gives up
        the checksums, never the look whether the bytes are the item's still.
        """
        return lease.map(first_block=first_block, block_count=block_count, state=state, verify=verify)

    def fetch_slices(
        self,
        lease: Lease,
        *,
        first_block: int,
        block_count: int,
        state: bool,
        slices: int,
        verify: bool = True,
    ) -> Iterator[FetchedItem | FetchedSlice]:
        """What `fetch` brings, cut by layers so that the first layers of all blocks are here early: first the state's
        items, then slice 0 of every block in order, then slice 1 of every block, and so on. The slices are those of
        kvstore.profile.layout.layer_slices(profile, slices), which may be fewer.

        Of a block of which one slice is missing all later ones are. Where the service has no room for a sliced fetch, they
        are cut here, and the first comes when all blocks have come. Raises as `fetch`.
        """
        return lease.fetch_slices(
            first_block=first_block, block_count=block_count, state=state, slices=slices, verify=verify
        )

    # ---- writing --------------------------------------------------------------------------------------------

    def reserve(self, namespace: bytes, items: Sequence[ReserveItem]) -> Reservation:
        """Claim items to write, parents before their children. Use the answer as a context manager."""
        connection, reply = self._link.run_held(calls.reserve(self._link.deadlines, namespace, items))
        return Reservation(self._link, connection, items, reply)

    # ---- handoffs -------------------------------------------------------------------------------------------

    def put_handoff(
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
        """Leave a state for another worker; the ticket under which it takes it. `seconds` 0: the service's default."""
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
        return self._link.run(call)

    def take_handoff(self, namespace: bytes, ticket: bytes) -> HandoffTake:
        """UnknownTicket when it is not here (any more), LimitExceeded when all its takes are out."""
        connection = self._link.connection()
        frames = self._link.stream(
            connection,
            "TakeHandoff",
            pb.TakeHandoffRequest(namespace=namespace, ticket=ticket),
            timeout=self._link.deadlines.handoff,
        )
        return HandoffTake(**read_handoff(frames), _link=self._link, _connection=connection)

    def drop_handoff(self, namespace: bytes, ticket: bytes) -> bool:
        """Nobody will take it any more. Whether it was there; what is out now is its takers'."""
        return self._link.run(calls.drop_handoff(self._link.deadlines, namespace, ticket))

    # ---- administration -------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        """The service's figures by name."""
        return dict(self._link.run(calls.stats(self._link.deadlines)).values)

    def buffered_because(self) -> str:
        """Why the service's segments pass through the page cache; empty where they do not."""
        return str(self._link.run(calls.stats(self._link.deadlines)).buffered_because)

    def clear(self, namespace: bytes = b"") -> Cleared:
        """Forget everything of one namespace, or of all."""
        return self._link.run(calls.clear(self._link.deadlines, namespace))

    def drain(self, seconds: float) -> int:
        """Let the service refuse new work and wait up to `seconds` for what is under way; how much is then still open."""
        return self._link.run(calls.drain(self._link.deadlines, seconds))

    def set_policy(self, namespace: bytes, policy: str) -> OpenedNamespace:
        """`zero`, `endpoints`, `periodic:N`, `full` or `full+overlap`. PolicyTooLarge when the states of one prompt of the
        longest length would not fit the states' share of the disk."""
        return self._link.run(calls.set_policy(self._link.deadlines, namespace, policy))

    def drop_states(
        self, namespace: bytes = b"", tier: Literal["both", "pool", "ssd"] = "both"
    ) -> DroppedStates:
        """Drop window states that nobody leases, of one namespace or of all."""
        return self._link.run(calls.drop_states(self._link.deadlines, namespace, tier))

    def set_memory(self, *, cache: int | None = None, pool: int | None = None) -> MemoryBudgets:
        """Change what the service's block cache and pool may take of host memory, in bytes, until its next start; None leaves
        one as it is, and without either this only tells. LimitExceeded, and nothing changed, past what the service has."""
        return self._link.run(calls.set_memory(self._link.deadlines, cache, pool))

    def set_eviction(self, policy: str = "") -> Eviction:
        """Change which blocks go first where room is wanted, until the service's next start; without a name this only tells.
        InvalidArgument for an unknown name, or while another policy is on its way in."""
        return self._link.run(calls.set_eviction(self._link.deadlines, policy))

    def tenants(self) -> list[Tenant]:
        """Those that have a namespace, and what each holds and may hold."""
        return self._link.run(calls.tenants(self._link.deadlines))

    def erase_tenant(self, tenant: str, *, timeout: float = 3600.0) -> Iterator[Erased]:
        """Forget everything of a tenant, and overwrite where it lay on the disk. How far it is, when it is forgotten and about every
        half second, the last one `done`; within `timeout` seconds, or Unavailable. The work goes on when nobody listens.
        UnknownNamespace where it has no namespace, LimitExceeded while another tenant is erased."""
        self._link.check_served("EraseTenant")
        request = pb.EraseTenantRequest(tenant=tenant)
        replies = self._link.stream(self._link.connection(), "EraseTenant", request, timeout=timeout)
        with closing(replies):
            for reply in replies:
                yield calls.erased(reply)

    def namespaces(self) -> list[OpenedNamespace]:
        return self._link.run(calls.namespaces(self._link.deadlines))
