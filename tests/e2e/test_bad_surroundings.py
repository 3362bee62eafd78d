"""What a service finds at its start, and whoever knocks at its sockets: clear at once, and nobody else is delayed."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from kvstore.errors import Unavailable, UnknownSession
from kvstore.v1 import cache_pb2 as pb
from kvstore_client import CacheClient
from tests.conformance.test_client import free_port
from tests.e2e.service_raw import Chain, Raw, error_of
from tests.support.calls import look
from tests.support.chains import Chain as Blocks
from tests.support.chains import identity_of
from tests.support.polling import wait_for
from tests.support.probe import LOADED, Probe
from tests.support.service import PROGRAM, SMALL, ServiceProcess, running_service, short_directory

ANSWER_SECONDS_MAX = 0.1
CONNECTIONS = 2000


def start(directory: Path, *, limit: str = "true", **options: object) -> subprocess.CompletedProcess[str]:
    """A service that cannot start, and how it ended."""
    given = json.dumps({**SMALL, **options, "dir": str(directory)})
    return subprocess.run(
        ["bash", "-c", f'{limit}; exec "$0" "$@"', sys.executable, "-c", PROGRAM, given],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def serves(service: ServiceProcess) -> None:
    """It stores, and brings what was stored, to a client that maps where it can."""
    with CacheClient(service.directory, owner="tests") as client:
        chain = Blocks.of(client.open_namespace(identity_of("tiny"), name="tiny"), 4, seed=1)
        chain.store(client)
        found = look(client, chain)
        assert found.lease is not None
        items = list(client.map(found.lease, first_block=0, block_count=4, state=False))
        assert [bytes(item.payload or b"") == chain.right_bytes(item) for item in items] == [True] * 4  # type: ignore[arg-type]
        assert all(item.payload is not None for item in chain.fetch(client, found))


# ---- at the start --------------------------------------------------------------------------------------------------

WITHOUT = {
    "no memfd": "import os\ndef refuse(*asked): raise OSError(38, 'no such call')\nos.memfd_create = refuse\n",
    "no seals": "import fcntl\ndel fcntl.F_ADD_SEALS\n",
    "no memory to lock": "import resource\nresource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))\n",
    "few descriptors": "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))\n",
}


@pytest.mark.parametrize("what", WITHOUT)
def test_a_service_that_lacks_something_of_the_system_serves_without_it(what: str) -> None:
    with running_service(before=WITHOUT[what], sessions=20) as service:
        serves(service)
        if what in ("no memfd", "no seals"):
            assert service.log.count("nothing is kept in memory for clients to map") == 1
        if what == "few descriptors":
            assert "open files are limited to 200" in service.log


def test_sockets_that_a_dead_service_left_are_replaced() -> None:
    with running_service() as service:
        service.kill()
        names = ("kvstore.sock", "session.sock")
        assert all((service.directory / name).is_socket() for name in names)
        with CacheClient(service.directory, owner="tests") as client, pytest.raises(Unavailable):
            client.stats()
        service.start()
        serves(service)


@pytest.mark.parametrize("name", ["kvstore.sock", "session.sock"])
def test_what_is_no_socket_in_a_sockets_place_is_left_alone_and_named(name: str) -> None:
    with short_directory() as directory:
        directory.mkdir(mode=0o700)
        (directory / name).write_text("mine")
        done = start(directory)
        assert done.returncode != 0
        assert name in done.stderr.splitlines()[-1], done.stderr
        assert (directory / name).read_text() == "mine"


def test_a_second_service_is_refused_and_the_firsts_sockets_stay() -> None:
    with running_service() as service:
        with Probe(service.target) as probe:
            done = start(service.directory)
        assert done.returncode != 0
        assert f"pid {service.pid}" in done.stderr.splitlines()[-1], done.stderr
        assert not probe.errors
        serves(service)


def test_a_session_of_one_service_is_none_of_another_and_the_client_is_told_at_once() -> None:
    with running_service() as one, running_service() as other, short_directory() as mixed:
        # As where directories were copied, or a link leads elsewhere: calls go to one, the session is the other's.
        mixed.mkdir(mode=0o700)
        (mixed / "kvstore.sock").symlink_to(one.directory / "kvstore.sock")
        (mixed / "session.sock").symlink_to(other.directory / "session.sock")
        with CacheClient(mixed, owner="tests") as client:
            chain = Blocks.of(client.open_namespace(identity_of("tiny"), name="tiny"), 2, seed=1)
            with pytest.raises((UnknownSession, Unavailable)):
                chain.store(client)
        serves(one)
        serves(other)


def test_a_number_that_is_no_session_gets_nothing_and_ends_nothing() -> None:
    with running_service() as service, Raw(service.directory) as raw, Raw(service.directory) as other:
        chain = Chain(raw.open("n"), 2, seed=1)
        raw.store(chain)
        found = raw.lookup(chain)
        number = str(raw.hello["session"])
        for wrong in (
            "",
            "0" * 32,
            number[:-1],
            number + "0",
            number.upper() + "x",
            str(other.hello["boot"]),
        ):
            stream = raw.cache.Fetch(
                pb.FetchRequest(lease_id=found.lease_id, block_count=1),
                metadata=(("kvstore-session", wrong),),
                timeout=10,
            )
            with pytest.raises(grpc.RpcError) as refused:
                next(stream)
            assert error_of(refused.value) == "UNKNOWN_SESSION", wrong
        assert len(raw.fetch(found.lease_id, count=1)) == 1


# ---- who knocks ----------------------------------------------------------------------------------------------------


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CONNECTIONS + 500
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"descriptors: {wanted} are needed, {hard} are allowed")
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def knock(stack: ExitStack, address: str | tuple[str, int], says: bytes) -> bool:
    """Connect, say so much, and stay; whether that was let in."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    made = stack.enter_context(socket.socket(family))
    try:
        made.connect(address)
        made.sendall(says)
    except OSError:
        return False
    return True


