"""The way to the service: dialled when first needed, given up when it breaks, dialled again by the next call."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import grpc

from kvstore.clock import Clock
from kvstore.errors import (
    Draining,
    InvalidArgument,
    KvstoreError,
    Unavailable,
    UnknownLease,
    UnknownReservation,
    UnknownSession,
    UnknownTicket,
)
from kvstore.v1.cache_pb2_grpc import AdminStub, CacheStub
from kvstore_client.breaker import Breaker
from kvstore_client.failures import translated
from kvstore_client.session import Session, open_session, probe
from kvstore_client.values import Deadlines

MESSAGE_BYTES_MAX = 64 << 20
SOCKET_PATH_BYTES_MAX = 107
SMALL_BYTES_MAX = 4096
"""Requests up to here share a channel. Dozens of them fit a socket's buffer, and so are never stuck in a write."""
PATIENCE_SECONDS = 0.1
"""How much later than its deadline a large call is given up: its own error says more."""
SESSION_ENTRY = "kvstore-session"

T = TypeVar("T")


class Connection:
    """One session and the channels that are used with it. They begin and end together, so that no call can quote a
    session of one service process to another.

    Two channels, since gRPC does not end a call at its deadline while bytes of it are in a write that the socket does
    not take, as when the service is stopped: large requests go their own way, and only they have to be waited for with
    a limit of our own. A channel dials when it is first used.
    """

    def __init__(self, session: Session, small: grpc.Channel, large: grpc.Channel) -> None:
        self.session = session
        self.metadata = ((SESSION_ENTRY, session.number),)
        self.closed = False
        self._channels = {False: small, True: large}
        self._stubs = {
            way: (CacheStub(channel), AdminStub(channel)) for way, channel in self._channels.items()
        }

    def method(self, name: str, *, large: bool = False) -> Any:
        """The call of that name in either service of the contract."""
        cache, admin = self._stubs[large]
        return getattr(cache if hasattr(cache, name) else admin, name)

    def usable(self) -> bool:
        return not self.closed and self.session.alive()

    def close(self) -> None:
        """Calls under way end with Unavailable."""
        self.closed = True
        self.session.close()
        for channel in self._channels.values():
            channel.close()


@dataclass(frozen=True, slots=True)
class Begun:
    """A call under way."""

    link: Link
    connection: Connection
    name: str
    call: Any
    timeout: float

    def result(self) -> Any:
        """The answer, or an error of kvstore.errors, within about the call's time from now on."""
        return self.link.finish(self)

    def cancel(self) -> None:
        """Nobody waits for it any more."""
        self.call.cancel()


