"""The way to the service: dialled when first needed, given up when it breaks, dialled again by the next call."""

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from kvstore.clock import Clock
from kvstore.errors import (
    Draining,
    KvstoreError,
    Unavailable,
    UnknownLease,
    UnknownReservation,
    UnknownSession,
    UnknownTicket,
)
from kvstore_client.address import Address, InProcessAddress, LocalAddress, RemoteAddress
from kvstore_client.calls import Call
from kvstore_client.failures import translated
from kvstore_client.fetching import Fetching
from kvstore_client.forks import kept_in_children
from kvstore_client.link_base import (
    PATIENCE_SECONDS,
    SMALL_BYTES_MAX,
    ConnectionBase,
    LinkBase,
    SessionLike,
    dropped,
    no_session_here,
    too_slow,
)
from kvstore_client.remote import open_remote_session
from kvstore_client.session import open_session, probe
from kvstore_client.spans import CallSpan
from kvstore_client.values import Deadlines, FetchedItem

T = TypeVar("T")

LOST = (Unavailable, UnknownSession, UnknownLease, UnknownReservation, UnknownTicket, Draining)
"""How a call that only tells the service something sooner may fail without anybody's loss."""


class Connection(ConnectionBase):
    def close(self) -> None:
        """Calls under way end with Unavailable."""
        self.closed = True
        self.session.close()
        for channel in self.channels:
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


