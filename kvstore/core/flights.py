"""Flights: who computes which blocks now, so that others may wait for them instead of computing them too.

A flight is advice. Writing needs none, and nobody's bytes are right or wrong because of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvstore.core.deadlines import Deadlines
from kvstore.core.steps import Steps
from kvstore.types import BlockKey, NamespaceDigest

SLACK = 2.0
"""Rates that two workers of a busy machine have measured differ by a third each way, for equal work. Within this factor a
wait counts as no longer than the caller's own computing; and the pool computes the blocks once."""

LATE = 2.0
"""An owner that has made nothing visible for this multiple of the time that its blocks were to take is not waited for."""

LEAST_PATIENCE_SECONDS = 0.05
"""Beside what is computed, an owner has to store it, which the announced price does not cover."""

STATES_SECONDS = 5.0
"""How long a flight goes on, if its owner does not end it, when all its blocks are visible: their states may follow."""


KEYS_AT_ONCE = 4096
"""Of flights that end: some milliseconds."""


@dataclass(eq=False, slots=True)
class Flight:
    """`session` computes the blocks `keys`, in the order of the prompt, until `deadline` (monotonic seconds).

    exact: whether they will be of EXACT lineage. expected_seconds: what computing them was priced at. unseen: those that
    have not become visible. progressed: when the last one did, at first `born`.
    """

    flight_id: int
    session: str
    namespace: NamespaceDigest
    keys: Sequence[BlockKey]
    born: float
    deadline: float
    expected_seconds: float
    exact: bool
    progressed: float
    unseen: set[BlockKey] = field(repr=False)

    @property
    def done(self) -> int:
        return len(self.keys) - len(self.unseen)


def patience(
    *,
    blocks: int,
    done: int,
    expected_seconds: float,
    progress_age: float,
    age: float,
    shared: int,
    saving_seconds: float,
) -> float:
    """For how many seconds from now to wait for `shared` more blocks of a flight if nothing more is heard of it; 0: do not.

    The flight has `blocks` blocks in all, priced at `expected_seconds`; `done` of them were visible when it was
    `progress_age` seconds old, and none since; it is `age` old now. `saving_seconds`: what computing the shared blocks
    would cost the caller. The wait is worth it while the time that it is expected to take is no more than the saving, but
    for SLACK, and the owner is not late.
    """
    # The announced rate weighs as much as a whole flight that was seen. The seen one alone would be far too slow at first,
    # since nothing becomes visible before much of what follows is computed.
    seconds_per_block = (expected_seconds + progress_age) / (blocks + done)
    needed = shared * seconds_per_block
    quiet = age - progress_age
    if needed - quiet > SLACK * saving_seconds:
        return 0.0
    return max(max(LATE * needed, LEAST_PATIENCE_SECONDS) - quiet, 0.0)


