"""Reading all that lives while the service runs, no faster than it was asked to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass, field

from kvstore.errors import InvalidArgument, KvstoreError, LimitExceeded
from kvstore.service.engine import Engine
from kvstore.service.turns import in_parts
from kvstore.store.base import Damage, Verified

BYTES_PER_SECOND = 100 << 20
BYTES_PER_SECOND_MIN = 1 << 20
STEP_BYTES = 4 << 20
TOLD_EVERY_SECONDS = 0.5


@dataclass(slots=True)
class Progress:
    """`damages`: found since the last one."""

    records: int = 0
    bytes: int = 0
    bytes_total: int = 0
    damages: list[Damage] = field(default_factory=list)
    done: bool = False


def pause_seconds(done_bytes: int, seconds: float, bytes_per_second: float) -> float:
    """How long to wait after so many bytes in so many seconds, to be no faster than that on average."""
    return max(0.0, done_bytes / bytes_per_second - seconds) if bytes_per_second else 0.0


class Verifying:
    """One run at a time. What is damaged leaves the index at once, as if a read had found it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._running = False

    async def run(self, bytes_per_second: int) -> AsyncGenerator[Progress, None]:
        """Progress about every half second, the last one `done`. Raises LimitExceeded while another run is under way,
        DeviceError when the device fails a read."""
        if 0 < bytes_per_second < BYTES_PER_SECOND_MIN:
            raise InvalidArgument(
                "too slow to end",
                field="bytes_per_second",
                value=bytes_per_second,
                allowed=f"0 for {BYTES_PER_SECOND}, or {BYTES_PER_SECOND_MIN} or more",
            )
        if self._running:
            raise LimitExceeded(
                "the store is being verified already", field="runs", value=2, allowed="1; wait for its end"
            )
        self._running = True
        try:
            async for progress in self._run(bytes_per_second or BYTES_PER_SECOND):
                yield progress
        finally:
            self._running = False

    async def _run(self, bytes_per_second: int) -> AsyncGenerator[Progress, None]:
        engine = self._engine
        loop = asyncio.get_running_loop()
        begun = told = loop.time()
        space = await loop.run_in_executor(None, engine.log.space)
        progress = Progress(bytes_total=space.live)
        for segment_id in await loop.run_in_executor(None, engine.log.segment_ids):
            begin: int | None = 0
            while begin is not None:
                step = await loop.run_in_executor(None, self._step, segment_id, begin)
                progress.records += step.records
                progress.bytes += step.bytes
                progress.damages += step.damages
                begin = step.next
                await self._forget(step.damages)
                await asyncio.sleep(pause_seconds(progress.bytes, loop.time() - begun, bytes_per_second))
                if loop.time() - told >= TOLD_EVERY_SECONDS:
                    told = loop.time()
                    yield progress
                    progress.damages = []
        progress.done = True
        yield progress

    def _step(self, segment_id: int, begin: int) -> Verified:
        return self._engine.log.verify(segment_id, begin=begin, bytes_max=STEP_BYTES)

    async def _forget(self, damages: list[Damage]) -> None:
        """What can be said again is written anew; the rest is a miss."""
        engine = self._engine
        places = [damage.place for damage in damages]
        async for part in in_parts(places):
            engine.discard(engine.core.forget_places(part))
        engine.counts["verify_damages_total"] += len(damages)
        with suppress(KvstoreError):  # the catalogue keeps them, and the next start tries again
            await engine.registry.renew(set(places))
