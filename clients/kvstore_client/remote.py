"""A session with a service on another machine: a stream whose end is the end of the session."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import grpc

from kvstore.errors import KvstoreError, Unavailable
from kvstore.v1 import cache_pb2 as pb
from kvstore.v1.cache_pb2_grpc import CacheStub
from kvstore_client.address import RemoteAddress
from kvstore_client.failures import translated
from kvstore_client.forks import kept_in_children
from kvstore_client.hello import Hello, check_hello
from kvstore_client.memory import Memory


class RemoteSession:
    """An open Session stream, with a thread that waits for its end. `number` goes into each call's metadata."""

    memory: Memory | None = None
    """There is none to read on another machine."""

    def __init__(self, stream: _Stream, hello: Hello) -> None:
        self.number = hello.number
        self.boot = hello.boot
        self._stream = stream
        # Forgotten without a close, it ends as a local one does, whose socket is closed then.
        self._end = weakref.finalize(self, stream.close)
        self._end.atexit = False

    def alive(self) -> bool:
        """False once the service has ended the session, or does not answer pings. Waits for nothing."""
        return not self._stream.ended.is_set()

    def close(self) -> None:
        """End the session: the service gives back all that it holds. Closing twice does nothing."""
        self._end()


class _Stream:
    """Not held by its thread's caller alone: the thread keeps it, and so nothing here keeps the session."""

    def __init__(self, channel: grpc.Channel, metadata: tuple[tuple[str, str], ...]) -> None:
        self.said: queue.SimpleQueue[pb.SessionHello | grpc.RpcError | None] = queue.SimpleQueue()
        self.ended = threading.Event()
        self._channel = channel
        self._silence = threading.Event()
        self._call: Any = CacheStub(channel).Session(_nothing(self._silence), metadata=metadata)
        # A client that nobody closes must not keep its process from ending.
        threading.Thread(target=self._listen, name="kvstore-session", daemon=True).start()

    def _listen(self) -> None:
        failure: grpc.RpcError | None = None
        try:
            for hello in self._call:
                self.said.put(hello)
        except grpc.RpcError as error:
            failure = error
        finally:
            self.ended.set()
            self._silence.set()
            self.said.put(failure)

    def close(self) -> None:
        self.ended.set()
        self._silence.set()
        self._call.cancel()
        self._channel.close()


def _nothing(until: threading.Event) -> Iterator[pb.SessionRequest]:
    """The client's side of the stream: open, and silent, until the session's end."""
    until.wait()
    yield from ()


def open_remote_session(address: RemoteAddress, channel: grpc.Channel, *, timeout: float) -> RemoteSession:
    """A session on a channel of its own, which goes with it, within `timeout` seconds; Unavailable, or the service's own
    refusal as its class of kvstore.errors."""
    stream = _Stream(channel, address.metadata)
    try:
        try:
            said = stream.said.get(timeout=timeout)
        except queue.Empty:
            raise Unavailable(
                "the service gave no session",
                field="address",
                value=address,
                allowed=f"an answer within {timeout:g} s",
            ) from None
        return kept_in_children(RemoteSession(stream, hello_of(said, address)))
    except BaseException:
        stream.close()
        raise


def hello_of(said: pb.SessionHello | grpc.RpcError | None, address: RemoteAddress) -> Hello:
    """What the service said first, or how it ended the stream without a word."""
    if isinstance(said, grpc.RpcError):
        raise no_remote_session(said, address) from said
    if said is None:
        raise Unavailable("the service gave no session", field="address", value=address)
    spoken = f"protocol {said.protocol} to {said.newest or said.protocol}"
    return check_hello(said.protocol, said.newest, said.session, said.boot, said=spoken)


def no_remote_session(error: grpc.RpcError, address: RemoteAddress) -> KvstoreError:
    failure = translated(error, what="Session")
    if type(failure) is not Unavailable:
        return failure
    # A service that does not take the certificate hangs up without a word that gRPC would pass on.
    hint = "" if address.pair is None else ", or it does not take this client's certificate"
    return Unavailable(f"no service to be reached{hint} ({failure})", field="address", value=address)
