"""A stretch of network that breaks: a connection is closed when it has carried so many bytes to the client."""

from __future__ import annotations

import socket
import threading
from types import TracebackType
from typing import Self

_READ_BYTES = 1 << 16


class Breaking:
    """Listens on `port` of 127.0.0.1 and passes all on to `target`. `carries`: bytes of one connection, 0 for any number;
    `breaks`: how often it breaks, None for always."""

    def __init__(self, target: int, *, carries: int = 0, breaks: int | None = None) -> None:
        self.carries = carries
        self.breaks = breaks
        self.broken = 0
        self.swallows = False
        """Whether what it breaks at is lost with it."""
        self.is_away = False
        """Whether new connections are closed at once."""
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept)]
        self._open: list[socket.socket] = []

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.is_away:
                client.close()
                continue
            service = socket.create_connection(("127.0.0.1", self._target))
            self._open += [client, service]
            for pair in ((client, service, False), (service, client, True)):
                thread = threading.Thread(target=self._pass, args=pair)
                self._threads.append(thread)
                thread.start()

    def _breaks_after(self, carried: int) -> bool:
        left = self.breaks is None or self.broken < self.breaks
        return left and 0 < self.carries <= carried

    def _pass(self, source: socket.socket, target: socket.socket, counts: bool) -> None:
        carried = 0
        try:
            while data := source.recv(_READ_BYTES):
                carried += len(data)
                breaks = counts and self._breaks_after(carried)
                if not (breaks and self.swallows):
                    target.sendall(data)
                if breaks:
                    self.broken += 1
                    break
        except OSError:
            return
        finally:
            for each in (source, target):
                try:
                    each.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in self._open:
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        for thread in self._threads:
            thread.join(10)
        for each in self._open:
            each.close()
