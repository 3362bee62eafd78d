"""The reader against publishers as engines have them; and tokens for events that have none."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgpack
import pytest
import zmq

from kvstore.errors import ConfigError, InvalidArgument
from kvstore.events.base import AllBlocksCleared, BlockRemoved, BlockStored, short_hash
from kvstore.prefix import block_keys
from kvstore_client.events import EventReader, PromptBook, packed

SPACE = b"s" * 32


class Engine:
    """Sends batches as vLLM does: numbers from 0 on in each life, and tells the last ones again to who asks."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        # As PUB, and it tells of who has come to listen.
        self.pub = self.context.socket(zmq.XPUB)
        port = self.pub.bind_to_random_port("tcp://127.0.0.1")
        self.router = self.context.socket(zmq.ROUTER)
        again = self.router.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint, self.replay = f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{again}"
        self.ts = 100.0
        self.next = 0
        self.kept: list[tuple[int, bytes]] = []
        self._end = threading.Event()
        self._answering = threading.Thread(target=self._answer)
        self._answering.start()

    def _answer(self) -> None:
        while not self._end.is_set():
            if self.router.poll(20):
                asker, _, start = self.router.recv_multipart()
                for number, payload in self.kept:
                    if number >= int.from_bytes(start, "big"):
                        self.router.send_multipart([asker, b"", number.to_bytes(8, "big"), payload])
                self.router.send_multipart([asker, b"", b"\xff" * 8, b""])

    def send(self, events: Sequence[Any], *, is_lost: bool = False, payload: bytes | None = None) -> None:
        self.ts += 1.0
        data = msgpack.packb([self.ts, events, 0]) if payload is None else payload
        self.kept.append((self.next, data))
        if not is_lost:
            self.pub.send_multipart([b"", self.next.to_bytes(8, "big"), data])
        self.next += 1

    def wait_for_listener(self) -> None:
        """What is sent before that reaches nobody."""
        while True:
            assert self.pub.poll(20_000), "a reader listens"
            if self.pub.recv()[:1] == b"\x01":
                return

    def restart(self) -> None:
        self.kept, self.next = [], 0

    def close(self) -> None:
        self._end.set()
        self._answering.join()
        self.router.close(0)
        self.pub.close(0)
        self.context.term()


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = Engine()
    try:
        yield made
    finally:
        made.close()


@contextmanager
def reading(engine: Engine, *, replay: bool = True) -> Iterator[EventReader]:
    with EventReader(
        engine.endpoint, replay=engine.replay if replay else None, quiet_seconds=0.1, answer_seconds=1.0
    ) as reader:
        engine.wait_for_listener()
        yield reader


def numbers(reader: EventReader, count: int) -> list[tuple[int, int]]:
    """(Sequence, missed) of the next `count` batches."""
    read = [reader.read(timeout=20.0) for _ in range(count)]
    return [(batch.sequence, batch.missed) for batch in read if batch is not None]


def stored(*hashes: int) -> dict[str, Any]:
    return {"type": "BlockStored", "block_hashes": list(hashes), "token_ids": [], "block_size": 16}


def test_what_was_sent_before_it_listened_is_read_where_it_is_told_again(engine: Engine) -> None:
    engine.send([stored(1)])
    engine.send([["BlockRemoved", [1], "GPU"], ["AllBlocksCleared"]])
    with reading(engine) as reader:
        first, second = reader.read(timeout=20), reader.read(timeout=20)
        assert first is not None
        assert second is not None
        assert first.events == (BlockStored(block_hashes=(1,), block_size=16),)
        assert second.events == (BlockRemoved(block_hashes=(1,), medium="GPU"), AllBlocksCleared())
        assert (first.sequence, second.sequence, first.data_parallel_rank) == (0, 1, 0)
        assert reader.read(timeout=0.0) is None


def test_a_gap_is_closed_in_order(engine: Engine) -> None:
    with reading(engine) as reader:
        engine.send([stored(1)])
        assert numbers(reader, 1) == [(0, 0)]
        engine.send([stored(2)], is_lost=True)
        engine.send([stored(3)], is_lost=True)
        engine.send([stored(4)])
        assert numbers(reader, 3) == [(1, 0), (2, 0), (3, 0)]


def test_the_last_batch_is_asked_for_where_it_was_lost(engine: Engine) -> None:
    with reading(engine) as reader:
        engine.send([stored(1)])
        assert numbers(reader, 1) == [(0, 0)]
        engine.send([stored(2)], is_lost=True)
        assert numbers(reader, 1) == [(1, 0)]


