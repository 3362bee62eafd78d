"""Reservations: the writer's side. Invisible until commit, given back if the writer goes."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import overload

from kvstore.core.base import GivenBack, Granted
from kvstore.core.deadlines import Deadlines
from kvstore.core.holds import Holds
from kvstore.core.steps import ITEMS_AT_ONCE, Steps
from kvstore.errors import LimitExceeded, UnknownReservation
from kvstore.types import BlockKey, ItemId, NamespaceDigest


@dataclass(slots=True, eq=False)
class Reservation:
    """Items that one session may write. `builds_on`: keys of the blocks that they follow and that others hold or write;
    `held_slots`: those of them that are in the index. `undecided`: items that were asked for beside those granted, while it is being
    made. `over`: it has ended. `writing`: its bytes are on their way to the log, and its end is the commit's to decide. `accepted`:
    of them, what became visible before it was durable, parents first; `settling`: no more of it does, since what has become of
    the write is known; `settled`: of those, what was visible still when it became durable. `void`: its namespace was cleared
    meanwhile, so that nothing of it may become visible. `ssd_bytes`: payload bytes of what was granted for SSD."""

    reservation_id: int
    session: str
    namespace: NamespaceDigest
    granted: list[Granted]
    born: float
    deadline: float
    undecided: int = 0
    builds_on: set[BlockKey] = field(default_factory=set)
    held_slots: set[int] = field(default_factory=set)
    writing: bool = False
    accepted: list[ItemId] = field(default_factory=list)
    settling: bool = False
    settled: set[ItemId] = field(default_factory=set)
    void: bool = False
    over: bool = False
    ssd_bytes: int = 0


class Returned(Sequence[GivenBack]):
    """What ended reservations give back, made when it is asked for: nobody may want to know."""

    def __init__(self, ended: Sequence[Reservation]) -> None:
        self._ended = ended

    def __len__(self) -> int:
        return sum(len(each.granted) for each in self._ended)

    def __iter__(self) -> Iterator[GivenBack]:
        return (
            GivenBack(ended.namespace, each.item.item_id) for ended in self._ended for each in ended.granted
        )

    @overload
    def __getitem__(self, index: int) -> GivenBack: ...

    @overload
    def __getitem__(self, index: slice) -> list[GivenBack]: ...

    def __getitem__(self, index: int | slice) -> GivenBack | list[GivenBack]:
        return list(self)[index]


def returned(ended: Sequence[Reservation]) -> Sequence[GivenBack]:
    return Returned(ended) if ended else []


class ReservationTable:
    """All reservations, by number, by session and by key. `now` is monotonic seconds.

    Ending one takes no longer for its items: they are marked as free with it, and swept out later.
    """

    def __init__(
        self,
        holds: Holds,
        *,
        seconds: float,
        most: int,
        most_per_session: int,
        most_items: int,
        most_items_per_session: int,
    ) -> None:
        self._holds = holds
        self._seconds = seconds
        self._most = most
        self._most_per_session = most_per_session
        self._most_items = most_items
        self._most_items_per_session = most_items_per_session
        self._open: dict[int, Reservation] = {}
        self._sessions: dict[str, set[int]] = {}
        self._in_flight: dict[tuple[NamespaceDigest, ItemId], tuple[Reservation, Granted]] = {}
        self._builders: dict[tuple[NamespaceDigest, BlockKey], set[int]] = {}
        self._deadlines = Deadlines()
        self._items = 0
        self._undecided = 0
        self._unswept: deque[Reservation] = deque()
        self.ssd_bytes: Counter[NamespaceDigest] = Counter()
        """That open reservations may put on the disk, by namespace."""

    def __len__(self) -> int:
        return len(self._open)

    @property
    def seconds(self) -> float:
        return self._seconds

    @property
    def in_flight(self) -> int:
        return self._items

    def check_room(self, session: str, items: int) -> None:
        """Raise LimitExceeded unless one more of so many items may be made."""
        numbers = self._sessions.get(session, ())
        mine = len(numbers)
        # What others are about to be granted counts, or calls side by side would be given the same room.
        own = sum(len(each.granted) + each.undecided for each in map(self._open.__getitem__, numbers))
        for name, value, most in (
            ("reservations", len(self._open) + 1, self._most),
            ("reservations_per_session", mine + 1, self._most_per_session),
            ("reserved_items_in_all", self._items + self._undecided + items, self._most_items),
            ("reserved_items_per_session", own + items, self._most_items_per_session),
        ):
            if value > most:
                raise LimitExceeded(
                    "too much is reserved; commit or abort some",
                    field=name,
                    value=value,
                    allowed=f"{most}",
                )

    def is_crowded(self, session: str) -> bool:
        """Whether more than half of what the session may have, or of all, is open."""
        numbers = self._sessions.get(session, ())
        own = sum(len(each.granted) + each.undecided for each in map(self._open.__getitem__, numbers))
        return (
            2 * len(numbers) > self._most_per_session
            or 2 * len(self._open) > self._most
            or 2 * own > self._most_items_per_session
            or 2 * (self._items + self._undecided) > self._most_items
        )

    def owner(self, namespace: NamespaceDigest, item: ItemId) -> Reservation | None:
        """The reservation that has the item."""
        found = self.promise(namespace, item)
        return None if found is None else found[0]

    def promise(self, namespace: NamespaceDigest, item: ItemId) -> tuple[Reservation, Granted] | None:
        """The same, and what of it the item is. Takes no longer for a large reservation."""
        found = self._in_flight.get((namespace, item))
        return None if found is None or found[0].over else found

    def find(self, reservation_id: int) -> Reservation | None:
        return self._open.get(reservation_id)

    def begin(
        self, reservation_id: int, session: str, namespace: NamespaceDigest, *, undecided: int, now: float
    ) -> Reservation:
        """One of no items yet, with room for `undecided`."""
        made = Reservation(reservation_id, session, namespace, [], now, now + self._seconds, undecided)
        self._undecided += undecided
        self._open[reservation_id] = made
        self._sessions.setdefault(session, set()).add(reservation_id)
        self._deadlines.set(reservation_id, made.deadline)
        return made

    def grant(
        self,
        made: Reservation,
        granted: Sequence[Granted],
        builds_on: Mapping[BlockKey, int | None],
        *,
        undecided: int,
    ) -> None:
        """More items for it, which nobody has; `undecided` are left to be decided about. `builds_on`: slots of the blocks outside
        the reservation that they follow, None where another reservation is still writing it. They are not evicted while the
        reservation lives, once they are in the index."""
        namespace = made.namespace
        made.granted += granted
        self._undecided -= made.undecided - undecided
        made.undecided = undecided
        self._items += len(granted)
        size = sum(each.item.length for each in granted if each.item.to_ssd)
        made.ssd_bytes += size
        self.ssd_bytes[namespace] += size
        for each in granted:
            self._in_flight[namespace, each.item.item_id] = made, each
        for key, slot in builds_on.items():
            made.builds_on.add(key)
            self._builders.setdefault((namespace, key), set()).add(made.reservation_id)
            if slot is not None:
                self.hold(made, slot)

    def get(self, reservation_id: int, session: str) -> Reservation:
        """Raise UnknownReservation, also for another session's, which is as one that is not there."""
        found = self._open.get(reservation_id)
        if found is None or found.session != session:
            raise UnknownReservation(
                "no such reservation of this session: never made here, of another session, committed, given back, or past its deadline",
                field="reservation_id",
                value=reservation_id,
                allowed="a reservation that this session holds",
            )
        return found

    def start_writing(self, reservation: Reservation) -> None:
        """From here on its deadline and its session's end no longer count: the log may hold its bytes already."""
        reservation.writing = True
        self._deadlines.discard(reservation.reservation_id)

    def end(self, reservation: Reservation) -> None:
        del self._open[reservation.reservation_id]
        mine = self._sessions[reservation.session]
        mine.remove(reservation.reservation_id)
        if not mine:
            del self._sessions[reservation.session]
        self._deadlines.discard(reservation.reservation_id)
        reservation.over = True
        self._items -= len(reservation.granted)
        self._undecided -= reservation.undecided
        self.ssd_bytes[reservation.namespace] -= reservation.ssd_bytes
        if not self.ssd_bytes[reservation.namespace]:
            del self.ssd_bytes[reservation.namespace]
        self._unswept.append(reservation)
        for slot in reservation.held_slots:
            self._holds.release(slot, reservation.reservation_id)
        for key in reservation.builds_on:
            builders = self._builders[reservation.namespace, key]
            builders.remove(reservation.reservation_id)
            if not builders:
                del self._builders[reservation.namespace, key]

    def block_inserted(self, namespace: NamespaceDigest, key: BlockKey, slot: int) -> None:
        """A block is in the index now: the reservations that build on it hold it from here on."""
        for reservation_id in self._builders.get((namespace, key), ()):
            self.hold(self._open[reservation_id], slot)

    def hold(self, reservation: Reservation, slot: int) -> None:
        """The block is not evicted while the reservation lives."""
        reservation.held_slots.add(slot)
        self._holds.hold(slot, reservation.reservation_id)

    def sweeping(self) -> Steps[None, None]:
        """Let go of the memory of items whose reservations have ended, in steps."""
        swept = 0
        while self._unswept:
            over = self._unswept.popleft()
            for each in over.granted:
                name = (over.namespace, each.item.item_id)
                # Another may have it by now.
                if (found := self._in_flight.get(name)) is not None and found[0] is over:
                    del self._in_flight[name]
                swept += 1
                if swept % ITEMS_AT_ONCE == 0:
                    yield

    def of_session(self, session: str) -> list[int]:
        """Numbers of its reservations, the first one first."""
        return sorted(self._sessions.get(session, ()))

    def end_due(self, now: float) -> list[Reservation]:
        ended = [self._open[number] for number in self._deadlines.due(now)]
        for each in ended:
            self.end(each)
        return ended

    def block_removed(self, reservation_id: int, slot: int) -> None:
        """A block that the reservation builds on has left in spite of its hold."""
        found = self._open.get(reservation_id)
        if found is not None:
            found.held_slots.discard(slot)

    def void(self, namespace: NamespaceDigest) -> list[Reservation]:
        """The namespace is being cleared: end what is not being written, and mark the rest."""
        mine = [each for each in self._open.values() if each.namespace == namespace]
        for each in mine:
            each.void = True
        ended = [each for each in mine if not each.writing]
        for each in ended:
            self.end(each)
        return ended

    def all(self) -> list[Reservation]:
        return list(self._open.values())
