"""kill -9 of a real `kvstore serve` below clients that write and read."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kvstore.chaos.base import ChaosFailed, Check, Outcome, Progress, undisturbed
from kvstore.errors import (
    ConfigError,
    KvstoreError,
    Unavailable,
    UnknownLease,
    UnknownReservation,
    UnknownSession,
)
from kvstore.prefix.identity import NamespaceIdentity
from kvstore.prefix.keys import block_keys
from kvstore.profile.registry import get_profile
from kvstore.service.process import Places
from kvstore.types import ItemKind
from kvstore_client import CacheClient, Costs, OpenedNamespace, ReserveItem

_GONE = (Unavailable, UnknownLease, UnknownReservation, UnknownSession)
_EAGER = Costs(seconds_per_layer_token=1.0)
"""A price of computing at which every plan restores all that it can."""

_WRITERS = 2
_CHAIN_BLOCKS = 24
_CHAINS_PER_SERVICE = 2000
"""Nothing may be evicted: the budget holds more than that, and then a new directory begins."""
_READY_SECONDS = 30.0
_OPTIONS = ("--disk", "2GiB", "--segment", "4MiB", "--pool", "16MiB", "--staging", "64MiB")


@dataclass(slots=True)
class _Chain:
    """Blocks of one token run: how many were acknowledged, and how many may have been written at most."""

    namespace: OpenedNamespace
    keys: list[bytes]
    acknowledged: int = 0
    attempted: int = 0

    def store(self, client: CacheClient, last: int) -> None:
        space = self.namespace
        items = [
            ReserveItem(
                kind=ItemKind.BLOCK,
                key=self.keys[i],
                parent=self.keys[i - 1] if i else space.digest,
                position=(i + 1) * space.block_tokens,
                length=space.block_bytes,
            )
            for i in range(self.acknowledged, last)
        ]
        self.attempted = max(self.attempted, last)
        with client.reserve(space.digest, items) as reservation:
            reservation.write({i: _payload(items[i].key, space.block_bytes) for i in reservation.granted})
            reservation.commit()
        self.acknowledged = last

    def check(self, client: CacheClient) -> list[str]:
        """Everything that was acknowledged is held with its bytes."""
        owed, space = self.acknowledged, self.namespace
        found = client.lookup(
            space.digest,
            self.keys,
            prompt_tokens=len(self.keys) * space.block_tokens + 1,
            costs=_EAGER,
            lease=True,
        )
        name = self.keys[0].hex()[:12]
        trouble = []
        if not owed <= found.blocks_held <= self.attempted:
            trouble.append(
                f"chain {name}: {found.blocks_held} blocks are held, {owed} were acknowledged, {self.attempted} attempted"
            )
        if found.lease is not None:
            with found.lease:
                count = found.plan.compute_from // space.block_tokens
                for item in client.fetch(found.lease, first_block=0, block_count=count, state=False):
                    if item.payload is None:
                        trouble.append(f"chain {name}: block {item.index} was promised and is a miss")
                    elif bytes(item.payload) != _payload(self.keys[item.index], space.block_bytes):
                        trouble.append(f"chain {name}: block {item.index} came with wrong bytes")
        return trouble


@dataclass(slots=True)
class _Writers:
    """What all writers have done. Each has a chain of its own at a time."""

    namespace: OpenedNamespace
    seed: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    chains: list[_Chain] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def begin(self) -> _Chain:
        with self.lock:
            number = len(self.chains)
            tokens = [
                (self.seed + number * 1_000_003 + i * 7) % 50_000
                for i in range(_CHAIN_BLOCKS * self.namespace.block_tokens)
            ]
            keys = block_keys(self.namespace.digest, tokens, block_tokens=self.namespace.block_tokens)
            self.chains.append(_Chain(self.namespace, list(keys)))
            return self.chains[-1]

    def write(self, client: CacheClient, rng: random.Random) -> None:
        """Grow chains a few blocks at a time; a step that failed is done again."""
        chain = self.begin()
        while not self.stop.is_set():
            if chain.acknowledged == _CHAIN_BLOCKS:
                chain = self.begin()
            try:
                chain.store(client, min(chain.acknowledged + rng.randint(1, 8), _CHAIN_BLOCKS))
            except _GONE:
                self.stop.wait(0.005)
            except KvstoreError as error:
                self.trouble.append(f"a write was refused: {error}")
                return


class _Service:
    """`kvstore serve` on one directory, started and killed again and again. check: called while it is waited for."""

    def __init__(self, directory: Path, check: Check) -> None:
        self.directory = directory
        self._check = check
        self._log = directory.with_name("service.log")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvstore.cli.main", "serve", "--dir", str(self.directory), *_OPTIONS],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def kill(self) -> str:
        """Why it had ended before; empty when it was alive."""
        assert self._process is not None
        ended = self._process.poll()
        self._process.kill()
        self._process.wait()
        self._process = None
        if ended is None:
            return ""
        last = self._log.read_text(errors="replace").strip().splitlines()[-1:] or ["without a word"]
        return f"the service ended with {ended}: {last[0]}"

    def end(self) -> None:
        if self._process is not None:
            self.kill()

    def answer(self, ask: Callable[[], list[str]]) -> list[str]:
        """Ask until it is there."""
        deadline = time.monotonic() + _READY_SECONDS
        while True:
            self._check()
            try:
                return ask()
            except _GONE as error:
                if self._process is None or self._process.poll() is not None:
                    return ["the service ended while it started"]
                if time.monotonic() > deadline:
                    return [f"the service was not ready within {_READY_SECONDS:g} s: {error}"]
            threading.Event().wait(0.01)


def kill_service_rounds(
    rounds: int, *, seed: int, scratch: Path, progress: Progress, check: Check = undisturbed
) -> Outcome:
    """`rounds` kills of a service over directories below `scratch`; after each it is started again and held to its
    promises."""
    outcome = Outcome("kill", seed, "kills of a service")
    begun = time.monotonic()
    rng = random.Random(seed)
    while outcome.rounds < rounds and not outcome.violations:
        with tempfile.TemporaryDirectory(prefix="kv-", dir=scratch, ignore_cleanup_errors=True) as folder:
            directory = _place(Path(folder))
            with _running(directory, rng, check) as (service, checker, writers):
                _kill_until_full(
                    service, checker, writers, rounds=rounds, rng=rng, outcome=outcome, progress=progress
                )
            outcome.acknowledged += sum(chain.acknowledged for chain in writers.chains)
            outcome.count("services")
    outcome.seconds = time.monotonic() - begun
    return outcome


def _place(folder: Path) -> Path:
    """Where a service runs below `folder`. ChaosFailed where its sockets' paths would be too long."""
    directory = folder.absolute() / "s"
    try:
        Places(directory, directory).check()
    except ConfigError as error:
        raise ChaosFailed(
            "the paths of a service's sockets would be too long",
            field="--dir",
            value=folder.parent.parent,
            allowed="a folder with a shorter path",
        ) from error
    return directory


