"""Sessions: one connection to the session socket, or one Session call, is one client process. Its end gives back all that
it held."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import socket
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import cast

from kvstore.errors import LimitExceeded, UnknownSession
from kvstore.memory import Arena, Extent
from kvstore.service.callers import LOCAL, Caller
from kvstore.types import BootId

log = logging.getLogger(__name__)

OLDEST_PROTOCOL = 1
"""Of clients that are served; it is raised where serving them costs more than upgrading them."""
PROTOCOL = 1
"""The newest one that is spoken here."""
SESSION_METADATA = "kvstore-session"
_PEER = struct.Struct("=iII")  # pid, uid, gid

Tell = Callable[[dict[str, object], int], bool]
"""Writes one line with a descriptor, and says whether this system let it go on its way. ConnectionError where the other end
does not take it."""


@dataclass(eq=False, slots=True)
class Session:
    """An open session. `ended` is done from the moment that the connection is gone."""

    id: str
    pid: int
    ended: asyncio.Future[None] = field(repr=False)
    hang_up: Callable[[], None] = field(repr=False)
    _tell: Tell | None = field(repr=False)
    caller: Caller = LOCAL
    extents: set[Extent] = field(default_factory=set, repr=False)
    """Those whose descriptors it was given: it may read them until it ends."""
    accepts: bool = False
    """Whether its last commit asked to be answered before it was durable: the next one is taken to do so too."""

    @property
    def takes_memory(self) -> bool:
        """Whether it can be told of memory at all: not where its connection is a call."""
        return self._tell is not None

    def give(self, extent: Extent) -> bool:
        """Tell the other end of an extent, with its descriptor; whether it has it now. It has not where this system has
        nothing left to pass it with. UnknownSession where the other end does not take it at once: it does not read what it
        is told, and the connection ends."""
        if not self._say({"extent": extent.number, "bytes": extent.bytes}, extent.descriptor):
            return False
        self.extents.add(extent)
        return True

    def give_arena(self, arena: Arena) -> bool:
        """The same of memory that it may write to."""
        return self._say({"arena": arena.number, "bytes": arena.bytes}, arena.descriptor)

    def give_way(self, dock: int, descriptor: int) -> bool:
        """The same of one end of a way by which the descriptor of a dock is to come."""
        return self._say({"dock": dock}, descriptor)

    def _say(self, line: dict[str, object], descriptor: int) -> bool:
        if self._tell is None:
            return False
        try:
            return self._tell(line, descriptor)
        except ConnectionError as error:
            self.hang_up()
            raise UnknownSession(
                "the session's end does not read what it is told; the connection was closed",
                field="kvstore-session",
                value=self.id,
                allowed="an end that takes each line of its session connection",
            ) from error


class Sessions:
    """The open sessions by number.

    `on_end` is called once for each session, after it left the table, and must not raise. All calls come from the
    event loop's thread.
    """

    def __init__(self, *, boot: BootId, limit: int, on_end: Callable[[Session], None]) -> None:
        self.boot = boot
        self._limit = limit
        self._on_end = on_end
        self._open: dict[str, Session] = {}
        self.opened_total = 0
        self.refused_total = 0

    def __len__(self) -> int:
        return len(self._open)

    def begin(
        self, pid: int, hang_up: Callable[[], None], tell: Tell | None = None, caller: Caller = LOCAL
    ) -> Session:
        """`hang_up` ends the connection from our side; `tell` writes to it, if it can carry descriptors. LimitExceeded past
        the limit."""
        if len(self._open) >= self._limit:
            raise LimitExceeded(
                "too many open sessions",
                field="sessions",
                value=len(self._open) + 1,
                allowed=f"{self._limit}",
            )
        session = Session(
            secrets.token_hex(16), pid, asyncio.get_running_loop().create_future(), hang_up, tell, caller
        )
        self._open[session.id] = session
        self.opened_total += 1
        return session

    def end(self, session: Session) -> None:
        """Ending twice does nothing."""
        if self._open.pop(session.id, None) is not None:
            session.ended.set_result(None)
            self._on_end(session)

    def get(self, number: str, caller: Caller = LOCAL) -> Session:
        """UnknownSession also where it was opened by who may use other tenants' namespaces than `caller`."""
        session = self._open.get(number)
        if session is None or session.caller.tenants != caller.tenants:
            raise UnknownSession(
                "no such open session; connect to the session socket, or make a Session call, for a new one",
                field="kvstore-session",
                value=number or "(none)",
                allowed="the number in the hello of an open session",
            )
        return session

    def find(self, number: str) -> Session | None:
        """The open session of that number, whoever asks."""
        return self._open.get(number)

    def close_all(self) -> None:
        """The service is going: hang up on everyone."""
        self._close(list(self._open.values()))

    def close_calls(self) -> None:
        """Hang up on those whose connection is a call, so that none is left that others would wait for."""
        self._close([session for session in self._open.values() if not session.takes_memory])

    def close_where(self, gone: Callable[[Caller], bool]) -> int:
        """Hang up on those that were let in over TCP by who is not let in any more; how many."""
        ended = [each for each in self._open.values() if each.caller is not LOCAL and gone(each.caller)]
        self._close(ended)
        return len(ended)

    def _close(self, sessions: Iterable[Session]) -> None:
        for session in sessions:
            session.hang_up()
            self.end(session)

    def connection(self) -> asyncio.Protocol:
        return _Connection(self)


