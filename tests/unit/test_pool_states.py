from __future__ import annotations

import random

import pytest

from kvstore.errors import InvalidArgument
from kvstore.pool import PooledState, StatePool
from kvstore.types import BlockKey, Checks, Lineage, NamespaceDigest

ONE, TWO = NamespaceDigest(b"1" * 32), NamespaceDigest(b"2" * 32)
TTL = 60.0


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "little"))


def state(length: int = 10, position: int = 32, lineage: Lineage = Lineage.EXACT) -> PooledState:
    return PooledState(bytes(length), position, lineage, Checks(length))


def pool_of(budget: int = 30) -> StatePool:
    return StatePool(budget, TTL)


def held(pool: StatePool, now: float, numbers: range = range(40)) -> list[int]:
    pool.check_integrity()
    return [number for number in numbers if not pool.lacks(ONE, key(number), Lineage.BOUNDED, now=now)]


def test_the_least_recently_used_state_leaves_first() -> None:
    pool = pool_of()
    for number in (1, 2, 3):
        assert pool.put(ONE, key(number), state(), now=number)
    assert pool.get(ONE, key(1), now=4.0) is not None
    assert pool.put(ONE, key(4), state(), now=5.0)
    assert held(pool, 5.0) == [1, 3, 4]
    assert pool.statistics().evicted == 1


def test_the_budget_is_never_exceeded_and_what_cannot_fit_evicts_nothing() -> None:
    pool = pool_of()
    for number in (1, 2, 3):
        pool.put(ONE, key(number), state(), now=1.0)
    assert not pool.put(ONE, key(9), state(31), now=2.0)
    assert held(pool, 2.0) == [1, 2, 3]
    assert pool.statistics().refused == 1
    assert pool.put(ONE, key(9), state(30), now=2.0)
    assert held(pool, 2.0) == [9]


def test_pinned_states_are_neither_evicted_nor_expired() -> None:
    pool = pool_of()
    for number in (1, 2, 3):
        pool.put(ONE, key(number), state(), now=0.0)
    pins = [pool.pin(ONE, key(number), now=1.0) for number in (1, 2, 1)]
    assert not pool.put(ONE, key(4), state(11), now=2.0), "only ten bytes may be evicted"
    assert held(pool, 2.0) == [1, 2, 3]
    assert pool.expire(1000.0) == 1
    assert held(pool, 1000.0) == [1, 2]
    for pin in pins:
        assert pin is not None
        pool.unpin(pin, now=1000.0)
    assert held(pool, 1000.0 + TTL - 1) == [1, 2], "an unpinned state lives on from its last use"
    assert pool.expire(1000.0 + TTL) == 2
    assert pool.statistics().bytes == pool.statistics().pinned == 0


def test_a_smaller_budget_evicts_at_once_but_for_what_is_pinned_which_goes_when_it_is_not() -> None:
    pool = pool_of()
    for number in (1, 2, 3):
        pool.put(ONE, key(number), state(), now=0.0)
    pin = pool.pin(ONE, key(1), now=1.0)
    assert pin is not None
    pool.resize(5)
    assert held(pool, 2.0) == [1]
    assert not pool.put(ONE, key(4), state(1), now=2.0), "what is pinned is more than there is"
    pool.unpin(pin, now=3.0)
    assert held(pool, 3.0) == []
    pool.resize(30)
    assert pool.put(ONE, key(4), state(30), now=4.0)
    assert held(pool, 4.0) == [4]


def test_a_pin_of_a_removed_state_harms_no_later_state_under_its_key() -> None:
    pool = pool_of()
    pool.put(ONE, key(1), state(), now=0.0)
    old = pool.pin(ONE, key(1), now=0.0)
    assert old is not None
    assert pool.remove(ONE, key(1))
    pool.put(ONE, key(1), state(), now=0.0)
    new = pool.pin(ONE, key(1), now=0.0)
    assert new is not None
    assert pool.pinned(old) is None
    pool.unpin(old, now=0.0)
    assert pool.statistics().pinned == 1
    assert pool.pinned(new) is not None


def test_a_state_lives_its_time_since_its_last_use() -> None:
    pool = pool_of()
    pool.put(ONE, key(1), state(), now=0.0)
    pool.put(ONE, key(2), state(), now=0.0)
    assert pool.get(ONE, key(1), now=TTL - 1) is not None
    assert pool.lacks(ONE, key(2), Lineage.BOUNDED, now=TTL)
    assert pool.get(ONE, key(2), now=TTL) is None
    assert pool.pin(ONE, key(2), now=TTL) is None
    assert pool.expire(TTL) == 1
    assert held(pool, TTL) == [1]


def test_an_idle_branch_keeps_a_boundary_while_a_busy_one_asks_for_more() -> None:
    pool = pool_of(30)
    pool.put(ONE, key(1), state(), now=1.0)
    pool.put(ONE, key(2), state(), now=2.0, after=key(1))
    for number in range(11, 19):
        pool.put(ONE, key(number), state(), now=float(number), after=key(number - 1) if number > 11 else None)
        assert 2 in held(pool, float(number)), "the idle branch's last boundary stays"
    assert held(pool, 20.0) == [2, 17, 18]


def test_a_branch_point_ranks_with_the_last_boundaries() -> None:
    pool = pool_of(50)
    pool.put(ONE, key(1), state(), now=1.0)
    pool.put(ONE, key(2), state(), now=2.0, after=key(1))
    pool.put(ONE, key(3), state(), now=3.0, after=key(1))
    pool.put(ONE, key(4), state(), now=4.0, after=key(3))
    pool.put(ONE, key(5), state(), now=5.0, after=key(4))
    pool.put(ONE, key(6), state(), now=6.0)
    assert held(pool, 6.0) == [1, 2, 4, 5, 6], "3 was passed by 4; 1 has two branches"