@contextmanager
def _running(
    directory: Path, rng: random.Random, check: Check
) -> Iterator[tuple[_Service, CacheClient, _Writers]]:
    service = _Service(directory, check)
    service.start()
    with ExitStack() as stack:
        stack.callback(service.end)
        checker, *clients = [
            stack.enter_context(CacheClient(directory, owner=f"chaos-{i}")) for i in range(_WRITERS + 1)
        ]
        identity = NamespaceIdentity(get_profile("tiny"), weights_revision="chaos", numerics="none")
        opened: list[OpenedNamespace] = []

        def open_namespace() -> list[str]:
            opened.append(checker.open_namespace(identity, name="chaos"))
            return []

        if late := service.answer(open_namespace):
            raise ChaosFailed(late[0])
        writers = _Writers(opened[0], rng.randrange(50_000))
        threads = [
            threading.Thread(
                target=writers.write, args=(client, random.Random(rng.getrandbits(32))), daemon=True
            )
            for client in clients
        ]
        for thread in threads:
            thread.start()
        try:
            yield service, checker, writers
        finally:
            writers.stop.set()
            for thread in threads:
                thread.join(30)


def _kill_until_full(
    service: _Service,
    checker: CacheClient,
    writers: _Writers,
    *,
    rounds: int,
    rng: random.Random,
    outcome: Outcome,
    progress: Progress,
) -> None:
    checked = 0
    while outcome.rounds < rounds and len(writers.chains) < _CHAINS_PER_SERVICE and not writers.trouble:
        writers.stop.wait(rng.uniform(0.0, 0.3))
        where = f"kill {outcome.rounds} of the service"
        if ended := service.kill():
            outcome.blame(where, [ended])
        service.start()
        fresh = writers.chains[checked:]
        for chain in (*fresh, *rng.sample(writers.chains, min(3, len(writers.chains)))):
            outcome.blame(where, service.answer(lambda chain=chain: chain.check(checker)))  # type: ignore[misc]
            outcome.checked += chain.acknowledged
        checked = max(0, len(writers.chains) - _WRITERS)
        outcome.rounds += 1
        progress(f"kill {outcome.rounds:,} of {rounds:,}, {len(outcome.violations)} violations")
        if outcome.violations:
            return
    outcome.blame(f"kill {outcome.rounds} of the service", writers.trouble)


def _payload(key: bytes, length: int) -> bytes:
    return hashlib.shake_256(key).digest(length)
