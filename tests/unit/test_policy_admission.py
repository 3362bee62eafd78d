from __future__ import annotations

from kvstore.policy.admission import SecondSight


def test_a_block_is_admitted_when_it_is_asked_for_again() -> None:
    sight = SecondSight()
    assert sight.admit([1, 2, 3]) == 0
    assert sight.admit([1, 2, 4]) == 2
    # Those two were stored; when they have left they are strangers again.
    assert sight.admit([1, 2, 4]) == 0


def test_no_block_is_admitted_below_one_that_is_not() -> None:
    sight = SecondSight()
    sight.admit([7])
    sight.admit([8])
    assert sight.admit([1, 7, 8]) == 0
    assert sight.admit([7, 2, 8]) == 1


def test_the_oldest_are_forgotten() -> None:
    sight = SecondSight(most=3)
    sight.admit([1, 2, 3, 4])
    assert sight.admit([1]) == 0
    assert sight.admit([3, 4]) == 2
    assert sight.memory_bytes() <= SecondSight().memory_bytes() + 3 * 200
