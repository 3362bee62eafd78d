"""The service's end of a session connection: what it tells of memory, and of whom it thinks the worst."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import resource
import socket
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice

import pytest

from kvstore.errors import UnknownSession
from kvstore.memory import Extent, why_not_mapped
from kvstore.service.session import Session, Sessions
from kvstore.types import BootId

pytestmark = pytest.mark.skipif(bool(why_not_mapped()), reason=why_not_mapped() or "it is mapped")


@pytest.fixture(scope="module", autouse=True)
def _nothing_left_of_other_tests() -> None:
    """Descriptors that they left to the collector would go while they are counted here."""
    gc.collect()


@dataclass
class Rig:
    """A session, its service's table and its client's end."""

    client: socket.socket
    sessions: Sessions
    session: Session
    ended: list[Session] = field(default_factory=list)


@asynccontextmanager
async def connected() -> AsyncIterator[Rig]:
    ended: list[Session] = []
    sessions = Sessions(boot=BootId(bytes(16)), limit=2, on_end=ended.append)
    ours, client = socket.socketpair()
    ours.setblocking(False)
    client.settimeout(10)
    with client:
        transport, _ = await asyncio.get_running_loop().connect_accepted_socket(sessions.connection, ours)
        hello = json.loads(client.recv(4096))
        yield Rig(client, sessions, sessions.get(hello["session"]), ended)
        transport.abort()
        await until(lambda: len(sessions) == 0)


async def until(is_so: object) -> None:
    assert callable(is_so)
    async with asyncio.timeout(10):
        while not is_so():
            await asyncio.sleep(0)


@pytest.fixture
def extent() -> Iterator[Extent]:
    made = Extent(7, domain="", slot_bytes=4096, slots=1)
    yield made
    made.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_a_session_is_told_of_an_extent_with_its_descriptor(extent: Extent) -> None:
    async with connected() as made:
        assert made.session.give(extent)
        data, [given], _, _ = socket.recv_fds(made.client, 4096, 4)
        assert json.loads(data) == {"extent": 7, "bytes": extent.bytes}
        assert os.fstat(given).st_ino == os.fstat(extent.descriptor).st_ino
        os.close(given)
        assert made.session.extents == {extent}


async def test_a_peer_that_does_not_read_is_hung_up_on(extent: Extent) -> None:
    async with connected() as made:
        told = iter(lambda: made.session.give(extent), False)
        with pytest.raises(UnknownSession, match="does not read"):
            deque(islice(told, 100_000), maxlen=0)
        await until(lambda: made.ended == [made.session])


async def test_a_peer_that_is_gone_is_hung_up_on(extent: Extent) -> None:
    async with connected() as made:
        made.client.close()
        with pytest.raises(UnknownSession):
            made.session.give(extent)
        assert made.session.extents == set()
        await until(lambda: made.ended == [made.session])


async def test_a_service_without_a_free_descriptor_goes_on_telling_the_sessions_that_it_has(
    extent: Extent,
) -> None:
    async with connected() as made:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.dup(0)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
        try:
            assert made.session.give(extent)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert made.ended == []


async def test_a_connection_for_which_there_is_no_descriptor_left_is_refused_by_name() -> None:
    sessions = Sessions(boot=BootId(bytes(16)), limit=2, on_end=lambda session: None)
    ours, client = socket.socketpair()
    ours.setblocking(False)
    client.settimeout(10)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    with client:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
        try:
            await asyncio.get_running_loop().connect_accepted_socket(sessions.connection, ours)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert json.loads(client.recv(4096))["error"] == "LIMIT_EXCEEDED"
        assert (len(sessions), sessions.refused_total) == (0, 1)
        await until(lambda: ours.fileno() == -1)
        assert client.recv(1) == b""


async def test_a_session_takes_its_descriptors_with_it_however_much_it_was_told(extent: Extent) -> None:
    before = descriptors()
    for _ in range(5):
        async with connected() as made:
            open_now = descriptors()
            for _ in range(50):
                assert made.session.give(extent)
            assert descriptors() == open_now
    await until(lambda: descriptors() == before)


CROWDED = """
import asyncio, json, os, resource, socket
from kvstore.memory import Extent
from kvstore.service.session import Sessions
from kvstore.types import BootId

async def main():
    if os.geteuid() == 0:
        # Root may have as many on their way as it likes.
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    extent = Extent(7, domain="", slot_bytes=4096, slots=1)
    ended = []
    sessions = Sessions(boot=BootId(bytes(16)), limit=2, on_end=ended.append)
    ours, client = socket.socketpair()
    ours.setblocking(False)
    await asyncio.get_running_loop().connect_accepted_socket(sessions.connection, ours)
    session = sessions.get(json.loads(client.recv(4096))["session"])
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    one, other = socket.socketpair()
    socket.send_fds(one, [b"x"], [extent.descriptor] * 200)
    assert not session.give(extent)
    assert not session.give(extent)
    assert session.extents == set()
    one.close()
    other.close()
    # The kernel counts them for a moment longer.
    async with asyncio.timeout(10):
        while not session.give(extent):
            await asyncio.sleep(0)
    assert session.extents == {extent}
    assert json.loads(client.recv(4096))["extent"] == 7
    assert (ended, len(sessions)) == ([], 1)
    sessions.close_all()

asyncio.run(main())
"""


def test_with_too_many_descriptors_on_their_way_a_session_is_not_given_memory_and_lives_on() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CROWDED], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("not given all memory") == 1
