"""A store's events passed on with tokens: told is what is held and whose prompt somebody has seen."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import pytest

from kvstore.clock import SystemClock
from kvstore.events.sending import Sender
from kvstore.prefix import block_keys
from kvstore_client.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventReader,
    PromptBook,
    Relay,
    short_hash,
)

SPACE, OTHER = b"s" * 32, b"o" * 32
SIZE = 4
PROMPT = list(range(5 * SIZE))
KEYS = block_keys(SPACE, PROMPT, block_tokens=SIZE)


class Stepping:
    """Calls `step` in a thread of its own, again and again, until it is left. An error in it is raised there."""

    def __init__(self, step: Callable[[], object]) -> None:
        self._step = step
        self._end = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            while not self._end.wait(0.002):
                self._step()
        except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
            self._error = error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *ending: object) -> None:
        self._end.set()
        self._thread.join()
        if self._error is not None:
            raise self._error


class Chain:
    """A store's sender, a relay that follows it, and an indexer that follows the relay and knows hashes alone."""

    def __init__(self, folder: Path, ends: ExitStack, *, kept_bytes: int = 32 << 20) -> None:
        self.folder = folder
        self.kept_bytes = kept_bytes
        self.store = Sender(
            f"ipc://{folder / 'store'}",
            replay=f"ipc://{folder / 'store-again'}",
            first=1,
            kept_bytes=1 << 20,
            monotonic=SystemClock().monotonic,
        )
        self._lock = threading.Lock()
        ends.callback(self.store.close)
        self.store.open()
        self.store.kept.begin_snapshot()
        self.send(AllBlocksCleared())
        self.store.kept.end_snapshot()
        ends.enter_context(Stepping(self._answer))
        self._life = ends.enter_context(ExitStack())
        self.relay = self.new_relay()
        self.indexer = ends.enter_context(
            EventReader(f"ipc://{folder / 'relay'}", replay=f"ipc://{folder / 'again'}", quiet_seconds=0.2)
        )
        self.told: dict[int, tuple[int, ...]] = {}
        self.heard: list[Event] = []

    def _answer(self) -> None:
        with self._lock:
            self.store.hear()
            self.store.answer()

    def new_relay(self) -> Relay:
        """The one before it, where there is one, ends."""
        self._life.close()
        reader = self._life.enter_context(
            EventReader(
                f"ipc://{self.folder / 'store'}",
                replay=f"ipc://{self.folder / 'store-again'}",
                quiet_seconds=0.2,
            )
        )
        relay = self._life.enter_context(
            Relay(
                reader,
                PromptBook(SPACE, block_tokens=SIZE),
                endpoint=f"ipc://{self.folder / 'relay'}",
                replay=f"ipc://{self.folder / 'again'}",
                kept_bytes=self.kept_bytes,
            )
        )
        self._life.enter_context(Stepping(lambda: relay.step(timeout=0.01)))
        return relay

    def send(self, *events: Event) -> None:
        with self._lock:
            self.store.send(b"", events, ts=1.0)

    def stored(self, first: int, last: int, *, namespace: bytes = SPACE) -> None:
        keys = tuple(KEYS[first:last])
        self.send(
            BlockStored(
                block_hashes=tuple(map(short_hash, keys)),
                block_size=SIZE,
                namespace=namespace,
                block_keys=keys,
                parent_block_key=KEYS[first - 1] if first else None,
            )
        )

    def until(self, want: Sequence[int]) -> None:
        """Until the indexer knows exactly these blocks of the prompt."""
        deadline = time.monotonic() + 30.0
        while {short_hash(KEYS[number]) for number in want} != self.told.keys():
            assert time.monotonic() < deadline, f"the indexer knows {len(self.told)} blocks"
            self.turn()

    def turn(self) -> None:
        batch = self.indexer.read(timeout=0.05)
        for event in () if batch is None else batch.events:
            self.heard.append(event)
            if isinstance(event, BlockStored):
                [name] = event.block_hashes
                assert isinstance(name, int)
                assert event.parent_block_hash is None or event.parent_block_hash in self.told
                assert event.block_size == len(event.token_ids) == SIZE
                self.told[name] = event.token_ids
            elif isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    del self.told[name]  # type: ignore[arg-type]
            elif isinstance(event, AllBlocksCleared):
                self.told.clear()


@pytest.fixture
def chain_of() -> Iterator[Callable[..., Chain]]:
    with tempfile.TemporaryDirectory(prefix="kv-") as folder, ExitStack() as ends:
        yield lambda **options: Chain(Path(folder), ends, **options)


def test_blocks_are_told_with_their_tokens_whichever_comes_first(chain_of: Callable[..., Chain]) -> None:
    chain = chain_of()
    chain.relay.note(PROMPT[: 3 * SIZE])
    chain.stored(0, 3)
    chain.until([0, 1, 2])
    assert chain.told[short_hash(KEYS[1])] == tuple(PROMPT[SIZE : 2 * SIZE])
    chain.stored(3, 5)
    chain.stored(0, 5, namespace=OTHER)
    for _ in range(5):
        chain.turn()
    chain.until([0, 1, 2])
    chain.relay.note(PROMPT)
    chain.until([0, 1, 2, 3, 4])
    chain.send(BlockRemoved(block_hashes=(), namespace=OTHER, block_keys=tuple(KEYS)))
    gone = (KEYS[4], KEYS[3])
    chain.send(BlockRemoved(block_hashes=tuple(map(short_hash, gone)), namespace=SPACE, block_keys=gone))
    chain.until([0, 1, 2])
    chain.send(AllBlocksCleared(namespace=OTHER))
    chain.stored(3, 4)
    chain.until([0, 1, 2, 3])
    chain.send(AllBlocksCleared(namespace=SPACE))
    chain.until([])


def test_a_block_is_not_told_before_its_parent_is_held(chain_of: Callable[..., Chain]) -> None:
    chain = chain_of()
    chain.relay.note(PROMPT)
    chain.stored(2, 5)
    for _ in range(5):
        chain.turn()
    assert chain.told == {}
    chain.stored(0, 2)
    chain.relay.note(PROMPT)
    chain.until([0, 1, 2, 3, 4])


def test_an_indexer_that_lost_all_is_told_again_though_little_is_kept(chain_of: Callable[..., Chain]) -> None:
    chain = chain_of(kept_bytes=300)
    chain.relay.note(PROMPT)
    for number in range(5):
        chain.stored(number, number + 1)
        chain.until(range(number + 1))
    chain.told.clear()
    chain.indexer._next = None
    chain.until(range(5))
    assert AllBlocksCleared() in chain.heard


def test_a_relay_that_begins_anew_clears_what_its_earlier_life_told(chain_of: Callable[..., Chain]) -> None:
    chain = chain_of()
    chain.relay.note(PROMPT)
    chain.stored(0, 5)
    chain.until(range(5))
    chain.relay = chain.new_relay()
    chain.relay.note(PROMPT[: 2 * SIZE])
    chain.until(range(2))
    assert chain.indexer.unreadable_total == 0
