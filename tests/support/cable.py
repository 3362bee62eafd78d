"""A stretch of network between a client and a service that can be cut: nothing passes any more, and neither end is told."""

from __future__ import annotations

import selectors
import socket
import threading
from types import TracebackType
from typing import Self

_READ_BYTES = 1 << 16


class Cable:
    """Listens on `port` of 127.0.0.1 and passes all on to `target`, until it is cut."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._is_cut = threading.Event()
        self._wake, self._woken = socket.socketpair()
        self._over = False
        self._thread = threading.Thread(target=self._run)

    def cut(self) -> None:
        self._is_cut.set()

    def _run(self) -> None:
        others: dict[socket.socket, socket.socket] = {}
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            selector.register(self._listener, selectors.EVENT_READ)
            while not self._over:
                for key, _ in selector.select(0.2):
                    ready = key.fileobj
                    assert isinstance(ready, socket.socket)
                    if self._is_cut.is_set():
                        # What is not taken off its socket does not come to the other end, and nobody is told.
                        if ready is not self._woken:
                            selector.unregister(ready)
                    elif ready is self._listener:
                        one, _ = self._listener.accept()
                        other = socket.create_connection(("127.0.0.1", self._target))
                        others |= {one: other, other: one}
                        selector.register(one, selectors.EVENT_READ)
                        selector.register(other, selectors.EVENT_READ)
                    elif ready in others:
                        data = ready.recv(_READ_BYTES)
                        if data:
                            others[ready].sendall(data)
                        else:
                            selector.unregister(ready)
                            others[ready].shutdown(socket.SHUT_WR)
        for each in others:
            each.close()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        self._wake.send(b"x")
        self._thread.join()
        for each in (self._listener, self._wake, self._woken):
            each.close()
