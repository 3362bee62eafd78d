"""Clearing a tenant so that its bytes are gone from the disk too: forgotten, then overwritten, and gone on with after a restart."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

from kvstore.core import NamespaceInfo
from kvstore.errors import KvstoreError, LimitExceeded, UnknownNamespace
from kvstore.service.engine import Engine
from kvstore.service.turns import by_turns
from kvstore.types import NamespaceDigest

log = logging.getLogger(__name__)

TOLD_EVERY_SECONDS = 0.5
AGAIN_AFTER_SECONDS = 0.2
AGAIN_AFTER_SECONDS_MAX = 10.0
"""While readers, or the device, keep a file from going."""


@dataclass(frozen=True, slots=True)
class Progress:
    """`blocks`, `states`: forgotten. `files_left`: that may hold some of it; `overwritten`: bytes until now."""

    blocks: int = 0
    states: int = 0
    files_left: int = 0
    overwritten: int = 0
    done: bool = False


class Erasing:
    """One tenant at a time. The work is a task of its own: it ends with the service, and not with who asked for it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tenant = ""
        self._task: asyncio.Task[None] | None = None
        self._now = Progress()
        self._forgotten = asyncio.Event()

    def is_erasing(self, tenant: str) -> bool:
        return self._task is not None and not self._task.done() and tenant == self._tenant

    @property
    def progress(self) -> Progress:
        return self._now

    @property
    def is_stopped(self) -> bool:
        """It has ended with an error, or was found at a start and could not be gone on with."""
        return bool(self._engine.log.erasing) and (self._task is None or self._task.done())

    async def run(self, tenant: str) -> AsyncGenerator[Progress, None]:
        """When it is forgotten, then about every half second, the last one `done`. LimitExceeded while another tenant is erased,
        UnknownNamespace for one that has no namespace, and what ended the work."""
        if self._task is not None and not self._task.done():
            if tenant != self._tenant:
                raise LimitExceeded(
                    "another tenant is being erased; wait for its end",
                    field="erasing",
                    value=2,
                    allowed="1 at a time",
                )
        else:
            self._namespaces(tenant)
            self._begin(tenant)
        task = self._task
        assert task is not None, "it was begun, or goes on"
        forgotten = asyncio.ensure_future(self._forgotten.wait())
        try:
            await asyncio.wait({task, forgotten}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            forgotten.cancel()
        while not task.done():
            yield self._now
            await asyncio.wait({task}, timeout=TOLD_EVERY_SECONDS)
        await asyncio.shield(task)
        yield self._now

    async def resume(self) -> None:
        """Go on with what the last run did not end; returns when it is forgotten again. Before anybody is let in."""
        note = self._engine.log.erasing
        if not note:
            return
        try:
            tenant = str(json.loads(note)["tenant"])
        except (ValueError, KeyError, TypeError):
            log.error(
                "what was being erased at the last end cannot be read; ask for it again: kvstore clear --tenant"
            )
            return
        log.warning("erasing a tenant was not over at the last end; going on")
        self._begin(tenant)
        task = self._task
        assert task is not None
        forgotten = asyncio.ensure_future(self._forgotten.wait())
        await asyncio.wait({task, forgotten}, return_when=asyncio.FIRST_COMPLETED)
        forgotten.cancel()
        if not self._forgotten.is_set():
            # The disk took no note, or no record. Nobody finds any of it in this life all the same.
            for digest in self._digests(tenant):
                await by_turns(self._engine.core.clearing(digest), self._engine.discard)

    async def stop(self) -> None:
        """The service ends: what is left goes on with the next start."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task})

    # ---- inside -------------------------------------------------------------------------------------------------

    def _namespaces(self, tenant: str) -> list[NamespaceInfo]:
        found = [info for info in self._engine.core.namespaces() if info.tenant == tenant]
        if not found:
            raise UnknownNamespace(
                "no namespace is this tenant's: nothing is held of it",
                field="tenant",
                value=tenant,
                allowed="the tenant salt of an open namespace; `kvstore tenants` lists them",
            )
        return found

    def _digests(self, tenant: str) -> list[NamespaceDigest]:
        return [info.digest for info in self._engine.core.namespaces() if info.tenant == tenant]

    def _begin(self, tenant: str) -> None:
        self._tenant, self._now = tenant, Progress()
        self._forgotten.clear()
        self._task = asyncio.get_running_loop().create_task(self._work(tenant), name="erasing")
        # Whoever waits is told of a failure; nobody may be waiting any more.
        self._task.add_done_callback(_tell)

    async def _work(self, tenant: str) -> None:
        engine = self._engine
        writer, store = engine.writer, engine.log
        note = json.dumps({"tenant": tenant}).encode()

        async def begin() -> None:
            await writer.in_thread(lambda: store.begin_erasing(note))

        written = store.counters()["overwritten_bytes"]
        await writer.alone(begin)
        namespaces = self._digests(tenant)

        async def expect() -> None:
            await writer.in_thread(lambda: store.expect_clears(namespaces))

        await writer.alone(expect)
        for digest in namespaces:
            cleared = await engine.clear(digest)
            now = self._now
            self._now = replace(now, blocks=now.blocks + cleared.blocks, states=now.states + cleared.states)

        await self._count(written)
        self._forgotten.set()
        await self._blank_gaps(written)
        wait = AGAIN_AFTER_SECONDS
        while left := await self._count(written):
            before = self._now.overwritten
            went = False
            for segment_id in left:
                went = await self._give_up(segment_id) or went
                await self._count(written)
            if went or self._now.overwritten > before:
                wait = AGAIN_AFTER_SECONDS
            else:
                await asyncio.sleep(wait)
                wait = min(2 * wait, AGAIN_AFTER_SECONDS_MAX)

        async def end() -> None:
            await writer.in_thread(store.end_erasing)

        await writer.alone(end)
        self._now = replace(self._now, done=True)
        engine.counts["erased_tenants_total"] += 1
        log.info(
            "a tenant was erased: %d blocks, %d states, %d bytes overwritten",
            self._now.blocks,
            self._now.states,
            self._now.overwritten,
        )

    async def _count(self, before: int) -> list[int]:
        """The segments that are left."""
        writer, store = self._engine.writer, self._engine.log

        async def count() -> list[int]:
            return await writer.in_thread(store.to_erase)

        left = await writer.alone(count)
        overwritten = store.counters()["overwritten_bytes"] - before
        self._now = replace(self._now, files_left=len(left), overwritten=overwritten)
        return left

    async def _blank_gaps(self, before: int) -> None:
        writer, store = self._engine.writer, self._engine.log
        for segment_id in await asyncio.get_running_loop().run_in_executor(None, store.segment_ids):

            async def blank(segment_id: int = segment_id) -> bool:
                return await writer.in_thread(lambda: store.blank_gap(segment_id))

            if not await writer.alone(blank):
                await self._give_up(segment_id)
            overwritten = store.counters()["overwritten_bytes"] - before
            self._now = replace(self._now, overwritten=overwritten)

    async def _give_up(self, segment_id: int) -> bool:
        """Copy forward what lives there, so that its file goes; whether that was done."""
        room = self._engine.writer.room
        try:
            return await self._engine.writer.alone(lambda: room.give_up(segment_id))
        except KvstoreError as error:
            log.warning("segment %d cannot be given up yet: %s", segment_id, error)
            return False


def _tell(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("erasing a tenant stopped, and goes on with the next start or when asked again: %s", error)
