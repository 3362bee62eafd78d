"""What a worker refuses, what goes with a handoff, and how rates are measured."""

from __future__ import annotations

import json
import math
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import DamagedBytes, InvalidArgument
from kvstore_workers.runtime.handoff import Note, decode_note, encode_note, prompt_digest
from kvstore_workers.runtime.rates import Rates
from kvstore_workers.runtime.values import MAX_NEW_TOKENS, Request, StoreReport, check_request


def _request(**changes: object) -> Request:
    return Request(**{"tokens": [1, 2, 3], "max_new_tokens": 1, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tokens": []}, "tokens"),
        ({"tokens": range(1_048_577)}, "tokens"),
        ({"tokens": [1, 320, 2]}, "tokens[1]"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"max_new_tokens": MAX_NEW_TOKENS + 1}, "max_new_tokens"),
        ({"temperature": -0.5, "seed": 1}, "sampling.temperature"),
        ({"temperature": math.nan, "seed": 1}, "sampling.temperature"),
        ({"temperature": math.inf, "seed": 1}, "sampling.temperature"),
        ({"temperature": 0.7}, "sampling.seed"),
    ],
)
def test_a_wrong_request_is_refused_by_the_field_that_is_wrong(
    changes: dict[str, object], field: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        check_request(_request(**changes), vocabulary=320)
    assert refused.value.field == field
    assert refused.value.allowed


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tokens": [0]},
        {"tokens": [319]},
        {"max_new_tokens": MAX_NEW_TOKENS},
        {"temperature": 0.7, "seed": 0},
    ],
)
def test_a_request_at_the_ends_of_the_ranges_is_taken(changes: dict[str, object]) -> None:
    check_request(_request(**changes), vocabulary=320)


def test_without_a_vocabulary_token_ids_are_left_to_the_worker() -> None:
    check_request(_request(tokens=[2**32 - 1]), vocabulary=None)


NOTE = Note(
    prompt_tokens=100,
    prompt=prompt_digest(range(100)),
    first_tokens=(7, 9),
    output_edge_pool=True,
    output_edge_ssd=False,
    every_tokens=64,
)


def test_a_prompt_s_digest_is_that_of_its_ids_whatever_holds_them() -> None:
    assert prompt_digest([1, 2]) == prompt_digest(array("I", [1, 2])) != prompt_digest([2, 1])


@given(
    st.builds(
        Note,
        prompt_tokens=st.integers(0, 2**40),
        prompt=st.text(),
        first_tokens=st.lists(st.integers(0, 2**32 - 1), max_size=4).map(tuple),
        output_edge_pool=st.booleans(),
        output_edge_ssd=st.booleans(),
        every_tokens=st.integers(0, 2**32),
        rows=st.booleans(),
        rows_overlap=st.booleans(),
    )
)
def test_a_note_reads_back_as_it_was_written(note: Note) -> None:
    assert decode_note(encode_note(note)) == note


@pytest.mark.parametrize("cut", range(len(encode_note(NOTE))))
def test_a_note_that_is_cut_is_damage(cut: int) -> None:
    with pytest.raises(DamagedBytes):
        decode_note(encode_note(NOTE)[:cut])


@pytest.mark.parametrize(
    "change",
    [
        {"version": 1},
        {"first_tokens": [-1]},
        {"first_tokens": ["7"]},
        {"first_tokens": 7},
        {"rows": 1},
        {"output_edge_pool": 1},
        {"every_tokens": 1.5},
        {"prompt": 7},
        {"more": 1},
    ],
)
def test_a_note_of_another_form_is_damage(change: dict[str, object]) -> None:
    fields = json.loads(encode_note(NOTE)) | change
    with pytest.raises(DamagedBytes):
        decode_note(json.dumps(fields, sort_keys=True).encode())


@pytest.mark.parametrize("note", [b"", b"[]", b"null", b"[" * 100_000, b"\xff"])
def test_a_note_that_is_no_object_is_damage(note: bytes) -> None:
    with pytest.raises(DamagedBytes):
        decode_note(note)


def test_a_rate_that_was_not_measured_is_reported_as_not_known() -> None:
    costs = Rates().costs()
    assert (
        costs.seconds_per_layer_token
        == costs.seconds_per_ssd_byte
        == costs.seconds_per_memory_byte
        == costs.seconds_per_fetch
        == 0.0
    )


