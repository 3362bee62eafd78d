"""The service's parts put together: what a call does to the core, the log, the pool and the handoffs.

Everything here runs in the event loop's thread; what blocks goes through the writer and the reader.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING

from kvstore.config import ServiceConfig
from kvstore.core import (
    Cleared,
    CommitReport,
    Contained,
    Core,
    Dropped,
    FetchItem,
    Gone,
    Lease,
    LookupResult,
    ReserveItem,
    ReserveResult,
    Written,
)
from kvstore.core.flights import FlightTable
from kvstore.errors import Draining, KvstoreError, LimitExceeded, Unavailable, UnknownSession
from kvstore.memory import Arenas, Docks
from kvstore.plan.base import Costs, RestorePlan
from kvstore.pool.handoffs import HandoffTable
from kvstore.prefix.joined import JoinedKeys
from kvstore.profile.base import Profile
from kvstore.service.acceptance import Acceptance
from kvstore.service.activity import Activity
from kvstore.service.events import Publisher
from kvstore.service.flights import Flights
from kvstore.service.loopwatch import LoopWatch
from kvstore.service.pins import Pins
from kvstore.service.publication import Publication
from kvstore.service.rates import Rates
from kvstore.service.reader import Reader
from kvstore.service.registry import Registry
from kvstore.service.session import Session, Sessions
from kvstore.service.slowcalls import SlowCalls
from kvstore.service.staging import Staging
from kvstore.service.tenancy import Tenancy
from kvstore.service.tenant_limits import make_quota, namespace_of_caller
from kvstore.service.timekeeping import ServiceTime
from kvstore.service.turns import at_leisure, by_turns, in_parts
from kvstore.service.uploads import Upload, Uploads
from kvstore.service.writer import Writer
from kvstore.store.base import Place, RecordLog
from kvstore.types import BootId, Durability, Exactness, ItemId, ItemKind, NamespaceDigest, StateSource, Tier

if TYPE_CHECKING:
    from kvstore.service.audit import AuditLog
    from kvstore.service.erasing import Erasing
    from kvstore.service.reloading import Reloading

log = logging.getLogger(__name__)

NO_SESSION = ""

_PLAN_COUNTS = {source: f"plans_{source.value.lower()}_total" for source in StateSource}

PLANS_KEPT = 12
"""For people who look."""

LISTED_AT_ONCE = 512
"""Items of a fetch that are looked at in one go: 5 ms of the event loop's time."""


