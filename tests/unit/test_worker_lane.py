"""One thread, one request after another, and the streams that carry events out of it."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator

import pytest

from kvstore.errors import Draining, LimitExceeded, Unavailable
from kvstore_workers.runtime.lane import Lane
from kvstore_workers.runtime.room import Room
from kvstore_workers.runtime.stop import Stop, Stopped

SECONDS = 10.0


@pytest.fixture
def lane() -> Iterator[Lane]:
    lane = Lane(events_max=2, reader_seconds=0.2)
    yield lane
    lane.close()


class Gate:
    """Work that yields 1, then waits to be let through, then yields 2. Notes how it ended."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.open = threading.Event()
        self.ended = threading.Event()
        self.thread = ""

    def __call__(self, stop: Stop) -> Generator[int, None, None]:
        self.thread = threading.current_thread().name
        try:
            yield 1
            self.began.set()
            assert self.open.wait(SECONDS)
            stop.check()
            yield 2
        finally:
            self.ended.set()


def _count(stop: Stop) -> Generator[int, None, None]:
    yield from range(5)


def test_events_come_in_order_and_end(lane: Lane) -> None:
    assert list(lane.run(_count)) == [0, 1, 2, 3, 4]


def test_all_work_runs_in_one_thread(lane: Lane) -> None:
    names = set()
    for _ in range(3):
        gate = Gate()
        gate.open.set()
        assert list(lane.run(gate)) == [1, 2]
        names.add(gate.thread)
    names.add(lane.call(lambda: threading.current_thread().name))
    assert len(names) == 1
    assert names != {threading.current_thread().name}


def test_a_request_past_the_room_s_limit_is_refused_at_once_and_one_that_left_makes_room() -> None:
    room = Room(2, what="worker")
    with room:
        with room:
            assert room.inside == 2
            with (
                pytest.raises(
                    LimitExceeded, match="this worker is busy; requests_running=2; allowed: at most 2"
                ),
                room,
            ):
                pytest.fail("the third one got in")
        assert room.inside == 1
        with room:
            assert room.inside == 2
    assert room.inside == 0


def test_a_request_that_fails_leaves_the_room() -> None:
    room = Room(1, what="worker")
    with pytest.raises(Unavailable), room:
        raise Unavailable("gone")
    assert room.inside == 0


def test_what_the_work_raises_comes_out_of_the_stream_after_its_events(lane: Lane) -> None:
    def fail(stop: Stop) -> Generator[int, None, None]:
        yield 1
        raise Unavailable("gone")

    events = iter(lane.run(fail))
    assert next(events) == 1
    with pytest.raises(Unavailable, match="gone"):
        next(events)
    assert list(lane.run(_count)) == [0, 1, 2, 3, 4]


def test_cancelling_ends_running_work_at_its_next_step(lane: Lane) -> None:
    gate = Gate()
    stream = lane.run(gate)
    assert gate.began.wait(SECONDS)
    stream.cancel()
    gate.open.set()
    with pytest.raises(Stopped):
        list(stream)
    assert gate.ended.wait(SECONDS)
    assert list(lane.run(_count)) == [0, 1, 2, 3, 4]


def test_work_that_is_cancelled_while_it_waits_never_begins(lane: Lane) -> None:
    gate, waiting = Gate(), Gate()
    first, second = lane.run(gate), lane.run(waiting)
    second.cancel()
    gate.open.set()
    assert list(first) == [1, 2]
    with pytest.raises(Stopped):
        list(second)
    lane.close()
    assert waiting.thread == ""


def test_a_reader_that_takes_nothing_does_not_hold_up_the_others(lane: Lane) -> None:
    stuck = lane.run(_count)
    assert list(lane.run(_count)) == [0, 1, 2, 3, 4]
    with pytest.raises(LimitExceeded, match="takes no events"):
        list(stuck)


def test_a_draining_lane_finishes_what_it_took_and_takes_no_more(lane: Lane) -> None:
    gate = Gate()
    stream = lane.run(gate)
    lane.drain()
    with pytest.raises(Draining):
        lane.run(_count)
    gate.open.set()
    assert list(stream) == [1, 2]
