"""Handoffs: a state at any position, left by one worker for others under a ticket."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstore.errors import InvalidArgument, LimitExceeded, UnknownTicket
from kvstore.types import BytesLike, Checks, Lineage, NamespaceDigest

TICKET_BYTES = 16

MAX_TAKES = 1024

MAX_NOTE_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Handoff:
    """What is handed over. `position` is tokens; `note` is the worker's own words for its partner."""

    payload: BytesLike
    position: int
    lineage: Lineage
    checks: Checks
    note: bytes = b""

    @property
    def length(self) -> int:
        return memoryview(self.payload).nbytes + len(self.note)


@dataclass(frozen=True, slots=True)
class Take:
    """A handoff on loan to `session` until `confirm`, its session's end, or `deadline` (monotonic seconds)."""

    take_id: int
    ticket: bytes
    handoff: Handoff
    session: str
    deadline: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffStatistics:
    """`bytes` <= `budget_bytes` always. What follows `out` counts events since the start."""

    tickets: int
    bytes: int
    budget_bytes: int
    out: int
    stored: int
    confirmed: int
    returned: int
    expired: int
    refused: int


@dataclass(slots=True)
class _Entry:
    namespace: NamespaceDigest
    handoff: Handoff | None
    length: int
    seconds: float
    deadline: float
    takes_left: int
    out: set[int] = field(default_factory=set)
    dropped: bool = False