def test_the_first_writer_wins_but_exact_replaces_bounded_that_nobody_pins() -> None:
    pool = pool_of()
    pool.put(ONE, key(1), state(lineage=Lineage.BOUNDED), now=0.0)
    pin = pool.pin(ONE, key(1), now=0.0)
    assert pin is not None
    assert pool.put(ONE, key(1), state(5), now=0.0)
    assert pool.pinned(pin).lineage is Lineage.BOUNDED  # type: ignore[union-attr]
    pool.unpin(pin, now=0.0)
    assert pool.put(ONE, key(1), state(5), now=0.0)
    found = pool.get(ONE, key(1), now=0.0)
    assert found is not None
    assert (found.lineage, found.length) == (Lineage.EXACT, 5)
    assert pool.put(ONE, key(1), state(7, lineage=Lineage.BOUNDED), now=0.0)
    assert pool.get(ONE, key(1), now=0.0) is found
    assert pool.statistics().bytes == 5


def test_a_refused_exact_state_leaves_the_bounded_one() -> None:
    pool = pool_of()
    pool.put(ONE, key(1), state(lineage=Lineage.BOUNDED), now=0.0)
    assert not pool.put(ONE, key(1), state(31), now=0.0)
    assert held(pool, 0.0) == [1]


def test_namespaces_share_nothing() -> None:
    pool = pool_of()
    pool.put(ONE, key(1), state(), now=0.0)
    assert pool.get(TWO, key(1), now=0.0) is None
    assert not pool.remove(TWO, key(1))
    pool.put(TWO, key(1), state(), now=0.0)
    assert pool.clear(TWO) == (1, 0)
    assert held(pool, 0.0) == [1]


def test_clear_spares_pinned_states_only_when_asked_to() -> None:
    pool = pool_of()
    pool.put(ONE, key(1), state(), now=0.0)
    pool.put(TWO, key(2), state(), now=0.0)
    pin = pool.pin(ONE, key(1), now=0.0)
    assert pin is not None
    assert pool.clear(spare_pinned=True) == (1, 1)
    assert pool.clear() == (1, 0)
    assert pool.pinned(pin) is None
    pool.unpin(pin, now=0.0)
    assert pool.statistics().bytes == 0
    pool.check_integrity()


@pytest.mark.parametrize("few", [True, False])
def test_states_along_a_prompt(few: bool) -> None:
    pool = StatePool(10_000, TTL)
    keys = [key(number) for number in range(20)]
    for number in (3, 7, 19):
        pool.put(ONE, keys[number], state(position=32 * (number + 1)), now=0.0)
    pool.put(ONE, keys[5], state(position=32 * 6, lineage=Lineage.BOUNDED), now=0.0)
    for number in range(100, 105 if few else 150):
        pool.put(ONE, key(number), state(position=32 * (number - 90)), now=0.0)
    found = pool.held_along(ONE, keys[:10], block_tokens=32, now=0.0)
    assert found == [(3, Lineage.EXACT), (5, Lineage.BOUNDED), (7, Lineage.EXACT)]
    assert pool.held_along(ONE, keys, block_tokens=32, now=TTL) == []
    assert pool.held_along(TWO, keys, block_tokens=32, now=0.0) == []


@pytest.mark.parametrize(("budget", "ttl"), [(-1, 1.0), (1, 0.0), (1, float("nan"))])
def test_bad_settings_are_refused(budget: int, ttl: float) -> None:
    with pytest.raises(InvalidArgument):
        StatePool(budget, ttl)


@pytest.mark.parametrize("seed", range(8))
def test_any_sequence_keeps_budget_pins_and_books(seed: int) -> None:
    rng = random.Random(seed)
    pool, pins, now, budget = StatePool(100, TTL), list[tuple[int, object]](), 0.0, 100
    for _ in range(400):
        now += rng.random() * 5
        number = rng.randrange(30)
        choice = rng.randrange(8)
        if choice <= 2:
            pool.put(
                ONE,
                key(number),
                state(rng.randint(1, 40)),
                now=now,
                after=rng.choice([None, key(rng.randrange(30))]),
            )
        elif choice == 3 and (pin := pool.pin(ONE, key(number), now=now)) is not None:
            pins.append((number, pin))
        elif choice == 4 and pins:
            pool.unpin(pins.pop(rng.randrange(len(pins)))[1], now=now)  # type: ignore[arg-type]
        elif choice == 5:
            pool.expire(now)
        elif choice == 7:
            budget = rng.choice([0, 50, 100])
            pool.resize(budget)
        elif choice == 6 and rng.random() < 0.2:
            gone = rng.choice(range(30))
            pool.remove(ONE, key(gone))
            pins = [each for each in pins if each[0] != gone]
        pool.check_integrity()
        assert pool.statistics().bytes <= max(budget, pool.statistics().pinned_bytes)
        assert all(pool.pinned(pin) is not None for _, pin in pins), f"seed {seed}"  # type: ignore[arg-type]


def test_a_use_that_is_told_late_ranks_where_it_is_told() -> None:
    pool = pool_of()
    pool.put(ONE, key(1), state(), now=1.0)
    pin = pool.pin(ONE, key(1), now=1.0)
    assert pin is not None
    pool.put(ONE, key(2), state(), now=3.0)
    pool.unpin(pin, now=2.0)
    assert held(pool, 3.0) == [1, 2]
    assert pool.expire(2.0 + TTL) == 0
    assert pool.expire(3.0 + TTL) == 2
