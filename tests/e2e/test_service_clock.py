"""A wall clock that is set while the service runs, and its next start."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.e2e.service_raw import Chain, Raw
from tests.support.service import short_directory
from tests.support.serving import SetClock, serving

DAY = 86_400.0


def store(directory: Path, *, seed: int) -> None:
    with Raw(directory) as raw:
        raw.store(Chain(raw.open("clock"), 3, seed=seed))


def held(directory: Path, *, seed: int) -> int:
    with Raw(directory) as raw:
        return raw.lookup(Chain(raw.open("clock"), 3, seed=seed), lease=False).blocks_held


async def test_what_is_written_while_the_clock_is_wrong_makes_nothing_older_at_the_next_start() -> None:
    clock = SetClock()
    with short_directory() as directory:
        async with serving(directory, clock=clock):
            await asyncio.to_thread(store, directory, seed=0)
            for seed, wrong in enumerate((4 * DAY, -4 * DAY, 50_000 * DAY), 1):
                clock.offset = wrong
                await asyncio.to_thread(store, directory, seed=seed)
        clock.offset = 0.0
        async with serving(directory, clock=clock):
            for seed in range(4):
                assert await asyncio.to_thread(held, directory, seed=seed) == 3


async def test_a_clock_past_the_end_of_its_seconds_does_not_stop_a_service() -> None:
    clock = SetClock()
    clock.offset = 100_000 * DAY
    with short_directory() as directory:
        for seed in range(2):
            async with serving(directory, clock=clock):
                await asyncio.to_thread(store, directory, seed=seed)
                assert await asyncio.to_thread(held, directory, seed=0) == 3
