"""Who waits for a worker, who gets which, and which workers are away for now. Shared by all of a gateway's requests."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvstore.clock import Clock
from kvstore.errors import LimitExceeded, Unavailable
from kvstore.service.status import MAX_MESSAGE_CHARS
from kvstore_workers.runtime.caller import REQUEST_SECONDS, Caller
from kvstore_workers.runtime.peer import Ending, Peer, WorkerAway
from kvstore_workers.runtime.pool import AWAY_SECONDS_FIRST, Familiar, Load, Rule, away_seconds, choose

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """queue: new requests that may wait for a worker, each for at most queue_seconds. start_seconds: how long after the pool's own
    start workers that nobody has met yet may still be starting, and are waited for."""

    queue: int = 32
    queue_seconds: float = 30.0
    start_seconds: float = 0.0


@dataclass(slots=True, kw_only=True)
class Errand:
    """A request's search for workers of one role, over all its attempts.

    is_new: nothing was done for it yet, so that it may be refused when all are busy; one that was let in is carried
    through. patience: seconds to wait for a worker to come back when all are away. prefixes: see pool.edges.
    """

    is_new: bool
    patience: float
    prefixes: Sequence[bytes] = ()
    began: float
    away_since: float | None = None
    tried: dict[int, str] = field(default_factory=dict)


class Member:
    """One worker and what is known of it; changed under its pool's lock only."""

    def __init__(self, place: int, peer: Peer) -> None:
        self.place = place
        self.peer = peer
        self.in_flight = 0
        self.failures = 0
        self.away_until = 0.0
        self.why: WorkerAway | None = None
        self.watched = False

    @property
    def load(self) -> Load:
        return Load(self.in_flight, self.away_until)


