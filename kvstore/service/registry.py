"""Namespaces and the log: a namespace is durable before anyone hears of it, and so is a change of policy, a clear or a
drop of states."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Sequence, Set

from kvstore.core import Cleared, Core, Dropped, Gone, NamespaceInfo, describe
from kvstore.prefix.identity import NamespaceIdentity
from kvstore.service.turns import by_turns
from kvstore.service.writer import Writer
from kvstore.store.base import Place, Record, RecordKind, RecordLog
from kvstore.store.records import Records
from kvstore.types import KEY_BYTES, BlockKey, Checks, Lineage, NamespaceDigest, Tier

_NO_KEY = BlockKey(bytes(KEY_BYTES))
CLEARS_PER_APPEND = 16


class Registry:
    """Knows where each namespace's record lies. Its methods that wait do so for the writer."""

    def __init__(self, core: Core, store: RecordLog, writer: Writer) -> None:
        self._core = core
        self._log = store
        self._writer = writer
        self._places: dict[NamespaceDigest, Place] = {}
        self.is_clearing = False
        """Blocks are leaving, and none may come."""
        self._recording: dict[NamespaceDigest, asyncio.Task[None]] = {}

    def load(self, found: Records) -> None:
        """Where the records of the namespaces lie that the core has loaded."""
        known = {info.digest for info in self._core.namespaces()}
        self._places = {
            each.namespace: each.place
            for each in found.of_kind(RecordKind.NAMESPACE)
            if each.namespace in known
        }

    def moved(self, moves: dict[Place, Place]) -> None:
        """Take out of `moves`, and note, what is ours: the core does not know these places."""
        for digest, place in self._places.items():
            if place in moves:
                self._places[digest] = moves.pop(place)

    async def open(self, name: str, identity: NamespaceIdentity, policy: str | None) -> NamespaceInfo:
        """The namespace, known and durable. Raises as Core.open_namespace, or what kept its record from the log."""
        info = self._core.open_namespace(name, identity, policy)
        if info.digest not in self._places:
            task = self._recording.get(info.digest)
            if task is None:
                task = asyncio.get_running_loop().create_task(self._record_new(info))
                # Whoever waits is told of a failure; nobody may be waiting any more.
                task.add_done_callback(lambda done: done.cancelled() or done.exception())
                self._recording[info.digest] = task
            await asyncio.shield(task)
        return info

    async def _record_new(self, info: NamespaceInfo) -> None:
        try:
            await self._writer.alone(lambda: self._record([info]))
        except BaseException:
            cleared = self._core.withdraw_namespace(info.digest)
            self._writer.room.discard(each.place for each in cleared.gone)
            raise
        finally:
            del self._recording[info.digest]

    async def _record(self, infos: Sequence[NamespaceInfo], *, before: Sequence[Record] = ()) -> None:
        """Append descriptions, each replacing the one before; `before` goes ahead of them in the same append."""
        places = await self._writer.append([*before, *(_description(info) for info in infos)])
        for info, place in zip(infos, places[len(before) :], strict=True):
            old = self._places.get(info.digest)
            if old is not None:
                self._writer.room.discard([old])
            self._places[info.digest] = place

    async def renew(self, damaged: Set[Place]) -> None:
        """Write anew the descriptions that lie at these places. Raises what kept them from the log."""

        async def renew() -> None:
            # When it is this job's turn: an earlier one may have written them anew.
            infos = [info for info in self._core.namespaces() if self._places.get(info.digest) in damaged]
            for first in range(0, len(infos), CLEARS_PER_APPEND):
                await self._record(infos[first : first + CLEARS_PER_APPEND])

        if not damaged.isdisjoint(self._places.values()):
            await self._writer.alone(renew)

    async def set_policy(self, digest: bytes, text: str) -> NamespaceInfo:
        """Durable when it returns. Raises as Core.set_policy."""
        info = self._core.namespace(digest)
        policy = str(self._core.check_policy(digest, text))

        async def change() -> NamespaceInfo:
            await self._writer.room.make(len(policy))
            await self._writer.in_thread(lambda: self._log.put_policy(info.digest, policy))
            return self._core.set_policy(info.digest, policy)

        return await self._writer.alone(change)

    async def clear(self, digest: bytes | None, *, emptied: Callable[[], None]) -> Cleared:
        """Empty one namespace or all, so that they are empty after a restart too. `blocks` and `states` say what left.

        `emptied` is called at the moment when the core is empty; an error after that says that, after a crash, some of
        it may be found again.
        """

        async def clear() -> Cleared:
            self.is_clearing = True
            try:
                blocks, states = await by_turns(self._core.clearing(digest), self._discard)
                # Nothing is published meanwhile: what was reserved until now ends.
                self._core.void_reservations(digest)
                emptied()
            finally:
                self.is_clearing = False
            infos = self._core.namespaces() if digest is None else [self._core.namespace(digest)]
            for first in range(0, len(infos), CLEARS_PER_APPEND):
                # The clear covers the description as well, so that it is written anew behind it.
                part = infos[first : first + CLEARS_PER_APPEND]
                await self._record(part, before=[_clear(info) for info in part])
            await self._writer.room.survey()
            return Cleared(blocks, states, ())

        return await self._writer.alone(clear)

    def _discard(self, gone: Sequence[Gone]) -> None:
        self._writer.room.discard(each.place for each in gone)

    async def drop_states(self, digest: bytes | None, tier: Tier | None) -> Dropped:
        """States of one namespace or of all leave one tier or both, but for those that are leased.

        What leaves the SSD is gone after a restart too, except in a namespace where leased ones stay on SSD: what was
        dropped there may be found again after a restart, until a later drop finds none leased. An error says that some
        of it may be found again after a crash.
        """
        if tier is Tier.POOL:
            return await by_turns(self._core.dropping(digest, tier))

        async def drop() -> Dropped:
            dropped = await by_turns(self._core.dropping(digest, tier), self._discard)
            infos = self._core.namespaces() if digest is None else [self._core.namespace(digest)]
            # The record covers every state of its namespace. It is written where nothing was dropped as well: an
            # earlier drop may have left it out.
            records = [_clear_states(info) for info in infos if info.digest not in dropped.kept_in]
            for first in range(0, len(records), CLEARS_PER_APPEND):
                await self._writer.append(records[first : first + CLEARS_PER_APPEND])
            await self._writer.room.survey()
            return dropped

        # Alone: a state that is durable but not published yet would be covered, and served until the next start.
        return await self._writer.alone(drop)


def _record(kind: RecordKind, info: NamespaceInfo, payload: bytes) -> Record:
    return Record(
        kind,
        info.digest,
        BlockKey(info.digest),
        _NO_KEY,
        0,
        Lineage.EXACT,
        payload,
        Checks(zlib.crc32(payload)),
    )


def _description(info: NamespaceInfo) -> Record:
    return _record(RecordKind.NAMESPACE, info, describe(info.identity, info.name, str(info.policy)))


def _clear(info: NamespaceInfo) -> Record:
    return _record(RecordKind.CLEAR, info, b"")


def _clear_states(info: NamespaceInfo) -> Record:
    return _record(RecordKind.CLEAR_STATES, info, b"")
