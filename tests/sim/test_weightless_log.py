"""A log that keeps no payload writes what the real one does: both under the service's way to make room, with the same load."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore.clock import ManualClock
from kvstore.service.room import RoomMaker, SpaceLog
from kvstore.simulate.segments import WeightlessLog
from kvstore.store import open_log
from kvstore.store.base import Place
from kvstore.store.wear import WearBudget
from kvstore.testing.store_suite import MIB, make_record

BUDGET, SEGMENT = 16 * MIB, MIB


class Load:
    """Records that are used again now and then; what goes first is the least recently used."""

    def __init__(self, log: SpaceLog, append: Callable[[int, Sequence[int]], list[Place]]) -> None:
        self.append = append
        self.held: OrderedDict[int, Place] = OrderedDict()
        self.live: list[int] = []
        self.room = RoomMaker(
            log,
            self,
            segment_bytes=SEGMENT,
            in_thread=_here,
            wear=WearBudget(0, now=0.0, written=0),
            clock=ManualClock(),
        )

    def run(self, requests: int, *, size: int) -> None:
        chance, uses = random.Random(size), random.Random(size)
        for number in range(requests):
            lengths = [size] * chance.randint(1, 600_000 // size)
            for old in uses.sample(list(self.held), min(len(self.held) // 8, 20)):
                self.held.move_to_end(old)
            _run(self.room.make(sum(lengths)))
            places = self.append(1000 * number, lengths)
            self.held.update({1000 * number + at: place for at, place in enumerate(places)})
            self.room.appended(sum(lengths))
            self.live.append(sum(place.length for place in self.held.values()))

    def live_mean(self) -> float:
        """Payload bytes held, over the second half of the load."""
        half = self.live[len(self.live) // 2 :]
        return sum(half) / len(half)

    async def evict(self, need_bytes: int) -> list[Place]:
        gone: list[Place] = []
        while self.held and sum(place.length for place in gone) < need_bytes:
            gone.append(self.held.popitem(last=False)[1])
        return gone

    async def moved(self, segment_id: int, moves: dict[Place, Place]) -> list[Place]:
        known = set(self.held.values())
        self.held = OrderedDict((name, moves.get(place, place)) for name, place in self.held.items())
        return [new for old, new in moves.items() if old not in known]

    def left(self, places: Sequence[Place]) -> None:
        """Nobody has read them."""


async def _here(work: Callable[[], Any]) -> Any:
    return work()


def _run(work: Coroutine[Any, Any, None]) -> None:
    with pytest.raises(StopIteration):
        work.send(None)


@pytest.mark.parametrize("size", [30_000, 120_000])
def test_it_writes_and_copies_what_the_real_log_does(tmp_path: Path, size: int) -> None:
    weightless = WeightlessLog(budget_bytes=BUDGET, segment_bytes=SEGMENT)
    alike = Load(weightless, lambda _, lengths: weightless.append(lengths))
    alike.run(200, size=size)
    weightless.check_integrity()
    real, _ = open_log(tmp_path, budget_bytes=BUDGET, segment_bytes=SEGMENT, clock=ManualClock())
    load = Load(
        real,
        lambda first, lengths: real.append(
            [make_record(f"r{first + at}", bytes(length)) for at, length in enumerate(lengths)]
        ),
    )
    load.run(200, size=size)
    counts = real.counters()
    real.close()
    # The real one leaves room for a catalogue that is measured; so the two do not take every step alike.
    assert weightless.appended_bytes == counts["appended_bytes"] > 3 * BUDGET
    assert weightless.written_bytes == pytest.approx(counts["written_bytes"], rel=0.04)
    assert weightless.cleaned_bytes == pytest.approx(counts["cleaned_bytes"], rel=0.15)
    assert counts["cleaned_bytes"] > BUDGET // 4
    assert alike.live_mean() == pytest.approx(load.live_mean(), rel=0.05)
