"""Channels to a service in the same process: where its calls begin, for threads and for tasks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from kvstore.service.inprocess_calls import AwaitedCall, BlockingCall, Call, Metadata, Where


class Channel:
    """As much of grpc.Channel and grpc.aio.Channel as generated stubs and kvstore_client use. `kind`: of its calls."""

    def __init__(self, where: Where, kind: type[BlockingCall] | type[AwaitedCall]) -> None:
        self._where = where
        self._kind = kind
        self._closed = False
        self._lock = threading.Lock()
        self._calls: set[Call] = set()

    def unary_unary(self, method: str, **given: Any) -> Method:
        return Method(self, method, waits=True, is_stream=False, **given)

    def unary_stream(self, method: str, **given: Any) -> Method:
        return Method(self, method, waits=False, is_stream=False, **given)

    def stream_unary(self, method: str, **given: Any) -> Method:
        return Method(self, method, waits=True, is_stream=True, **given)

    def stream_stream(self, method: str, **given: Any) -> Method:
        return Method(self, method, waits=False, is_stream=True, **given)

    def subscribe(
        self, callback: Callable[[grpc.ChannelConnectivity], None], try_to_connect: bool = False
    ) -> None:
        callback(grpc.ChannelConnectivity.READY)

    def unsubscribe(self, callback: Callable[[grpc.ChannelConnectivity], None]) -> None:
        """Nobody is told anything later."""

    def begin(self, method: str, request: Any, **given: Any) -> Any:
        """ValueError, and grpc.aio.UsageError of a channel for tasks, where it is closed."""
        with self._lock:
            if self._closed:
                kind = ValueError if self._kind is BlockingCall else grpc.aio.UsageError
                raise kind("the channel is closed")
            self._calls = {each for each in self._calls if not each.done()}
            call = self._kind(self._where, method, request, **given)
            self._calls.add(call)
            return call

    def end_all(self) -> None:
        with self._lock:
            self._closed = True
            calls, self._calls = self._calls, set()
        for each in calls:
            each.cancel()

    @property
    def is_blocking(self) -> bool:
        return self._kind is BlockingCall


class BlockingChannel(Channel):
    def __init__(self, where: Where) -> None:
        super().__init__(where, BlockingCall)

    def close(self) -> None:
        """Calls under way end as cancelled."""
        self.end_all()


class AwaitedChannel(Channel):
    def __init__(self, where: Where) -> None:
        super().__init__(where, AwaitedCall)

    async def channel_ready(self) -> None:
        """It always is."""

    async def close(self, grace: float | None = None) -> None:
        """Calls under way end as cancelled."""
        self.end_all()


class Method:
    """One call's name on one channel. `waits`: calling it waits for the one answer, where the channel blocks."""

    def __init__(
        self,
        channel: Channel,
        name: str,
        *,
        waits: bool,
        is_stream: bool,
        request_serializer: object = None,
        response_deserializer: Callable[[bytes], Any],
        _registered_method: bool = False,
    ) -> None:
        self._channel = channel
        self._name = name
        self._waits = waits and channel.is_blocking
        self._is_stream = is_stream
        self._parse = response_deserializer

    def __call__(self, request: Any = None, *, timeout: float | None = None, metadata: Metadata = ()) -> Any:
        call = self.future(request, timeout=timeout, metadata=metadata)
        return call.result() if self._waits else call

    def future(self, request: Any = None, *, timeout: float | None = None, metadata: Metadata = ()) -> Any:
        """The call, begun."""
        return self._channel.begin(
            self._name,
            request,
            is_stream=self._is_stream,
            timeout=timeout,
            metadata=tuple(metadata),
            parse=self._parse,
        )