class Engine:
    """One running store. `ready` from when the index is complete; `draining` from a Drain call or a stop signal.

    `threads`: for work on bytes that would hold up the event loop.
    `pins`: what of the reader's memory stays for whom; None where it has none. It hears of the core's leases' ends."""

    def __init__(
        self,
        config: ServiceConfig,
        *,
        boot: BootId,
        store: RecordLog,
        core: Core,
        handoffs: HandoffTable,
        reader: Reader,
        time: ServiceTime,
        threads: Executor,
        pins: Pins | None = None,
    ) -> None:
        self.config = config
        self.boot = boot
        self.log = store
        self.core = core
        self.handoffs = handoffs
        self.reader = reader
        self.pins = pins
        self.threads = threads
        self.arenas = Arenas(config.arenas_bytes)
        self.docks = Docks()
        self.rates = Rates(reader.rate)
        self.time = time
        self.staging = Staging(config.staging_bytes)
        self.counts: Counter[str] = Counter()
        self.tenants = Tenancy(time.monotonic, self.counts)
        self.uploads = Uploads(self.staging, self.tenants, reader.memory)
        self.acceptance = Acceptance(self)
        self.flights = Flights(FlightTable(seconds=core.reservation_seconds), time.monotonic)
        self.sessions = Sessions(boot=boot, limit=config.sessions, on_end=self._end_session)
        self.activity = Activity(self._open_work)
        self.lookup_seconds = 0.0
        """Of Lookup calls from the message to the answer, without what they waited for others, but with the turns that long ones
        gave them."""
        self.loop = LoopWatch()
        self.slow = SlowCalls(time.monotonic)
        self.plans: deque[tuple[float, RestorePlan]] = deque(maxlen=PLANS_KEPT)
        """The last plans that were given, each with its monotonic time."""
        self.reloading: Reloading | None = None
        """Certificates, tokens and tenants; set before anybody is let in."""
        self.audit: AuditLog | None = None
        """Of admin calls; set before anybody is let in."""
        self.events: Publisher | None = None
        """Where events are sent."""
        self.ready = False
        self.draining = False

    def attach(self, writer: Writer, registry: Registry, erasing: Erasing) -> None:
        """The parts that decide through this one."""
        self.writer = writer
        self.registry = registry
        self.erasing = erasing

    def check_ready(self) -> None:
        if not self.ready:
            raise Unavailable("the index is being loaded; try again soon")

    def check_open(self) -> None:
        """Before anything that would be new work."""
        if self.draining:
            raise Draining(
                "the service takes no new leases, reservations and handoffs", field="draining", value="true"
            )

    def _open_work(self) -> int:
        """Leases, reservations and takes that are open."""
        return self.core.open_work + self.handoffs.statistics().out

    # ---- space: what the writer asks ----------------------------------------------------------------------------

    async def evict(self, need_bytes: int) -> list[Place]:
        gone: list[Gone] = []
        wall = self.time.wall()
        await by_turns(self.core.eviction(need_bytes, prefer_states=True, now_wall=wall), gone.extend)
        return places_of(gone)

    async def moved(self, segment_id: int, moves: dict[Place, Place]) -> list[Place]:
        self.registry.moved(moves)
        self.reader.moved(moves)
        relocated = await by_turns(self.core.relocation(segment_id, moves))
        return [*places_of(relocated.lost), *relocated.discard]

    def left(self, places: Sequence[Place]) -> None:
        self.reader.forget(places)

    # ---- reading ------------------------------------------------------------------------------------------------

    def lookup(
        self,
        namespace: NamespaceDigest,
        keys: Sequence[bytes],
        *,
        prompt_tokens: int,
        costs: Costs,
        session: str,
        lease: bool,
        exact_only: bool,
        counted: bool = True,
        measured: bool = True,
        held: array[int] | None = None,
    ) -> LookupResult:
        """As Core.lookup. Rates of `costs` that are zero are not known, and completed; those that come with a lease, and were
        `measured`, are remembered for others. `counted` False: for a look whose answer nobody is given."""
        if lease:
            self.check_open()
        mono = self.time.monotonic()
        found = self.core.lookup(
            namespace,
            keys,
            prompt_tokens=prompt_tokens,
            costs=self.rates.complete(namespace, costs),
            session=session,
            lease=lease,
            exact_only=exact_only,
            held=held,
            now_mono=mono,
            now_wall=self.time.wall_at(mono),
        )
        if lease and measured:
            self.rates.report(namespace, costs)
        if counted:
            way, counts = found.plan.chosen, self.counts
            self.plans.append((mono, found.plan))
            counts["lookups_total"] += 1
            counts["lookup_tokens_total"] += prompt_tokens
            counts["lookup_hit_tokens_total"] += way.compute_from
            counts[_PLAN_COUNTS[way.state_source]] += 1
            counts["lookup_hits_total" if way.compute_from else "lookup_misses_total"] += 1
        return found

    def contains(
        self, namespace: bytes, keys: JoinedKeys, *, session: str, use: bool, lease: bool
    ) -> Contained:
        """As Core.contains."""
        if lease:
            self.check_open()
        mono = self.time.monotonic()
        found = self.core.contains(
            namespace,
            keys,
            session=session,
            use=use,
            lease=lease,
            now_mono=mono,
            now_wall=self.time.wall_at(mono),
        )
        self.counts["contains_total"] += 1
        self.counts["contains_keys_total"] += len(found.held)
        self.counts["contains_held_total"] += found.held.count(1)
        return found

    def lease(self, lease_id: int, session: str) -> Lease:
        return self.core.lease(lease_id, session, self.time.monotonic())

    def release(self, lease_id: int, session: str) -> bool:
        was_held = self.core.release(lease_id, session, self.time.monotonic())
        self.activity.note()
        return was_held

    def damaged(self, namespace: NamespaceDigest, item: FetchItem) -> None:
        """What could not be read is forgotten after this one failure, and can be stored again."""
        self.counts["damaged_total"] += 1
        self.writer.room.discard(places_of(self.core.forget(namespace, item.item, place=item.place)))

    # ---- writing ------------------------------------------------------------------------------------------------

    async def reserve(
        self, session: Session, namespace: bytes, items: Sequence[ReserveItem]
    ) -> ReserveResult:
        """As Core.reserve, with turns for others, and within the limits of the namespace's tenant."""
        self.check_open()
        info = namespace_of_caller(self, namespace)
        self.tenants.begin(info.tenant)
        longest = max((item.length for item in items if item.to_ssd), default=0)
        self.writer.check_wear(longest)
        if longest > (largest := self.log.largest_append_bytes()):
            index = next(i for i, item in enumerate(items) if item.to_ssd and item.length > largest)
            raise LimitExceeded(
                "the item does not fit into one segment; start the service with larger segments",
                field=f"items[{index}].length",
                value=items[index].length,
                allowed=f"{largest} bytes",
            )
        now = self.time.monotonic()
        result = await by_turns(
            self.core.reserving(session.id, namespace, items, now_mono=now, now_wall=self.time.wall())
        )
        if session.ended.done():
            if result.reservation_id is not None:
                self.core.abort(result.reservation_id, session.id)
            raise UnknownSession(
                "the session ended during the call", field="kvstore-session", value=session.id
            )
        if result.reservation_id is not None:
            granted = self.core.granted(result.reservation_id, session.id)
            try:
                self.tenants.spend_bytes(info.tenant, sum(each.item.length for each in granted))
                await make_quota(self, info.tenant)
                # It may have ended meanwhile, with its session or by a clear.
                self.core.granted(result.reservation_id, session.id)
            except BaseException:
                if self.core.is_open(result.reservation_id):
                    self.core.abort(result.reservation_id, session.id)
                raise
            self.uploads.begin(
                result.reservation_id,
                session=session.id,
                namespace=NamespaceDigest(namespace),
                profile=info.profile,
                granted=granted,
                deadline=now + self.core.reservation_seconds,
                tenant=info.tenant,
                shown_in=info.tenant if session.accepts else None,
            )
        return result

    async def commit(
        self, reservation_id: int, session: Session, durability: Durability = Durability.DURABLE
    ) -> CommitReport:
        """What has become visible. ACCEPTED: before it is durable, where memory has room for it meanwhile."""
        upload = self.uploads.get(reservation_id, session.id)
        session.accepts = durability is Durability.ACCEPTED
        self.writer.check_accepts()
        self.core.commit_list(reservation_id, session.id)
        self.uploads.close(upload)
        written = self.writer.submit(Publication(upload, self.publish, is_void=self.core.is_void))
        if durability is Durability.ACCEPTED and (report := await self.acceptance.accept(upload)) is not None:
            return report
        return await asyncio.shield(written)

    async def publish(self, upload: Upload, places: dict[int, Place]) -> CommitReport:
        """The commit is over: what is durable becomes visible, and all of its memory goes back."""
        try:
            results: dict[ItemId, Written] = {}
            async for part in in_parts(list(upload.arrived)):
                results.update(upload.results(places, part))
            await self.acceptance.settle(upload, results)
            report = await by_turns(
                self.core.committing(
                    upload.reservation_id,
                    upload.session,
                    results,
                    now_mono=self.time.monotonic(),
                    now_wall=self.time.wall(),
                )
            )
        finally:
            self.acceptance.end(upload.reservation_id)
            await by_turns(self.uploads.ending(upload.reservation_id))
            self.activity.note()
        async for visible in in_parts(report.visible):
            self.flights.published(upload.namespace, visible)
        self.counts["committed_items_total"] += len(report.visible)
        self.counts["committed_bytes_total"] += report.bytes
        await by_turns(self.core.keeping_share(self.config.states_share_bytes), self.discard)
        return report

    def discard(self, gone: Sequence[Gone]) -> None:
        """These have left the index: what they take on the disk is not needed any more."""
        self.writer.room.discard(places_of(gone))

    def abort(self, reservation_id: int, session: Session) -> bool:
        try:
            self.uploads.get(reservation_id, session.id)
        except KvstoreError:
            # Being committed, ended, or never there: nothing to abort.
            return False
        self.core.abort(reservation_id, session.id)
        at_leisure(self.uploads.ending(reservation_id))
        self.activity.note()
        return True

    # ---- for operators ------------------------------------------------------------------------------------------

    async def clear(self, namespace: bytes | None) -> Cleared:
        """Everything of one namespace or of all, in every tier, handoffs included."""

        def emptied() -> None:
            at_leisure(self.uploads.ending_where(lambda upload: namespace in (None, upload.namespace)))
            digest = None if namespace is None else NamespaceDigest(namespace)
            self.handoffs.clear(digest)
            at_leisure(self.flights.clearing(digest))
            self.activity.note()

        return await self.registry.clear(namespace, emptied=emptied)

    async def drop_states(self, namespace: bytes | None, tier: Tier | None) -> Dropped:
        """As Registry.drop_states."""
        return await self.registry.drop_states(namespace, tier)

    async def drain(self, seconds: float) -> int:
        """Refuse new work from now on; what is still open when all has ended or the time is over."""
        self.draining = True
        self.flights.close()
        return await self.activity.wait_idle(seconds)

    # ---- ends ---------------------------------------------------------------------------------------------------

    def _end_session(self, session: Session) -> None:
        now = self.time.monotonic()
        at_leisure(self.core.ending(session.id, now), self.activity.note)
        at_leisure(self.uploads.ending_where(lambda upload: upload.session == session.id))
        self.handoffs.end_session(session.id, now)
        at_leisure(self.flights.ending_session(session.id))
        if self.reader.memory is not None:
            self.reader.memory.take_back(session.extents)
        self.arenas.end(session.id)
        self.docks.end(session.id)
        self.activity.note()

    async def expire(self) -> None:
        """End whatever is past its deadline in memory."""
        now = self.time.monotonic()
        self.counts["expired_leases_total"] += await by_turns(self.core.expiring_leases(now))
        self.core.expire_reservations(now)
        await by_turns(self.core.forgetting_claims())
        await by_turns(self.uploads.ending_where(lambda upload: upload.deadline <= now))
        self.handoffs.expire(now)
        await by_turns(self.flights.expiring())
        self.core.pool.expire(now)
        self.activity.note()

    def expire_blocks(self, *, limit: int) -> int:
        """Let go of up to `limit` blocks whose retention is over; how many records left the disk."""
        gone = self.core.expire_blocks(self.time.wall(), limit=limit)
        self.discard(gone)
        return len(gone)


