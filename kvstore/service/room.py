"""Making room on the disk: give back what is dead, clean what is mostly dead, evict; in that order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvstore.clock import Clock
from kvstore.errors import DeviceError, InvalidArgument, NoSpace
from kvstore.store.base import Cheapest, Place, Space
from kvstore.store.wear import CopyAllowance, WearBudget

log = logging.getLogger(__name__)

T = TypeVar("T")

CLEAN_BELOW_LIVE_SHARE = 0.35
"""While something may still be evicted, a segment is copied forward only when at most this share of it lives, and the
allowance for copies lasts. What is owed to retention is not counted: nothing may be evicted then."""

CLEAN_AT_ALL_BELOW_LIVE_SHARE = 0.95
EVICTION_STEPS_PER_SEGMENT = 4
EVICTION_STEP_BYTES_MAX = 8 << 20
"""Only whole segments come back, and what was used together was written together: so eviction goes on in steps of this
part of a segment until one is free. A step is decided in the event loop's thread, and so is not larger than this."""

DISCARDS_AT_ONCE = 2000

LEAST_GAIN_PER_SEGMENT = 64
"""A clean that wins back less than this part of a segment is not repeated until more is dead."""


CLEAN_AGAIN_SECONDS = 600.0
"""When a segment is tried again that the device kept from being copied: what kept it may be over."""


class InThread(Protocol):
    """Runs one blocking call in the log's one writer thread."""

    async def __call__(self, work: Callable[[], T]) -> T: ...


class SpaceLog(Protocol):
    """What of a RecordLog makes room: see there."""

    def discard(self, places: Iterable[Place]) -> None: ...

    def reclaim(self) -> int: ...

    def room_bytes(self) -> int: ...

    def largest_append_bytes(self) -> int: ...

    def space(self) -> Space: ...

    def cheapest_segment(self) -> Cheapest | None: ...

    def clean(self, segment_id: int) -> dict[Place, Place]: ...


class SpaceDecisions(Protocol):
    """What the core decides about space. Called in the event loop's thread."""

    async def evict(self, need_bytes: int) -> list[Place]:
        """Take about so many bytes out of the index, states first; their places. Empty: nothing may go now."""

    async def moved(self, segment_id: int, moves: dict[Place, Place]) -> list[Place]:
        """The live records of a segment have moved, and those not named were damaged. Places nobody needs."""

    def left(self, places: Sequence[Place]) -> None:
        """What lies at these places is not needed any more: nobody is to be given it."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What the log says after it has given back what it could."""

    room_bytes: int
    over_bytes: int
    cheapest: Cheapest | None
    space: Space

    @property
    def held_bytes(self) -> int:
        """In segments. A spare is not held: it lets writing go on and asks the file system for nothing."""
        return self.space.allocated - self.space.spare


