"""KV events of a service: what comes and goes is told in batches, a snapshot where something was lost.

All of it runs in the event loop's thread and never waits there: PUB drops what a slow reader does not take, an answer goes on when
its asker has room, and the journal that changes wait in forgets them past its limit. Each of these is a gap that the reader sees in
the numbers, and closes by asking; after a lost journal a snapshot comes by itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence

from kvstore.config import ServiceConfig
from kvstore.core import Core
from kvstore.core.changes import Change, Journal, block_events, state_events
from kvstore.core.steps import ITEMS_AT_ONCE
from kvstore.errors import ConfigError
from kvstore.events.base import AllBlocksCleared, Event
from kvstore.events.sending import Sender, check_sender
from kvstore.service.timekeeping import ServiceTime

log = logging.getLogger(__name__)

EVERY_SECONDS = 0.05
"""How long a change waits for others to share its batch, and an asker for its answer to begin."""

SNAPSHOTS_EVERY_SECONDS = 1.0
"""What is lost again and again is not shown anew all the time."""


def check_events(config: ServiceConfig) -> None:
    """Raise ConfigError where events cannot be sent as the configuration wants them."""
    if config.events:
        check_sender(config.events, config.events_replay, may_be_public=config.unsafe_public_events)
    elif config.events_replay:
        raise ConfigError(
            "what is not sent cannot be sent again",
            field="events_replay",
            value=config.events_replay,
            allowed="with --events",
        )


class Publisher:
    """Sends the events of one service. Figures count since the start."""

    def __init__(self, config: ServiceConfig, *, core: Core, journal: Journal, time: ServiceTime) -> None:
        self._core = core
        self._journal = journal
        self._time = time
        # Microseconds: no sender has as many batches, so that numbers of one start are larger than those of the one before.
        self.sender = Sender(
            config.events,
            replay=config.events_replay,
            first=int(time.wall() * 1e6),
            kept_bytes=config.events_buffer,
            monotonic=time.monotonic,
            may_be_public=config.unsafe_public_events,
        )
        self._topic = config.events_topic.encode()
        self._blocks_only = config.events_blocks_only
        self._snapshot_due = 0.0
        self._counts: Counter[str] = Counter()

    def open(self) -> None:
        """Listen. ConfigError where that cannot be."""
        self.sender.open()

    def close(self) -> None:
        """What lies on the way to readers has half a second."""
        self.sender.close()

    async def run(self) -> None:
        """Until it is cancelled. Begins with a snapshot."""
        while True:
            try:
                await self.step()
            except Exception:  # without it nobody would be told of anything any more
                log.exception("telling of events failed; a snapshot follows")
                self._counts["errors"] += 1
                self._journal.is_lost = True
            await asyncio.sleep(EVERY_SECONDS)

    async def step(self) -> None:
        """Tell all that has changed, and go on with answers."""
        self.sender.hear()
        wanted = self._journal.is_lost or self.sender.wants_snapshot
        if wanted and self._time.monotonic() >= self._snapshot_due:
            await self._snapshot()
        while changes := self._journal.take(ITEMS_AT_ONCE):
            self._tell(changes)
            await asyncio.sleep(0)
        while self.sender.answer():
            await asyncio.sleep(0)

    async def finish(self) -> None:
        """Tell what has changed last. What is lost is not shown anew: the next start does."""
        while changes := self._journal.take(ITEMS_AT_ONCE):
            self._tell(changes)
            await asyncio.sleep(0)

    def figures(self) -> dict[str, float]:
        """Event loop's thread only."""
        sent, own = self.sender.counts, self._counts
        return {
            **{f"events_{name}_total": sent[name] for name in ("batches", "answers", "answers_refused")},
            **{f"events_{name}_total": own[name] for name in ("told", "snapshots", "errors")},
            "events_lost_total": self._journal.lost_total,
            "events_waiting": len(self._journal),
            "events_kept_bytes": self.sender.kept.kept_bytes,
        }

    async def _snapshot(self) -> None:
        """All that is held, as if it had just come, after clearing everything. Changes from its first step on come after it."""
        kept = self.sender.kept
        kept.begin_snapshot()
        self._journal.begin()
        steps = self._core.all_held()
        # From here to the end of the first step nothing may come between.
        self._send(b"", [AllBlocksCleared()])
        for info in self._core.namespaces():
            self._send(info.digest, [AllBlocksCleared(namespace=info.digest)])
        try:
            for changes in steps:
                self._tell(changes)
                self.sender.hear()
                self.sender.answer()
                await asyncio.sleep(0)
        finally:
            steps.close()
            kept.end_snapshot()
        self._snapshot_due = self._time.monotonic() + SNAPSHOTS_EVERY_SECONDS
        self._counts["snapshots"] += 1

    def _tell(self, changes: Sequence[Change]) -> None:
        """In batches of one namespace each; states by themselves, for the sake of readers that do not know them."""
        spaces: dict[bytes, list[Change]] = {}
        for change in changes:
            spaces.setdefault(change.namespace, []).append(change)
        for digest, own in spaces.items():
            if blocks := block_events(own):
                self._send(digest, blocks)
            if not self._blocks_only and (states := state_events(own)):
                self._send(digest, states)
        self._counts["told"] += len(changes)

    def _send(self, namespace: bytes, events: Sequence[Event]) -> None:
        self.sender.send(self._topic or namespace.hex().encode(), events, ts=self._time.wall())
