"""The client's end of the session socket: it gives the session's number and memory to read, and its end is the end of the
session."""

from __future__ import annotations

import os
import socket
import weakref
from pathlib import Path

from kvstore.clock import Clock
from kvstore.errors import Unavailable
from kvstore_client.hello import Hello, HelloLine
from kvstore_client.memory import Memory


class Session:
    """An open session connection. `number` goes into each call's metadata; `boot` is new at each service start."""

    def __init__(self, connection: socket.socket, *, number: str, boot: str) -> None:
        # Without a timeout of its own: a socket with one waits for it in every recv, whatever the flags say.
        connection.setblocking(False)
        self._connection = connection
        self.memory = Memory(connection)
        self.number = number
        self.boot = boot
        _open_sessions.add(self)

    def alive(self) -> bool:
        """False once the service has ended the session or is gone. Waits for nothing; any thread may ask."""
        try:
            waiting = self._connection.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            return False
        # After its hello the service speaks of memory only; the end may lie behind that.
        return bool(waiting) and self.memory.read()

    def close(self) -> None:
        """End the session: the service gives back all that it holds. Closing twice does nothing."""
        _open_sessions.discard(self)
        self._connection.close()
        self.memory.close()


_open_sessions: weakref.WeakSet[Session] = weakref.WeakSet()


def _close_in_child() -> None:
    # A copy of the descriptor in a forked child would keep the session open after its owner's death, and a mapping the
    # service's memory.
    for session in list(_open_sessions):
        arena = session.memory.arena.now
        session.close()
        if arena is not None:
            arena.take_all_back()


os.register_at_fork(after_in_child=_close_in_child)


def open_session(path: Path, *, timeout: float, clock: Clock) -> Session:
    """Connect and read the hello line within `timeout` seconds; Unavailable if there is none, or the service's own
    refusal as its class of kvstore.errors."""
    connection = _connect(path, timeout)
    try:
        hello = _read_hello(connection, path, deadline=clock.monotonic() + timeout, clock=clock)
        return Session(connection, number=hello.number, boot=hello.boot)
    except BaseException:
        connection.close()
        raise


def probe(path: Path, *, timeout: float) -> None:
    """Return if a service answers on the session socket within `timeout` seconds, be it with a refusal; Unavailable
    if not. A connection alone proves nothing: the kernel makes it while the process is stopped."""
    with _connect(path, timeout) as connection:
        try:
            connection.recv(1)
        except OSError as error:
            raise no_answer(error, path, timeout) from error


def _connect(path: Path, timeout: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout)
        connection.connect(str(path))
    except OSError as error:
        connection.close()
        raise no_service(error, path) from error
    return connection


def _read_hello(connection: socket.socket, path: Path, *, deadline: float, clock: Clock) -> Hello:
    """The one line that the service says."""
    line = HelloLine()
    while True:
        left = deadline - clock.monotonic()
        try:
            if left <= 0:
                raise TimeoutError("no whole hello in time")
            connection.settimeout(left)
            chunk = connection.recv(line.room)
        except OSError as error:
            raise no_hello(error, path) from error
        if (hello := line.feed(chunk)) is not None:
            return hello


def no_hello(error: OSError, path: Path) -> Unavailable:
    return Unavailable(f"the service gave no session: {error}", field="socket", value=path)


def no_service(error: OSError, path: Path) -> Unavailable:
    return Unavailable(
        f"no service to be reached ({error.strerror or error}); is `kvstore serve` running on this directory?",
        field="socket",
        value=path,
    )


def no_answer(error: OSError, path: Path, timeout: float) -> Unavailable:
    return Unavailable(
        f"the service does not answer: {error}",
        field="socket",
        value=path,
        allowed=f"an answer within {timeout:g} s",
    )