def test_the_first_measurement_counts_whole_and_later_ones_move_the_average() -> None:
    rates = Rates()
    rates.computed(layer_tokens=100, index_entries=0, seconds=1.0)
    assert rates.costs().seconds_per_layer_token == pytest.approx(0.01)
    assert rates.costs().seconds_per_index_entry == 0.0
    rates.computed(layer_tokens=100, index_entries=0, seconds=2.0)
    assert 0.01 < rates.costs().seconds_per_layer_token < 0.02
    for _ in range(40):
        rates.computed(layer_tokens=100, index_entries=0, seconds=4.0)
    assert rates.costs().seconds_per_layer_token == pytest.approx(0.04, rel=0.01)
    rates.computed(layer_tokens=100, index_entries=0, seconds=5.0)
    assert rates.costs().seconds_per_layer_token == pytest.approx(0.042, rel=0.01)


def test_chunks_at_different_positions_tell_the_price_of_an_index_entry() -> None:
    rates = Rates()
    for position in range(0, 4096, 512):
        entries = 512 * position
        rates.computed(layer_tokens=5 * 512, index_entries=entries, seconds=5 * 512 * 2e-5 + entries * 3e-8)
    costs = rates.costs()
    assert costs.seconds_per_layer_token == pytest.approx(2e-5, rel=1e-6)
    assert costs.seconds_per_index_entry == pytest.approx(3e-8, rel=1e-6)
    assert rates.compute_seconds(1000, 1000) == pytest.approx(2e-2 + 3e-5)


def test_chunks_at_one_position_leave_the_first_price_of_an_index_entry_as_it_was() -> None:
    rates = Rates()
    rates.prime(layer_token=2e-5, index_entry=3e-8, spread=2000.0)
    for _ in range(20):
        rates.computed(layer_tokens=100, index_entries=50_000, seconds=100 * 4e-5 + 50_000 * 3e-8)
    costs = rates.costs()
    assert costs.seconds_per_index_entry == pytest.approx(3e-8, rel=0.05)
    assert costs.seconds_per_layer_token == pytest.approx(4e-5, rel=0.1)


def test_no_price_of_computing_falls_below_zero() -> None:
    rates = Rates()
    for entries, seconds in ((0, 3.0), (10_000, 1.0), (20_000, 0.1)):
        rates.computed(layer_tokens=100, index_entries=entries, seconds=seconds)
    assert rates.costs().seconds_per_index_entry == 0.0
    rising = Rates()
    for entries, seconds in ((10_000, 1.0), (20_000, 9.0)):
        rising.computed(layer_tokens=100, index_entries=entries, seconds=seconds)
    assert rising.costs().seconds_per_layer_token > 0.0
    assert rising.costs().seconds_per_index_entry > 0.0


def test_a_fetch_prices_the_tier_that_its_bytes_came_from() -> None:
    rates = Rates()
    rates.fetched(first_seconds=0.001, rest_seconds=0.1, rest_bytes=1000, from_memory=False)
    rates.fetched(first_seconds=0.001, rest_seconds=0.01, rest_bytes=1000, from_memory=True)
    costs = rates.costs()
    assert costs.seconds_per_ssd_byte == pytest.approx(1e-4)
    assert costs.seconds_per_memory_byte == pytest.approx(1e-5)
    assert costs.seconds_per_fetch == pytest.approx(0.001)
    rates.loaded(bytes_loaded=1000, seconds=0.05)
    assert rates.costs().seconds_per_ssd_byte == pytest.approx(1.5e-4)
    assert rates.costs().seconds_per_memory_byte == pytest.approx(6e-5)


def test_a_measurement_of_no_time_is_not_taken_for_not_known() -> None:
    rates = Rates()
    rates.computed(layer_tokens=100, index_entries=0, seconds=0.0)
    rates.fetched(first_seconds=0.0, rest_seconds=0.0, rest_bytes=0, from_memory=True)
    assert rates.costs().seconds_per_layer_token > 0.0
    assert rates.costs().seconds_per_fetch > 0.0
    assert rates.costs().seconds_per_memory_byte == 0.0


def test_reports_add_up_and_keep_the_first_failure() -> None:
    first = StoreReport(blocks_stored=1, blocks_failed=2, bytes_stored=10)
    second = StoreReport(blocks_stored=3, blocks_pending=4, failure="UNAVAILABLE: gone")
    both = first.plus(second).plus(StoreReport(failure="later"))
    assert both == StoreReport(
        blocks_stored=4, blocks_failed=2, blocks_pending=4, bytes_stored=10, failure="UNAVAILABLE: gone"
    )
