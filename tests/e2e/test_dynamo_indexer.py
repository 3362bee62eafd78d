"""NVIDIA Dynamo's own indexer beside a real service: it finds what the store holds. In an environment of its own:

python -m venv E; E/bin/pip install ai-dynamo-runtime==1.6.1 pyzmq msgspec
KVSTORE_DYNAMO_PYTHON=E/bin/python python -m pytest tests/e2e/test_dynamo_indexer.py
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kvstore.profile.registry import get_profile
from kvstore_client import CacheClient
from kvstore_client.events import AllBlocksCleared, BlockRemoved, BlockStored, EventReader, PromptBook, Relay
from tests.support.chains import Chain, identity_of
from tests.support.events import free_port
from tests.support.service import ServiceProcess, short_directory

PYTHON = os.environ.get("KVSTORE_DYNAMO_PYTHON", "")
SIZE = get_profile("tiny").block_tokens
SECONDS = 40.0


class Indexer:
    """The indexer's process and its HTTP answers."""

    def __init__(self, port: int) -> None:
        self._port = port

    def call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=5) as answer:
            return json.loads(answer.read() or b"null")

    def on_disk(self, tokens: list[int]) -> int:
        """Of how many of a prompt's tokens it says that the store has them on disk."""
        found = self.call("/query", {"token_ids": tokens, "model_name": "m"})
        return int(found["instances"].get("1", {}).get("disk", 0))

    def until(self, want: int, tokens: list[int], meanwhile: Callable[[], object] = lambda: None) -> None:
        deadline = time.monotonic() + SECONDS
        while (found := self.on_disk(tokens)) != want:
            assert time.monotonic() < deadline, f"{found} tokens instead of {want}"
            meanwhile()


@contextmanager
def indexer(events: str, replay: str) -> Iterator[Indexer]:
    port = free_port()
    command = [
        PYTHON,
        "-m",
        "dynamo.indexer",
        "--port",
        str(port),
        "--block-size",
        str(SIZE),
        "--model-name",
        "m",
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    try:
        made = Indexer(port)
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except urllib.error.URLError:
                assert process.poll() is None, "the indexer ended"
                assert time.monotonic() < deadline, "the indexer does not answer"
        made.call(
            "/register",
            {
                "instance_id": 1,
                "worker_id": 1,
                "dp_rank": 0,
                "endpoint": events,
                "replay_endpoint": replay,
                "model_name": "m",
                "block_size": SIZE,
            },
        )
        yield made
    finally:
        process.terminate()
        process.wait(20)


def tokens_of(seed: int, blocks: int) -> list[int]:
    """As Chain.of has them."""
    return [(seed * 1_000_003 + i * 7) % 50_000 for i in range(blocks * SIZE)]


def test_the_real_indexer_finds_what_the_store_holds(require: Callable[[str, bool, str], None]) -> None:
    require("dynamo", bool(PYTHON), "KVSTORE_DYNAMO_PYTHON names no interpreter that has ai-dynamo-runtime")
    with short_directory() as directory, ExitStack() as ends:
        folder: Path = directory.parent
        told = {"events": f"ipc://{folder / 'events'}", "events_replay": f"ipc://{folder / 'again'}"}
        service = ends.enter_context(ServiceProcess(directory, **told))
        client = ends.enter_context(CacheClient(directory, owner="w"))
        space = client.open_namespace(identity_of(), name="m")
        first, second = Chain.of(space, 8, seed=1), Chain.of(space, 5, seed=2)
        reader = ends.enter_context(
            EventReader(told["events"], replay=told["events_replay"], quiet_seconds=0.2)
        )
        events, again = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        book = PromptBook(space.digest, block_tokens=space.block_tokens)
        relay = ends.enter_context(Relay(reader, book, endpoint=events, replay=again))
        relay.note(tokens_of(1, 8))
        # What is there before the indexer, what comes with states beside it, and what leaves.
        first.store(client, last=6)
        found = ends.enter_context(indexer(events, again))
        found.until(0, tokens_of(2, 5), relay.step)
        first.store(client, first=6, states=[7])
        found.until(8 * SIZE, tokens_of(1, 8), relay.step)
        second.store(client, states=[4], to_pool=True)
        # A prompt that is seen after its blocks were stored.
        relay.note(tokens_of(2, 5))
        found.until(5 * SIZE, tokens_of(2, 5), relay.step)
        client.clear(namespace=space.digest)
        found.until(0, tokens_of(1, 8), relay.step)
        second.store(client)
        found.until(5 * SIZE, tokens_of(2, 5), relay.step)
        client.close()
        service.restart()
        with CacheClient(directory, owner="w") as other:
            other.open_namespace(identity_of(), name="m")
            first.store(other)
            found.until(8 * SIZE, tokens_of(1, 8), relay.step)
        found.until(5 * SIZE, tokens_of(2, 5), relay.step)


def test_the_real_indexer_reads_the_store_s_own_batches(require: Callable[[str, bool, str], None]) -> None:
    """Of blocks without tokens it can make nothing, and it says so; batches of states it passes over."""
    require("dynamo", bool(PYTHON), "KVSTORE_DYNAMO_PYTHON names no interpreter that has ai-dynamo-runtime")
    with short_directory() as directory, ExitStack() as ends:
        port, again = free_port(), free_port()
        told = {"events": f"tcp://127.0.0.1:{port}", "events_replay": f"tcp://127.0.0.1:{again}"}
        ends.enter_context(ServiceProcess(directory, **told))
        client = ends.enter_context(CacheClient(directory, owner="w"))
        space = client.open_namespace(identity_of(), name="m")
        found = ends.enter_context(indexer(told["events"], told["events_replay"]))
        Chain.of(space, 4, seed=1).store(client, states=[3])
        with EventReader(told["events"], replay=told["events_replay"], quiet_seconds=0.2) as reader:
            kinds = set()
            while BlockStored not in kinds:
                batch = reader.read(timeout=SECONDS)
                assert batch is not None
                kinds |= {type(event) for event in batch.events}
            assert kinds >= {AllBlocksCleared, BlockStored}
            assert BlockRemoved not in kinds
        assert found.on_disk(tokens_of(1, 4)) == 0
        [worker] = found.call("/workers")
        assert worker["status"] == "active"
