"""The sockets of a sender of events: PUB for all, ROUTER for who has missed some. Neither ever waits for a reader."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError
from kvstore.events.base import Event
from kvstore.events.endpoint import check_endpoint
from kvstore.events.stream import END_SEQUENCE, SEQUENCE_BYTES, Kept
from kvstore.events.wire import batch_value

log = logging.getLogger(__name__)

UNREAD_BATCHES_MAX = 2_000
"""Of a reader that does not keep up; what comes then is dropped for it, and is a gap."""

UNREAD_SECONDS_MAX = 30.0
"""How long a reader over TCP may take nothing of what is there for it. It is hung up on then: each would keep the batches that were told
while it stood still, and there may be any number of them."""

ANSWERS_MAX = 16
"""At once. Who asks when there are as many is told the end at once, and asks again."""

_IPC = "ipc://"

ANSWER_UNREAD_MAX = 64
"""Batches of an answer that lie on the way to its asker."""

ANSWER_AT_ONCE = 64
"""Batches of an answer that go in one turn, also to an asker that takes them as fast: a snapshot has thousands."""

ANSWER_SECONDS_MAX = 30.0
"""How long an asker may take nothing."""


@dataclass(slots=True)
class _Answer:
    """`at`: the next batch of it, None where a snapshot has to be written first. `moved`: when its asker last took something."""

    asker: bytes
    asked: int
    at: int | None
    moved: float


class Sender:
    """Sends numbered batches, and tells them again. One owner, in one thread, calls `hear` and `answer` often; where `wants_snapshot` says
    so it writes one, between `kept.begin_snapshot` and `kept.end_snapshot`.

    `counts` since the start: batches, answers, answers_refused.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        replay: str,
        first: int,
        kept_bytes: int,
        monotonic: Callable[[], float],
        may_be_public: bool = False,
    ) -> None:
        """`replay` empty: nothing is told again. `first`, `kept_bytes`: as Kept has them. Nothing is opened yet."""
        check_sender(endpoint, replay, may_be_public=may_be_public)
        self._endpoint = endpoint
        self._replay_endpoint = replay
        self._monotonic = monotonic
        self.kept = Kept(first=first, limit_bytes=kept_bytes)
        self.counts: Counter[str] = Counter()
        self._ends = ExitStack()
        self._pub: Any = None
        self._replay: Any = None
        self._answers: list[_Answer] = []
        self._is_short = False
        """Whether an answer was broken off in this turn, and not for want of room."""

    def open(self) -> None:
        """Listen. ConfigError where that cannot be."""
        self._zmq = zmq = importlib.import_module("zmq")
        self._pack: Callable[[Any], bytes] = importlib.import_module("msgpack").packb
        with ExitStack() as undo:
            context = zmq.Context(io_threads=1)
            undo.callback(context.term)
            self._pub = context.socket(zmq.PUB)
            undo.callback(self._pub.close)
            options = {zmq.SNDHWM: UNREAD_BATCHES_MAX, zmq.LINGER: 500}
            self._listen(self._pub, self._endpoint, options, field="events")
            if self._replay_endpoint:
                options = {
                    zmq.SNDHWM: ANSWER_UNREAD_MAX,
                    zmq.RCVHWM: ANSWER_UNREAD_MAX,
                    zmq.LINGER: 0,
                    # A peer that has gone or has no room is told of by send, and is not written to in vain.
                    zmq.ROUTER_MANDATORY: 1,
                    zmq.MAXMSGSIZE: 256,
                }
                self._replay = context.socket(zmq.ROUTER)
                undo.callback(self._replay.close)
                self._listen(self._replay, self._replay_endpoint, options, field="events_replay")
            self._ends = undo.pop_all()

    def _listen(self, end: Any, endpoint: str, options: dict[int, int], *, field: str) -> None:
        zmq = self._zmq
        for option, value in options.items():
            end.setsockopt(option, value)
        end.setsockopt(zmq.TCP_MAXRT, int(UNREAD_SECONDS_MAX * 1000))
        if "[" in endpoint:
            end.setsockopt(zmq.IPV6, 1)
        if endpoint.startswith(_IPC):
            _check_path(Path(endpoint.removeprefix(_IPC)), field=field, endpoint=endpoint)
        try:
            end.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"cannot listen: {error.strerror}",
                field=field,
                value=endpoint,
                allowed="a free address of this machine",
            ) from error
        if endpoint.startswith(_IPC):
            Path(endpoint.removeprefix(_IPC)).chmod(0o600)
        log.info("%s at %s", field.replace("_", " "), end.getsockopt(zmq.LAST_ENDPOINT).decode())

    def close(self) -> None:
        """What lies on the way to readers has half a second. Safe to call again."""
        self._ends.close()

    def send(self, topic: bytes, events: Sequence[Event], *, ts: float) -> None:
        """One batch. For a reader without room it is dropped."""
        payload = self._pack(batch_value(events, ts=ts))
        number = self.kept.add(payload) if self._replay is not None else self.kept.skip()
        self._pub.send_multipart((topic, number.to_bytes(SEQUENCE_BYTES, "big"), payload))
        self.counts["batches"] += 1

    @property
    def wants_snapshot(self) -> bool:
        """Somebody asks for what only a snapshot can tell."""
        return any(answer.at is None for answer in self._answers)

    def hear(self) -> None:
        """Take up what is asked for."""
        if self._replay is None:
            return
        for _ in range(ANSWERS_MAX):
            try:
                frames = self._replay.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.Again:
                return
            if len(frames) != 3 or len(frames[2]) != SEQUENCE_BYTES:
                self.counts["answers_refused"] += 1
                continue
            asker, asked = frames[0], int.from_bytes(frames[2], "big")
            if len(self._answers) >= ANSWERS_MAX:
                self.counts["answers_refused"] += 1
                self._put(asker, END_SEQUENCE, b"")
                continue
            begin = self.kept.begin_of_answer(asked)
            self._answers.append(_Answer(asker, asked, begin, self._monotonic()))

    def answer(self) -> bool:
        """Send of each answer what its asker has room for now, ANSWER_AT_ONCE batches at most. Whether more of any may go at once."""
        self._is_short = False
        self._answers = [answer for answer in self._answers if self._goes_on(answer)]
        return self._is_short

    def _goes_on(self, answer: _Answer) -> bool:
        now = self._monotonic()
        if answer.at is None or (answer.at != self.kept.next and self.kept.get(answer.at) is None):
            # A snapshot may have been written meanwhile, or what came next may be kept no more.
            answer.at = self.kept.begin_of_answer(answer.asked if answer.at is None else answer.at)
        last = None if answer.at is None else answer.at + ANSWER_AT_ONCE
        while answer.at is not None:
            if answer.at == last:
                self._is_short = True
                break
            payload = self.kept.get(answer.at)
            if payload is None:
                if self.kept.is_open:
                    return True
                sent = self._put(answer.asker, END_SEQUENCE, b"")
                self.counts["answers"] += bool(sent)
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


def _check_path(path: Path, *, field: str, endpoint: str) -> None:
    """ConfigError unless nothing is there, or a socket at which nobody listens any more: whatever is there is removed without a word
    when ZMQ listens, a file as well as the socket of another who goes on listening to nobody."""
    what = ""
    if path.is_socket():
        with socket.socket(socket.AF_UNIX) as tried, suppress(OSError):
            tried.setblocking(False)
            tried.connect(str(path))
            what = "another process listens there"
    elif path.is_symlink() or path.exists():
        what = "something that is no socket has that name"
    if what:
        raise ConfigError(
            f"cannot listen: {what}", field=field, value=endpoint, allowed="a path that is free"
        )


def check_sender(endpoint: str, replay: str, *, may_be_public: bool) -> None:
    """Raise ConfigError where events cannot be sent like that."""
    check_endpoint(endpoint, field="events", may_be_public=may_be_public)
    if replay:
        check_endpoint(replay, field="events_replay", may_be_public=may_be_public)
    for package in ("zmq", "msgpack"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                "sending KV events needs pyzmq and msgpack; install kvstore[events]",
                field="package",
                value=package,
            )