def test_what_nobody_can_tell_again_is_counted(engine: Engine) -> None:
    with reading(engine) as reader:
        engine.send([stored(1)])
        assert numbers(reader, 1) == [(0, 0)]
        for number in range(2, 6):
            engine.send([stored(number)], is_lost=True)
        del engine.kept[:3]
        assert numbers(reader, 2) == [(3, 2), (4, 0)]


def test_an_engine_that_starts_again_counts_from_0_and_is_followed(engine: Engine) -> None:
    with reading(engine) as reader:
        for number in range(5):
            engine.send([stored(number)])
        assert numbers(reader, 5)[-1] == (4, 0)
        engine.restart()
        engine.send([stored(9)])
        engine.send([stored(10)])
        assert numbers(reader, 2) == [(0, 0), (1, 0)]


def test_a_new_life_whose_clock_was_set_back_is_followed_though_it_is_never_quiet(engine: Engine) -> None:
    with reading(engine) as reader:
        for number in range(6):
            engine.send([stored(number)])
        assert numbers(reader, 6)[-1] == (5, 0)
        engine.restart()
        engine.ts -= 1000.0
        engine.send([stored(100)], is_lost=True)
        engine.send([stored(101)])
        heard: list[Any] = []
        end = time.monotonic() + 20.0
        while not heard and time.monotonic() < end:
            # Its numbers are lower than those of the old life, and so are its times.
            engine.pub.send_multipart([b"", *_last(engine)])
            if (batch := reader.read(timeout=0.02)) is not None:
                heard += batch.events
        assert heard[0] == BlockStored(block_hashes=(100,), block_size=16)


def _last(engine: Engine) -> list[bytes]:
    number, payload = engine.kept[-1]
    return [number.to_bytes(8, "big"), payload]


def test_a_batch_that_cannot_be_read_is_passed_over_and_counted(engine: Engine) -> None:
    with reading(engine) as reader:
        engine.send([stored(1)])
        assert numbers(reader, 1) == [(0, 0)]
        engine.send([], payload=b"\xc1\xff")
        engine.send([{"type": "BlockStored"}])
        engine.send([stored(2)])
        assert numbers(reader, 1) == [(3, 0)]
        assert reader.unreadable_total == 2


def test_a_publisher_that_is_away_is_waited_for_no_longer_than_asked() -> None:
    with EventReader("tcp://127.0.0.1:1", replay="tcp://127.0.0.1:1", answer_seconds=0.05) as reader:
        assert reader.read(timeout=0.1) is None


def test_an_endpoint_that_is_none_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="endpoint=nowhere"):
        EventReader("nowhere")


# ---- tokens -------------------------------------------------------------------------------------------------


def event_of(tokens: Sequence[int], namespace: bytes = SPACE) -> BlockStored:
    keys = tuple(block_keys(namespace, tokens, block_tokens=4))
    return BlockStored(
        block_hashes=tuple(map(short_hash, keys)), block_size=4, namespace=namespace, block_keys=keys
    )


def test_who_has_seen_the_prompt_completes_the_event() -> None:
    book = PromptBook(SPACE, block_tokens=4)
    assert book.note(range(10)) == block_keys(SPACE, list(range(8)), block_tokens=4)
    assert len(book) == 2
    described = book.described(event_of(range(8)))
    assert isinstance(described, BlockStored)
    assert described.token_ids == tuple(range(8))
    assert book.described(event_of(range(12))) == event_of(range(12)), "one block is not known"
    other = event_of(range(8), b"o" * 32)
    assert book.described(other) == other
    assert book.described(AllBlocksCleared()) == AllBlocksCleared()


def test_a_book_keeps_the_prompts_seen_last() -> None:
    book = PromptBook(SPACE, block_tokens=4, limit_blocks=2)
    book.note([1] * 4)
    book.note([2] * 4)
    book.note([1] * 4)
    book.note([3] * 4)
    known = [book.described(event_of([n] * 4)) != event_of([n] * 4) for n in (1, 2, 3)]
    assert known == [True, False, True]
    with pytest.raises(InvalidArgument, match="limit_blocks"):
        PromptBook(SPACE, block_tokens=4, limit_blocks=0)


def test_what_is_passed_on_is_a_batch_again(engine: Engine) -> None:
    with reading(engine) as reader:
        engine.send([], payload=packed([event_of(range(4))], ts=7.0))
        batch = reader.read(timeout=20)
        assert batch is not None
        assert (batch.ts, batch.events) == (7.0, (event_of(range(4)),))
