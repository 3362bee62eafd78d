"""KV events of a real service: who follows them knows what it holds, whatever happens to either."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.types import StateSource
from kvstore_client import CacheClient
from kvstore_client.events import AllBlocksCleared, BlockStored
from tests.support.calls import look
from tests.support.chains import Chain, identity_of
from tests.support.events import Follower, endpoints
from tests.support.service import ServiceProcess, short_directory


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_directory() as directory:
        yield directory.parent


def test_a_follower_knows_blocks_and_states_and_how_far_a_prompt_is_restorable(folder: Path) -> None:
    told = endpoints(folder)
    with (
        ServiceProcess(folder / "s", **told) as service,
        Follower(told) as follower,
        CacheClient(service.directory, owner="w") as client,
    ):
        space = client.open_namespace(identity_of(salt="a"), name="a")
        digest = space.digest
        chain = Chain.of(space, 6, seed=1)
        chain.store(client, last=5, states=[2, 4])
        held = follower.until(lambda held: len(held.states(digest)) == 2)
        assert held.keys(digest) == set(chain.keys[:5])
        assert held.blocks_held(digest, chain.keys) == look(client, chain, lease=False).blocks_held == 5
        assert held.restorable_tokens(digest, chain.keys) == 5 * space.block_tokens
        assert held.restorable_tokens(digest, chain.keys[:4]) == 3 * space.block_tokens
        client.drop_states(namespace=digest)
        follower.until(lambda held: not held.states(digest))
        assert held.restorable_tokens(digest, chain.keys) == 0
        chain.store(client, first=5, states=[5], to_pool=True)
        follower.until(lambda held: (chain.keys[5], StateSource.POOL) in held.states(digest))
        client.clear(namespace=digest)
        follower.until(lambda held: not held.keys(digest) and not held.states(digest))
        assert follower.missed == 0


def test_who_comes_late_is_told_all_and_a_restart_is_no_loss(folder: Path) -> None:
    told = endpoints(folder)
    with ServiceProcess(folder / "s", **told) as service:
        with CacheClient(service.directory, owner="w") as client:
            space = client.open_namespace(identity_of(salt="b"), name="b")
            first, second = (Chain.of(space, 20, seed=seed) for seed in (1, 2))
            first.store(client, states=[19])
        with Follower(told) as follower:
            held = follower.until(lambda held: set(first.keys) <= held.keys(space.digest))
            assert follower.batches[0].events == (AllBlocksCleared(),)
            heard = len(follower.batches)
            service.restart()
            follower.until(
                lambda _: any(batch.events[0] == AllBlocksCleared() for batch in follower.batches[heard:])
            )
            with CacheClient(service.directory, owner="w") as client:
                client.open_namespace(identity_of(salt="b"), name="b")
                second.store(client, states=[19])
            follower.until(lambda held: held.keys(space.digest) >= {*first.keys, *second.keys})
            follower.until(lambda held: len(held.states(space.digest)) == 2)
            assert held.restorable_tokens(space.digest, first.keys) == 20 * space.block_tokens
            assert follower.missed == 0
            numbers = [batch.sequence for batch in follower.batches]
            assert numbers == sorted(numbers), "a start's numbers are larger than those of the one before"


def test_a_follower_of_a_full_store_knows_what_was_evicted(folder: Path) -> None:
    told = endpoints(folder)
    with (
        ServiceProcess(folder / "s", disk=8 << 20, segment=1 << 20, **told) as service,
        Follower(told) as follower,
        CacheClient(service.directory, owner="w") as client,
    ):
        space = client.open_namespace(identity_of(salt="c"), name="c")
        chains = [Chain.of(space, 200, seed=seed) for seed in range(14)]
        for chain in chains:
            chain.store(client, states=[199])
        figures = client.stats()
        assert figures["evicted_blocks_total"] > 0
        held = follower.until(lambda held: len(held.keys(space.digest)) == figures["blocks"])
        for chain in chains:
            assert held.blocks_held(space.digest, chain.keys) == look(client, chain, lease=False).blocks_held
        assert follower.missed == 0


def test_the_command_prints_what_is_told(folder: Path) -> None:
    told = endpoints(folder)
    with (
        ServiceProcess(folder / "s", **told) as service,
        CacheClient(service.directory, owner="w") as client,
    ):
        space = client.open_namespace(identity_of(salt="d"), name="d")
        chain = Chain.of(space, 3, seed=1)
        chain.store(client, states=[2])

        def kvstore(*args: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "kvstore.cli.main", "events", told["events"], *args]
            return subprocess.run(
                command, capture_output=True, text=True, timeout=60, env=dict(os.environ), check=False
            )

        again = ("--replay", told["events_replay"], "--quiet", "1s")
        said = kvstore(*again)
        assert (said.returncode, said.stderr) == (0, "")
        assert "all cleared" in said.stdout
        assert (
            f"3 blocks stored, to {chain.keys[2].hex()[:12]} of {space.digest.hex()[:12]} (STORAGE)"
            in said.stdout
        )
        assert f"restorable to {3 * space.block_tokens} tokens" in said.stdout
        lines = [json.loads(line) for line in kvstore(*again, "--json").stdout.splitlines()]
        [stored] = [line for line in lines if line["type"] == "BlockStored"]
        assert stored["block_keys"] == b"".join(chain.keys).hex()
        assert stored["namespace"] == space.digest.hex()
        assert stored["block_size"] == space.block_tokens
        one = kvstore(*again, "--batches", "1").stdout
        assert len(one.splitlines()) == 1


def test_topics_are_digests_or_what_is_asked_for(folder: Path) -> None:
    zmq = pytest.importorskip("zmq")
    told = {**endpoints(folder), "events_topic": "kv@pod@model", "events_blocks_only": True}
    with (
        ServiceProcess(folder / "s", **told) as service,
        CacheClient(service.directory, owner="w") as client,
        zmq.Context() as context,
        context.socket(zmq.SUB) as socket,
        Follower(endpoints(folder)) as follower,
    ):
        socket.subscribe(b"kv@pod@")
        socket.connect(told["events"])
        space = client.open_namespace(identity_of(salt="e"), name="e")
        chain = Chain.of(space, 3, seed=1)
        heard = b""
        for number in range(3):
            chain.store(client, first=number, last=number + 1, states=[number])
            if socket.poll(2_000):
                heard = socket.recv_multipart()[0]
        assert heard == b"kv@pod@model"
        follower.until(lambda held: held.keys(space.digest) == set(chain.keys))
        assert follower.held.states(space.digest) == frozenset()
        kinds = {type(event) for batch in follower.batches for event in batch.events}
        assert kinds == {AllBlocksCleared, BlockStored}
