"""The tier without an engine: the calls of one scheduler in the orders in which vLLM makes them, over a store that a test holds."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from kvstore.clock import ManualClock
from kvstore.errors import LimitExceeded, Unavailable
from kvstore_vllm.figures import FIGURES
from kvstore_vllm.identity import opaque_key
from kvstore_vllm.lookups import Verdict
from kvstore_vllm.rows import Finished, RowTier
from kvstore_vllm.settings import TierSettings
from tests.support.row_store import WAIT, HeldStore

ROW = 64
ROWS = 32
HIT, MISS, LATER = Verdict.HIT, Verdict.MISS, Verdict.LATER


def key(number: int, group: int = 0) -> bytes:
    return b"hash%04d" % number + group.to_bytes(4, "big")


class Rig:
    def __init__(self, **settings: Any) -> None:
        self.store = HeldStore()
        self.clock = ManualClock()
        self.pool = bytearray(ROW * ROWS)
        self.view = memoryview(self.pool)
        self.closed = 0
        self.tier = RowTier(
            self.store,
            self.view,
            row_bytes=ROW,
            settings=TierSettings(address="/nowhere", **settings),
            clock=self.clock,
            close=self._close,
        )

    def _close(self) -> None:
        self.closed += 1
        self.store.let_go()

    def fill(self, row: int, number: int) -> bytes:
        data = bytes([number]) * ROW
        self.pool[row * ROW : (row + 1) * ROW] = data
        return data

    def row(self, number: int) -> bytes:
        return bytes(self.pool[number * ROW : (number + 1) * ROW])

    def step(self) -> None:
        """A step's end, and the time that the model takes: what was asked is answered."""
        self.tier.step_ended()
        assert self.tier._asking.wait_idle(WAIT)

    def look(self, *numbers: int, request: str = "r") -> list[Verdict]:
        return [self.tier.lookup(key(number), request) for number in numbers]

    def ended(self) -> list[Finished]:
        """All jobs, as soon as none is under way."""
        assert self.tier._loading.wait_idle(WAIT)
        assert self.tier._storing.wait_idle(WAIT)
        return self.tier.finished()

    def keep(self, *numbers: int) -> None:
        for number in numbers:
            self.store.kept[opaque_key(key(number))] = bytes([number]) * ROW


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.store.let_go()
    made.tier.shutdown()


# ---- the orders of calls that were recorded -----------------------------------------------------------------


def test_cold_then_stored(rig: Rig) -> None:
    """Each step looks a request's keys up anew until none is RETRY; rows are stored when the model has run."""
    assert rig.look(1, 2, 3) == [LATER] * 3
    assert rig.tier.has_work
    rig.step()
    assert rig.look(1) == [MISS]
    filled = [rig.fill(row, number) for row, number in ((4, 1), (9, 2), (2, 3))]
    rig.tier.touch([key(1), key(2), key(3)])
    rig.tier.store(0, [key(1), key(2), key(3)], [4, 9, 2])
    assert rig.tier.has_work
    rig.tier.request_ended("r")
    [done] = rig.ended()
    assert (done.job.number, done.success, list(done.done)) == (0, True, [key(1), key(2), key(3)])
    assert [rig.store.kept[opaque_key(key(number))] for number in (1, 2, 3)] == filled
    assert not rig.tier.has_work
    assert rig.tier.take_counts() == {"keys_asked": 3, "rows_stored": 3}
    assert rig.tier.take_counts() == {}


def test_warm_hits_are_loaded_into_their_rows(rig: Rig) -> None:
    rig.keep(1, 2)
    assert rig.look(1, 2, 3) == [LATER] * 3
    rig.step()
    assert rig.look(1, 2, 3) == [HIT, HIT, MISS]
    rig.tier.load(5, [key(1), key(2)], [7, 0])
    rig.tier.step_ended()
    [done] = rig.ended()
    assert (done.job.is_load, done.success) == (True, True)
    assert (rig.row(7), rig.row(0)) == (b"\1" * ROW, b"\2" * ROW)
    assert rig.tier.take_counts() == {"keys_asked": 3, "keys_held": 2, "rows_loaded": 2}


def test_a_sliding_windows_keys_are_asked_for_from_the_last_one_on(rig: Rig) -> None:
    rig.keep(8, 9)
    assert rig.look(9, 8, 7) == [LATER] * 3
    rig.step()
    assert rig.look(9, 8) == [HIT, HIT]
    assert [name for name, _ in rig.store.calls] == ["contains"], "one call for a step's keys"


