"""KV events as they travel: both forms are read, maps are written, and what is not one is refused by name."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from kvstore.errors import ConfigError, InvalidArgument
from kvstore.events.base import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    StateRemoved,
    StateStored,
    UnknownEvent,
    short_hash,
)
from kvstore.events.endpoint import check_endpoint
from kvstore.events.wire import batch_of, batch_value, event_of
from kvstore.types import StateSource

A, B, C, SPACE = (bytes([n]) * 32 for n in (1, 2, 3, 9))

OURS: list[Event] = [
    BlockStored(
        block_hashes=(short_hash(A), short_hash(B)),
        parent_block_hash=short_hash(C),
        token_ids=(7, 8),
        block_size=1,
        medium="STORAGE",
        namespace=SPACE,
        block_keys=(A, B),
        parent_block_key=C,
    ),
    BlockStored(block_hashes=(short_hash(A),), block_size=4, namespace=SPACE, block_keys=(A,)),
    BlockRemoved(block_hashes=(short_hash(B),), medium="STORAGE", namespace=SPACE, block_keys=(B,)),
    AllBlocksCleared(namespace=SPACE),
    AllBlocksCleared(),
    StateStored(namespace=SPACE, block_key=A, source=StateSource.POOL, restorable_tokens=128, medium="CPU"),
    StateStored(
        namespace=SPACE,
        block_key=A,
        source=StateSource.ROWS,
        restorable_tokens=384,
        rows_blocks=2,
        rows_behind=1,
        medium="STORAGE",
    ),
    StateRemoved(namespace=SPACE, block_key=A, source=StateSource.CHECKPOINT, medium="STORAGE"),
]


def _through_msgpack(value: Any) -> Any:
    return msgpack.unpackb(msgpack.packb(value))


@pytest.mark.parametrize("event", OURS, ids=range(len(OURS)))
def test_an_event_is_read_as_it_was_written(event: Event) -> None:
    batch = batch_of(_through_msgpack(batch_value([event], ts=12.5)), sequence=3)
    assert (batch.sequence, batch.ts, batch.events, batch.data_parallel_rank) == (3, 12.5, (event,), None)


def test_a_stored_event_has_every_field_that_engines_write_and_numbers_for_hashes() -> None:
    written = _through_msgpack(batch_value([OURS[0]], ts=1.0))[1][0]
    assert written["type"] == "BlockStored"
    assert written["block_hashes"] == [0x0101010101010101, 0x0202020202020202]
    assert written["parent_block_hash"] == 0x0303030303030303
    for name in ("token_ids", "block_size", "lora_id", "medium", "lora_name"):
        assert name in written


@pytest.mark.parametrize(
    ("value", "event"),
    [
        (
            {
                "type": "BlockStored",
                "block_hashes": [11, 12],
                "parent_block_hash": None,
                "token_ids": [1, 2],
                "block_size": 1,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": "x",
                "group_idx": 1,
            },
            BlockStored(
                block_hashes=(11, 12),
                token_ids=(1, 2),
                block_size=1,
                medium="GPU",
                more={"lora_name": "x", "group_idx": 1},
            ),
        ),
        (
            ["BlockStored", [b"h" * 32], b"p" * 32, [1, 2], 2, None, "CPU"],
            BlockStored(
                block_hashes=(b"h" * 32,),
                parent_block_hash=b"p" * 32,
                token_ids=(1, 2),
                block_size=2,
                medium="CPU",
            ),
        ),
        # Older engines end where the rest is left out.
        (["BlockStored", [1], None, [5], 1], BlockStored(block_hashes=(1,), token_ids=(5,), block_size=1)),
        (["BlockRemoved", [1, 2], "GPU"], BlockRemoved(block_hashes=(1, 2), medium="GPU")),
        (["BlockRemoved", [1]], BlockRemoved(block_hashes=(1,))),
        (["AllBlocksCleared"], AllBlocksCleared()),
        (["Moved", 1, 2], UnknownEvent(type="Moved", fields={"field_1": 1, "field_2": 2})),
        ({"type": "Moved", "x": 1}, UnknownEvent(type="Moved", fields={"x": 1})),
    ],
)
def test_engines_events_are_read_in_both_forms(value: Any, event: Event) -> None:
    assert event_of(_through_msgpack(value)) == event


@pytest.mark.parametrize("value", [[1.0, [["AllBlocksCleared"]], 3], [1.0, [["AllBlocksCleared"]]]])
def test_a_batch_is_read_with_its_rank_and_without(value: list[Any]) -> None:
    read = batch_of(_through_msgpack(value), sequence=0)
    assert (read.events, read.data_parallel_rank) == (
        (AllBlocksCleared(),),
        value[2] if len(value) > 2 else None,
    )


def test_a_batch_in_map_form_is_read() -> None:
    read = batch_of({"ts": 1, "events": [{"type": "AllBlocksCleared"}], "data_parallel_rank": 2}, sequence=0)
    assert (read.ts, read.events, read.data_parallel_rank) == (1.0, (AllBlocksCleared(),), 2)


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (7, "batch"),
        ([1.0], "batch"),
        ([1.0, 5], "batch"),
        ([1.0, [7]], "event"),
        ([1.0, [[]]], "event"),
        ([1.0, [[5]]], "type"),
        ([1.0, [{}]], "type"),
        ([1.0, [{"type": "BlockStored", "block_hashes": "x"}]], "block_hashes"),
        ([1.0, [{"type": "BlockStored", "block_hashes": [True]}]], "block_hashes"),
        ([1.0, [{"type": "BlockStored", "block_hashes": [1], "block_size": -1}]], "block_size"),
        ([1.0, [{"type": "BlockStored", "block_hashes": [1], "token_ids": 5}]], "token_ids"),
        ([1.0, [{"type": "BlockStored", "block_hashes": [1], "block_keys": b"short"}]], "block_keys"),
        ([1.0, [{"type": "BlockRemoved", "block_hashes": [1], "namespace": b"short"}]], "namespace"),
        ([1.0, [{"type": "BlockRemoved", "block_hashes": [1], "medium": 5}]], "medium"),
        ([1.0, [{"type": "StateStored", "namespace": SPACE}]], "block_key"),
        (
            [1.0, [{"type": "StateRemoved", "namespace": SPACE, "block_key": A, "source": "REPLAY"}]],
            "source",
        ),
    ],
)
def test_what_is_no_event_is_refused_by_its_field(value: Any, word: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{word}="):
        batch_of(value, sequence=0)


@pytest.mark.parametrize(
    "endpoint", ["tcp://127.0.0.1:5557", "tcp://localhost:1", "tcp://[::1]:5557", "ipc:///run/kv/events"]
)
def test_addresses_that_only_this_machine_reaches_are_taken(endpoint: str) -> None:
    check_endpoint(endpoint, field="events", may_be_public=False)


@pytest.mark.parametrize(
    "endpoint", ["tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://[::]:5557", "tcp://store:5557"]
)
def test_addresses_that_others_reach_want_an_unsafe_word(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="--unsafe-public-events"):
        check_endpoint(endpoint, field="events", may_be_public=False)
    check_endpoint(endpoint, field="events", may_be_public=True)


@pytest.mark.parametrize(
    "endpoint", ["", "5557", "127.0.0.1:5557", "tcp://127.0.0.1", "tcp://a:99999", "udp://a:1", "ipc://"]
)
def test_what_is_no_address_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="tcp://HOST:PORT"):
        check_endpoint(endpoint, field="events", may_be_public=True)
