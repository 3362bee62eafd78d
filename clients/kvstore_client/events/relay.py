"""A store's events for indexers that hash tokens themselves: passed on with the tokens of prompts that somebody has seen."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from kvstore.clock import Clock, SystemClock
from kvstore.events.base import (
    DISK_MEDIUM,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    short_hash,
)
from kvstore.events.sending import Sender
from kvstore_client.events.prompts import PromptBook
from kvstore_client.events.reader import EventReader

BATCH_EVENTS_MAX = 400

BATCHES_AT_ONCE = 100
"""Then those that ask have their turn."""

PROMPTS_WAITING_MAX = 10_000
"""Noted and not looked at yet; past that the oldest is forgotten, and is told when it is noted again."""


class Relay:
    """Follows a store and tells, as a publisher of its own, of the blocks of one namespace that are held and whose tokens are known:
    of a block once its prompt is noted, whichever comes first. Blocks nobody has seen a prompt of are not told; nor are states.

    One thread calls `step`; any may call `note`. Open it as a context manager.
    """

    def __init__(
        self,
        reader: EventReader,
        book: PromptBook,
        *,
        endpoint: str,
        replay: str = "",
        topic: str = "",
        kept_bytes: int = 32 << 20,
        may_be_public: bool = False,
        clock: Clock | None = None,
    ) -> None:
        """`endpoint`, `replay`: where the indexer listens and asks, as `kvstore serve` has them. ConfigError where that cannot be."""
        self._reader = reader
        self._book = book
        self._topic = topic.encode()
        self._clock = clock = SystemClock() if clock is None else clock
        # Microseconds, so that the numbers of one life are larger than those of the one before.
        self._sender = Sender(
            endpoint,
            replay=replay,
            first=int(clock.wall() * 1e6),
            kept_bytes=kept_bytes,
            monotonic=clock.monotonic,
            may_be_public=may_be_public,
        )
        self._held: set[bytes] = set()
        self._told: set[bytes] = set()
        self._noted: deque[list[bytes]] = deque(maxlen=PROMPTS_WAITING_MAX)

    def __enter__(self) -> Relay:
        self._sender.open()
        # What an earlier life has told is not known any more.
        self._snapshot()
        return self

    def __exit__(self, *ending: object) -> None:
        self._sender.close()

    def note(self, tokens: Sequence[int]) -> None:
        """A prompt that somebody has seen, from its first token on."""
        self._noted.append(self._book.note(tokens))

    def step(self, *, timeout: float = 0.05) -> None:
        """Pass on what has come within `timeout` seconds, and answer who asks."""
        for number in range(BATCHES_AT_ONCE):
            batch = self._reader.read(timeout=0.0 if number else timeout)
            if batch is None:
                break
            self._send(self._passed_on(batch.events))
        while self._noted:
            self._send(self._now_known(self._noted.popleft()))
        self._sender.hear()
        if self._sender.wants_snapshot:
            self._snapshot()
        while self._sender.answer():
            pass

    def _passed_on(self, events: Iterable[Event]) -> list[Event]:
        told: list[Event] = []
        for event in events:
            if isinstance(event, AllBlocksCleared) and event.namespace in (None, self._book.namespace):
                self._held.clear()
                self._told.clear()
                told.append(AllBlocksCleared())
            elif isinstance(event, BlockStored) and event.namespace == self._book.namespace:
                self._held.update(event.block_keys)
                told += self._now_known(event.block_keys)
            elif isinstance(event, BlockRemoved) and event.namespace == self._book.namespace:
                self._held.difference_update(event.block_keys)
                left = tuple(key for key in event.block_keys if key in self._told)
                self._told.difference_update(left)
                if left:
                    hashes = tuple(map(short_hash, left))
                    told.append(BlockRemoved(block_hashes=hashes, medium=DISK_MEDIUM))
        return told

    def _now_known(self, keys: Iterable[bytes]) -> list[Event]:
        """Of these blocks and what comes before them: what is held, whose tokens are known, and is not told yet. Parents first."""
        told: list[Event] = []
        for key in keys:
            path: list[BlockStored] = []
            at: bytes | None = key
            while at is not None and at not in self._told:
                block = self._book.get(at)
                if block is None or at not in self._held:
                    # An indexer has no use for a block whose parent it does not know.
                    path.clear()
                    break
                path.append(
                    BlockStored(
                        block_hashes=(short_hash(at),),
                        parent_block_hash=None if block.parent is None else short_hash(block.parent),
                        token_ids=block.tokens,
                        block_size=self._book.block_tokens,
                        medium=DISK_MEDIUM,
                        block_keys=(at,),
                        parent_block_key=block.parent,
                        namespace=self._book.namespace,
                    )
                )
                at = block.parent
            told += reversed(path)
            self._told.update(event.block_keys[0] for event in path)
        return told

    def _snapshot(self) -> None:
        """All that is told and can be told again: of blocks whose tokens are known no more there is nothing to tell."""
        before, self._told = self._told, set()
        self._sender.kept.begin_snapshot()
        self._send([AllBlocksCleared()])
        self._send(self._now_known(before))
        self._sender.kept.end_snapshot()

    def _send(self, events: Sequence[Event]) -> None:
        for first in range(0, len(events), BATCH_EVENTS_MAX):
            part = events[first : first + BATCH_EVENTS_MAX]
            self._sender.send(self._topic, part, ts=self._clock.wall())
