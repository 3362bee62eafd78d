"""Leases: protection of what a lookup promised. A lease ends one way: release, session end, or deadline."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass

from kvstore.core.deadlines import Deadlines
from kvstore.core.holds import Holds
from kvstore.core.index import NO_SLOT
from kvstore.core.states import StateEntry
from kvstore.errors import LimitExceeded, UnknownLease
from kvstore.pool.states import StatePin
from kvstore.types import ItemKind, NamespaceDigest


@dataclass(slots=True, eq=False)
class Lease:
    """What one lookup promised to `session` until `deadline` (monotonic seconds).

    blocks: how many of the prompt's first blocks it covers; state_at: position of the state that it covers, 0 for none.
    The rest is the core's: `slots` are the blocks' slots, of which the first `intact` are still there (damage and
    clearing take away what is leased too). The state lies in the pool (`pool_pin`) or on SSD: `states` are the number
    of its block, its kind and its entry, one for a checkpoint, one per block that is read for rows.

    apart: its blocks are no chain, each is protected by itself, and one that has left is NO_SLOT among `slots`.
    """

    lease_id: int
    session: str
    namespace: NamespaceDigest
    blocks: int
    state_at: int
    born: float
    deadline: float
    slots: array[int]
    intact: int
    pool_pin: StatePin | None = None
    states: tuple[tuple[int, ItemKind, StateEntry], ...] = ()
    apart: bool = False

    @property
    def held_slots(self) -> list[int]:
        """Those that must not be evicted: of a chain its deepest block's that is there."""
        if self.apart:
            return [slot for slot in self.slots if slot != NO_SLOT]
        return [self.slots[self.intact - 1]] if self.intact else []

    def covers_slot(self, slot: int, number: int) -> bool:
        """Whether it covers the block `slot`, which is number `number` of its chain."""
        if self.apart:
            return slot in self.slots
        return number < self.intact and self.slots[number] == slot

    @property
    def covers_state(self) -> bool:
        return self.pool_pin is not None or bool(self.states)