def descriptors(service: ServiceProcess) -> int:
    return len(os.listdir(f"/proc/{service.pid}/fd"))


def resource_limit(service: ServiceProcess) -> int:
    return resource.prlimit(service.pid, resource.RLIMIT_NOFILE)[0]


_BEGUN = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""All that a connection needs before its first call."""

SAID = {
    "nothing": (b"",),
    "a beginning": (_BEGUN, b"PRI * HTTP/2.0\r\n"),
    "nonsense": (b"GET / HTTP/1.1\r\n\r\n", os.urandom(64), b"\x16\x03\x01\x02\x00\x01"),
}


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("where", ["kvstore.sock", "session.sock", "tcp"])
def test_two_thousand_connections_at_once_delay_nobody(where: str, said: str, many_files: None) -> None:
    # No more than what it asks for with so many sessions.
    few = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (1800, 1800))\n"
    port = free_port()
    listen = {"listen": f"127.0.0.1:{port}", "unsafe_plaintext_tcp": True, "unsafe_no_token": True}
    with (
        running_service(before=few, **listen, sessions=100) as service,
        Raw(service.directory) as raw,
        ExitStack() as stack,
    ):
        chain = Chain(raw.open("n"), 4, seed=1)
        raw.store(chain)
        before = descriptors(service)
        address = ("127.0.0.1", port) if where == "tcp" else str(service.directory / where)
        with Probe(service.target) as probe:
            # Who has a connection keeps it; who comes while all are taken does not get in.
            wait_for(lambda: probe.answers > 0)
            let_in = sum(
                knock(stack, address, SAID[said][number % len(SAID[said])]) for number in range(CONNECTIONS)
            )
            assert let_in > 0
            for _ in range(20):
                found = raw.lookup(chain)
                assert all(chain.is_right(*item) for item in raw.fetch(found.lease_id, count=4))
                assert raw.call("Release", pb.ReleaseRequest(lease_id=found.lease_id)).was_held
            assert raw.stats()["sessions"] <= 100
            # There is room on the disk's side of things, too: a new segment is a new file.
            assert raw.store(Chain(chain.namespace, 4, seed=2)).items == 4
            assert descriptors(service) < resource_limit(service) - 100
            if where == "tcp":
                serves(service)
        assert not probe.errors
        assert probe.slowest_seconds < ANSWER_SECONDS_MAX * LOADED
        assert raw.stats()["loop_gap_own_seconds_max"] < ANSWER_SECONDS_MAX
        stack.close()
        wait_for(lambda: raw.stats()["sessions"] == 1)
        with Raw(service.directory) as after:
            assert after.lookup(chain).lease_id
        wait_for(lambda: descriptors(service) <= before + 10)
