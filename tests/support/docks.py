"""Memory that is lent to a service: an honest pool of rows, and a session's dock by hand."""

from __future__ import annotations

import gc
import json
import mmap
import os
import socket
from array import array
from collections.abc import Iterator
from contextlib import contextmanager

from kvstore.v1 import cache_pb2 as pb
from tests.e2e.service_raw import Raw

LINE_BYTES = 4096
LOCK = 4711


@contextmanager
def pool_file(size: int) -> Iterator[tuple[int, mmap.mmap]]:
    """A file in memory that is all there, and its mapping, as an engine makes them."""
    descriptor = os.memfd_create("pool")
    try:
        os.ftruncate(descriptor, size)
        memory = mmap.mmap(descriptor, size)
        memory[:] = b"\xee" * size
        yield descriptor, memory
        # Frames of errors that were caught may hold views still.
        gc.collect()
        memory.close()
    finally:
        os.close(descriptor)


def way_of(raw: Raw) -> tuple[int, socket.socket]:
    """A dock's number, and the way for its descriptor."""
    reply = raw.call("OpenDock", pb.OpenDockRequest())
    data, [descriptor], _, _ = socket.recv_fds(raw.socket, LINE_BYTES, 4, socket.MSG_CMSG_CLOEXEC)
    assert json.loads(data) == {"dock": reply.dock}
    return reply.dock, socket.socket(fileno=descriptor)


def send(way: socket.socket, *descriptors: int) -> None:
    way.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))])


def lend(raw: Raw, descriptor: int, size: int, *, lock: int = LOCK) -> None:
    number, way = way_of(raw)
    with way:
        send(way, descriptor)
        raw.call("TakeDock", pb.TakeDockRequest(dock=number, bytes=size, lock=lock))
