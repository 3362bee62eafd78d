"""KV events: a PUB socket that tells what comes and goes, and a ROUTER socket that tells it again to who has missed some.

All of it runs in the event loop's thread and never waits there: PUB drops what a slow reader does not take, an answer goes on when
its asker has room, and the journal that changes wait in forgets them past its limit. Each of these is a gap that the reader sees in
the numbers, and closes by asking; after a lost journal a snapshot comes by itself.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.config import ServiceConfig
from kvstore.core import Core
from kvstore.core.changes import Change, Journal, block_events, state_events
from kvstore.core.steps import ITEMS_AT_ONCE
from kvstore.errors import ConfigError
from kvstore.events.base import AllBlocksCleared, Event
from kvstore.events.endpoint import check_endpoint
from kvstore.events.stream import END_SEQUENCE, SEQUENCE_BYTES, Kept
from kvstore.events.wire import batch_value
from kvstore.service.timekeeping import ServiceTime

log = logging.getLogger(__name__)

EVERY_SECONDS = 0.05
"""How long a change waits for others to share its batch, and an asker for its answer to begin."""

SNAPSHOTS_EVERY_SECONDS = 1.0
"""What is lost again and again is not shown anew all the time."""

UNREAD_BATCHES_MAX = 2_000
"""Of a reader that does not keep up; what comes then is dropped for it, and is a gap."""

ANSWERS_MAX = 16
"""At once. Who asks when there are as many is told the end at once, and asks again."""

ANSWER_UNREAD_MAX = 64
"""Batches of an answer that lie on the way to its asker."""

ANSWER_SECONDS_MAX = 30.0
"""How long an asker may take nothing."""


@dataclass(slots=True)
class _Answer:
    """`at`: the next batch of it, None where a snapshot has to be written first. `moved`: when its asker last took something."""

    asker: bytes
    asked: int
    at: int | None
    moved: float


def check_events(config: ServiceConfig) -> None:
    """Raise ConfigError where events cannot be sent as the configuration wants them."""
    for field in ("events", "events_replay"):
        if text := getattr(config, field):
            check_endpoint(text, field=field, may_be_public=config.unsafe_public_events)
    if config.events_replay and not config.events:
        raise ConfigError(
            "what is not sent cannot be sent again",
            field="events_replay",
            value=config.events_replay,
            allowed="with --events",
        )
    if config.events and importlib.util.find_spec("zmq") is None:
        raise ConfigError(
            "the package pyzmq is not installed; install kvstore[events]", field="events", value=config.events
        )


class Publisher:
    """Sends the events of one service. Figures count since the start."""

    def __init__(self, config: ServiceConfig, *, core: Core, journal: Journal, time: ServiceTime) -> None:
        self._config = config
        self._core = core
        self._journal = journal
        self._time = time
        # Microseconds: no sender has as many batches, so that numbers of one start are larger than those of the one before.
        self._kept = Kept(first=int(time.wall() * 1e6), limit_bytes=config.events_buffer)
        self._topic = config.events_topic.encode()
        self._sockets = ExitStack()
        self._pub: Any = None
        self._replay: Any = None
        self._answers: list[_Answer] = []
        self._snapshot_due = 0.0
        self.counts: Counter[str] = Counter()

    # ---- life -----------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Listen. ConfigError where that cannot be."""
        self._zmq = zmq = importlib.import_module("zmq")
        self._pack: Callable[[Any], bytes] = importlib.import_module("msgpack").packb
        with ExitStack() as sockets:
            context = zmq.Context(io_threads=1)
            sockets.callback(context.term)
            self._pub = self._listen(
                sockets, context, zmq.PUB, "events", {zmq.SNDHWM: UNREAD_BATCHES_MAX, zmq.LINGER: 500}
            )
            if self._config.events_replay:
                options = {
                    zmq.SNDHWM: ANSWER_UNREAD_MAX,
                    zmq.RCVHWM: ANSWER_UNREAD_MAX,
                    zmq.LINGER: 0,
                    # A peer that has gone or has no room is told of by send, and is not written to in vain.
                    zmq.ROUTER_MANDATORY: 1,
                    zmq.MAXMSGSIZE: 256,
                }
                self._replay = self._listen(sockets, context, zmq.ROUTER, "events_replay", options)
            self._sockets = sockets.pop_all()

    def _listen(
        self, sockets: ExitStack, context: Any, kind: int, field: str, options: dict[int, int]
    ) -> Any:
        zmq, endpoint = self._zmq, getattr(self._config, field)
        socket = context.socket(kind)
        sockets.callback(socket.close)
        for option, value in options.items():
            socket.setsockopt(option, value)
        if "[" in endpoint:
            socket.setsockopt(zmq.IPV6, 1)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"cannot listen: {error.strerror}",
                field=field,
                value=endpoint,
                allowed="a free address of this machine",
            ) from error
        if endpoint.startswith("ipc://"):
            Path(endpoint.removeprefix("ipc://")).chmod(0o600)
        log.info("%s at %s", field.replace("_", " "), socket.getsockopt(zmq.LAST_ENDPOINT).decode())
        return socket

    def close(self) -> None:
        """What lies on the way to readers has half a second."""
        self._sockets.close()

    async def run(self) -> None:
        """Until it is cancelled. Begins with a snapshot."""
        while True:
            try:
                await self.step()
            except Exception:  # without it nobody would be told of anything any more
                log.exception("telling of events failed; a snapshot follows")
                self.counts["events_errors_total"] += 1
                self._journal.is_lost = True
            await asyncio.sleep(EVERY_SECONDS)

    async def step(self) -> None:
        """Tell all that has changed, and go on with answers."""
        self._hear()
        wanted = self._journal.is_lost or any(answer.at is None for answer in self._answers)
        if wanted and self._time.monotonic() >= self._snapshot_due:
            await self._snapshot()
        while changes := self._journal.take(ITEMS_AT_ONCE):
            self._tell(changes)
            await asyncio.sleep(0)
        self._answer()

    def figures(self) -> dict[str, float]:
        """Event loop's thread only."""
        names = ("batches", "told", "snapshots", "answers", "answers_refused", "errors")
        return {
            **{f"events_{name}_total": self.counts[f"events_{name}_total"] for name in names},
            "events_lost_total": self._journal.lost_total,
            "events_waiting": len(self._journal),
            "events_kept_bytes": self._kept.kept_bytes,
        }

    # ---- telling --------------------------------------------------------------------------------------------

    async def _snapshot(self) -> None:
        """All that is held, as if it had just come, after clearing everything. Changes from its first step on come after it."""
        self._kept.begin_snapshot()
        self._journal.begin()
        steps = self._core.all_held()
        # From here to the end of the first step nothing may come between.
        self._send(b"", [AllBlocksCleared()])
        for info in self._core.namespaces():
            self._send(self._topic_of(info.digest), [AllBlocksCleared(namespace=info.digest)])
        try:
            for changes in steps:
                self._tell(changes)
                self._hear()
                self._answer()
                await asyncio.sleep(0)
        finally:
            steps.close()
            self._kept.end_snapshot()
        self._snapshot_due = self._time.monotonic() + SNAPSHOTS_EVERY_SECONDS
        self.counts["events_snapshots_total"] += 1

    def _tell(self, changes: Sequence[Change]) -> None:
        """In batches of one namespace each; states by themselves, for the sake of readers that do not know them."""
        spaces: dict[bytes, list[Change]] = {}
        for change in changes:
            spaces.setdefault(change.namespace, []).append(change)
        for digest, own in spaces.items():
            topic = self._topic_of(digest)
            if blocks := block_events(own):
                self._send(topic, blocks)
            if not self._config.events_blocks_only and (states := state_events(own)):
                self._send(topic, states)
        self.counts["events_told_total"] += len(changes)

    def _topic_of(self, digest: bytes) -> bytes:
        return self._topic or digest.hex().encode()

    def _send(self, topic: bytes, events: Sequence[Event]) -> None:
        payload = self._pack(batch_value(events, ts=self._time.wall()))
        number = self._kept.add(payload) if self._replay is not None else self._kept.skip()
        # PUB never waits: for a reader without room it drops.
        self._pub.send_multipart((topic or self._topic, number.to_bytes(SEQUENCE_BYTES, "big"), payload))
        self.counts["events_batches_total"] += 1

    # ---- telling again --------------------------------------------------------------------------------------

    def _hear(self) -> None:
        """Take up what is asked for."""
        if self._replay is None:
            return
        for _ in range(ANSWERS_MAX):
            try:
                frames = self._replay.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.Again:
                return
            if len(frames) != 3 or len(frames[2]) != SEQUENCE_BYTES:
                self.counts["events_answers_refused_total"] += 1
                continue
            asker, asked = frames[0], int.from_bytes(frames[2], "big")
            if len(self._answers) >= ANSWERS_MAX:
                self.counts["events_answers_refused_total"] += 1
                self._put(asker, END_SEQUENCE, b"")
                continue
            begin = self._kept.begin_of_answer(asked)
            self._answers.append(_Answer(asker, asked, begin, self._time.monotonic()))

    def _answer(self) -> None:
        """Send of each answer what its asker has room for now."""
        self._answers = [answer for answer in self._answers if self._goes_on(answer)]

    def _goes_on(self, answer: _Answer) -> bool:
        now = self._time.monotonic()
        if answer.at is None or (answer.at != self._kept.next and self._kept.get(answer.at) is None):
            # A snapshot may have been written meanwhile, or what came next may be kept no more.
            answer.at = self._kept.begin_of_answer(answer.asked if answer.at is None else answer.at)
        while answer.at is not None:
            payload = self._kept.get(answer.at)
            if payload is None:
                if self._kept.is_open:
                    return True
                sent = self._put(answer.asker, END_SEQUENCE, b"")
                self.counts["events_answers_total"] += bool(sent)
            else:
                sent = self._put(answer.asker, answer.at.to_bytes(SEQUENCE_BYTES, "big"), payload)
            if sent is None:
                break
            if not sent or payload is None:
                return False
            answer.at, answer.moved = answer.at + 1, now
        return now - answer.moved < ANSWER_SECONDS_MAX

    def _put(self, asker: bytes, number: bytes, payload: bytes) -> bool | None:
        """Whether it is on its way: None where the asker has no room, False where it has gone."""
        try:
            self._replay.send_multipart((asker, b"", number, payload), self._zmq.NOBLOCK)
        except self._zmq.Again:
            return None
        except self._zmq.ZMQError as error:
            log.debug("an asker for events has gone: %s", error)
            return False
        return True