class HandoffTable:
    """Handoffs within a byte budget and a count. `now` is monotonic seconds. Not thread-safe: one owner.

    A ticket can be taken `takes` times. A take that is not confirmed comes back and can be taken again, for as long as a
    new handoff waits even where the ticket's first deadline has passed meanwhile, so that a worker that fails late can be
    replaced. The last confirmation frees the bytes. Of the last `max_tickets` tickets that ended it is remembered how,
    so that one take too many, or one too late, is told apart from a ticket that never was.
    """

    def __init__(
        self,
        budget_bytes: int,
        *,
        random_bytes: Callable[[int], bytes],
        take_seconds: float = 60.0,
        max_tickets: int = 4096,
    ) -> None:
        for name, value in (
            ("budget_bytes", budget_bytes),
            ("take_seconds", take_seconds),
            ("max_tickets", max_tickets),
        ):
            if value < 0:
                raise InvalidArgument(f"bad {name}", field=name, value=value, allowed=">= 0")
        self._budget = budget_bytes
        self._random_bytes = random_bytes
        self._take_seconds = take_seconds
        self._max_tickets = max_tickets
        self._entries: dict[bytes, _Entry] = {}
        self._takes: dict[int, Take] = {}
        # Of tickets that are over: their namespace, and whether all takes were used up.
        self._ended: OrderedDict[bytes, tuple[NamespaceDigest, bool]] = OrderedDict()
        self._bytes = self._next_take = 0
        self._stored = self._confirmed = self._returned = self._expired = self._refused = 0

    def put(
        self, namespace: NamespaceDigest, handoff: Handoff, *, takes: int, seconds: float, now: float
    ) -> bytes:
        """Keep it for `seconds`; returns the ticket, 16 random bytes.

        InvalidArgument for bad numbers; LimitExceeded past the byte budget, for one handoff or for all together, and
        past the count of tickets. Nothing is ever evicted for it: a handoff was promised.
        """
        if not 1 <= takes <= MAX_TAKES:
            raise InvalidArgument(
                "a handoff can be taken", field="takes", value=takes, allowed=f"1 to {MAX_TAKES}"
            )
        if not 0 < seconds < float("inf"):
            raise InvalidArgument(
                "a handoff has a deadline", field="seconds", value=seconds, allowed="> 0, finite"
            )
        if handoff.position < 1:
            raise InvalidArgument(
                "a state has a position", field="position", value=handoff.position, allowed=">= 1"
            )
        if len(handoff.note) > MAX_NOTE_BYTES:
            raise InvalidArgument(
                "the note is too long",
                field="note",
                value=f"{len(handoff.note)} bytes",
                allowed=f"{MAX_NOTE_BYTES} bytes",
            )
        self.expire(now)
        length = handoff.length
        if self._bytes + length > self._budget:
            self._refused += 1
            raise LimitExceeded(
                "no room for this handoff",
                field="handoff_bytes",
                value=length,
                allowed=f"{self._budget - self._bytes} bytes now, {self._budget} in all",
            )
        if len(self._entries) >= self._max_tickets:
            self._refused += 1
            raise LimitExceeded(
                "too many tickets",
                field="handoff_tickets",
                value=len(self._entries) + 1,
                allowed=f"{self._max_tickets}",
            )
        ticket = self._random_bytes(TICKET_BYTES)
        assert len(ticket) == TICKET_BYTES, "the randomness callable returns as many bytes as asked"
        assert ticket not in self._entries, "128 random bits do not repeat"
        self._entries[ticket] = _Entry(namespace, handoff, length, seconds, now + seconds, takes)
        self._bytes += length
        self._stored += 1
        return ticket

    def take(self, ticket: bytes, namespace: NamespaceDigest, session: str, now: float) -> Take:
        """UnknownTicket when it never was, is of another namespace or past its deadline; LimitExceeded when all its
        takes are out or used up."""
        self._return_late_takes(now)
        entry = self._entries.get(ticket)
        if entry is None:
            self._refuse_ended(ticket, namespace)
            raise UnknownTicket(
                "no such ticket: never given here, dropped by a clear or a restart, or forgotten long since",
                field="ticket",
                value=ticket,
                allowed="the ticket of a handoff that is here",
            )
        _check_namespace(ticket, entry.namespace, namespace)
        if entry.takes_left == 0:
            raise _used_up(ticket)
        if entry.deadline <= now:
            raise _late(ticket)
        if entry.takes_left <= len(entry.out):
            raise LimitExceeded(
                "all takes of this ticket are out",
                field="ticket",
                value=ticket,
                allowed="takes that come back unconfirmed",
            )
        assert entry.handoff is not None, "a handoff is kept while it has takes"
        self._next_take += 1
        take = Take(self._next_take, ticket, entry.handoff, session, now + self._take_seconds)
        entry.out.add(take.take_id)
        self._takes[take.take_id] = take
        return take

    def confirm(self, take_id: int, session: str, now: float) -> bool:
        """The taker has it for good. False when this take is not out (any more): confirmed, returned, or another's."""
        self._return_late_takes(now)
        take = self._takes.get(take_id)
        if take is None or take.session != session:
            return False
        del self._takes[take_id]
        entry = self._entries[take.ticket]
        entry.out.discard(take_id)
        entry.takes_left -= 1
        self._confirmed += 1
        if not entry.takes_left:
            self._free(entry)
        self._forget_if_over(take.ticket, entry, now)
        return True

    def drop(self, ticket: bytes, namespace: NamespaceDigest, now: float) -> bool:
        """Nobody will take it any more: its takes count as used up, but for those that are out. Whether it
        was here."""
        entry = self._entries.get(ticket)
        if entry is None or entry.namespace != namespace or not entry.takes_left:
            return False
        entry.dropped = True
        entry.takes_left = len(entry.out)
        if not entry.takes_left:
            self._free(entry)
        entry.deadline = min(entry.deadline, now)
        self._forget_if_over(ticket, entry, now)
        return True

    def give_back(self, take_id: int, now: float) -> None:
        """The take did not reach its taker. One that has ended already is left alone."""
        take = self._takes.get(take_id)
        if take is not None:
            self._return(take, now)

    def end_session(self, session: str, now: float) -> int:
        """Its takes come back. How many."""
        mine = [take for take in self._takes.values() if take.session == session]
        for take in mine:
            self._return(take, now)
        return len(mine)

    def expire(self, now: float) -> int:
        """Drop handoffs past their deadline that are not out, and take back late takes. How many were dropped."""
        self._return_late_takes(now)
        before = self._expired
        for ticket, entry in list(self._entries.items()):
            self._forget_if_over(ticket, entry, now)
        return self._expired - before

    def clear(self, namespace: NamespaceDigest | None = None) -> int:
        """Drop all handoffs of one namespace or of all, those that are out too. How many."""
        gone = [ticket for ticket, entry in self._entries.items() if namespace in (None, entry.namespace)]
        for ticket in gone:
            entry = self._entries.pop(ticket)
            for take_id in entry.out:
                del self._takes[take_id]
            self._free(entry)
        return len(gone)

    def statistics(self) -> HandoffStatistics:
        return HandoffStatistics(
            tickets=len(self._entries),
            bytes=self._bytes,
            budget_bytes=self._budget,
            out=len(self._takes),
            stored=self._stored,
            confirmed=self._confirmed,
            returned=self._returned,
            expired=self._expired,
            refused=self._refused,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless bytes and takes add up and the budget holds."""
        held = [entry for entry in self._entries.values() if entry.handoff is not None]
        assert sum(entry.length for entry in held) == self._bytes <= self._budget, "bytes"
        out = {take_id for entry in self._entries.values() for take_id in entry.out}
        assert out == self._takes.keys(), "takes"
        for entry in self._entries.values():
            assert 0 <= len(entry.out) <= entry.takes_left, "more takes are out than are left"
            assert (entry.handoff is None) == (entry.takes_left == 0), (
                "bytes are kept exactly while takes are left"
            )

    def _return_late_takes(self, now: float) -> None:
        # Takes have one length of loan and times do not decrease, so that the oldest is the first to be late.
        while self._takes:
            take = next(iter(self._takes.values()))
            if take.deadline > now:
                break
            entry = self._entries[take.ticket]
            self._return(take, take.deadline)
            if take.ticket in self._entries:
                self._forget_if_over(take.ticket, entry, now)

    def _return(self, take: Take, now: float) -> None:
        del self._takes[take.take_id]
        entry = self._entries[take.ticket]
        entry.out.discard(take.take_id)
        self._returned += 1
        if entry.dropped:
            entry.takes_left = len(entry.out)
            if not entry.takes_left:
                self._free(entry)
            self._forget_if_over(take.ticket, entry, now)
            return
        # Whoever replaces the worker that failed has as long to take it as that worker had.
        entry.deadline = max(entry.deadline, now + entry.seconds)

    def _forget_if_over(self, ticket: bytes, entry: _Entry, now: float) -> None:
        if not entry.out and (entry.deadline <= now or not entry.takes_left):
            del self._entries[ticket]
            self._ended[ticket] = entry.namespace, entry.takes_left == 0
            if len(self._ended) > self._max_tickets:
                self._ended.popitem(last=False)
            self._expired += entry.handoff is not None
            self._free(entry)

    def _refuse_ended(self, ticket: bytes, namespace: NamespaceDigest) -> None:
        if ticket in self._ended:
            theirs, used_up = self._ended[ticket]
            _check_namespace(ticket, theirs, namespace)
            raise _used_up(ticket) if used_up else _late(ticket)

    def _free(self, entry: _Entry) -> None:
        if entry.handoff is not None:
            self._bytes -= entry.length
            entry.handoff = None
            entry.takes_left = 0


def _check_namespace(ticket: bytes, theirs: NamespaceDigest, named: NamespaceDigest) -> None:
    if theirs != named:
        raise UnknownTicket(
            "the ticket is of another namespace",
            field="ticket",
            value=ticket,
            allowed="tickets of the namespace named",
        )


def _used_up(ticket: bytes) -> LimitExceeded:
    return LimitExceeded(
        "all takes of this ticket are used up", field="ticket", value=ticket, allowed="no more takes"
    )


def _late(ticket: bytes) -> UnknownTicket:
    return UnknownTicket(
        "the ticket is past its deadline",
        field="ticket",
        value=ticket,
        allowed="tickets before their deadline",
    )
