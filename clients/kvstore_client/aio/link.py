"""The way to the service on an event loop: dialled when first needed, given up when it breaks, dialled again."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import grpc
import grpc.aio

from kvstore.clock import Clock
from kvstore.errors import InvalidArgument, KvstoreError, Unavailable, UnknownSession
from kvstore_client.address import Address, InProcessAddress, LocalAddress, RemoteAddress
from kvstore_client.aio.session import open_remote_session, open_session, probe
from kvstore_client.calls import Call
from kvstore_client.failures import translated
from kvstore_client.fetching import Fetching
from kvstore_client.forks import kept_in_children
from kvstore_client.link import LOST
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
from kvstore_client.spans import CallSpan
from kvstore_client.values import Deadlines, FetchedItem

BREAK_SECONDS = 0.05
"""How long a channel may take to know of a break that a call on it has told of."""

T = TypeVar("T")


class AsyncConnection(ConnectionBase):
    async def close(self) -> None:
        """Calls under way end with Unavailable."""
        self.closed = True
        self.session.close()
        for channel in self.channels:
            await channel.close()


class AsyncLink(LinkBase):
    """As kvstore_client.link.Link, for the tasks of one loop."""

    def __init__(self, address: Address, *, owner: str, deadlines: Deadlines, clock: Clock) -> None:
        super().__init__(address, owner=owner, deadlines=deadlines, clock=clock)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = asyncio.Lock()
        self._is_looking = False
        self._connection: AsyncConnection | None = None

    # ---- connections ----------------------------------------------------------------------------------------

    async def connection(self) -> AsyncConnection:
        """As Link.connection."""
        self._check_here()
        await self._admit()
        async with self._lock:
            self._check_open()
            if self._connection is not None and self._connection.usable():
                return self._connection
            self._refuse_if_open()
            await self._let_go()
            try:
                session = await self._open_session()
            except Unavailable:
                self._note_failure()
                raise
            # close() does not wait for this lock: it may have come meanwhile.
            if self._closed:
                session.close()
            self._check_open()
            self._connection = AsyncConnection(session, self.address, self._channel(), self._channel())
            return self._connection

    @property
    def boot(self) -> str | None:
        connection = self._connection
        if os.getpid() != self._pid or connection is None or not connection.usable():
            return None
        return connection.session.boot

    async def drop(self, connection: AsyncConnection) -> None:
        """As Link.drop."""
        if self._connection is connection:
            await self._let_go()

    async def close(self) -> None:
        """As Link.close."""
        if os.getpid() != self._pid:
            return
        self._check_here()
        self._closed = True
        await self._let_go()

    async def _let_go(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await connection.close()

    async def _open_session(self) -> SessionLike:
        timeout = self.deadlines.connect
        if isinstance(self.address, LocalAddress):
            return await open_session(self.address.session_path, timeout=timeout)
        if isinstance(self.address, InProcessAddress):
            return await session_here(self.address, timeout=timeout)
        return await open_remote_session(self.address, self._channel(), timeout=timeout)

    def _channel(self) -> grpc.aio.Channel:
        if isinstance(self.address, InProcessAddress):
            made: grpc.aio.Channel = self.address.service.async_channel()
            return made
        credentials = self.address.credentials() if isinstance(self.address, RemoteAddress) else None
        if credentials is None:
            return kept_in_children(grpc.aio.insecure_channel(self.address.target, options=self._options))
        return kept_in_children(
            grpc.aio.secure_channel(self.address.target, credentials, options=self._options)
        )

    async def _admit(self) -> None:
        if self._breaker.is_closed:
            return
        self._refuse_if_open()
        if self._is_looking:
            raise self._another_looks()
        self._is_looking = True
        try:
            await self._probe()
        except Unavailable:
            self._note_failure()
            raise
        finally:
            self._is_looking = False
        self._note_success()

    async def _probe(self) -> None:
        if isinstance(self.address, LocalAddress):
            await probe(self.address.session_path, timeout=self.deadlines.probe)
            return
        try:
            session = await self._open_session()
        except Unavailable:
            raise
        except KvstoreError:
            # It lives; what it refuses it says to the call.
            return
        session.close()

    def _check_here(self) -> None:
        self._check_process()
        loop = asyncio.get_running_loop()
        self._loop = self._loop or loop
        if self._loop is not loop:
            raise InvalidArgument(
                "this client is used from two event loops; make one for each",
                field="loop",
                value="another",
                allowed="the loop of the first call",
            )

    # ---- calls ----------------------------------------------------------------------------------------------

    async def hint(self, connection: AsyncConnection, name: str, request: Any) -> Any | None:
        """As Link.hint."""
        if not connection.usable():
            return None
        try:
            return await self._call(connection, name, request, timeout=self.deadlines.release, counts=False)
        except LOST:
            return None

    async def run(self, call: Call[T]) -> T:
        """As Link.run."""
        return (await self.run_held(call))[1]

    async def run_held(self, call: Call[T]) -> tuple[AsyncConnection, T]:
        """As Link.run_held."""
        self.check_served(call.name)
        try:
            return await self._run_once(call)
        except UnknownSession:
            if not (call.repeatable and self._may_retry()):
                raise
        return await self._run_once(call)

    async def _run_once(self, call: Call[T]) -> tuple[AsyncConnection, T]:
        connection = await self.connection()
        reply = await self._answer(connection, call)
        try:
            self._check_boot(connection, call, reply)
        except UnknownSession:
            await self.drop(connection)
            raise
        return connection, call.parse(reply)

    async def _answer(self, connection: AsyncConnection, call: Call[Any]) -> Any:
        """As Link._answer."""
        if not call.again:
            return await self.call(connection, call.name, call.request, timeout=call.timeout)
        deadline = self.now() + call.timeout
        try:
            return await self._call(connection, call.name, call.request, timeout=call.timeout, counts=False)
        except Unavailable as error:
            left = deadline - self.now()
            if not (
                self.asks_again(connection, call, error, left) and await self._reached_again(connection, left)
            ):
                raise self.failure(connection, error) from error.__cause__
        return await self.call(connection, call.name, call.request, timeout=max(deadline - self.now(), 0.0))

    async def call(self, connection: AsyncConnection, name: str, request: Any, *, timeout: float) -> Any:
        """As Link.call. Cancelling the task that waits for it cancels the call."""
        return await self._call(connection, name, request, timeout=timeout, counts=True)

    async def _call(
        self, connection: AsyncConnection, name: str, request: Any, *, timeout: float, counts: bool
    ) -> Any:
        self._check_here()
        large = isinstance(request, Iterator) or request.ByteSize() > SMALL_BYTES_MAX
        method = connection.method(name, large=large)
        try:
            with CallSpan(name, connection.metadata) as metadata:
                async with asyncio.timeout(timeout + PATIENCE_SECONDS):
                    reply = await kept_in_children(method(request, timeout=timeout, metadata=metadata))
        except grpc.RpcError as error:
            raise await self._failed(connection, translated(error, what=name), counts=counts) from error
        except TimeoutError as error:
            raise await self._failed(connection, too_slow(name, timeout), counts=counts) from error
        except (asyncio.CancelledError, grpc.aio.UsageError) as error:
            if _was_dropped(connection):
                raise dropped(name) from error
            raise
        self._note_success()
        return reply

    async def stream(
        self, connection: AsyncConnection, name: str, request: Any, *, timeout: float, counts: bool = True
    ) -> AsyncGenerator[Any, None]:
        """As Link.stream."""
        self._check_here()
        with CallSpan(name, connection.metadata) as metadata:
            try:
                call = kept_in_children(connection.method(name)(request, timeout=timeout, metadata=metadata))
            except grpc.aio.UsageError as error:
                if _was_dropped(connection):
                    raise dropped(name) from error
                raise
            try:
                while (message := await _next(call)) is not grpc.aio.EOF:
                    yield message
            except grpc.RpcError as error:
                raise await self._failed(connection, translated(error, what=name), counts=counts) from error
            except asyncio.CancelledError as error:
                if _was_dropped(connection):
                    raise dropped(name) from error
                raise
            finally:
                if os.getpid() == self._pid:
                    call.cancel()
        self._note_success()

    async def fetch(
        self, connection: AsyncConnection, fetching: Fetching, *, timeout: float
    ) -> AsyncGenerator[FetchedItem, None]:
        """As Link.fetch."""
        deadline = self.now() + timeout
        left = timeout
        while True:
            frames = self.stream(connection, "Fetch", fetching.request(), timeout=left, counts=False)
            try:
                async with aclosing(frames):
                    async for frame in frames:
                        for item in fetching.feed(frame):
                            yield item
                fetching.finish()
                return
            except KvstoreError as error:
                left = deadline - self.now()
                if not (
                    self.goes_on(connection, fetching, error, left)
                    and await self._reached_again(connection, left)
                ):
                    raise self.failure(connection, error) from error.__cause__
                left = deadline - self.now()

    async def _reached_again(self, connection: AsyncConnection, left: float) -> bool:
        channel = connection.channels[0]
        try:
            # A call may know of the break before its channel does: one made right now would meet it too.
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left, BREAK_SECONDS)):
                    await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
            async with asyncio.timeout(min(left, self.deadlines.connect)):
                await channel.channel_ready()
        except (TimeoutError, grpc.aio.UsageError):
            return False
        return connection.usable()

    async def _failed(
        self, connection: AsyncConnection, failure: KvstoreError, *, counts: bool
    ) -> KvstoreError:
        if isinstance(failure, UnknownSession):
            await self.drop(connection)
        return self.failure(connection, failure, counts=counts)


async def session_here(address: InProcessAddress, *, timeout: float) -> SessionLike:
    """As kvstore_client.link.session_here."""
    try:
        async with asyncio.timeout(timeout):
            opened: SessionLike = await asyncio.wrap_future(address.service.open_session())
    except TimeoutError as error:
        raise no_session_here(address, timeout) from error
    return opened


async def _next(call: Any) -> Any:
    """The next message of a stream, or EOF. Who cancels the task that waits for it ends the call."""
    reading = asyncio.ensure_future(call.read())
    try:
        return await asyncio.shield(reading)
    except asyncio.CancelledError:
        # Not the reading itself: gRPC would never free a message that it has for a reader who was cancelled.
        call.cancel()
        # It ends with the call, and nobody is left to hear how.
        reading.add_done_callback(lambda done: done.cancelled() or done.exception())
        raise


def _was_dropped(connection: AsyncConnection) -> bool:
    """gRPC ends a call as cancelled where its channel is closed, and so does who cancels the task that waits for it."""
    task = asyncio.current_task()
    return connection.closed and not (task is not None and task.cancelling())
