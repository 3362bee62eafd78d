"""Single flight: lookups that wait for what another session computes, and the flights that they wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.core import LookupResult
from kvstore.core.flights import STATES_SECONDS, Flight, FlightTable, patience
from kvstore.core.steps import Steps
from kvstore.errors import UnknownSession
from kvstore.plan.base import RestorePlan
from kvstore.service.session import Session
from kvstore.types import BlockKey, Exactness, ItemId, ItemKind, NamespaceDigest

WAITERS_MAX = 2048
"""Lookups that wait at once. Each holds the keys of its prompt; one more does not wait."""

WAITING_KEYS_MAX = 1 << 19
"""Keys of all prompts that wait, some hundred bytes each; a lookup past it does not wait."""

SHORTEST_WAIT_SECONDS = 0.001
"""The event loop's clock is no finer."""


class Prompt(NamedTuple):
    """What a lookup asks about. `keys`: of its whole blocks of `block_tokens` tokens; `session`: whose lookup it is;
    `exact_only`: approximate blocks are of no use to it."""

    session: str
    namespace: NamespaceDigest
    keys: Sequence[BlockKey]
    prompt_tokens: int
    block_tokens: int
    exact_only: bool = True

    @property
    def usable(self) -> int:
        """Blocks that a resume may use: the last token is always computed."""
        return min(len(self.keys), max(self.prompt_tokens - 1, 0) // self.block_tokens)


@dataclass(frozen=True, slots=True)
class Waited:
    """How long a lookup waited, and whether an owner that it waited for ended with blocks missing."""

    seconds: float = 0.0
    inherits: bool = False


@dataclass(frozen=True, slots=True)
class _Target:
    """What to wait for: that `flight` makes the block `key` visible or, `states`, what a resume at its end needs."""

    flight: Flight
    key: BlockKey
    states: bool
    seconds: float


@dataclass(eq=False, slots=True)
class _Waiter:
    target: _Target
    turn: asyncio.Future[None]


def own_seconds(plan: RestorePlan, edge: int) -> float:
    """What it costs by `plan` to have everything before `edge` computed: restoring, and its part of the computing."""
    way = plan.chosen
    rest = max(plan.prompt_tokens - way.compute_from, 1)
    return way.read_seconds + way.replay_seconds + way.compute_seconds * (edge - way.compute_from) / rest


class Flights:
    """The flights of a service, and who waits for them. `now` is monotonic seconds; all calls come from the event loop's
    thread. Nothing is polled: a waiter wakes when what it waits for has happened, cannot happen any more, or is late."""

    def __init__(self, table: FlightTable, now: Callable[[], float]) -> None:
        self.table = table
        self._now = now
        self._waiters: dict[int, list[_Waiter]] = {}
        self._is_closed = False
        # Who has waited looks again one at a time, so that others are answered in between.
        self._turns = asyncio.Lock()
        self.waiting = 0
        self._waiting_keys = 0
        self.waited_total = 0
        self.inherited_total = 0

    # ---- lookups ------------------------------------------------------------------------------------------------

    async def wait(
        self, prompt: Prompt, session: Session, *, seconds: float, look: Callable[[], LookupResult]
    ) -> Waited:
        """Return when it is no longer worth waiting for others, after `seconds` at most. `look` tells how the prompt
        stands; it takes no lease, since what it answers may be another's in the end. UnknownSession when the session ends
        meanwhile."""
        begin = self._now()
        waited = inherits = False
        followed: set[int] = set()
        while not self._is_closed and self.table.has_others(prompt.namespace, prompt.session):
            target = self._target(prompt, look(), followed)
            left = begin + seconds - self._now()
            if target is None or min(target.seconds, left) < SHORTEST_WAIT_SECONDS:
                break
            if self.waiting >= WAITERS_MAX or self._waiting_keys + len(prompt.keys) > WAITING_KEYS_MAX:
                break
            waited = True
            self._waiting_keys += len(prompt.keys)
            try:
                await self._until(target, session, min(target.seconds, left))
            finally:
                self._waiting_keys -= len(prompt.keys)
            async with self._turns:
                await asyncio.sleep(0)
            check_open(session)
            if not self.table.is_open(target.flight) and target.flight.unseen:
                inherits = True
        if not waited:
            return Waited()
        self.waited_total += 1
        return Waited(self._now() - begin, inherits)

    def announce(self, prompt: Prompt, found: LookupResult, *, inherits: bool) -> Flight | None:
        """The flight of the blocks that `found` lacks and nobody computes."""
        keys = prompt.keys[found.coverage.blocks :]
        if not keys:
            return None
        flight = self.table.announce(
            prompt.session,
            prompt.namespace,
            keys,
            expected_seconds=own_seconds(found.plan, len(prompt.keys) * prompt.block_tokens),
            exact=found.plan.exactness is Exactness.EXACT,
            now=self._now(),
        )
        self.inherited_total += flight is not None and inherits
        return flight

    @property
    def are_open(self) -> bool:
        return len(self.table) > 0

    def ahead(self, prompt: Prompt, found: LookupResult) -> tuple[int, float]:
        """(blocks right after those held that other sessions compute or write, seconds since the first was announced)."""
        if not len(self.table):
            return len(found.plan.wait_for), 0.0
        keys = prompt.keys[found.coverage.blocks :]
        count, first, _ = self.table.ahead(prompt.session, prompt.namespace, keys)
        return max(count, len(found.plan.wait_for)), 0.0 if first is None else self._now() - first.born

    def _target(self, prompt: Prompt, found: LookupResult, followed: set[int]) -> _Target | None:
        """What to wait for; None where computing is as good. `followed`: flights whose states were waited for before."""
        held, size, usable = found.coverage.blocks, prompt.block_tokens, prompt.usable
        missing = prompt.keys[held:usable]
        _, flight, shared = self.table.ahead(prompt.session, prompt.namespace, missing)
        if flight is not None:
            if prompt.exact_only and not flight.exact:
                return None
            seconds = self._patience(flight, shared, own_seconds(found.plan, (held + shared) * size))
            return _Target(flight, missing[shared - 1], False, seconds)
        # All that the plan can use is visible. What a resume there needs may not be: owners store that last.
        last, way = min(held, usable), found.plan.chosen
        saving = own_seconds(found.plan, last * size) - way.read_seconds
        if way.compute_from >= last * size and not way.replay_tokens:
            return None
        flight = self.table.follows(prompt.session, prompt.namespace, prompt.keys[last - 1])
        if flight is None or flight.flight_id in followed or (prompt.exact_only and not flight.exact):
            return None
        followed.add(flight.flight_id)
        # An owner with nothing left to compute is about to store its states, and then ends the flight. One that goes on
        # may never store a state here.
        seconds = self._patience(flight, 1, saving) if flight.unseen else min(saving, STATES_SECONDS)
        return _Target(flight, prompt.keys[last - 1], True, seconds)

    def _patience(self, flight: Flight, shared: int, saving_seconds: float) -> float:
        return patience(
            blocks=len(flight.keys),
            done=flight.done,
            expected_seconds=flight.expected_seconds,
            progress_age=flight.progressed - flight.born,
            age=self._now() - flight.born,
            shared=shared,
            saving_seconds=saving_seconds,
        )

    async def _until(self, target: _Target, session: Session, seconds: float) -> None:
        number = target.flight.flight_id
        waiter = _Waiter(target, asyncio.get_running_loop().create_future())
        self._waiters.setdefault(number, []).append(waiter)
        self.waiting += 1
        try:
            either: set[asyncio.Future[None]] = {waiter.turn, session.ended}
            await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.waiting -= 1
            left = self._waiters[number]
            left.remove(waiter)
            if not left:
                del self._waiters[number]
        check_open(session)

    # ---- what happens to flights --------------------------------------------------------------------------------

    def published(self, namespace: NamespaceDigest, items: Sequence[ItemId]) -> None:
        """These are visible now, whoever wrote them."""
        if not len(self.table):
            return
        now = self._now()
        for flight in self.table.visible(
            namespace, (item.key for item in items if item.kind is ItemKind.BLOCK), now
        ):
            for waiter in self._waiters.get(flight.flight_id, ()):
                if not waiter.target.states and waiter.target.key not in flight.unseen:
                    _wake(waiter)
        for item in items:
            if item.kind is not ItemKind.BLOCK:
                owner = self.table.follows("", namespace, item.key)
                for waiter in () if owner is None else self._waiters.get(owner.flight_id, ()):
                    if waiter.target.states and waiter.target.key == item.key:
                        _wake(waiter)

    def end(self, flight_id: int, session: str) -> bool:
        """Whether this ended it. Those that wait for it wake; the first of them finds nobody ahead."""
        flight = self.table.end(flight_id, session)
        self._ended([] if flight is None else [flight])
        return flight is not None

    def ending_session(self, session: str) -> Steps[None, None]:
        """End the session's flights."""
        yield from self._ending(self.table.of_session(session))

    def clearing(self, namespace: NamespaceDigest | None) -> Steps[None, None]:
        """Nothing of the namespace, or of any, is to come: the flights of now end."""
        yield from self._ending(self.table.of_namespace(namespace))

    def expiring(self) -> Steps[None, None]:
        """End those that are past their deadline."""
        yield from self._ending(self.table.due(self._now()))

    def _ending(self, numbers: Iterable[int]) -> Steps[None, None]:
        for flights in self.table.ending(numbers):
            self._ended(flights)
            yield

    def close(self) -> None:
        """The service takes no new work: nobody waits from here on."""
        self._is_closed = True
        for waiters in self._waiters.values():
            for waiter in waiters:
                _wake(waiter)

    def _ended(self, flights: Iterable[Flight]) -> None:
        for flight in flights:
            for waiter in self._waiters.get(flight.flight_id, ()):
                _wake(waiter)


def check_open(session: Session) -> None:
    """Raise UnknownSession where it has ended."""
    if session.ended.done():
        raise UnknownSession("the session ended during the call", field="kvstore-session", value=session.id)


def _wake(waiter: _Waiter) -> None:
    if not waiter.turn.done():
        waiter.turn.set_result(None)
