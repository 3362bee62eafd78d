"""SIGKILL at random moments of a busy service: what was acknowledged is found again, and nothing wrong is served."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest

from kvstore.types import Durability
from kvstore_client import CacheClient, OpenedNamespace, ReserveOutcome
from tests.support.calls import GONE, look
from tests.support.chains import Chain, identity_of
from tests.support.service import ServiceProcess, running_service

ROUNDS = 10
WRITERS = 3
CHAIN_BLOCKS = 24


@dataclass
class Written:
    """One chain: how many of its blocks were acknowledged, and how many may have been written at most."""

    chain: Chain
    acknowledged: int = 0
    attempted: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Ledger:
    """All chains so far. Written to by the writers, read by everyone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chains: list[Written] = []
        self.wrong: list[BaseException] = []
        self.commits = self.accepted = 0
        self.fetches = 0

    def begin(self, namespace: OpenedNamespace) -> Written:
        with self._lock:
            written = Written(Chain.of(namespace, CHAIN_BLOCKS, seed=len(self._chains)))
            self._chains.append(written)
            return written

    def acknowledge(self, written: Written, blocks: int) -> None:
        with self._lock:
            written.acknowledged = blocks
            self.commits += 1

    def accept(self) -> None:
        with self._lock:
            self.accepted += 1

    def fetched(self) -> None:
        with self._lock:
            self.fetches += 1

    def chains(self) -> list[Written]:
        with self._lock:
            return list(self._chains)


def write_chains(
    client: CacheClient, namespace: OpenedNamespace, ledger: Ledger, rng: random.Random, stop: threading.Event
) -> None:
    """Grow chains a few blocks at a time, each step committed, one in three before it is durable; after a failure it goes on
    behind what was acknowledged as durable."""
    written, first = ledger.begin(namespace), 0
    while not stop.is_set():
        if written.acknowledged == CHAIN_BLOCKS:
            written, first = ledger.begin(namespace), 0
        last = min(first + rng.randint(1, 8), CHAIN_BLOCKS)
        is_accepted = last < CHAIN_BLOCKS and rng.random() < 0.33
        written.attempted = max(written.attempted, last)
        try:
            written.chain.store(
                client,
                first=first,
                last=last,
                states=[last - 1] if rng.random() < 0.5 else [],
                to_pool=rng.random() < 0.5,
                durability=Durability.ACCEPTED if is_accepted else Durability.DURABLE,
            )
        except GONE:
            first = written.acknowledged
            stop.wait(0.005)
        else:
            first = last
            if is_accepted:
                ledger.accept()
            else:
                # With all that was accepted before.
                ledger.acknowledge(written, last)


def check(client: CacheClient, written: Written) -> None:
    """What was acknowledged is held, with right bytes, under a chain without a gap."""
    acknowledged = written.acknowledged
    chain = written.chain
    found = look(client, chain)
    assert found.blocks_held >= acknowledged, (
        f"{found.blocks_held} of {acknowledged} acknowledged blocks are held"
    )
    if found.lease is None:
        return
    with found.lease:
        items = chain.fetch(client, found)
        assert all(item.payload is not None for item in items), "an item that was promised is missing"


def check_closed(client: CacheClient, written: Written) -> None:
    """No block is held whose parent is not, and none that nobody wrote."""
    chain = written.chain
    with client.reserve(
        chain.namespace.digest, [chain.block_item(i) for i in range(CHAIN_BLOCKS)]
    ) as reservation:
        held = [outcome is ReserveOutcome.HELD for outcome in reservation.outcomes]
    count = held.count(True)
    assert held == [True] * count + [False] * (CHAIN_BLOCKS - count), held
    assert written.acknowledged <= count <= written.attempted, (
        written.acknowledged,
        count,
        written.attempted,
    )


def read_chains(client: CacheClient, ledger: Ledger, rng: random.Random, stop: threading.Event) -> None:
    while not stop.is_set():
        chains = ledger.chains()
        try:
            if chains:
                check(client, rng.choice(chains))
                ledger.fetched()
        except GONE:
            stop.wait(0.005)


@pytest.fixture
def service() -> Iterator[ServiceProcess]:
    # A budget that this test cannot fill: nothing may be evicted.
    with running_service(disk=1 << 30, segment=2 << 20, pool=32 << 20) as process:
        yield process


@pytest.mark.slow
@pytest.mark.parametrize("seed", [20_261_130])
def test_acknowledged_commits_survive_kills_at_random_moments(service: ServiceProcess, seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    ledger = Ledger()
    stop = threading.Event()

    def guarded(work: object, *arguments: object) -> None:
        try:
            work(*arguments)  # type: ignore[operator]
        except BaseException as error:
            ledger.wrong.append(error)
            raise

    with ExitStack() as stack:
        clients = [
            stack.enter_context(CacheClient(service.directory, owner=f"w{i}")) for i in range(WRITERS + 2)
        ]
        *writers, reader, checker = clients
        namespace = checker.open_namespace(identity_of(), name="kill")
        threads = [
            threading.Thread(
                target=guarded,
                args=(write_chains, client, namespace, ledger, random.Random(f"{seed}-{i}"), stop),
            )
            for i, client in enumerate(writers)
        ]
        threads.append(
            threading.Thread(
                target=guarded, args=(read_chains, reader, ledger, random.Random(f"{seed}-r"), stop)
            )
        )
        for thread in threads:
            thread.start()
        try:
            checked = 0
            for number in range(ROUNDS):
                stop.wait(rng.uniform(0.0, 0.3))
                service.kill()
                acknowledged = {id(written): written.acknowledged for written in ledger.chains()}
                service.start()
                fresh = ledger.chains()[checked:]
                for written in (*fresh, *rng.sample(ledger.chains(), k=min(3, len(ledger.chains())))):
                    assert written.acknowledged >= acknowledged.get(id(written), 0)
                    check(checker, written)
                checked = max(len(ledger.chains()) - WRITERS, 0)
                assert not ledger.wrong, f"seed {seed} round {number}: {ledger.wrong}"
        finally:
            stop.set()
            for thread in threads:
                thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
        assert not ledger.wrong, f"seed {seed}: {ledger.wrong}"
        service.restart()
        for written in ledger.chains():
            check(checker, written)
            check_closed(checker, written)
        figures = checker.stats()
    blocks = sum(written.acknowledged for written in ledger.chains())
    print(
        f"{ROUNDS} kills, {ledger.commits} commits, {blocks} blocks acknowledged, {ledger.accepted} commits before they were durable, "
        f"{ledger.fetches} chains read meanwhile"
    )
    assert figures["leases"] == 0
    assert figures["damaged_total"] == 0
    assert figures["blocks"] >= blocks
    assert ledger.commits >= ROUNDS
    assert ledger.accepted