class Link(LinkBase):
    """Thread-safe. Holds at most one Connection.

    A failure to reach the service opens the breaker: calls are then refused at once for a short while, after which one
    caller looks whether the service answers before the calls go on.
    """

    def __init__(self, address: Address, *, owner: str, deadlines: Deadlines, clock: Clock) -> None:
        super().__init__(address, owner=owner, deadlines=deadlines, clock=clock)
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._connection: Connection | None = None

    # ---- connections ----------------------------------------------------------------------------------------

    def connection(self) -> Connection:
        """The living connection, made now if there is none. Unavailable at once while the breaker is open."""
        self._check_process()
        self._admit()
        with self._lock:
            self._check_open()
            if self._connection is not None and self._connection.usable():
                return self._connection
            # A caller that waited for the lock while another failed to connect is not to fail as slowly.
            self._refuse_if_open()
            self._let_go()
            try:
                session = self._open_session()
            except Unavailable:
                self._note_failure()
                raise
            self._connection = Connection(session, self.address, self._channel(), self._channel())
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

    @property
    def is_closed(self) -> bool:
        return self._closed

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

    def _open_session(self) -> SessionLike:
        timeout = self.deadlines.connect
        if isinstance(self.address, LocalAddress):
            return open_session(self.address.session_path, timeout=timeout, clock=self._clock)
        if isinstance(self.address, InProcessAddress):
            return session_here(self.address, timeout=timeout)
        return open_remote_session(self.address, self._channel(), timeout=timeout)

    def _channel(self) -> grpc.Channel:
        if isinstance(self.address, InProcessAddress):
            made: grpc.Channel = self.address.service.channel()
            return made
        credentials = self.address.credentials() if isinstance(self.address, RemoteAddress) else None
        if credentials is None:
            return kept_in_children(grpc.insecure_channel(self.address.target, options=self._options))
        return kept_in_children(grpc.secure_channel(self.address.target, credentials, options=self._options))

    def _admit(self) -> None:
        if self._breaker.is_closed:
            return
        self._refuse_if_open()
        # One caller looks, with a deadline of its own that is short; the others would only wait with it.
        if not self._looking.acquire(blocking=False):
            raise self._another_looks()
        try:
            self._probe()
        except Unavailable:
            self._note_failure()
            raise
        finally:
            self._looking.release()
        self._note_success()

    def _probe(self) -> None:
        if isinstance(self.address, LocalAddress):
            probe(self.address.session_path, timeout=self.deadlines.probe)
            return
        try:
            # The way there may be longer than a look at a socket takes.
            self._open_session().close()
        except Unavailable:
            raise
        except KvstoreError:
            # It lives; what it refuses it says to the call.
            return

    # ---- calls ----------------------------------------------------------------------------------------------

    def hint(self, connection: Connection, name: str, request: Any) -> Any | None:
        """The answer to a call that only tells the service sooner what it would find out by itself. None where it does not
        get there: the service is away, has ended the session, or knows no more of what the call is about. An answer that is
        late for so short a deadline says nothing about whether the service can be reached."""
        if not connection.usable():
            return None
        try:
            return self._call(connection, name, request, timeout=self.deadlines.release, counts=False)
        except LOST:
            return None

    def run(self, call: Call[T]) -> T:
        """The answer. What may run twice is asked once more with a new session if the service does not know the session
        (any more), and with the same one, if that is no harm, where the way there broke."""
        return self.run_held(call)[1]

    def run_held(self, call: Call[T]) -> tuple[Connection, T]:
        """The answer with the connection that it belongs to."""
        self.check_served(call.name)
        try:
            return self._run_once(call)
        except UnknownSession:
            if not (call.repeatable and self._may_retry()):
                raise
        return self._run_once(call)

    def _run_once(self, call: Call[T]) -> tuple[Connection, T]:
        connection = self.connection()
        reply = self._answer(connection, call)
        try:
            self._check_boot(connection, call, reply)
        except UnknownSession:
            self.drop(connection)
            raise
        return connection, call.parse(reply)

    def _answer(self, connection: Connection, call: Call[Any]) -> Any:
        """Asked for once more where the way broke under it and its session lives."""
        if not call.again:
            return self.call(connection, call.name, call.request, timeout=call.timeout)
        deadline = self.now() + call.timeout
        try:
            return self._call(connection, call.name, call.request, timeout=call.timeout, counts=False)
        except Unavailable as error:
            left = deadline - self.now()
            if not (self.asks_again(connection, call, error, left) and self._reached_again(connection, left)):
                raise self.failure(connection, error) from error.__cause__
        return self.call(connection, call.name, call.request, timeout=max(deadline - self.now(), 0.0))

    def call(self, connection: Connection, name: str, request: Any, *, timeout: float) -> Any:
        """The call `name` with one answer; `request` is a message, or an iterator of messages. The answer, or an error of
        kvstore.errors, within about `timeout` seconds."""
        return self._call(connection, name, request, timeout=timeout, counts=True)

    def begin(self, connection: Connection, name: str, request: Any, *, timeout: float) -> Begun:
        """The call `name` of one message, begun now and waited for later."""
        self._check_process()
        method = connection.method(name, large=request.ByteSize() > SMALL_BYTES_MAX)
        span = CallSpan(name, connection.metadata)
        try:
            call = kept_in_children(method.future(request, timeout=timeout, metadata=span.begin()))
            if span.is_open:
                call.add_done_callback(lambda _: span.end())
        except ValueError as error:
            # gRPC raises one for a call on a channel that another thread closed.
            if connection.closed:
                raise dropped(name) from error
            raise
        return Begun(self, connection, name, call, timeout)

    def finish(self, begun: Begun) -> Any:
        """The answer, as of `call`."""
        try:
            reply = _result(begun.call, begun.timeout, begun.name)
        except grpc.RpcError as error:
            failure = translated(error, what=begun.name)
            raise self._failed(begun.connection, failure, counts=True) from error
        except Unavailable as error:
            raise self._failed(begun.connection, error, counts=True) from error.__cause__
        self._note_success()
        return reply

    def _call(self, connection: Connection, name: str, request: Any, *, timeout: float, counts: bool) -> Any:
        """`counts`: whether a failure says that the service cannot be reached."""
        self._check_process()
        large = isinstance(request, Iterator) or request.ByteSize() > SMALL_BYTES_MAX
        method = connection.method(name, large=large)
        try:
            with CallSpan(name, connection.metadata) as metadata:
                if large:
                    reply = _result(method.future(request, timeout=timeout, metadata=metadata), timeout, name)
                else:
                    reply = method(request, timeout=timeout, metadata=metadata)
        except grpc.RpcError as error:
            raise self._failed(connection, translated(error, what=name), counts=counts) from error
        except Unavailable as error:
            raise self._failed(connection, error, counts=counts) from error.__cause__
        except ValueError as error:
            # gRPC raises one for a call on a channel that another thread closed.
            if connection.closed:
                raise dropped(name) from error
            raise
        self._note_success()
        return reply

    def stream(
        self, connection: Connection, name: str, request: Any, *, timeout: float, counts: bool = True
    ) -> Generator[Any, None, None]:
        """The messages of one call with a small request; closing the iterator cancels the call."""
        self._check_process()
        with CallSpan(name, connection.metadata) as metadata:
            try:
                call = kept_in_children(connection.method(name)(request, timeout=timeout, metadata=metadata))
            except ValueError as error:
                # gRPC raises one for a call on a channel that another thread closed.
                if connection.closed:
                    raise dropped(name) from error
                raise
            try:
                for message in call:
                    self._check_process()
                    yield message
            except grpc.RpcError as error:
                raise self._failed(connection, translated(error, what=name), counts=counts) from error
            finally:
                # A forked child gets a copy of the iterator, and its end there must not touch gRPC.
                if os.getpid() == self._pid:
                    call.cancel()
        self._note_success()

    def fetch(
        self, connection: Connection, fetching: Fetching, *, timeout: float
    ) -> Generator[FetchedItem, None, None]:
        """The items of a Fetch, which goes on where it breaks off while its session lives."""
        deadline = self.now() + timeout
        left = timeout
        while True:
            frames = self.stream(connection, "Fetch", fetching.request(), timeout=left, counts=False)
            try:
                with closing(frames):
                    for frame in frames:
                        yield from fetching.feed(frame)
                fetching.finish()
                return
            except KvstoreError as error:
                left = deadline - self.now()
                if not (
                    self.goes_on(connection, fetching, error, left) and self._reached_again(connection, left)
                ):
                    raise self.failure(connection, error) from error.__cause__
                left = deadline - self.now()

    def _reached_again(self, connection: Connection, left: float) -> bool:
        # A channel that has just lost its connection refuses calls for a moment.
        ready = grpc.channel_ready_future(connection.channels[0])
        try:
            ready.result(timeout=min(left, self.deadlines.connect))
        except (grpc.FutureTimeoutError, grpc.FutureCancelledError, ValueError):
            return False
        finally:
            ready.cancel()
        return connection.usable()

    def _failed(self, connection: Connection, failure: KvstoreError, *, counts: bool) -> KvstoreError:
        if isinstance(failure, UnknownSession):
            self.drop(connection)
        return self.failure(connection, failure, counts=counts)


def session_here(address: InProcessAddress, *, timeout: float) -> SessionLike:
    """A session with a service of this process within `timeout` seconds; Unavailable, or the service's own refusal."""
    try:
        opened: SessionLike = address.service.open_session().result(timeout)
    except TimeoutError as error:
        raise no_session_here(address, timeout) from error
    return opened


def _result(call: Any, timeout: float, name: str) -> Any:
    """The answer of a call that gRPC may fail to end at its deadline."""
    try:
        return call.result(timeout=timeout + PATIENCE_SECONDS)
    except (grpc.FutureTimeoutError, grpc.FutureCancelledError) as error:
        call.cancel()
        raise too_slow(name, timeout) from error