def test_a_load_that_fails_in_part_says_what_came_and_the_rest_is_a_miss(rig: Rig) -> None:
    rig.keep(1, 3)
    rig.store.lost.add(opaque_key(key(2)))
    rig.look(1, 2, 3)
    rig.look(2, request="other")
    rig.step()
    assert rig.look(1, 2, 3) == [HIT] * 3
    rig.tier.load(1, [key(1), key(2), key(3)], [1, 2, 3])
    [done] = rig.ended()
    assert (done.success, list(done.done)) == (False, [key(1), key(3)])
    assert rig.look(1, 2, 3) == [HIT, MISS, HIT]
    assert rig.look(2, request="other") == [MISS]
    rig.step()
    assert rig.look(2) == [MISS], "it is not asked for again while a request that knows it lives"
    counts = rig.tier.take_counts()
    assert (counts["rows_loaded"], counts["rows_load_failed"]) == (2, 1)


def test_a_load_that_fails_altogether_is_a_miss_for_all_its_keys(rig: Rig) -> None:
    rig.keep(1, 2)
    rig.look(1, 2)
    rig.step()
    rig.look(1, 2)
    rig.store.fails = Unavailable("gone")
    rig.tier.load(1, [key(1), key(2)], [1, 2])
    [done] = rig.ended()
    assert (done.success, list(done.done)) == (False, [])
    assert rig.look(1, 2) == [MISS, MISS]
    counts = rig.tier.take_counts()
    assert (counts["rows_load_failed"], counts["calls_failed"]) == (2, 1)


# ---- nobody waits -------------------------------------------------------------------------------------------


def test_no_call_of_the_scheduler_waits_for_the_store(rig: Rig) -> None:
    rig.store.hold()
    rig.look(1, 2)
    rig.tier.step_ended()
    rig.store.wait_standing()
    rig.tier.store(0, [key(3)], [0])
    rig.tier.load(1, [key(4)], [1])
    rig.tier.touch([key(1)])
    rig.tier.step_ended()
    assert rig.look(1) == [LATER]
    assert rig.tier.finished() == []
    rig.tier.request_ended("r")
    assert rig.tier.has_work


def test_a_request_waits_for_an_answer_as_long_as_it_was_told_to(rig: Rig) -> None:
    rig.keep(1)
    rig.store.hold()
    rig.look(1)
    rig.tier.step_ended()
    rig.store.wait_standing()
    rig.clock.advance(0.9)
    assert rig.look(1) == [LATER]
    rig.clock.advance(0.1)
    assert rig.look(1) == [MISS]
    assert rig.tier.take_counts() == {"keys_late": 1}


