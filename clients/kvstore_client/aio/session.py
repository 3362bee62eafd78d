"""Sessions that are opened without holding up the loop."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from kvstore.errors import Unavailable
from kvstore.v1.cache_pb2_grpc import CacheStub
from kvstore_client.address import RemoteAddress
from kvstore_client.forks import kept_in_children
from kvstore_client.hello import Hello, HelloLine
from kvstore_client.memory import Memory
from kvstore_client.remote import hello_of, no_remote_session
from kvstore_client.session import Session, no_answer, no_hello, no_service


async def open_session(path: Path, *, timeout: float) -> Session:
    """As kvstore_client.session.open_session."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        async with asyncio.timeout(timeout):
            await _connect(connection, path)
            hello = await _read_hello(connection, path)
    except TimeoutError as error:
        connection.close()
        raise no_hello(TimeoutError("no whole hello in time"), path) from error
    except BaseException:
        connection.close()
        raise
    return Session(connection, number=hello.number, boot=hello.boot)


async def probe(path: Path, *, timeout: float) -> None:
    """As kvstore_client.session.probe."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as connection:
        try:
            async with asyncio.timeout(timeout):
                await _connect(connection, path)
                await asyncio.get_running_loop().sock_recv(connection, 1)
        except OSError as error:
            raise no_answer(error, path, timeout) from error


async def _connect(connection: socket.socket, path: Path) -> None:
    try:
        await asyncio.get_running_loop().sock_connect(connection, str(path))
    except TimeoutError:
        raise
    except OSError as error:
        raise no_service(error, path) from error


async def _read_hello(connection: socket.socket, path: Path) -> Hello:
    line = HelloLine()
    while True:
        try:
            chunk = await asyncio.get_running_loop().sock_recv(connection, line.room)
        except OSError as error:
            raise no_hello(error, path) from error
        if (hello := line.feed(chunk)) is not None:
            return hello


class AsyncRemoteSession:
    """As kvstore_client.remote.RemoteSession, without a thread."""

    memory: Memory | None = None

    def __init__(self, call: Any, channel: grpc.aio.Channel, hello: Hello) -> None:
        self.number = hello.number
        self.boot = hello.boot
        self._call = call
        # The channel ends with the last name for it.
        self._channel = channel

    def alive(self) -> bool:
        return not self._call.done()

    def close(self) -> None:
        self._call.cancel()


async def open_remote_session(
    address: RemoteAddress, channel: grpc.aio.Channel, *, timeout: float
) -> AsyncRemoteSession:
    """As kvstore_client.remote.open_remote_session."""
    call: Any = kept_in_children(CacheStub(channel).Session(metadata=address.metadata))
    try:
        async with asyncio.timeout(timeout):
            said = await call.read()
        return AsyncRemoteSession(call, channel, hello_of(None if said is grpc.aio.EOF else said, address))
    except TimeoutError as error:
        call.cancel()
        raise Unavailable(
            "the service gave no session",
            field="address",
            value=address,
            allowed=f"an answer within {timeout:g} s",
        ) from error
    except grpc.RpcError as error:
        raise no_remote_session(error, address) from error
    except BaseException:
        call.cancel()
        raise
