"""What happens by itself: deadlines each second, last uses to disk each minute."""

from __future__ import annotations

import asyncio
import logging

from kvstore.service.engine import Engine
from kvstore.service.tenant_limits import keep_quotas
from kvstore.store.base import Place

log = logging.getLogger(__name__)

PERIOD_SECONDS = 1.0
USES_EVERY_SECONDS = 60.0
EXPIRED_BLOCKS_AT_ONCE = 400
USES_AT_ONCE = 2000
"""Each some milliseconds of the event loop's time."""


class Upkeep:
    """One task beside the calls. A step that fails is logged and counted, and the next one comes all the same."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._uses_due = engine.time.monotonic() + USES_EVERY_SECONDS

    async def run(self) -> None:
        watching = asyncio.create_task(self._engine.loop.run(), name="loop watch")
        try:
            await self._steps()
        finally:
            watching.cancel()

    async def _steps(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            try:
                await self.step()
            except Exception:  # without upkeep nothing would ever be given back
                log.exception("upkeep failed; it goes on in %g s", PERIOD_SECONDS)
                self._engine.counts["upkeep_errors_total"] += 1

    async def step(self) -> None:
        engine = self._engine
        await engine.expire()
        while engine.expire_blocks(limit=EXPIRED_BLOCKS_AT_ONCE):
            await asyncio.sleep(0)  # the calls that wait have their turn
        await keep_quotas(engine)
        if engine.writer.room.waiting:
            await engine.writer.alone(engine.writer.room.survey)
        # A segment may have been made ready, or sealed, after the last append. Not in the writer's thread: a device that
        # stands still must not keep leases from ending.
        await asyncio.get_running_loop().run_in_executor(engine.threads, engine.writer.room.look)
        if engine.time.monotonic() >= self._uses_due:
            self._uses_due = engine.time.monotonic() + USES_EVERY_SECONDS
            await self.note_uses()

    async def note_uses(self) -> None:
        """Persist last uses, so that a restart keeps what is in use."""
        engine = self._engine

        async def note() -> None:
            # Taken when it is this job's turn: a clean before it would have moved the places.
            uses: list[tuple[Place, float]] = []
            for _ in range(0, engine.core.uses_waiting, USES_AT_ONCE):
                uses += engine.core.take_uses(USES_AT_ONCE)
                await asyncio.sleep(0)
            if uses:
                await engine.writer.in_thread(lambda: engine.log.note_uses(uses))

        await engine.writer.alone(note)
