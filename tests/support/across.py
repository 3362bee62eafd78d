"""What scenarios across two hosts have in common: a service on one, clients on the other, and what the cable can carry."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore_client import CacheClient, Deadlines
from kvstore_client.aio import AsyncCacheClient
from tests.support import netns
from tests.support.blocking import Blocking, LoopThread
from tests.support.chains import Chain, identity_of
from tests.support.netns import Hosts, inside
from tests.support.remote import TOKENS, Secrets
from tests.support.service import ServiceProcess, short_directory

PORT = 7000
PROFILE = "flash-slim"
BLOCKS = 60


@dataclass(frozen=True)
class Ground:
    """What a scenario needs to know. `kind` of client: sync or async; `seed`: keeps what scenarios store apart."""

    hosts: Hosts
    secrets: Secrets
    directory: Path
    pid: int
    port: int = PORT
    kind: str = "sync"
    seed: int = 0

    @contextmanager
    def client(self, host: str = netns.SERVICE_IP, **options: Any) -> Iterator[CacheClient]:
        given = {
            "address": f"tcp://{host}:{self.port}",
            "owner": "across",
            "token": TOKENS[0],
            "ca": self.secrets.folder / "issuer.pem",
            "deadlines": Deadlines(connect=5.0, lookup=10.0, fetch=30.0, write=30.0),
            **options,
        }
        with ExitStack() as stack:
            if self.kind == "sync":
                yield stack.enter_context(CacheClient(**given))
                return
            thread = LoopThread(asyncio.new_event_loop)
            stack.callback(thread.close)
            client: Any = Blocking(AsyncCacheClient(**given), thread)
            yield stack.enter_context(client)

    def chain(self, blocks: int = BLOCKS, *, number: int = 0, stored: bool = True) -> Chain:
        """Stored from the service's own host, where the cable is not in the way."""
        with CacheClient(self.directory, owner="writer") as client:
            name = f"{self.seed}-{number}"
            chain = Chain.of(
                client.open_namespace(identity_of(PROFILE, salt=name), name=name), blocks, seed=1
            )
            for first in range(0, blocks if stored else 0, 20):
                chain.store(client, first=first, last=min(first + 20, blocks))
            return chain


@contextmanager
def service_on(hosts: Hosts, secrets: Secrets, port: int) -> Iterator[ServiceProcess]:
    with short_directory() as directory, ExitStack() as stack:
        service = ServiceProcess(directory, **{**secrets.options, "listen": f"0.0.0.0:{port}"})
        stack.push(service)
        start_on(hosts, service)
        yield service


def start_on(hosts: Hosts, service: ServiceProcess) -> None:
    with inside(hosts.service):
        service.start(wait=False, fresh=True)
    service.wait_ready()


def bare_seconds(hosts: Hosts, size: int, *, up: bool) -> float:
    """How long a stream of so many bytes takes with nothing around it. `up`: to the service's host, else from it."""
    with inside(hosts.service):
        listener = socket.create_server((netns.SERVICE_IP, 0))

    def send(end: socket.socket) -> None:
        end.sendall(bytes(size))
        end.shutdown(socket.SHUT_WR)
        end.recv(1)

    def receive(end: socket.socket) -> None:
        left = size
        while left:
            left -= len(end.recv(1 << 18))

    def there() -> None:
        with listener.accept()[0] as end:
            (receive if up else send)(end)

    thread = threading.Thread(target=there)
    with listener:
        thread.start()
        begin = time.monotonic()
        with socket.create_connection(listener.getsockname(), timeout=30) as end:
            (send if up else receive)(end)
            seconds = time.monotonic() - begin
        thread.join(30)
    return seconds


def timed(call: Callable[[], object]) -> float:
    begin = time.monotonic()
    call()
    return time.monotonic() - begin