def _duplicate(transport: asyncio.Transport) -> socket.socket:
    """The transport's own socket object is not open to options and messages under every event loop."""
    return socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))


class _Connection(asyncio.Protocol):
    """The service's end of a session connection. It says hello, tells of extents, and waits for the end."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._session: Session | None = None
        self._transport: asyncio.Transport | None = None
        self._own: socket.socket | None = None
        self._is_short = False
        """Whether it has been said that this system has nothing left to pass descriptors with."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # a stream's, whichever loop made it
        try:
            self._own = _duplicate(self._transport)
        except OSError as error:
            self._refuse({"error": LimitExceeded.code, "message": f"no session: {error.strerror}"})
            return
        peer = _peer(self._own)
        if peer is not None and peer[1] != os.geteuid():
            self._refuse(
                {"error": "UNKNOWN_SESSION", "message": f"sessions are for uid {os.geteuid()}, not {peer[1]}"}
            )
            return
        try:
            self._session = self._sessions.begin(peer[0] if peer else 0, self._close, self._tell)
        except LimitExceeded as error:
            self._refuse({"error": error.code, "message": str(error)})
            return
        self._say({**_spoken(), "session": self._session.id, "boot": self._sessions.boot.hex()})

    def data_received(self, data: bytes) -> None:
        # The connection carries nothing from the client: whatever this is, it is not one of ours.
        log.warning("a session sent %d bytes, which it may not: closed", len(data))
        self._close()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        if self._own is not None:
            self._own.close()
        if self._session is not None:
            self._sessions.end(self._session)

    def _say(self, line: dict[str, object]) -> None:
        assert self._transport is not None
        self._transport.write(json.dumps(line).encode() + b"\n")

    def _tell(self, line: dict[str, object], descriptor: int) -> bool:
        """Write a line at once, with a descriptor beside its first byte. Nothing waits: a line comes before the answer that
        needs it, or not at all."""
        transport, own = self._transport, self._own
        assert transport is not None
        assert own is not None
        if transport.is_closing() or transport.get_write_buffer_size():
            raise ConnectionError("it is gone, or has not taken what was said before")
        data = json.dumps(line).encode() + b"\n"
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("=i", descriptor))]
        try:
            sent = own.sendmsg([data], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError as error:
            raise ConnectionError("it does not read") from error
        except ConnectionError:
            raise
        except OSError as error:
            # Of ours, or of all of this user's: too many descriptors on their way, no memory. Nothing of the line has gone.
            if not self._is_short:
                log.warning("a session is not given all memory that it could map: %s", error.strerror)
            self._is_short = True
            return False
        if sent < len(data):
            raise ConnectionError("it does not read")
        return True

    def _refuse(self, line: dict[str, object]) -> None:
        self._sessions.refused_total += 1
        log.warning("refused a session: %s", line["message"])
        self._say({**_spoken(), **line})
        self._close()

    def _close(self) -> None:
        assert self._transport is not None
        self._transport.close()


def _spoken() -> dict[str, object]:
    return {"protocol": OLDEST_PROTOCOL, "newest": PROTOCOL}


def _peer(connection: socket.socket) -> tuple[int, int, int] | None:
    """(pid, uid, gid) of the other end, as the kernel says; None where the platform does not tell."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return None
    pid, uid, gid = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, option, _PEER.size))
    return pid, uid, gid
