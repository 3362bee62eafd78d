"""The core: the live index and everything that decides about it. Events in, decisions out; no I/O, no clock."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from kvstore.core import accepting, keyed, leaving, lookup, recovery
from kvstore.core.audit import check_integrity, statistics
from kvstore.core.base import (
    Cleared,
    CommitReport,
    Contained,
    CoreStatistics,
    Dropped,
    Ended,
    FetchItem,
    GivenBack,
    Gone,
    Granted,
    Limits,
    LoadReport,
    LookupResult,
    Relocated,
    ReserveItem,
    ReserveResult,
    Written,
)
from kvstore.core.changes import Journal
from kvstore.core.leases import Lease
from kvstore.core.live import Live
from kvstore.core.longwork import LongWork
from kvstore.core.namespaces import NamespaceInfo, StatesShare
from kvstore.core.reservations import returned
from kvstore.core.steps import collected, whole
from kvstore.errors import PolicyTooLarge
from kvstore.plan.base import Costs
from kvstore.policy.base import EvictionPolicy
from kvstore.policy.lru import LruPolicy
from kvstore.policy.window import DEFAULT_POLICY, WindowPolicy
from kvstore.pool.states import StatePool
from kvstore.prefix.identity import NamespaceIdentity
from kvstore.prefix.joined import JoinedKeys
from kvstore.store.base import Found, Place
from kvstore.types import ItemId, NamespaceDigest, Tier

UNBOUNDED_BYTES = 1 << 62


class Core(LongWork):
    """Owns the index of all namespaces, the leases and reservations, and the pool of states that it was given.

    Every method takes the time it needs: `now_mono` in monotonic seconds (leases, reservations, pool), `now_wall` in
    wall seconds (last uses, expiry); the caller sees to it that `now_wall` does not jump while the process lives.
    Methods return at once and either do all of what they say or raise and change nothing. Not thread-safe: one owner,
    in one thread. What leaves the index is returned as places for the owner to discard in the log.
    """

    def __init__(
        self,
        *,
        pool: StatePool,
        retention_seconds: float = 72 * 3600.0,
        lease_seconds: float = 60.0,
        longest_lease_seconds: float = 3600.0,
        reservation_seconds: float = 60.0,
        default_policy: str = DEFAULT_POLICY,
        limits: Limits | None = None,
        states_share_bytes: int = UNBOUNDED_BYTES,
        on_lease_end: Callable[[int], None] = lambda lease_id: None,
        ranks: EvictionPolicy | None = None,
        journal: Journal | None = None,
    ) -> None:
        """`states_share_bytes`: the disk's share for states; a policy that keeps more of one prompt of the longest length
        (`limits.prompt_tokens`) is refused. `on_lease_end` is told of each lease once, whichever way it ends, and must not
        raise. `ranks`: what is evicted first, empty; None for least recently used. `journal` is told what comes and goes, but for what
        `load` finds; the pool's states are told by the pool."""
        limits = limits or Limits()
        self._live = Live(
            pool=pool,
            limits=limits,
            retention_seconds=retention_seconds,
            lease_seconds=lease_seconds,
            longest_lease_seconds=longest_lease_seconds,
            reservation_seconds=reservation_seconds,
            default_policy=default_policy,
            share=StatesShare(states_share_bytes, limits.prompt_tokens),
            on_lease_end=on_lease_end,
            eviction=LruPolicy() if ranks is None else ranks,
            journal=journal,
        )

    @property
    def pool(self) -> StatePool:
        return self._live.pool

    @property
    def lease_seconds(self) -> float:
        return self._live.leases.seconds

    @property
    def reservation_seconds(self) -> float:
        return self._live.reservations.seconds

    @property
    def eviction_name(self) -> str:
        """Of the policy that decides what is evicted first."""
        return self._live.ranks.name

    # ---- namespaces -----------------------------------------------------------------------------------------

    def open_namespace(
        self, name: str, identity: NamespaceIdentity, policy: str | None = None
    ) -> NamespaceInfo:
        """Make a namespace known, or confirm it. `is_new` says which; a new one is to be recorded in the log before
        anyone hears of it, and withdrawn if that fails. `policy` counts for a new one only; None is the default.

        GeometryMismatch (field, value, what it was opened with) when the tenant has `name` with another identity;
        InvalidArgument for a bad name or policy; PolicyTooLarge for a new one's policy that the states' share does not
        hold; LimitExceeded past the number of namespaces.
        """
        return self._live.namespaces.open(name, identity, policy)

    def withdraw_namespace(self, digest: bytes) -> Cleared:
        """Undo an open whose record could not be written: the namespace is unknown again, and empty."""
        cleared, _ = self.clear(digest)
        info = self._live.namespaces.remove(digest)
        self._live.index.drop_space(info.number)
        return cleared

    def namespace(self, digest: bytes) -> NamespaceInfo:
        """Raises UnknownNamespace."""
        return self._live.namespaces.get(digest)

    def find_namespace(self, digest: bytes) -> NamespaceInfo | None:
        return self._live.namespaces.find(digest)

    def check_policy(self, digest: bytes, text: str) -> WindowPolicy:
        """What `set_policy` would set. Raises UnknownNamespace, InvalidArgument for a policy that the profile does not
        allow, and PolicyTooLarge for one of which the states' share does not hold one prompt of the longest length."""
        return self._live.namespaces.policy_for(self.namespace(digest).profile, text)

    def set_policy(self, digest: bytes, text: str) -> NamespaceInfo:
        """Raises as `check_policy` does."""
        return self._live.namespaces.set_policy(digest, str(self.check_policy(digest, text)))

    def check_share(self, info: NamespaceInfo) -> None:
        """Raise PolicyTooLarge where a namespace that `load` found has a policy that would be refused now."""
        self._live.namespaces.check_share(info)

    def policy_fits(self, info: NamespaceInfo) -> bool:
        """False where `check_share` would raise."""
        try:
            self.check_share(info)
        except PolicyTooLarge:
            return False
        return True

    def share_states(self, info: NamespaceInfo) -> int:
        """How many whole states of the namespace the states' share holds."""
        return self._live.namespaces.share_states(info)

    def share_tokens(self, info: NamespaceInfo) -> int:
        """Of how many tokens the states' share holds the states under the namespace's policy; 0 where none are kept."""
        return self._live.namespaces.share_tokens(info)

    def namespaces(self) -> list[NamespaceInfo]:
        return self._live.namespaces.all()

    def tenants(self) -> list[str]:
        """The tenants that have a namespace, by their salts."""
        return self._live.namespaces.tenants()

    def tenant_namespaces(self, tenant: str) -> int:
        return len(self._live.namespaces.numbers_of(tenant))

    def tenant_bytes(self, tenant: str) -> tuple[int, int]:
        """Payload bytes of the tenant's blocks and states on the disk, and those that its open reservations may add."""
        live, held, promised = self._live, 0, 0
        for number in live.namespaces.numbers_of(tenant):
            held += live.space_bytes[number]
            promised += live.reservations.ssd_bytes[live.namespaces.by_number(number).digest]
        return held, promised

    def load(
        self, records: Iterable[Found], policies: Mapping[NamespaceDigest, str], *, now_wall: float
    ) -> LoadReport:
        """Rebuild everything from what recovery found, in any order. Once, before any other call.

        Blocks whose chain is not whole, states without their block, and records that do not fit their namespace are
        left out; their places are in the report. A last use in the future counts as now.
        """
        return recovery.load(self._live, records, policies, now_wall=now_wall)

    # ---- lookup ---------------------------------------------------------------------------------------------

    def lookup(
        self,
        namespace: bytes,
        keys: Sequence[bytes],
        *,
        prompt_tokens: int,
        costs: Costs,
        session: str,
        now_mono: float,
        now_wall: float,
        lease: bool,
        exact_only: bool = True,
        held: array[int] | None = None,
    ) -> LookupResult:
        """What is held of a prompt, and the cheapest correct way to resume it.

        `keys`: of the prompt's whole blocks, first first (fewer are allowed: the rest counts as not held). With `lease`
        the blocks and the state that the plan reads are used now, and protected until the lease ends; a probe
        changes nothing. `held` is what `finding` has just found for these keys; without it that is done here.
        UnknownNamespace; InvalidArgument for keys that are not keys or are more than the prompt has
        blocks; LimitExceeded for prompts, keys and leases past their limits.
        """
        return lookup.lookup(
            self._live,
            namespace,
            keys,
            prompt_tokens=prompt_tokens,
            costs=costs,
            session=session,
            now_mono=now_mono,
            now_wall=now_wall,
            lease=lease,
            exact_only=exact_only,
            held=held,
        )

    def contains(
        self,
        namespace: bytes,
        keys: JoinedKeys,
        *,
        session: str,
        now_mono: float,
        now_wall: float,
        use: bool,
        lease: bool,
    ) -> Contained:
        """Which of these keys of a keyed namespace are held. With `use`, and with `lease`, they are used now, the last one first;
        with `lease` they are protected until it ends.

        UnknownNamespace; InvalidArgument for a namespace that is not keyed; LimitExceeded for keys and leases past their
        limits.
        """
        return keyed.contains(
            self._live,
            namespace,
            keys,
            session=session,
            now_mono=now_mono,
            now_wall=now_wall,
            use=use,
            lease=lease,
        )

    def lease(self, lease_id: int, session: str, now_mono: float) -> Lease:
        """Raises UnknownLease, saying whether it is past its deadline; another session's is one that is not there."""
        return self._live.leases.get(lease_id, session, now_mono)

    def renew(self, lease_id: int, session: str, now_mono: float) -> Lease:
        """A new deadline, up to the longest life of a lease. Raises UnknownLease as `lease` does."""
        return self._live.leases.renew(lease_id, session, now_mono)

    def release(self, lease_id: int, session: str, now_mono: float) -> bool:
        """Whether this ended it. A lease that has ended, or is another session's, is left alone."""
        lease = self._live.leases.pop(lease_id, session)
        if lease is None:
            return False
        self._live.end_leases([lease], now_mono)
        return True

    def fetch_list(
        self, lease: Lease, *, first_block: int, block_count: int, want_state: bool
    ) -> list[FetchItem | None]:
        """The items asked for: blocks in order, then what the plan's window state is made of: one STATE, or the ROWS of each
        block that a resume from rows needs, in order. None stands for an item that was lost to damage or clearing
        in spite of the lease. InvalidArgument, with the limit, for what the lease does not cover. Places hold until the
        next `relocate`."""
        return lookup.fetch_list(
            self._live, lease, first_block=first_block, block_count=block_count, want_state=want_state
        )

    def fetch_places(self, lease: Lease, *, first_block: int, block_count: int) -> list[tuple[int, int, int]]:
        """Where these blocks lie, for who asks about thousands of them; as plain tuples, each equal to its Place. It ends
        before the first one that was lost. Raises as `fetch_list`; places hold as long."""
        return lookup.fetch_places(self._live, lease, first_block=first_block, block_count=block_count)

    def check_fetch(self, lease: Lease, *, first_block: int, block_count: int, want_state: bool) -> None:
        """Raise InvalidArgument as `fetch_list` does."""
        lookup.check_fetch(lease, first_block=first_block, block_count=block_count, want_state=want_state)

    # ---- writing --------------------------------------------------------------------------------------------

    def reserve(
        self,
        session: str,
        namespace: bytes,
        items: Sequence[ReserveItem],
        *,
        now_mono: float,
        now_wall: float,
    ) -> ReserveResult:
        """Claim items to write, parents before children. One outcome per item; what is HELD is used now.

        A block's parent must be held, be granted earlier in the call, or be on its way in this session; a state's block
        likewise; else PARENT_MISSING. The held blocks that granted items build on are not evicted meanwhile. EXACT items
        may claim what is held as BOUNDED and not leased. Raises, with nothing claimed: UnknownNamespace, InvalidArgument,
        GeometryMismatch (length), LimitExceeded.
        """
        return whole(self.reserving(session, namespace, items, now_mono=now_mono, now_wall=now_wall))

    def commit_list(self, reservation_id: int, session: str) -> Sequence[Granted]:
        """What the reservation was granted, in order. From here on its deadline and its session's end no longer count:
        the caller writes it and calls `committed`, or `abort` if nothing of it can have been written.
        Raises UnknownReservation."""
        found = self._live.reservations.get(reservation_id, session)
        self._live.reservations.start_writing(found)
        return found.granted

    def granted(self, reservation_id: int, session: str) -> Sequence[Granted]:
        """The same list, for checking what a writer sends. Changes nothing. Raises UnknownReservation."""
        return self._live.reservations.get(reservation_id, session).granted

    def accept(
        self,
        reservation_id: int,
        session: str,
        arrived: Sequence[tuple[Granted, Written]],
        *,
        now_mono: float,
        now_wall: float,
    ) -> list[ItemId]:
        """These items have arrived and are being written: they become visible, parents first, and not durable. Which of them: not
        what there is something of already, nor what has no parent here, nor anything once `settling` has begun or the namespace
        was cleared. Until they are settled they lie at `accepted_place` of the reservation, where a log has nothing; `arrived`
        has the payload of what goes to the pool, and no places. The reservation goes on: what is accepted is another's IN_FLIGHT, and
        no durable item follows it. Nothing may be cleared meanwhile."""
        return accepting.accept(
            self._live,
            self._live.reservations.get(reservation_id, session),
            arrived,
            now_mono=now_mono,
            now_wall=now_wall,
        )

    def is_open(self, reservation_id: int) -> bool:
        return self._live.reservations.find(reservation_id) is not None

    def is_void(self, reservation_id: int) -> bool:
        """Whether its namespace was cleared while it was being written: nothing of it becomes visible."""
        found = self._live.reservations.find(reservation_id)
        return found is not None and found.void

    def is_crowded(self, session: str) -> bool:
        """Whether more than half of what the session, or all, may have reserved is."""
        return self._live.reservations.is_crowded(session)

    def committed(
        self,
        reservation_id: int,
        session: str,
        results: Mapping[ItemId, Written],
        *,
        now_mono: float,
        now_wall: float,
    ) -> CommitReport:
        """These items are durable: they become visible, parents first, and the reservation ends.

        Granted items that `results` lacks are given back; what was accepted has been settled. An item whose parent was lost
        meanwhile, or is accepted and not durable, and everything if the namespace was cleared meanwhile, does not become visible: its
        place is to be discarded.
        """
        return whole(self.committing(reservation_id, session, results, now_mono=now_mono, now_wall=now_wall))

    def abort(self, reservation_id: int, session: str) -> Sequence[GivenBack]:
        """Give its keys back. Empty when it has ended already or is another session's."""
        found = self._live.reservations.find(reservation_id)
        if found is None or found.session != session:
            return []
        assert not found.accepted, "what was accepted is being written"
        self._live.reservations.end(found)
        return returned([found])

    # ---- ends -----------------------------------------------------------------------------------------------

    def end_session(self, session: str, now_mono: float) -> Ended:
        """Its leases end, and its reservations but for those that are being written."""
        return whole(self.ending(session, now_mono))

    def expire_leases(self, now_mono: float) -> int:
        """End those past their deadline; how many."""
        return whole(self.expiring_leases(now_mono))

    def expire_reservations(self, now_mono: float) -> Sequence[GivenBack]:
        """End those past their deadline that are not being written."""
        return returned(self._live.reservations.end_due(now_mono))

    # ---- leaving --------------------------------------------------------------------------------------------

    def plan_eviction(self, need_bytes: int, *, prefer_states: bool, now_wall: float) -> list[Gone]:
        """Take out about `need_bytes` of payload, or all that may go: with `prefer_states` first states, least recently
        used first, then blocks: the oldest that have no children and that no lease or reservation holds, each block's
        states and rows before it. A block that leaves before its retention is over counts as a retention shortfall."""
        return collected(self.eviction(need_bytes, prefer_states=prefer_states, now_wall=now_wall))[0]

    def states_over_share(self, limit_bytes: int) -> list[Gone]:
        """Take out unleased states on SSD, least recently used first, until they are at most `limit_bytes`."""
        return collected(self.keeping_share(limit_bytes))[0]

    def expire_blocks(self, now_wall: float, *, limit: int = 10_000) -> list[Gone]:
        """Take out blocks whose retention is over, tails first, at most `limit` of them, each with its states."""
        return leaving.expire(self._live, now_wall, limit)

    def forget(self, namespace: bytes, item: ItemId, *, place: Place | None = None) -> list[Gone]:
        """The item turned out damaged. A block takes its descendants and their states along, leased or not; leases then
        find them missing. With `place` only if the item still lies there. Unknown items: nothing."""
        info = self._live.namespaces.find(namespace)
        return [] if info is None else leaving.forget(self._live, info, item.key, item.kind, place)

    def forget_places(self, places: Collection[Place]) -> list[Gone]:
        """What lies at these places turned out damaged, as `forget`. Places where nothing lies any more: nothing."""
        return leaving.forget_places(self._live, places)

    def forget_pooled(self, namespace: bytes, item: ItemId) -> bool:
        """The pooled state turned out damaged. Whether it was there."""
        return self._live.pool.remove(NamespaceDigest(namespace), item.key)

    def relocate(self, segment_id: int, moved: Mapping[Place, Place]) -> Relocated:
        """A segment was cleaned: `moved` says where each of its records went. What the index still has there is lost.
        Places of appends must have been given to `committed` before a clean that may have moved them is reported."""
        return whole(self.relocation(segment_id, moved))

    def clear(self, namespace: bytes | None = None) -> tuple[Cleared, Sequence[GivenBack]]:
        """Everything of one namespace, or of all, leaves at once, in both tiers, leased or not. Reservations end; what
        is being written will not become visible. The namespaces stay known."""
        gone, (blocks, states) = collected(self.clearing(namespace))
        return Cleared(blocks, states, gone), self.void_reservations(namespace)

    def drop_states(self, namespace: bytes | None = None, tier: Tier | None = None) -> Dropped:
        """States of one namespace or of all leave one tier or both, but for those that are leased."""
        gone, dropped = collected(self.dropping(namespace, tier))
        return replace(dropped, gone=gone)

    # ---- seen from outside ----------------------------------------------------------------------------------

    def take_uses(self, limit: int | None = None) -> Iterator[tuple[Place, float]]:
        """Place and last use (wall seconds, rounded up to a whole hour) of what was used since the last call and is not
        persisted for that hour yet; of the first `limit` uses only. Iterate it to the end, before any other call."""
        return self._live.take_uses(limit)

    @property
    def uses_waiting(self) -> int:
        """No more than so many are there for `take_uses`."""
        return self._live.uses_waiting

    def items_in_segments(self) -> dict[int, int]:
        """How many items of the index lie in each segment."""
        return self._live.segments.counts()

    @property
    def open_work(self) -> int:
        """Leases and reservations that are open."""
        return len(self._live.leases) + len(self._live.reservations)

    def statistics(self) -> CoreStatistics:
        return statistics(self._live)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every law holds. Walks everything."""
        check_integrity(self._live)

    def __repr__(self) -> str:
        live = self._live
        return (
            f"<Core {len(live.namespaces)} namespaces, {len(live.index)} blocks, {len(live.states)} states on SSD, "
            f"{len(live.leases)} leases, {len(live.reservations)} reservations>"
        )