class FlightTable:
    """All flights, by number, by session and by key. `now` is monotonic seconds.

    A key is in one flight at most. Past a limit nothing is refused: there is no flight, and that is counted.
    """

    def __init__(
        self, *, seconds: float, most: int = 10_000, most_per_session: int = 256, most_keys: int = 1 << 18
    ) -> None:
        self._seconds = seconds
        self._most = most
        self._most_per_session = most_per_session
        self._most_keys = most_keys
        self._open: dict[int, Flight] = {}
        self._sessions: dict[str, set[int]] = {}
        self._owners: dict[NamespaceDigest, dict[BlockKey, Flight]] = {}
        self._keys = 0
        self._deadlines = Deadlines()
        self._last_id = 0
        self.announced_total = 0
        self.unannounced_total = 0

    def __len__(self) -> int:
        return len(self._open)

    @property
    def keys(self) -> int:
        return self._keys

    def is_open(self, flight: Flight) -> bool:
        return flight.flight_id in self._open

    def has_others(self, namespace: NamespaceDigest, session: str) -> bool:
        """Whether another session may have a flight in the namespace: False is certain."""
        return namespace in self._owners and len(self._open) > len(self._sessions.get(session, ()))

    def announce(
        self,
        session: str,
        namespace: NamespaceDigest,
        keys: Sequence[BlockKey],
        *,
        expected_seconds: float,
        now: float,
        exact: bool = True,
    ) -> Flight | None:
        """A flight of those of `keys` that are in none, up to the first that is in another session's. None where there
        are none of them, or no room."""
        # A caller's keys are claims: one that comes twice is no chain, and counts once.
        free = list(dict.fromkeys(self._free(session, namespace, keys)))
        if not free:
            return None
        mine = self._sessions.get(session, ())
        if (
            len(self._open) >= self._most
            or len(mine) >= self._most_per_session
            or self._keys + len(free) > self._most_keys
        ):
            self.unannounced_total += 1
            return None
        self._last_id += 1
        share = len(free) / len(keys)
        made = Flight(
            self._last_id,
            session,
            namespace,
            free,
            born=now,
            deadline=now + self._seconds,
            expected_seconds=expected_seconds * share,
            exact=exact,
            progressed=now,
            unseen=set(free),
        )
        self._open[made.flight_id] = made
        self._sessions.setdefault(session, set()).add(made.flight_id)
        self._owners.setdefault(namespace, {}).update(dict.fromkeys(free, made))
        self._keys += len(free)
        self._deadlines.set(made.flight_id, made.deadline)
        self.announced_total += 1
        return made

    def _free(self, session: str, namespace: NamespaceDigest, keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
        owners = self._owners.get(namespace)
        if owners is None:
            return keys
        free = []
        for key in keys:
            owner = owners.get(key)
            if owner is None:
                free.append(key)
            elif owner.session != session:
                break
        return free

    def ahead(
        self, session: str, namespace: NamespaceDigest, keys: Sequence[BlockKey]
    ) -> tuple[int, Flight | None, int]:
        """(how many of the first `keys` other sessions have in flight, the flight of the first of them, how many that one
        has without a gap). What has become visible is not in flight any more."""
        first: Flight | None = None
        count = of_first = 0
        owners = self._owners.get(namespace)
        if owners is None:
            return 0, None, 0
        for key in keys:
            owner = owners.get(key)
            if owner is None or owner.session == session or key not in owner.unseen:
                break
            first = first or owner
            if owner is first and of_first == count:
                of_first += 1
            count += 1
        return count, first, of_first

    def follows(self, session: str, namespace: NamespaceDigest, key: BlockKey) -> Flight | None:
        """The other session's flight that has made `key` visible and may make its state so."""
        owner = self._owners.get(namespace, {}).get(key)
        return None if owner is None or owner.session == session or key in owner.unseen else owner

    def visible(self, namespace: NamespaceDigest, keys: Iterable[BlockKey], now: float) -> list[Flight]:
        """These blocks are visible now, whoever wrote them. The flights that they were in: their deadlines are new."""
        owners = self._owners.get(namespace)
        if owners is None:
            return []
        moved: dict[int, Flight] = {}
        for key in keys:
            flight = owners.get(key)
            if flight is not None and key in flight.unseen:
                flight.unseen.remove(key)
                moved[flight.flight_id] = flight
        for flight in moved.values():
            flight.progressed = now
            flight.deadline = now + (self._seconds if flight.unseen else min(self._seconds, STATES_SECONDS))
            self._deadlines.set(flight.flight_id, flight.deadline)
        return list(moved.values())

    def end(self, flight_id: int, session: str) -> Flight | None:
        """None where it has ended before, was never there, or is another session's."""
        flight = self._open.get(flight_id)
        if flight is None or flight.session != session:
            return None
        self._end(flight)
        return flight

    def of_session(self, session: str) -> list[int]:
        """Its flights' numbers, as of now."""
        return sorted(self._sessions.get(session, ()))

    def of_namespace(self, namespace: NamespaceDigest | None) -> list[int]:
        """Of one namespace, or of all."""
        return [flight.flight_id for flight in self._open.values() if namespace in (None, flight.namespace)]

    def due(self, now: float) -> Iterator[int]:
        """Those whose deadline has come, each when it is asked for."""
        while found := self._deadlines.due(now, limit=1):
            yield found[0]

    def ending(self, numbers: Iterable[int]) -> Steps[list[Flight], None]:
        """End these, in steps of what is no more than some thousand keys together, or a single flight. Those that have ended by
        their turn are left out."""
        ended: list[Flight] = []
        keys = 0
        for number in numbers:
            flight = self._open.get(number)
            if flight is None:
                continue
            self._end(flight)
            ended.append(flight)
            keys += len(flight.keys)
            if keys >= KEYS_AT_ONCE:
                yield ended
                ended, keys = [], 0
        if ended:
            yield ended

    def check_integrity(self) -> None:
        """Raise AssertionError unless every law holds. Walks everything."""
        seen: set[tuple[NamespaceDigest, BlockKey]] = set()
        for flight in self._open.values():
            assert flight.unseen <= set(flight.keys), "what is unseen was announced"
            for key in flight.keys:
                assert self._owners[flight.namespace][key] is flight, "a flight owns its keys"
                assert (flight.namespace, key) not in seen, "a key is in one flight"
                seen.add((flight.namespace, key))
        assert len(seen) == self._keys == sum(map(len, self._owners.values())), "keys are counted"
        assert all(self._owners.values()), "a namespace without flights is not kept"
        assert sum(map(len, self._sessions.values())) == len(self._open), "a flight has one session"

    def _end(self, flight: Flight) -> None:
        del self._open[flight.flight_id]
        mine = self._sessions[flight.session]
        mine.remove(flight.flight_id)
        if not mine:
            del self._sessions[flight.session]
        owners = self._owners[flight.namespace]
        for key in flight.keys:
            del owners[key]
        if not owners:
            del self._owners[flight.namespace]
        self._keys -= len(flight.keys)
        self._deadlines.discard(flight.flight_id)
