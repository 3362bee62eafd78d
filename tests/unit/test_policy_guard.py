"""Whether LRU would have found more: what the guard of an order says after requests."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kvstore.policy.guard import LOSS_SHARE, SHADOW_MAX, LruGuard

HELD = 50


def serve(guard: LruGuard, chain: Sequence[int], found: int, *, held: int = HELD) -> None:
    guard.begin([mark for mark in chain[:found] if not mark & guard.mask], held)
    for mark in chain[found:]:
        if not mark & guard.mask:
            guard.bring(mark)


def warmed() -> LruGuard:
    guard = LruGuard()
    for _ in range(2 * HELD):
        guard.leave()
    serve(guard, range(10), 0)
    serve(guard, range(10), 10)
    assert guard.trusts
    return guard


def test_an_order_is_tried_when_twice_what_is_held_has_left() -> None:
    guard = LruGuard()
    for _ in range(2 * HELD - 1):
        guard.leave()
    serve(guard, [1], 0)
    serve(guard, [2], 0)
    assert not guard.trusts
    guard.leave()
    serve(guard, [3], 0)
    assert guard.trusts


def test_an_order_that_finds_less_than_lru_is_not_trusted_until_what_it_lost_is_little() -> None:
    guard = warmed()
    serve(guard, range(10), 3)
    serve(guard, range(10), 10)
    assert not guard.trusts
    served = 0
    while not guard.trusts:
        serve(guard, range(10), 10)
        served += 1
        guard.check_integrity()
    # Seven blocks are that share of as many; what is forgotten on the way makes it sooner, by a fifth.
    assert 0.7 < 10 * served / (7 / LOSS_SHARE) < 1.0


def test_an_order_that_finds_more_is_trusted() -> None:
    guard = warmed()
    for number in range(2000):
        serve(guard, range(100 * number, 100 * number + 60), 20)
        assert guard.trusts


@pytest.mark.parametrize("held", [HELD, 3 * SHADOW_MAX])
def test_what_lru_itself_finds_is_neither_ahead_nor_behind(held: int) -> None:
    """Chains of a few beginnings under LRU, touched from their ends on, beside the guard's own shadow of a sample."""
    guard, chance = LruGuard(), random.Random(5)
    order: dict[int, None] = {}
    for _ in range(2 * held):
        guard.leave()
    for number in range(600):
        first = chance.randrange(1, 40) if held == HELD else number % 7
        size = chance.randrange(1, 12) if held == HELD else 20_000
        chain = [(first * 20_000 + depth) * 2_654_435_761 % 2**32 for depth in range(size)]
        found = next((n for n, mark in enumerate(chain) if mark not in order), len(chain))
        serve(guard, chain, found, held=held)
        for mark in reversed(chain):
            order.pop(mark, None)
            order[mark] = None
        for mark in list(order)[: max(len(order) - held, 0)]:
            del order[mark]
        guard.check_integrity()
        if number > 1:
            assert guard.trusts
        if held != HELD and number == 14:
            break
    assert guard.mask == (0 if held == HELD else 3)


def test_memory_does_not_grow_with_what_is_held() -> None:
    guard = LruGuard()
    chance = random.Random(1)
    for _ in range(30):
        serve(guard, [chance.getrandbits(32) for _ in range(10_000)], 0, held=1 << 24)
    serve(guard, [], 0, held=1 << 24)
    guard.check_integrity()
    assert guard.memory_bytes() < 200 * SHADOW_MAX
