"""Long work in steps, with all that a service does between two of them: the core's laws hold after each, what a lease protects
stays what it was, and in the end nothing is left."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from kvstore.core import FetchItem, Lease, Limits, Written
from kvstore.core.accepted import is_accepted
from kvstore.core.steps import Steps
from kvstore.errors import LimitExceeded, UnknownLease, UnknownReservation
from kvstore.types import ItemId, Lineage, Tier
from tests.support.core import EAGER, B, CoreRig, checks_of
from tests.support.long import seeds

ACTIONS = 300
SESSIONS = ("a", "b", "c")
FORGETFUL = (LimitExceeded, UnknownReservation)
"""What work may end with where others were faster."""


@dataclass(frozen=True)
class Leased:
    lease: Lease
    items: list[FetchItem | None]


class Machine:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.rig = CoreRig(
            limits=Limits(reserved_items_per_session=400), per_segment=16, pool_states=6, policy="full"
        )
        self.core = self.rig.core
        self.prompts = [
            self.rig.keys([prompt] * B + list(range(self.random.randrange(2, 14) * B))) for prompt in range(4)
        ]
        self.writing: tuple[Steps[Any, Any], Callable[[], object]] | None = None
        """One at a time, and what follows it."""
        self.beside: list[tuple[str, Steps[Any, Any]]] = []
        """By whom, "" for the service itself."""
        self.reserved: list[tuple[int, str]] = []
        self.accepted: set[int] = set()
        """Of those reserved, what is to be committed, whatever ends."""
        self.is_clearing = False
        self.leased: list[Leased] = []

    @property
    def now(self) -> float:
        return self.rig.clock.monotonic()

    def act(self) -> None:
        actions: list[tuple[Callable[[], None], float]] = [
            (self.reserve, 1.0),
            (self.lookup, 2.0),
            (self.release, 1.0),
            (self.end_session, 0.2),
            (self.advance, 0.2),
            (self.expire, 1.0),
            (self.damage, 0.2),
            (self.give_up, 0.3),
            (self.accept, 1.0),
            (self.write, 2.0),
        ]
        [action] = self.random.choices(
            [each for each, _ in actions], weights=[weight for _, weight in actions]
        )
        action()
        self.step()

    # ---- what callers do ----------------------------------------------------------------------------------------

    def reserve(self) -> None:
        keys, session = self.random.choice(self.prompts), self.random.choice(SESSIONS)
        lineage = self.random.choice(list(Lineage))
        items = self.rig.block_items(keys, lineage=lineage)
        for number in self.random.sample(range(len(keys)), self.random.randrange(3)):
            is_pooled = self.random.random() < 0.5
            items.append(self.rig.state_item(keys, (number + 1) * B, pool=is_pooled, lineage=lineage))
        self.beside.append((session, self.core.reserving(session, self.rig.main, items, **self.rig.now)))

    def lookup(self) -> None:
        keys, session = self.random.choice(self.prompts), self.random.choice(SESSIONS)
        found = self.core.lookup(
            self.rig.main,
            keys,
            prompt_tokens=len(keys) * B + 1,
            costs=EAGER,
            session=session,
            lease=True,
            exact_only=self.random.random() < 0.5,
            **self.rig.now,
        )
        if found.lease_id is not None:
            lease = self.core.lease(found.lease_id, session, self.now)
            self.leased.append(Leased(lease, self.items_of(lease)))

    def items_of(self, lease: Lease) -> list[FetchItem | None]:
        return self.core.fetch_list(
            lease, first_block=0, block_count=lease.blocks, want_state=bool(lease.states)
        )

    def release(self) -> None:
        if self.leased:
            lease = self.leased.pop(self.random.randrange(len(self.leased))).lease
            self.core.release(lease.lease_id, lease.session, self.now)

    def end_session(self) -> None:
        self.beside.append(("", self.core.ending(self.random.choice(SESSIONS), self.now)))

    def give_up(self) -> None:
        mine = [each for each in self.beside if each[0]]
        if mine:
            gone = self.random.choice(mine)
            gone[1].close()
            self.beside.remove(gone)

    def accept(self) -> None:
        """Some of what is reserved becomes visible while its write is going to come; not beside a clear."""
        if not self.reserved or self.is_clearing:
            return
        number, session = self.random.choice(self.reserved)
        try:
            granted = self.core.commit_list(number, session)
        except UnknownReservation:
            return
        self.accepted.add(number)
        at = self.random.randrange(len(granted))
        arrived = [
            (each, Written(checks_of(each.item.key), None, self.rig.written(each.item).payload))
            for each in granted[at : at + 5]
        ]
        self.core.accept(number, session, arrived, **self.rig.now)

    # ---- what the service does ----------------------------------------------------------------------------------

    def advance(self) -> None:
        self.rig.clock.advance(self.random.choice((1, 20, 70)))

    def expire(self) -> None:
        self.core.expire_reservations(self.now)
        self.beside += [("", self.core.expiring_leases(self.now)), ("", self.core.forgetting_claims())]
        later = self.random.choice((0.0, 0.0, 1e9))
        self.core.expire_blocks(self.rig.clock.wall() + later, limit=3)

    def damage(self) -> None:
        items = [item for each in self.leased for item in self.items_of(each.lease)[:1] if item is not None]
        if items:
            item = self.random.choice(items)
            self.core.forget(self.rig.main, item.item, place=item.place)

    def write(self) -> None:
        """What the writer does, one after another."""
        if self.writing is None:
            self.random.choice((self.commit, self.commit, self.evict, self.clear, self.drop, self.clean))()

    def commit(self) -> None:
        if not self.reserved:
            return
        number, session = self.reserved.pop(self.random.randrange(len(self.reserved)))
        try:
            granted = self.core.commit_list(number, session)
        except UnknownReservation:
            return
        results = {
            each.item.item_id: self.rig.written(each.item) for each in granted if self.random.random() < 0.9
        }
        self.begin(self.settle_and_commit(number, session, results))

    def settle_and_commit(self, number: int, session: str, results: dict[ItemId, Written]) -> Steps[Any, Any]:
        """What is told of a place is true of the index then: whoever reads may look there at once."""
        for step in self.core.settling(number, session, results):
            assert not {*step.moved} & {each.place for each in step.gone}
            yield
        self.accepted.discard(number)
        yield from self.core.committing(number, session, results, **self.rig.now)

    def evict(self) -> None:
        need = self.random.choice((1, 50_000, 10**9))
        is_states = self.random.random() < 0.5
        wall = self.rig.clock.wall()
        self.begin(self.core.eviction(need, prefer_states=is_states, now_wall=wall))

    def clear(self) -> None:
        if self.random.random() < 0.3:
            self.is_clearing = True
            self.begin(self.core.clearing(None), then=self.end_clear)

    def end_clear(self) -> None:
        self.core.void_reservations(None)
        self.is_clearing = False

    def drop(self) -> None:
        self.begin(self.core.dropping(None, self.random.choice((None, Tier.SSD))))

    def clean(self) -> None:
        segments = [each for each in self.core.items_in_segments() if not is_accepted(each)]
        if segments:
            segment = self.random.choice(segments)
            items = [item for each in self.leased for item in self.items_of(each.lease)]
            places = {item.place for item in items if item is not None and item.place is not None}
            moved = {place: self.rig.place(place.length) for place in places if place.segment_id == segment}
            self.begin(self.core.relocation(segment, moved))

    def begin(self, steps: Steps[Any, Any], then: Callable[[], object] = lambda: None) -> None:
        self.writing = steps, then

    # ---- steps --------------------------------------------------------------------------------------------------

    def step(self) -> None:
        if self.writing is not None and self.random.random() < 0.6:
            steps, then = self.writing
            if not self.goes_on(steps):
                then()
                self.writing = None
        for each in list(self.beside):
            if self.random.random() < 0.6 and not self.goes_on(each[1], session=each[0]):
                self.beside.remove(each)

    def goes_on(self, steps: Steps[Any, Any], *, session: str = "") -> bool:
        try:
            next(steps)
        except StopIteration as end:
            if session and end.value.reservation_id is not None:
                self.reserved.append((end.value.reservation_id, session))
            return False
        except FORGETFUL:
            assert session, "only what a caller asked for is refused"
            return False
        return True

    # ---- what holds ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        self.core.check_integrity()
        for each in self.leased:
            try:
                lease = self.core.lease(each.lease.lease_id, each.lease.session, self.now)
            except UnknownLease:
                continue
            pairs = zip(each.items, self.items_of(lease), strict=True)
            assert all(was is None or now is None or same(was) == same(now) for was, now in pairs)

    def end(self) -> None:
        while self.writing is not None or self.beside or self.accepted:
            self.reserved = [each for each in self.reserved if each[0] in self.accepted]
            if self.writing is None:
                self.commit()
            self.step()
        for session in SESSIONS:
            self.core.end_session(session, self.now)
        for _ in self.core.forgetting_claims():
            self.core.check_integrity()
        self.core.check_integrity()
        statistics = self.core.statistics()
        assert (self.core.open_work, statistics.in_flight) == (0, 0)
        assert self.core.pool.statistics().pinned == 0


def same(item: FetchItem) -> tuple[ItemId, Lineage, object]:
    return item.item, item.lineage, item.checks


@pytest.mark.parametrize("seed", seeds(15, of=120))
def test_whatever_comes_between_two_steps_the_laws_hold(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("accepting", "leaving", "showing", "writing", "ending", "reservations"):
        monkeypatch.setattr(f"kvstore.core.{module}.ITEMS_AT_ONCE", 3)
    monkeypatch.setattr("kvstore.core.leaving.VISITS_AT_ONCE", 7)
    machine = Machine(seed)
    for _ in range(ACTIONS):
        machine.act()
        machine.check()
    machine.end()
