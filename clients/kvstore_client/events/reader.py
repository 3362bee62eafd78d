"""Read KV events from a ZMQ publisher, and ask again for what was missed."""

from __future__ import annotations

import importlib
import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from kvstore.errors import ConfigError, InvalidArgument
from kvstore.events.base import AllBlocksCleared, Batch, Event
from kvstore.events.stream import END_SEQUENCE, SEQUENCE_BYTES
from kvstore.events.wire import BATCH_BYTES_MAX, batch_of, batch_value

UNREAD_BATCHES_MAX = 10_000
"""That wait in this process; further ones are dropped, and asked for again."""


def packed(events: Sequence[Event], *, ts: float) -> bytes:
    """A batch as it is sent, for who passes events on."""
    pack = _module("msgpack").packb
    payload: bytes = pack(batch_value(events, ts=ts))
    return payload


class EventReader:
    """The events of one publisher, in order: a store's, or an engine's of any version. Use it as a context manager, in one thread.

    It begins with all that the publisher can tell again: of a store that is a snapshot, and so is what comes after a restart of the store. A gap
    in the numbers is closed by asking; what nobody can tell again is counted in the batch after it (`Batch.missed`). A batch that
    cannot be read is passed over, and counted (`unreadable_total`).
    """

    def __init__(
        self,
        endpoint: str,
        *,
        replay: str | None = None,
        quiet_seconds: float = 1.0,
        answer_seconds: float = 5.0,
    ) -> None:
        """`endpoint`: of the publisher's PUB socket. `replay`: where it tells again; None: it does not, and every gap is a loss. It is asked
        after `quiet_seconds` without a batch too, since the last one may be what was lost; an answer that stands still for
        `answer_seconds` is given up. ConfigError where pyzmq or msgpack is missing, or an endpoint is none."""
        self._zmq = _module("zmq")
        self._unpack = _module("msgpack").unpackb
        self._replay_endpoint = replay or None
        self._quiet_seconds = quiet_seconds
        self._answer_ms = int(answer_seconds * 1000)
        with ExitStack() as undo:
            self._context = self._zmq.Context(io_threads=1)
            undo.callback(self._context.term)
            self._sub = self._socket(self._zmq.SUB)
            undo.callback(self._sub.close)
            self._sub.setsockopt(self._zmq.RCVHWM, UNREAD_BATCHES_MAX)
            self._sub.setsockopt(self._zmq.SUBSCRIBE, b"")
            self._connect(self._sub, endpoint)
            self._ends = undo.pop_all()
        self._next: int | None = None
        self._ready: deque[Batch] = deque()
        self._asked = self._newest = self._went_on = -math.inf
        self.unreadable_total = 0
        self.replays_total = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Safe to call again."""
        self._ends.close()

    def __iter__(self) -> Iterator[Batch]:
        """Batches without end."""
        while True:
            if (batch := self.read(timeout=3600.0)) is not None:
                yield batch

    def read(self, *, timeout: float) -> Batch | None:
        """The next batch; None where none has come within `timeout` seconds, and the `answer_seconds` of a question that began in them. An
        answer is kept whole until it is read: as much as the publisher keeps."""
        deadline = time.monotonic() + timeout
        if self._next is None and self._replay_endpoint and not self._ready:
            self._ask(0)
        while not self._ready:
            left = max(deadline - time.monotonic(), 0.0)
            wait = min(left, self._quiet_seconds) if self._replay_endpoint else left
            if self._sub.poll(math.ceil(wait * 1000)):
                self._take(self._sub.recv_multipart())
            elif not left:
                return None
            elif self._replay_endpoint and time.monotonic() - self._asked >= self._quiet_seconds:
                self._ask(0 if self._next is None else self._next)
        return self._ready.popleft()

    def _take(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != SEQUENCE_BYTES:
            self.unreadable_total += 1
            return
        sequence, payload = int.from_bytes(frames[1], "big"), frames[2]
        if self._next is not None and sequence < self._next:
            # One that an answer has told already; or its publisher has begun a new life, which begins to count again. Where its clock was
            # set back both look alike, but answers are over soon.
            batch = self._parsed(sequence, payload)
            is_known = batch is None or batch.ts <= self._newest
            if is_known and time.monotonic() - self._went_on < self._quiet_seconds:
                return
            self._next, self._newest = None, -math.inf
            if self._replay_endpoint:
                self._ask(0)
        elif self._next is not None and sequence > self._next and self._replay_endpoint:
            self._ask(self._next)
        if self._next is None or sequence >= self._next:
            self._add(sequence, payload, missed=0 if self._next is None else sequence - self._next)

    def _ask(self, begin: int) -> None:
        """Have all batches from `begin` on told again."""
        self._asked = time.monotonic()
        self.replays_total += 1
        # One of its own for each question: what an earlier one still sends is nobody's then.
        socket = self._socket(self._zmq.DEALER)
        try:
            self._connect(socket, self._replay_endpoint or "")
            socket.send_multipart((b"", begin.to_bytes(SEQUENCE_BYTES, "big")))
            is_first = True
            while socket.poll(self._answer_ms):
                frames = socket.recv_multipart()
                if len(frames) != 3 or frames[1] == END_SEQUENCE or len(frames[1]) != SEQUENCE_BYTES:
                    return
                self._told_again(int.from_bytes(frames[1], "big"), frames[2], is_first=is_first)
                is_first = False
        finally:
            socket.close(linger=0)

    def _told_again(self, sequence: int, payload: bytes, *, is_first: bool) -> None:
        """One batch of an answer. Where it does not go on from what is known, it may say all that is held, and nothing is missed."""
        if self._next is None or sequence == self._next:
            self._add(sequence, payload, missed=0)
        elif sequence > self._next or is_first:
            batch = self._parsed(sequence, payload)
            if batch is not None and batch.events[:1] == (AllBlocksCleared(),):
                self._add(sequence, payload, missed=0)
            elif sequence > self._next:
                self._add(sequence, payload, missed=sequence - self._next)

    def _add(self, sequence: int, payload: bytes, *, missed: int) -> None:
        """The batch of this number is the next one."""
        self._next = sequence + 1
        self._went_on = time.monotonic()
        batch = self._parsed(sequence, payload, missed=missed)
        if batch is None:
            self.unreadable_total += 1
            return
        self._newest = max(self._newest, batch.ts)
        self._ready.append(batch)

    def _parsed(self, sequence: int, payload: bytes, *, missed: int = 0) -> Batch | None:
        try:
            value = self._unpack(payload, strict_map_key=False)
            return batch_of(value, sequence=sequence, missed=missed)
        # msgpack has errors of many kinds, all of them of these.
        except (ValueError, TypeError, InvalidArgument):
            return None

    def _socket(self, kind: int) -> Any:
        socket = self._context.socket(kind)
        socket.setsockopt(self._zmq.LINGER, 0)
        socket.setsockopt(self._zmq.MAXMSGSIZE, BATCH_BYTES_MAX)
        return socket

    def _connect(self, socket: Any, endpoint: str) -> None:
        if "[" in endpoint:
            socket.setsockopt(self._zmq.IPV6, 1)
        try:
            socket.connect(endpoint)
        except self._zmq.ZMQError as error:
            raise ConfigError(
                f"cannot connect: {error.strerror}",
                field="endpoint",
                value=endpoint,
                allowed="tcp://HOST:PORT or ipc:///PATH",
            ) from error


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            "reading KV events needs a package that is not installed; install kvstore[events]",
            field="package",
            value={"zmq": "pyzmq"}.get(name, name),
        ) from error