class LeaseTable:
    """All leases, by number and by session. `now` is monotonic seconds."""

    def __init__(
        self,
        holds: Holds,
        *,
        seconds: float,
        longest_seconds: float,
        most: int,
        most_per_session: int,
        most_blocks: int,
        most_blocks_per_session: int,
    ) -> None:
        self._holds = holds
        self._seconds = seconds
        self._longest = longest_seconds
        self._most = most
        self._most_per_session = most_per_session
        self._most_blocks = most_blocks
        self._most_blocks_per_session = most_blocks_per_session
        self._leases: dict[int, Lease] = {}
        self._sessions: dict[str, set[int]] = {}
        self._deadlines = Deadlines()
        self._blocks: Counter[str] = Counter()
        """Covered, by session."""
        self._all_blocks = 0

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def seconds(self) -> float:
        return self._seconds

    def check_room(self, session: str, blocks: int) -> None:
        """Raise LimitExceeded unless one more lease of so many blocks may be granted."""
        leases, mine = len(self._leases) + 1, len(self._sessions.get(session, ())) + 1
        all_blocks, my_blocks = self._all_blocks + blocks, self._blocks[session] + blocks
        if (
            leases <= self._most
            and mine <= self._most_per_session
            and all_blocks <= self._most_blocks
            and my_blocks <= self._most_blocks_per_session
        ):
            return
        for field, value, most in (
            ("leases", leases, self._most),
            ("leases_per_session", mine, self._most_per_session),
            ("leased_blocks", all_blocks, self._most_blocks),
            ("leased_blocks_per_session", my_blocks, self._most_blocks_per_session),
        ):
            if value > most:
                raise LimitExceeded(
                    "too much is leased; release leases that are done with",
                    field=field,
                    value=value,
                    allowed=f"{most}",
                )

    def grant(
        self,
        lease_id: int,
        session: str,
        namespace: NamespaceDigest,
        *,
        slots: array[int],
        state_at: int,
        now: float,
        apart: bool = False,
    ) -> Lease:
        """A lease on the chain `slots`, or on each of them (`apart`); its state is the caller's to protect. The id was never used
        before."""
        blocks, deadline = len(slots), now + self._seconds
        lease = Lease(lease_id, session, namespace, blocks, state_at, now, deadline, slots, blocks)
        lease.apart = apart
        self._leases[lease_id] = lease
        mine = self._sessions.get(session)
        if mine is None:
            mine = self._sessions[session] = set()
        mine.add(lease_id)
        self._deadlines.set(lease_id, deadline)
        if apart:
            for slot in slots:
                self._holds.hold(slot, lease_id)
        else:
            self._holds.hold(slots[-1], lease_id)
        self._blocks[session] += blocks
        self._all_blocks += blocks
        return lease

    def get(self, lease_id: int, session: str, now: float) -> Lease:
        """Raise UnknownLease, saying whether it is past its deadline. Another session's is refused as one that is not there: numbers
        can be guessed, and whose they are is nobody's business."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.session != session:
            raise UnknownLease(
                "no such lease of this session: never given here, of another session, released, or ended",
                field="lease_id",
                value=lease_id,
                allowed="a lease that this session holds",
            )
        if lease.deadline <= now:
            raise UnknownLease(
                "the lease is past its deadline; look up again",
                field="lease_id",
                value=lease_id,
                allowed=f"leases less than {self._seconds:g} s after the last lookup or renewal",
            )
        return lease

    def renew(self, lease_id: int, session: str, now: float) -> Lease:
        """A new deadline, no later than the longest life of a lease."""
        lease = self.get(lease_id, session, now)
        lease.deadline = min(now + self._seconds, lease.born + self._longest)
        self._deadlines.set(lease_id, lease.deadline)
        return lease

    def pop(self, lease_id: int, session: str) -> Lease | None:
        """End it if it is the session's; None changes nothing."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.session != session:
            return None
        self._end(lease)
        return lease

    def of_session(self, session: str) -> list[int]:
        """Numbers of its leases, the first one first."""
        return sorted(self._sessions.get(session, ()))

    def pop_due(self, now: float) -> Lease | None:
        """The first one that is past its deadline, if any is; it has ended."""
        for lease_id in self._deadlines.due(now, limit=1):
            lease = self._leases[lease_id]
            self._end(lease)
            return lease
        return None

    def block_removed(self, lease_id: int, slot: int, number: int) -> None:
        """Block `number` of what the lease covers has left in spite of it, and nothing after it is there any more.
        The hold moves to the block before. Where its blocks are apart, the one in `slot` has left and all others stay."""
        lease = self._leases.get(lease_id)
        if lease is not None and lease.apart:
            for at, each in enumerate(lease.slots):
                if each == slot:
                    lease.slots[at] = NO_SLOT
        elif lease is not None:
            lease.intact = number
            if number:
                self._holds.hold(lease.slots[number - 1], lease_id)

    def covers(self, slot: int, number: int) -> bool:
        """Whether any lease covers the block `slot`, which is number `number` of its chain. Walks all leases."""
        return any(lease.covers_slot(slot, number) for lease in self._leases.values())

    def all(self) -> list[Lease]:
        return list(self._leases.values())

    def _end(self, lease: Lease) -> None:
        del self._leases[lease.lease_id]
        mine = self._sessions[lease.session]
        mine.remove(lease.lease_id)
        if not mine:
            del self._sessions[lease.session]
        self._deadlines.discard(lease.lease_id)
        for slot in lease.held_slots:
            self._holds.release(slot, lease.lease_id)
        self._all_blocks -= lease.blocks
        self._blocks[lease.session] -= lease.blocks
        if not self._blocks[lease.session]:
            del self._blocks[lease.session]