class RoomMaker:
    """Owns what is to be discarded, and the order in which space is won back. All but `discard` is the writer task's."""

    def __init__(
        self,
        store: SpaceLog,
        decisions: SpaceDecisions,
        *,
        segment_bytes: int,
        in_thread: InThread,
        wear: WearBudget,
        clock: Clock,
    ) -> None:
        self._clock = clock
        self._log = store
        self._decisions = decisions
        self._segment_bytes = segment_bytes
        self._in_thread = in_thread
        self._wear = wear
        self._allowance = CopyAllowance(segment_bytes)
        self._discards: list[Place] = []
        self._unreadable: dict[int, float] = {}
        """Segments that could not be copied, and from when on they are tried again."""
        self._still = asyncio.Event()
        self._still.set()
        self._clean_above_dead_bytes = 0
        self.space = store.space()
        self.copied_for_hits_total = 0
        """Payload bytes that were copied forward though something could have been evicted instead."""

    def appended(self, payload_bytes: int) -> None:
        """So much was written for callers: a share of it may be copied."""
        self._allowance.appended(payload_bytes)

    def discard(self, places: Iterable[Place]) -> None:
        """These are not needed any more. The log is told before its next append, or within a second."""
        left = list(places)
        self._discards += left
        self._decisions.left(left)

    def look(self) -> None:
        """Bring `space` up to date. In any thread; it waits for no device."""
        self.space = self._log.space()

    @property
    def waiting(self) -> int:
        return len(self._discards)

    async def survey(self) -> Survey:
        """Tell the log what to discard and let it give back what it can."""
        discards, self._discards = self._discards, []
        # The thread empties it: to let go of a million at once, as after a clear, would hold up the event loop.
        survey = await self._in_thread(lambda: self._look(discards))
        self.space = survey.space
        return survey

    def _look(self, discards: list[Place]) -> Survey:
        # Some at a time: readers wait for the same lock.
        while discards:
            self._log.discard(discards[-DISCARDS_AT_ONCE:])
            del discards[-DISCARDS_AT_ONCE:]
        self._log.reclaim()
        room = self._log.room_bytes()
        space = self._log.space()
        return Survey(room, space.allocated + space.other - space.budget, self._log.cheapest_segment(), space)

    async def make(self, need_bytes: int) -> None:
        """On return one append of `need_bytes` finds room. NoSpace when nothing more may go: all is leased, or in use."""
        while (survey := await self.survey()).room_bytes < need_bytes:
            if await self._win_back(survey, need_bytes - survey.room_bytes):
                continue
            space = survey.space
            raise NoSpace(
                "the disk budget is used up and nothing may be evicted now",
                field="disk",
                value=space.allocated + space.other,
                allowed=f"{space.budget} bytes; end leases, wait for them to end, or raise the budget",
            )

    async def give_back_a_segment(self) -> bool:
        """For a file system that is fuller than the budget: let go of files until a new segment fits where they were.
        False when nothing may go."""
        survey = await self.survey()
        if survey.space.spare:
            return True
        before = survey.held_bytes
        # A sealed segment is a little smaller than a new one, so that one is not always enough.
        while before - survey.held_bytes < self._segment_bytes and not survey.space.spare:
            if not await self._win_back(survey, self._segment_bytes):
                break
            survey = await self.survey()
        return survey.held_bytes < before

    async def shrink_to_budget(self) -> None:
        """Evict until the log is within its budget, as at the first start with a smaller one. NoSpace as `make`."""
        while (survey := await self.survey()).over_bytes > 0:
            if not await self._win_back(survey, survey.over_bytes):
                raise NoSpace(
                    "the directory holds more than the disk budget and nothing may be evicted",
                    field="disk",
                    value=survey.space.allocated + survey.space.other,
                    allowed=f"{survey.space.budget} bytes",
                )

    async def _win_back(self, survey: Survey, missing_bytes: int) -> bool:
        """One step towards more room; whether there was one to take."""
        cheapest = self._worth_cleaning(survey)
        # One that was cleaned, or could not be, is not named again before the next survey: it may be gone.
        is_tried = cheapest is not None and self._is_allowed(cheapest)
        if is_tried and cheapest is not None and await self._clean(cheapest, for_hits=True):
            return True
        step = max(missing_bytes, self._segment_bytes // EVICTION_STEPS_PER_SEGMENT)
        evicted = await self._decisions.evict(min(step, EVICTION_STEP_BYTES_MAX))
        if evicted:
            self.discard(evicted)
            return True
        return cheapest is not None and not is_tried and await self._clean(cheapest, for_hits=False)

    def _worth_cleaning(self, survey: Survey) -> Cheapest | None:
        cheapest = survey.cheapest
        if cheapest is None or self._unreadable.get(cheapest.segment_id, 0.0) > self._clock.monotonic():
            return None
        is_worth = (
            cheapest.live_share <= CLEAN_AT_ALL_BELOW_LIVE_SHARE
            and survey.space.dead > self._clean_above_dead_bytes
        )
        return cheapest if is_worth else None

    def _is_allowed(self, cheapest: Cheapest) -> bool:
        """Whether it may be copied while something else could be evicted."""
        return (
            cheapest.live_share <= CLEAN_BELOW_LIVE_SHARE
            and cheapest.live <= self._allowance.bytes
            and self._wear.spares(cheapest.live)
        )

    async def settled(self) -> None:
        """Return when no records are between two places: the log lets the old copies go a moment before the core
        hears of the new ones."""
        while not self._still.is_set():
            await self._still.wait()

    async def give_up(self, segment_id: int) -> bool:
        """Copy forward all that lives in a sealed segment, whatever that wins, so that its file goes. False where it cannot be read, or
        is gone, or going. Raises NoSpace where nothing may go for the copies."""
        await self.make(self._log.largest_append_bytes())
        self._unreadable.pop(segment_id, None)
        before = self._clean_above_dead_bytes
        self._still.clear()
        try:
            await self._move(segment_id, for_hits=False)
        except InvalidArgument:
            # What made room took it.
            return False
        finally:
            self._still.set()
            # It was not cleaned for what it wins.
            self._clean_above_dead_bytes = before
        return segment_id not in self._unreadable

    async def _clean(self, segment: Cheapest, *, for_hits: bool) -> bool:
        """Copy a segment's live records forward. False when that won nothing, or could not be done."""
        self._still.clear()
        try:
            return await self._move(segment.segment_id, for_hits=for_hits)
        finally:
            self._still.set()

    async def _move(self, segment_id: int, *, for_hits: bool) -> bool:
        dead_before = (await self._in_thread(self._log.space)).dead
        try:
            moves = await self._in_thread(lambda: self._log.clean(segment_id))
        except NoSpace:
            return False
        except DeviceError as error:
            # Not at once again, or every commit would fail on this one segment; its blocks leave by eviction meanwhile.
            self._unreadable[segment_id] = self._clock.monotonic() + CLEAN_AGAIN_SECONDS
            log.warning(
                "segment %d cannot be cleaned, and is tried again in %g s: %s",
                segment_id,
                CLEAN_AGAIN_SECONDS,
                error,
            )
            return False
        self._unreadable.pop(segment_id, None)
        if for_hits:
            copied = sum(place.length for place in moves.values())
            self._allowance.copied(copied)
            self.copied_for_hits_total += copied
        # What was discarded while the copies were made names the old places.
        known = dict(moves)
        unused = await self._decisions.moved(segment_id, moves)
        self._discards = [known.get(place, place) for place in self._discards]
        self.discard(unused)
        dead_after = (await self._in_thread(self._log.space)).dead
        least = self._segment_bytes // LEAST_GAIN_PER_SEGMENT
        # Small records lie in segments that are never full of payload. Without this, they would be copied for ever.
        self._clean_above_dead_bytes = dead_after + least if dead_before - dead_after < least else 0
        return dead_before - dead_after >= least