class LeasedItems:
    """The list that one Fetch call asked for, as the reader needs it."""

    def __init__(
        self, engine: Engine, lease: Lease, *, first_block: int, block_count: int, state: bool
    ) -> None:
        self._engine = engine
        self._lease = lease
        self.session = lease.session
        self.domain = engine.core.namespace(lease.namespace).identity.tenant_salt
        self._first = first_block
        self._blocks = block_count
        self._state = state
        # What the window state is made of, as headers name it.
        self._state_names: list[tuple[ItemKind, int]] = [
            (kind, number) for number, kind, _ in lease.states if kind is ItemKind.ROWS
        ] or [(ItemKind.STATE, lease.state_at)]
        engine.core.check_fetch(lease, first_block=first_block, block_count=block_count, want_state=state)

    def items(self) -> Iterator[FetchItem | None]:
        """All items in order, each as it is when its turn comes. Raises UnknownLease once the lease has ended: what it
        covered may be another's by then."""
        for first in range(0, self._blocks, LISTED_AT_ONCE):
            count = min(LISTED_AT_ONCE, self._blocks - first)
            yield from self._list(first_block=self._first + first, block_count=count, want_state=False)
        if self._state:
            yield from self._list(first_block=0, block_count=0, want_state=True)

    def _list(self, *, first_block: int, block_count: int, want_state: bool) -> list[FetchItem | None]:
        lease = self._engine.lease(self._lease.lease_id, self._lease.session)
        return self._engine.core.fetch_list(
            lease, first_block=first_block, block_count=block_count, want_state=want_state
        )

    def place_of(self, number: int) -> tuple[ItemKind, int]:
        """Kind and index, as an item's header names them, of item `number`."""
        if number < self._blocks:
            return ItemKind.BLOCK, self._first + number
        return self._state_names[number - self._blocks]

    async def settled(self) -> None:
        await self._engine.writer.room.settled()

    def again(self, number: int) -> FetchItem | None:
        if number < self._blocks:
            return self._list(first_block=self._first + number, block_count=1, want_state=False)[0]
        return self._list(first_block=0, block_count=0, want_state=True)[number - self._blocks]

    def damaged(self, item: FetchItem) -> None:
        self._engine.damaged(self._lease.namespace, item)


def is_exact_only(profile: Profile, exactness: Exactness | None) -> bool:
    """Whether approximate bytes are of no use to a lookup that asks for `exactness`; None: what the model was trained for."""
    return not profile.bounded_is_trained if exactness is None else exactness is Exactness.EXACT


def places_of(gone: Sequence[Gone]) -> list[Place]:
    return [each.place for each in gone]
