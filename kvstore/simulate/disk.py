"""The disk of a simulation: the service's own way to make room, over a log that keeps no payload."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar, cast

from kvstore.clock import ManualClock
from kvstore.config import ServiceConfig
from kvstore.core import Core
from kvstore.core.base import Gone
from kvstore.errors import InvalidArgument, NoSpace
from kvstore.service.room import RoomMaker
from kvstore.simulate.segments import WeightlessLog
from kvstore.store.base import Place
from kvstore.store.segment import bytes_for
from kvstore.store.space import segment_bytes_for
from kvstore.store.wear import WearBudget

T = TypeVar("T")

UNLIMITED_BYTES = 1 << 62
COMMIT_BYTES = cast(int, ServiceConfig.__dataclass_fields__["commit_bytes"].default)
"""What the service's commits gather where nobody says otherwise."""


def segment_size(budget_bytes: int | None, asked: int | None, block_bytes: int) -> int:
    """Of a store with this budget, None for no limit: as the service would have it, or as asked. Raises ConfigError for a size that
    no store has, InvalidArgument where not a block fits."""
    size = segment_bytes_for(UNLIMITED_BYTES if budget_bytes is None else budget_bytes, asked)
    if bytes_for([block_bytes], namespaces=1) > size:
        raise InvalidArgument(
            f"a segment of {size:,} bytes holds no block of {block_bytes:,} bytes",
            field="--segment",
            value=size,
            allowed="a larger --size, --segment with room for a block, or a smaller --profile",
        )
    return size


class SimulatedDisk:
    """Space as the service has it: whole segments come back, the cleaner copies within its allowance, and what goes first the
    core says. `left` is told what was evicted."""

    def __init__(
        self,
        core: Core,
        *,
        budget_bytes: int | None,
        segment_bytes: int,
        left: Callable[[Sequence[Gone]], None],
    ) -> None:
        self._core = core
        self._left = left
        self._now = 0.0
        budget = UNLIMITED_BYTES if budget_bytes is None else budget_bytes
        self.log = WeightlessLog(budget_bytes=budget, segment_bytes=segment_bytes)
        self._room = RoomMaker(
            self.log,
            self,
            segment_bytes=segment_bytes,
            in_thread=_here,
            wear=WearBudget(0, now=0.0, written=0),
            # Nothing of it is ever unreadable: no time is waited for.
            clock=ManualClock(),
        )
        self._placed: list[Place] = []
        self._most = min(COMMIT_BYTES, self.log.largest_append_bytes())

    def append(self, lengths: Sequence[int], now: float) -> list[Place]:
        """Where records of these lengths lie, of as many as found room, from the first on. In batches as a commit makes them."""
        self._now = now
        self._placed = []
        begin = 0
        while begin < len(lengths):
            end, size = begin, 0
            while end < len(lengths) and (end == begin or size + lengths[end] <= self._most):
                size += lengths[end]
                end += 1
            try:
                _at_once(self._room.make(size))
                places = self.log.append(lengths[begin:end])
            except NoSpace:
                break
            self._placed += places
            self._room.appended(size)
            begin = end
        placed, self._placed = self._placed, []
        return placed

    def discard(self, places: Iterable[Place]) -> None:
        """These are not needed any more."""
        self._room.discard(places)

    # ---- what making room asks ----------------------------------------------------------------------------------

    async def evict(self, need_bytes: int) -> list[Place]:
        gone = self._core.plan_eviction(need_bytes, prefer_states=True, now_wall=self._now)
        self._left(gone)
        return [each.place for each in gone]

    async def moved(self, segment_id: int, moves: dict[Place, Place]) -> list[Place]:
        # What is on its way in is not in the index yet.
        self._placed = [moves.pop(place, place) for place in self._placed]
        relocated = self._core.relocate(segment_id, moves)
        assert not relocated.lost, "nothing is damaged here"
        return list(relocated.discard)

    def left(self, places: Sequence[Place]) -> None:
        """Nobody has read them."""


async def _here(work: Callable[[], T]) -> T:
    return work()


def _at_once(work: Coroutine[Any, Any, T]) -> T:
    """What never waits, since its calls are made here."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("nothing here waits")
