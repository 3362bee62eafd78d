from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from kvstore_vllm.lane import Lane

WAIT = 10.0


class Work:
    """What a lane calls. Pieces are numbers that weigh themselves; each batch waits until it is let go."""

    def __init__(self, *, held: bool = False, **options: int) -> None:
        self.begun: list[list[int]] = []
        self.dropped: list[int] = []
        self.reached = threading.Semaphore(0)
        self.gate = threading.Event()
        if not held:
            self.gate.set()
        self.lane: Lane[int] = Lane("test", self._work, self.dropped.extend, weigh=int, **options)

    def _work(self, pieces: Sequence[int]) -> None:
        self.begun.append(list(pieces))
        self.reached.release()
        assert self.gate.wait(WAIT)
        if 13 in pieces:
            raise RuntimeError("an error that nobody expected")

    def wait_begun(self) -> None:
        assert self.reached.acquire(timeout=WAIT)


def test_who_offers_never_waits_and_is_refused_past_the_limit() -> None:
    work = Work(held=True, most_weight=10)
    assert work.lane.offer(4)
    work.wait_begun()
    assert [work.lane.offer(piece) for piece in (6, 3, 2, 1)] == [True, True, False, True]
    assert not work.lane.wait_idle(0)
    work.gate.set()
    assert work.lane.wait_idle(WAIT)
    assert sorted(piece for batch in work.begun for piece in batch) == [1, 3, 4, 6]
    assert work.lane.close(WAIT)
    assert not work.lane.offer(1)


def test_pieces_that_wait_are_worked_on_together_up_to_a_weight() -> None:
    work = Work(held=True, most_weight=100, batch_weight=5)
    work.lane.offer(1)
    work.wait_begun()
    for piece in (2, 3, 1, 9, 4):
        assert work.lane.offer(piece)
    work.gate.set()
    assert work.lane.wait_idle(WAIT)
    assert work.begun == [[1], [2, 3], [1], [9], [4]]
    work.lane.close(WAIT)


def test_cancelled_pieces_are_told_of_and_what_has_begun_ends() -> None:
    work = Work(held=True, most_weight=10)
    work.lane.offer(1)
    work.wait_begun()
    work.lane.offer(2)
    work.lane.cancel()
    assert work.dropped == [2]
    assert not work.lane.wait_idle(0)
    work.gate.set()
    assert work.lane.wait_idle(WAIT)
    work.lane.offer(3)
    assert work.lane.close(WAIT)
    assert sorted([*work.dropped, *(piece for batch in work.begun for piece in batch)]) == [1, 2, 3]


def test_closing_says_whether_a_thread_is_left() -> None:
    work = Work(held=True, most_weight=10)
    work.lane.offer(1)
    work.wait_begun()
    assert not work.lane.close(0.01)
    work.gate.set()
    assert work.lane.close(WAIT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_unexpected_error_leaves_nobody_waiting() -> None:
    work = Work(held=True, most_weight=100)
    work.lane.offer(13)
    work.wait_begun()
    work.lane.offer(5)
    work.gate.set()
    assert work.lane.wait_idle(WAIT)
    assert work.lane.close(WAIT)
    assert work.dropped == [5]
    assert not work.lane.offer(1)