class Link:
    """Thread-safe. Holds at most one Connection; has no threads of its own.

    A failure to reach the service opens the breaker: calls are then refused at once for a short while, after which one
    caller looks whether the service answers before the calls go on.
    """

    def __init__(self, directory: Path, *, owner: str, deadlines: Deadlines, clock: Clock) -> None:
        self.deadlines = deadlines
        self._clock = clock
        self._session_path = directory / "session.sock"
        self._target = f"unix:{quote(str(directory / 'kvstore.sock'))}"
        self._options = _options(owner, deadlines)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._breaker = Breaker(deadlines.pause_first, deadlines.pause_most)
        self._connection: Connection | None = None
        self._closed = False
        longest = len(os.fsencode(self._session_path))
        if longest > SOCKET_PATH_BYTES_MAX:
            raise InvalidArgument(
                "the path of a socket is too long; use a directory with a shorter path",
                field="directory",
                value=directory,
                allowed=f"at most {SOCKET_PATH_BYTES_MAX} bytes with /session.sock, this has {longest}",
            )

    # ---- connections ----------------------------------------------------------------------------------------

    def connection(self) -> Connection:
        """The living connection, made now if there is none. Unavailable at once while the breaker is open."""
        self._check_process()
        self._admit()
        with self._lock:
            if self._closed:
                raise Unavailable(
                    "this client is closed", field="client", value="closed", allowed="a new CacheClient"
                )
            if self._connection is not None and self._connection.usable():
                return self._connection
            # A caller that waited for the lock while another failed to connect is not to fail as slowly.
            self._refuse_if_open()
            self._let_go()
            try:
                session = open_session(self._session_path, timeout=self.deadlines.connect, clock=self._clock)
            except Unavailable:
                self._note_failure()
                raise
            small, large = (grpc.insecure_channel(self._target, options=self._options) for _ in range(2))
            self._connection = Connection(session, small, large)
            return self._connection

    @property
    def boot(self) -> str | None:
        if os.getpid() != self._pid:
            return None
        with self._lock:
            return (
                self._connection.session.boot
                if self._connection is not None and self._connection.usable()
                else None
            )

    def drop(self, connection: Connection) -> None:
        """Give up `connection`: what its session held is given back by the service."""
        with self._lock:
            if self._connection is connection:
                self._let_go()

    def close(self) -> None:
        """No call succeeds afterwards. Nothing to do in a forked child: its copy of the session is closed already."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed = True
            self._let_go()

    def _let_go(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.close()

    # ---- calls ----------------------------------------------------------------------------------------------

    def hint(self, connection: Connection, name: str, request: Any) -> Any | None:
        """The answer to a call that only tells the service sooner what it would find out by itself. None where it does not
        get there: the service is away, has ended the session, or knows no more of what the call is about. An answer that is
        late for so short a deadline says nothing about whether the service can be reached."""
        if not connection.usable():
            return None
        try:
            return self._call(connection, name, request, timeout=self.deadlines.release, counts=False)
        except (Unavailable, UnknownSession, UnknownLease, UnknownReservation, UnknownTicket, Draining):
            return None

    def begin(self, connection: Connection, name: str, request: Any, *, timeout: float) -> Begun:
        """The call `name` of one message, begun now and waited for later."""
        self._check_process()
        method = connection.method(name, large=request.ByteSize() > SMALL_BYTES_MAX)
        try:
            call = method.future(request, timeout=timeout, metadata=connection.metadata)
        except ValueError as error:
            raise _closed_under(connection, error, name) from error
        return Begun(self, connection, name, call, timeout)

    def finish(self, begun: Begun) -> Any:
        """The answer, as of `call`."""
        try:
            reply = _result(begun.call, begun.timeout, begun.name)
        except grpc.RpcError as error:
            raise self._failure(begun.connection, translated(error, what=begun.name)) from error
        except Unavailable as error:
            raise self._failure(begun.connection, error) from error.__cause__
        self._note_success()
        return reply

    def call(self, connection: Connection, name: str, request: Any, *, timeout: float) -> Any:
        """The call `name` with one answer; `request` is a message, or an iterator of messages. The answer, or an error of
        kvstore.errors, within about `timeout` seconds."""
        return self._call(connection, name, request, timeout=timeout, counts=True)

    def _call(self, connection: Connection, name: str, request: Any, *, timeout: float, counts: bool) -> Any:
        """`counts`: whether a failure says that the service cannot be reached."""
        self._check_process()
        large = isinstance(request, Iterator) or request.ByteSize() > SMALL_BYTES_MAX
        method = connection.method(name, large=large)
        try:
            if large:
                reply = _result(
                    method.future(request, timeout=timeout, metadata=connection.metadata), timeout, name
                )
            else:
                reply = method(request, timeout=timeout, metadata=connection.metadata)
        except grpc.RpcError as error:
            raise self._failure(connection, translated(error, what=name), counts=counts) from error
        except Unavailable as error:
            raise self._failure(connection, error, counts=counts) from error.__cause__
        except ValueError as error:
            raise _closed_under(connection, error, name) from error
        self._note_success()
        return reply

    def stream(
        self, connection: Connection, name: str, request: Any, *, timeout: float
    ) -> Generator[Any, None, None]:
        """The messages of one call with a small request; closing the iterator cancels the call."""
        self._check_process()
        try:
            call = connection.method(name)(request, timeout=timeout, metadata=connection.metadata)
        except ValueError as error:
            raise _closed_under(connection, error, name) from error
        try:
            for message in call:
                self._check_process()
                yield message
        except grpc.RpcError as error:
            raise self._failure(connection, translated(error, what=name)) from error
        finally:
            # A forked child gets a copy of the iterator, and its end there must not touch gRPC.
            if os.getpid() == self._pid:
                call.cancel()
        self._note_success()

    def repeatable(self, attempt: Callable[[Connection], T]) -> T:
        """`attempt`, and once more with a new session if the service does not know the session (any more). Only for
        what may run twice."""
        try:
            return attempt(self.connection())
        except UnknownSession:
            return attempt(self.connection())

    # ---- failures -------------------------------------------------------------------------------------------

    def _failure(self, connection: Connection, failure: KvstoreError, *, counts: bool = True) -> KvstoreError:
        """`failure`, with what follows from it for this link."""
        if isinstance(failure, UnknownSession):
            self.drop(connection)
        elif isinstance(failure, Unavailable) and counts and not connection.closed:
            self._note_failure()
        return failure

    def _note_failure(self) -> None:
        self._breaker = self._breaker.failed(self._clock.monotonic())

    def _note_success(self) -> None:
        if not self._breaker.is_closed:
            self._breaker = self._breaker.succeeded()

    def _refuse_if_open(self) -> None:
        left = self._breaker.seconds_left(self._clock.monotonic())
        if left > 0:
            raise Unavailable(
                "the service could not be reached just now",
                field="directory",
                value=self._session_path.parent,
                allowed=f"calls again in {left * 1000:.0f} ms",
            )

    def _admit(self) -> None:
        if self._breaker.is_closed:
            return
        self._refuse_if_open()
        # One caller looks, with a deadline of its own that is short; the others would only wait with it.
        if not self._looking.acquire(blocking=False):
            raise Unavailable(
                "another call is trying to reach the service",
                field="directory",
                value=self._session_path.parent,
            )
        try:
            probe(self._session_path, timeout=self.deadlines.probe)
        except Unavailable:
            self._note_failure()
            raise
        finally:
            self._looking.release()
        self._note_success()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            # gRPC's threads and locks do not survive a fork; a call would hang, and waiting is what a miss must not cost.
            raise InvalidArgument(
                "this client was made before a fork; make one in the process that uses it",
                field="pid",
                value=os.getpid(),
                allowed=f"{self._pid}",
            )


def _result(call: Any, timeout: float, name: str) -> Any:
    """The answer of a call that gRPC may fail to end at its deadline."""
    try:
        return call.result(timeout=timeout + PATIENCE_SECONDS)
    except (grpc.FutureTimeoutError, grpc.FutureCancelledError) as error:
        call.cancel()
        raise Unavailable(
            f"{name} failed: the service does not take the request", field="timeout", value=timeout
        ) from error


def _closed_under(connection: Connection, error: ValueError, name: str) -> Exception:
    """What to raise for a ValueError of gRPC: it raises one for a call on a channel that another thread closed."""
    return Unavailable(f"{name} failed: the connection was dropped") if connection.closed else error


def _options(owner: str, deadlines: Deadlines) -> tuple[tuple[str, int | str], ...]:
    return (
        ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
        ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
        ("grpc.initial_reconnect_backoff_ms", 20),
        ("grpc.max_reconnect_backoff_ms", 100),
        # Also how long gRPC lets one attempt to connect take, so it is not smaller than our own patience.
        ("grpc.min_reconnect_backoff_ms", max(20, int(deadlines.connect * 1000))),
        # A pool shared in the process would hand a new channel the backoff of the one before.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
        ("grpc.primary_user_agent", owner),
    )
