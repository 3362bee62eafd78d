"""A log that is kept full of equal blocks: what the benches write and read."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import xxhash
from isal import isal_zlib

from kvstore.clock import SystemClock
from kvstore.store import Place, Record, RecordKind, RecordLog, Wanted, open_log
from kvstore.store.buffers import Slot, carved
from kvstore.store.format import LARGE_PAYLOAD_BYTES, record_span
from kvstore.store.segment import is_spare_name, segment_name
from kvstore.types import KEY_BYTES, BlockKey, BytesLike, Checks, Lineage, NamespaceDigest

SEGMENT_BYTES = 256 << 20
SPARE_SEGMENTS = 6
"""Beyond what the bench keeps: the open one, the next one, and those that wait for their next life."""

FILES_ROUND = 5
"""What is kept while writes are measured, the open one, the next one, and one that waits."""

SLOTS = 160
"""Different payloads, larger together than a processor's cache. Large ones come in the memory that the log writes from."""

_SPACE = NamespaceDigest(b"bench".ljust(KEY_BYTES, b"\0"))


class BlockLog:
    """Blocks of `block_bytes`, oldest out first, at least `kept_bytes` of them once it has been filled. check: called
    before each append; it may raise."""

    def __init__(
        self,
        directory: Path,
        *,
        block_bytes: int,
        kept_bytes: int,
        budget_bytes: int = 0,
        ends: Sequence[int] = (),
        seed: int,
        check: Callable[[], None],
    ) -> None:
        self.directory = directory
        self.check = check
        self.block_bytes = block_bytes
        self.kept_bytes = kept_bytes
        # Small records take an eighth more than their payload.
        self.budget_bytes = budget_bytes or kept_bytes * 8 // 7 + SPARE_SEGMENTS * SEGMENT_BYTES
        self.log: RecordLog
        self.log, _ = open_log(
            directory, budget_bytes=self.budget_bytes, segment_bytes=SEGMENT_BYTES, clock=SystemClock()
        )
        self._ends = ends
        chance = random.Random(seed)
        self.slots: list[Slot] = []
        if block_bytes >= LARGE_PAYLOAD_BYTES:
            self.slots = [Slot(block_bytes, pages) for pages in carved(record_span(block_bytes), SLOTS)]
        for slot in self.slots:
            slot.payload[:] = chance.randbytes(block_bytes)
        self._payloads: list[BytesLike] = [slot.payload for slot in self.slots] or [
            chance.randbytes(block_bytes) for _ in range(SLOTS)
        ]
        # As they come from a client, which has summed up what it sends.
        self._checks = [
            Checks(isal_zlib.crc32(payload), xxhash.xxh3_64_intdigest(payload), has_xxh3=True)
            for payload in self._payloads
        ]
        self._next = 0
        self._holding = threading.Lock()
        self.held: deque[tuple[int, Place]] = deque()

    def append(self, count: int) -> None:
        """`count` more blocks, durable on return. The oldest go as soon as there are more than are to be kept, a segment at
        a time: so the log finds room before it needs it, and files to use again."""
        self.append_made(self.make(count))

    def make(self, count: int) -> list[tuple[int, Record]]:
        """The next `count` blocks, to be appended next."""
        assert count <= SLOTS or not self.slots, "a slot is used once in a batch"
        numbers = range(self._next, self._next + count)
        self._next += count
        return [(number, self._record(number)) for number in numbers]

    def append_made(self, made: list[tuple[int, Record]]) -> None:
        """As `append`, of blocks that were made before."""
        self.check()
        places = self.log.append([record for _, record in made])
        with self._holding:
            self._hold(made, places)

    def _hold(self, made: list[tuple[int, Record]], places: list[Place]) -> None:
        self.held.extend((number, place) for (number, _), place in zip(made, places, strict=True))
        if len(self.held) * self.block_bytes > self.kept_bytes:
            first = self.held[0][1].segment_id
            gone = []
            while self.held[0][1].segment_id == first:
                gone.append(self.held.popleft()[1])
            self.log.discard(gone)
            self.log.reclaim()

    def fill(self, batch: int) -> None:
        """Until every file is used again: from then on an append costs what it costs for good."""
        while self.log.counters()["recycled_segments"] < FILES_ROUND:
            self.append(batch)

    def keep(self, kept_bytes: int, batch: int) -> None:
        """From now on hold so much, and hold it."""
        self.kept_bytes = kept_bytes
        while len(self.held) * self.block_bytes < kept_bytes - SEGMENT_BYTES:
            self.append(batch)

    def let_go(self) -> None:
        """Hold nothing any more."""
        self.log.discard([place for _, place in self.held])
        self.held.clear()
        self.log.reclaim()

    def spares(self) -> list[Path]:
        """Files between two lives: nothing in them is looked at any more."""
        return sorted(path for path in self.directory.iterdir() if is_spare_name(path.name))

    def wanted(self, held: Sequence[tuple[int, Place]]) -> list[Wanted]:
        return [Wanted(place, _key(number), RecordKind.BLOCK) for number, place in held]

    def path_of(self, place: Place) -> Path:
        return self.directory / segment_name(place.segment_id)

    def written_bytes(self) -> int:
        """As the log counts them."""
        return self.log.counters()["written_bytes"]

    def _record(self, number: int) -> Record:
        payload = self._payloads[number % SLOTS]
        return Record(
            RecordKind.BLOCK,
            _SPACE,
            _key(number),
            BlockKey(_SPACE),
            128 * (number + 1),
            Lineage.EXACT,
            payload,
            self._checks[number % SLOTS],
            self._ends,
            self.slots[number % SLOTS] if self.slots else None,
        )


def _key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(KEY_BYTES, "little"))