def test_a_store_that_fails_is_a_miss_and_is_said_once_at_its_begin_and_end(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.store.fails = Unavailable("the service could not be reached")
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            rig.look(number)
            rig.step()
            assert rig.look(number) == [MISS]
        rig.tier.store(0, [key(9)], [0])
        [done] = rig.ended()
        assert not done.success
        rig.store.fails = None
        rig.keep(7)
        rig.look(7)
        rig.step()
        assert rig.look(7) == [HIT]
    said = [record.message for record in caplog.records]
    assert len(said) == 2
    assert "could not be reached" in said[0]
    assert "answers again" in said[1]
    assert rig.tier.take_counts()["rows_store_failed"] == 1


def test_past_the_limits_a_store_is_refused_and_a_load_is_a_miss() -> None:
    rig = Rig(store_rows=2, load_rows=2, load_threads=1)
    rig.keep(1, 2, 3)
    rig.look(1, 2, 3)
    rig.step()
    assert rig.look(1, 2, 3) == [HIT] * 3
    rig.store.hold()
    try:
        rig.tier.store(0, [key(10), key(11), key(12)], [0, 1, 2])
        rig.tier.load(1, [key(1), key(2), key(3)], [3, 4, 5])
        refused = rig.tier.finished()
        assert [(done.job.number, done.success, list(done.done)) for done in refused] == [
            (0, False, []),
            (1, False, []),
        ]
        assert rig.look(1, 2, 3) == [MISS] * 3
        counts = rig.tier.take_counts()
        assert (counts["rows_store_refused"], counts["rows_load_refused"]) == (3, 3)
    finally:
        rig.store.let_go()
        rig.tier.shutdown()


def test_past_the_limit_of_questions_a_key_is_a_miss() -> None:
    rig = Rig(lookup_keys=2)
    assert rig.look(1, 2, 3) == [LATER, LATER, MISS]
    rig.step()
    assert rig.tier.take_counts()["keys_refused"] == 1
    rig.tier.shutdown()


# ---- rows belong to a job until it is reported --------------------------------------------------------------


def test_a_job_is_reported_when_nothing_touches_its_rows_any_more(rig: Rig) -> None:
    rig.keep(1)
    rig.look(1)
    rig.step()
    rig.store.hold()
    rig.tier.load(1, [key(1)], [3])
    rig.store.wait_standing()
    rig.store.wait_standing()
    rig.tier.request_ended("r")
    assert rig.tier.finished() == [], "a request that ends takes no job with it"
    rig.store.let_go()
    [done] = rig.ended()
    assert done.success
    before = rig.fill(3, 99)
    assert rig.ended() == []
    assert rig.row(3) == before


def test_drain_drops_what_has_not_begun_and_waits_for_what_has() -> None:
    rig = Rig(load_threads=1)
    rig.keep(1, 2)
    rig.store.hold()
    rig.tier.load(1, [key(1)], [1])
    rig.store.wait_standing()
    rig.tier.load(2, [key(2)], [2])
    rig.tier.store(3, [key(3)], [3])
    rig.store.wait_standing()
    rig.tier.store(4, [key(4)], [4])
    before = rig.row(2)
    rig.tier._loading.cancel()
    rig.tier._storing.cancel()
    rig.store.let_go()
    rig.tier.drain()
    ended = {done.job.number: done.success for done in rig.tier.finished()}
    assert ended == {1: True, 2: False, 3: True, 4: False}
    assert rig.row(2) == before
    assert not rig.tier.has_work
    rig.tier.shutdown()


def test_at_the_end_stores_have_a_while_and_no_view_of_the_pool_is_left() -> None:
    rig = Rig(shutdown_seconds=10.0, load_threads=1)
    data = rig.fill(0, 5)
    rig.store.hold()
    rig.look(1)
    rig.tier.step_ended()
    rig.store.wait_standing()
    rig.store.let_go()
    rig.tier.store(0, [key(5)], [0])
    rig.tier.shutdown()
    assert rig.store.kept[opaque_key(key(5))] == data
    assert rig.closed == 1
    rig.view.release()
    rig.pool.clear()


def test_an_end_does_not_wait_for_a_store_that_stands_still() -> None:
    rig = Rig(shutdown_seconds=0.05)
    rig.store.hold()
    rig.tier.store(0, [key(5)], [0])
    rig.store.wait_standing()
    rig.tier.shutdown()
    assert rig.closed == 1


# ---- storing ------------------------------------------------------------------------------------------------


def test_jobs_that_wait_together_are_stored_together() -> None:
    rig = Rig(batch_bytes=4 * ROW)
    rig.store.hold()
    rig.tier.store(0, [key(0)], [0])
    rig.store.wait_standing()
    rig.tier.store(1, [key(1), key(2)], [1, 2])
    rig.tier.store(2, [key(2), key(3)], [3, 4])
    rig.tier.store(3, [key(number) for number in range(4, 10)], list(range(4, 10)))
    rig.store.let_go()
    assert [done.success for done in rig.ended()] == [True] * 4
    puts = [[each.key for each in keys] for name, keys in rig.store.calls if name == "put"]
    assert [len(keys) for keys in puts] == [1, 3, 4, 2], "one go holds at most `batch_bytes`"
    rig.tier.shutdown()


def test_a_store_that_fails_half_way_says_what_is_held() -> None:
    rig = Rig(batch_bytes=2 * ROW)
    rig.store.fails, rig.store.fails_after = LimitExceeded("staging"), 1
    rig.tier.store(0, [key(number) for number in range(4)], list(range(4)))
    [done] = rig.ended()
    assert (done.success, list(done.done)) == (False, [key(0), key(1)])
    counts = rig.tier.take_counts()
    assert (counts["rows_stored"], counts["rows_store_failed"]) == (2, 2)
    rig.tier.shutdown()


def test_what_another_engine_is_storing_is_left_to_it(rig: Rig) -> None:
    rig.store.in_flight.add(opaque_key(key(2)))
    rig.tier.store(0, [key(1), key(2)], [0, 1])
    [done] = rig.ended()
    assert (done.success, list(done.done)) == (True, [key(1)])
    assert rig.tier.take_counts() == {"rows_stored": 1}


def test_uses_are_told_with_the_steps_question(rig: Rig) -> None:
    rig.tier.touch([key(1), key(2)])
    rig.look(3)
    rig.step()
    assert [name for name, _ in rig.store.calls] == ["contains", "use"]
    rig.tier.touch([key(1), key(2)])
    rig.step()
    assert rig.store.used == [opaque_key(key(1)), opaque_key(key(2))]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_that_nobody_expected_ends_no_request(rig: Rig) -> None:
    rig.store.fails = ValueError("a bug")  # type: ignore[assignment]
    rig.look(1)
    rig.step()
    assert rig.look(1) == [MISS]
    rig.look(2)
    rig.step()
    assert rig.look(2) == [MISS]
    rig.tier.store(0, [key(1)], [0])
    rig.tier.load(1, [key(1)], [1])
    assert [done.success for done in rig.ended()] == [False, False]


def test_every_count_has_a_text(rig: Rig) -> None:
    rig.store.fails = Unavailable("gone")
    rig.look(1)
    rig.step()
    rig.look(1)
    rig.tier.store(0, [key(1)], [0])
    rig.tier.load(1, [key(1)], [1])
    rig.ended()
    assert set(rig.tier.take_counts()) <= set(FIGURES)