class Pool:
    """All workers of one role. Requests wait here, in order of arrival, for one that has room."""

    def __init__(self, role: str, peers: Sequence[Peer], *, rule: Rule, limits: Limits, clock: Clock) -> None:
        self.role = role
        self._members = [Member(place, peer) for place, peer in enumerate(peers)]
        self._rule = rule
        self._limits = limits
        self._clock = clock
        self._changed = threading.Condition()
        self._line: list[object] = []
        self._familiar = Familiar()
        self._turn = 0
        self._starting_until = clock.monotonic() + limits.start_seconds
        """Until one of them has done something."""

    def __str__(self) -> str:
        return ", ".join(member.peer.address for member in self._members)

    @property
    def capacity(self) -> int:
        """Calls that all workers together may have."""
        return self._rule.per_worker * len(self._members)

    def in_flight(self) -> list[int]:
        """Calls under way to each worker."""
        with self._changed:
            return [member.in_flight for member in self._members]

    def waiting(self) -> int:
        """Requests that wait for a worker."""
        with self._changed:
            return len(self._line)

    def errand(self, *, is_new: bool, patience: float, prefixes: Sequence[bytes] = ()) -> Errand:
        return Errand(is_new=is_new, patience=patience, prefixes=prefixes, began=self._clock.monotonic())

    @contextmanager
    def worker(self, errand: Errand, caller: Caller) -> Iterator[Member]:
        """A worker with room for one more call, which is this one's inside.

        LIMIT_EXCEEDED when a new request can't wait or has waited too long, UNAVAILABLE naming what was tried when all
        workers are away, Stopped when the caller goes.
        """
        with caller.waking(self._wake):
            member = self._enter(errand, caller)
        try:
            yield member
        finally:
            with self._changed:
                member.in_flight -= 1
                self._changed.notify_all()

    def away(self, errand: Errand, member: Member, away: WorkerAway) -> None:
        """The member did not do this errand: it is passed over for a while, longer each time in a row."""
        with self._changed:
            errand.tried[member.place] = str(away)
            now = self._clock.monotonic()
            if away.ending is Ending.LOST:
                # It was had, and worked for the errand.
                errand.away_since, errand.is_new = None, False
            if member.away_until <= now:
                # Requests that fail together are one failure.
                member.failures += 1
            member.away_until = now + away_seconds(member.failures)
            if member.why is None or member.why.ending is not away.ending:
                log.warning("the %s is passed over: %s", member.peer, away)
            member.why = away
            self._changed.notify_all()
        if away.ending in (Ending.ABSENT, Ending.LOST):
            self._watch(member)

    def well(self, member: Member) -> None:
        """The member does what it is asked."""
        with self._changed:
            if member.why is not None:
                log.warning("the %s is back", member.peer)
            self._starting_until = 0.0
            self._return(member)

    # ---- the line ----------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _enter(self, errand: Errand, caller: Caller) -> Member:
        with self._changed:
            self._check_line(errand)
            place = object()
            self._line.append(place)
            try:
                while True:
                    caller.check()
                    if self._line[0] is place and (member := self._pick(errand)) is not None:
                        return member
                    self._changed.wait(self._pause(errand, caller, is_head=self._line[0] is place))
            finally:
                self._line.remove(place)
                self._changed.notify_all()

    def _check_line(self, errand: Errand) -> None:
        if not errand.is_new or len(self._line) < self._limits.queue:
            return
        if self._line or (self._find(errand) is None and not self._all_away()):
            raise LimitExceeded(
                f"every {self.role} worker is busy and the queue is full",
                field="queue",
                value=len(self._line),
                allowed=f"at most {self._limits.queue} waiting, with {self._rule.per_worker} on each worker",
            )

    def _pick(self, errand: Errand) -> Member | None:
        found = self._find(errand)
        if found is None:
            return None
        self._turn = (found + 1) % len(self._members)
        self._familiar.note(errand.prefixes, found)
        member = self._members[found]
        member.in_flight += 1
        return member

    def _find(self, errand: Errand) -> int | None:
        now = self._clock.monotonic()
        loads = [member.load for member in self._members]
        familiar = self._familiar.worker(errand.prefixes)
        found = choose(loads, self._rule, now=now, turn=self._turn, familiar=familiar)
        if found is None and self._all_away():
            # Nothing else is there: one that this errand has not tried may be back.
            untried = [
                load if place in errand.tried else Load(load.in_flight) for place, load in enumerate(loads)
            ]
            found = choose(untried, self._rule, now=now, turn=self._turn)
        return found

    def _all_away(self) -> bool:
        """Whether each is passed over and none of them because it is busy."""
        now = self._clock.monotonic()
        return all(
            member.away_until > now and member.why is not None and member.why.ending is not Ending.BUSY
            for member in self._members
        )

    def _pause(self, errand: Errand, caller: Caller, *, is_head: bool) -> float:
        """Seconds until this errand should look again if nothing changes before; raises where it should not wait."""
        now = self._clock.monotonic()
        left = [caller.seconds_left()]
        if not left[0]:
            raise LimitExceeded(
                f"no {self.role} worker became free in time", field="seconds", value=f"{REQUEST_SECONDS:g}"
            )
        if self._all_away():
            errand.away_since = now if errand.away_since is None else errand.away_since
            patience = max(errand.away_since + errand.patience, self._starting_until) - now
            if patience > 0:
                left.append(patience)
            elif is_head or errand.patience:
                raise self.unreachable(errand)
        else:
            if any(member.away_until <= now for member in self._members if self._is_full(member)):
                # Others are being served: what was away is over.
                errand.away_since = None
            if errand.is_new:
                left.append(self._queue_seconds_left(errand, now))
        left.extend(member.away_until - now for member in self._members if member.away_until > now)
        return max(min(left), 0.001)

    def _queue_seconds_left(self, errand: Errand, now: float) -> float:
        seconds = errand.began + self._limits.queue_seconds - now
        if seconds <= 0:
            raise LimitExceeded(
                f"no {self.role} worker became free",
                field="queue_seconds",
                value=f"{now - errand.began:.3g}",
                allowed=f"{self._limits.queue_seconds:g}, with {self._rule.per_worker} requests on each worker",
            )
        return seconds

    def _is_full(self, member: Member) -> bool:
        return member.in_flight >= self._rule.per_worker

    def unreachable(self, errand: Errand) -> Unavailable:
        """What was tried, by name; for one that had no turn, what was last known of each."""
        known = errand.tried or {
            member.place: str(member.why) for member in self._members if member.why is not None
        }
        tried = "; ".join(f"{self._members[place].peer.address} {words}" for place, words in known.items())
        return Unavailable(f"no {self.role} worker could do it; tried {tried}"[:MAX_MESSAGE_CHARS])

    # ---- coming back -------------------------------------------------------------------------------------------

    def _return(self, member: Member) -> None:
        member.failures, member.away_until, member.why = 0, 0.0, None
        self._changed.notify_all()

    def _watch(self, member: Member) -> None:
        """Let the member be asked again as soon as it is there again."""
        with self._changed:
            if member.watched:
                return
            member.watched = True
            began = self._clock.monotonic()

        def answered(is_there: bool) -> None:
            with self._changed:
                member.watched = False
                # One that answers at once was not away, and fails for another reason.
                if is_there and self._clock.monotonic() - began >= AWAY_SECONDS_FIRST:
                    member.away_until = 0.0
                    self._changed.notify_all()

        member.peer.when_there(answered)
