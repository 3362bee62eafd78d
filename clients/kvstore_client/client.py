"""The client of one cache service on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, cast

from kvstore.clock import Clock, SystemClock
from kvstore.errors import GeometryMismatch, InvalidArgument, UnknownSession
from kvstore.prefix.identity import NamespaceIdentity
from kvstore.types import BytesLike, Exactness, Lineage
from kvstore.v1 import cache_pb2 as pb
from kvstore_client.checks import crc32
from kvstore_client.flight import Flight
from kvstore_client.handoff import HandoffTake, handoff_frames, read_handoff
from kvstore_client.lease import Lease
from kvstore_client.link import Connection, Link
from kvstore_client.mapped import MappedItem
from kvstore_client.messages import (
    count,
    from_costs,
    from_coverage,
    from_namespace,
    from_plan,
    joined_keys,
    to_costs,
    to_reserve_item,
)
from kvstore_client.profiles import Profiles
from kvstore_client.prompt import PromptKeys
from kvstore_client.reservation import Reservation
from kvstore_client.values import (
    Cleared,
    Costs,
    Coverage,
    Deadlines,
    DroppedStates,
    FetchedItem,
    FetchedSlice,
    OpenedNamespace,
    Plan,
    ReserveItem,
)

OWNER_MAX = 128
HANDOFF_TAKES_MAX = (1 << 32) - 1
DRAIN_SECONDS_MAX = 86_400.0
WAIT_SECONDS_MAX = 3600.0
_TIERS = {"both": pb.STATE_TIER_UNSPECIFIED, "pool": pb.STATE_TIER_POOL, "ssd": pb.STATE_TIER_SSD}


@dataclass(frozen=True, slots=True)
class Lookup:
    """`lease` is None where it was not asked for or there is nothing to protect. `blocks_held`: blocks held without a
    gap from the start, whether or not the plan uses them. `blocks_in_flight`: blocks right after those that others are
    computing, the first of them since `in_flight_seconds`. `waited_seconds`: how long the call waited for others.
    `flight` is None where it was not asked for, or another's flight or a limit is in the way. `costs` are the rates that
    the plan was priced with."""

    plan: Plan
    lease: Lease | None
    blocks_held: int
    blocks_in_flight: int
    in_flight_seconds: float
    waited_seconds: float
    flight: Flight | None
    coverage: Coverage
    costs: Costs


class CacheClient:
    """Talks to the service whose sockets, kvstore.sock and session.sock, lie in `directory`. `owner` is a name for logs.

    Nothing is opened before the first call. Any number of threads may call. Every call ends by its deadline, with an
    answer or one of kvstore.errors: Unavailable when the service cannot be reached or goes away, which then lets
    further calls fail at once for a short while (see Deadlines), and otherwise what the service refused. The same
    object works again when the service is back. Leases, reservations and takes belong to the service process that
    gave them: after its end they are refused as UnknownLease and UnknownReservation, and releasing them does nothing.

    An object does not survive a fork: in the child its calls raise InvalidArgument; make a new one there.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        owner: str,
        deadlines: Deadlines | None = None,
        clock: Clock | None = None,
    ) -> None:
        if not (0 < len(owner) <= OWNER_MAX and owner.isascii() and owner.isprintable()):
            raise InvalidArgument(
                "not an owner",
                field="owner",
                value=owner,
                allowed=f"1 to {OWNER_MAX} printable ASCII characters",
            )
        self._link = Link(
            Path(directory).absolute(),
            owner=owner,
            deadlines=deadlines or Deadlines(),
            clock=clock or SystemClock(),
        )
        self._profiles = Profiles(self.namespaces)
        self._directory = directory
        self._owner = owner

    def __repr__(self) -> str:
        return f"CacheClient({str(self._directory)!r}, owner={self._owner!r}, boot={self.boot})"

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
        request = pb.OpenNamespaceRequest(
            name=name,
            profile=pb.Profile(name=identity.profile.name, geometry=identity.profile.geometry()),
            weights_revision=identity.weights_revision,
            numerics=identity.numerics,
            adapter=identity.adapter,
            tenant_salt=identity.tenant_salt,
            policy=policy,
        )
        reply = self._link.repeatable(
            lambda connection: self._link.call(
                connection, "OpenNamespace", request, timeout=self._link.deadlines.control
            )
        )
        opened = from_namespace(reply)
        if opened.digest != identity.digest():
            # Keys are chained from our digest: with another one, nothing would ever be found, and nobody would say why.
            raise GeometryMismatch(
                "the service digests this identity differently; use a client and a service of one version",
                field="digest",
                value=opened.digest,
                allowed=identity.digest().hex(),
            )
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
        if not 0 <= wait_seconds <= WAIT_SECONDS_MAX:
            raise InvalidArgument(
                "not a time to wait",
                field="wait_seconds",
                value=wait_seconds,
                allowed=f"0 to {WAIT_SECONDS_MAX:g}",
            )
        request = pb.LookupRequest(
            namespace=namespace,
            keys=joined_keys(keys),
            prompt_tokens=count("prompt_tokens", prompt_tokens),
            costs=to_costs(costs),
            lease=lease,
            exactness="EXACTNESS_UNSPECIFIED" if exactness is None else exactness.value,
            announce=announce,
            wait_seconds=wait_seconds,
            assumed_costs=costs is not None and costs.assumed,
        )
        timeout = self._link.deadlines.lookup + wait_seconds

        def attempt(connection: Connection) -> Lookup:
            reply = self._link.call(connection, "Lookup", request, timeout=timeout)
            return self._found(connection, namespace, reply)

        return self._link.repeatable(attempt)

    def _found(self, connection: Connection, namespace: bytes, reply: pb.LookupReply) -> Lookup:
        plan = from_plan(reply.plan)
        lease = flight = None
        if reply.lease_id:
            lease = Lease(
                self._link,
                connection,
                self._profiles,
                lease_id=reply.lease_id,
                seconds=reply.lease_seconds,
                namespace=namespace,
                plan=plan,
            )
        if reply.flight_id:
            flight = Flight(self._link, connection, flight_id=reply.flight_id)
        return Lookup(
            plan=plan,
            lease=lease,
            blocks_held=reply.blocks_held,
            blocks_in_flight=reply.blocks_in_flight,
            in_flight_seconds=reply.in_flight_seconds,
            waited_seconds=reply.waited_seconds,
            flight=flight,
            coverage=from_coverage(reply.coverage),
            costs=from_costs(reply.costs),
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
        request = pb.ReserveRequest(
            namespace=namespace, items=[to_reserve_item(i, item) for i, item in enumerate(items)]
        )
        connection = self._link.connection()
        reply = self._link.call(connection, "Reserve", request, timeout=self._link.deadlines.control)
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
        header = pb.HandoffHeader(
            namespace=namespace,
            position=count("position", position),
            length=len(memoryview(payload).cast("B")),
            crc32=crc32(payload),
            takes=count("takes", takes, most=HANDOFF_TAKES_MAX),
            seconds=seconds,
            note=note,
            lineage=f"LINEAGE_{lineage.name}",
        )
        connection = self._link.connection()
        reply = self._link.call(
            connection, "PutHandoff", handoff_frames(header, payload), timeout=self._link.deadlines.handoff
        )
        ticket: bytes = reply.ticket
        return ticket

    def take_handoff(self, namespace: bytes, ticket: bytes) -> HandoffTake:
        """UnknownTicket when it is not here (any more), LimitExceeded when all its takes are out."""
        connection = self._link.connection()
        frames = self._link.stream(
            connection,
            "TakeHandoff",
            pb.TakeHandoffRequest(namespace=namespace, ticket=ticket),
            timeout=self._link.deadlines.handoff,
        )
        header, payload = read_handoff(frames)
        return HandoffTake(
            payload=payload,
            position=header.position,
            note=header.note,
            lineage=Lineage(header.lineage),
            take_id=header.take_id,
            _link=self._link,
            _connection=connection,
        )

    def drop_handoff(self, namespace: bytes, ticket: bytes) -> bool:
        """Nobody will take it any more. Whether it was there; what is out now is its takers'."""
        reply = self._link.call(
            self._link.connection(),
            "DropHandoff",
            pb.DropHandoffRequest(namespace=namespace, ticket=ticket),
            timeout=self._link.deadlines.control,
        )
        return bool(reply.was_here)

    # ---- administration -------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        """The service's figures by name."""
        return dict(self._stats().values)

    def buffered_because(self) -> str:
        """Why the service's segments pass through the page cache; empty where they do not."""
        return str(self._stats().buffered_because)

    def _stats(self) -> pb.StatsReply:
        request = pb.StatsRequest()

        def attempt(connection: Connection) -> pb.StatsReply:
            reply = self._link.call(connection, "Stats", request, timeout=self._link.deadlines.admin)
            if reply.boot != connection.session.boot:
                self._link.drop(connection)
                raise UnknownSession("the service has started again", field="boot", value=reply.boot)
            return cast(pb.StatsReply, reply)

        return self._link.repeatable(attempt)

    def clear(self, namespace: bytes = b"") -> Cleared:
        """Forget everything of one namespace, or of all."""
        reply = self._admin("Clear", pb.ClearRequest(namespace=namespace))
        return Cleared(reply.blocks, reply.states)

    def drain(self, seconds: float) -> int:
        """Let the service refuse new work and wait up to `seconds` for what is under way; how much is then still open."""
        if not 0 <= seconds <= DRAIN_SECONDS_MAX:
            raise InvalidArgument(
                "not a time to drain", field="seconds", value=seconds, allowed=f"0 to {DRAIN_SECONDS_MAX:g}"
            )
        reply = self._admin("Drain", pb.DrainRequest(seconds=seconds), extra_seconds=seconds)
        return int(reply.left_open)

    def set_policy(self, namespace: bytes, policy: str) -> OpenedNamespace:
        """`zero`, `endpoints`, `periodic:N`, `full` or `full+overlap`. PolicyTooLarge when the states of one prompt of the
        longest length would not fit the states' share of the disk."""
        return from_namespace(
            self._admin("SetPolicy", pb.SetPolicyRequest(namespace=namespace, policy=policy))
        )

    def drop_states(
        self, namespace: bytes = b"", tier: Literal["both", "pool", "ssd"] = "both"
    ) -> DroppedStates:
        """Drop window states that nobody leases, of one namespace or of all."""
        if tier not in _TIERS:
            raise InvalidArgument("no such tier", field="tier", value=tier, allowed=", ".join(_TIERS))
        reply = self._admin("DropStates", pb.DropStatesRequest(namespace=namespace, tier=_TIERS[tier]))
        return DroppedStates(reply.dropped, reply.kept)

    def namespaces(self) -> list[OpenedNamespace]:
        reply = self._admin("ListNamespaces", pb.ListNamespacesRequest())
        return [from_namespace(namespace) for namespace in reply.namespaces]

    # ---- inside ---------------------------------------------------------------------------------------------

    def _admin(self, name: str, request: Any, *, extra_seconds: float = 0.0) -> Any:
        return self._link.call(
            self._link.connection(), name, request, timeout=self._link.deadlines.admin + extra_seconds
        )
