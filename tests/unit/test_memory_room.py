"""Who has room in the block cache: how large extents are, which of them are given up, and which are not."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Sequence

import pytest

from kvstore.memory import BlockCache, Extent, Slot, why_not_mapped
from kvstore.memory.cache import SLOTS_MIN
from kvstore.memory.extent import PAGE

pytestmark = pytest.mark.skipif(bool(why_not_mapped()), reason=why_not_mapped() or "it is mapped")


@pytest.mark.parametrize("slot_bytes", [PAGE, 100 * PAGE])
def test_slots_that_are_large_for_an_extent_are_given_while_the_budget_holds_the_fewest(
    slot_bytes: int,
) -> None:
    room = PAGE + SLOTS_MIN * slot_bytes
    for budget, given in ((room - 1, 0), (room, SLOTS_MIN), (3 * room, 3 * SLOTS_MIN)):
        cache = BlockCache(budget, extent_bytes=PAGE)
        slots = [cache.begin("", (1, number, 1), room_bytes=slot_bytes) for number in range(20)]
        assert sum(slot is not None for slot in slots) == given
        assert cache.allocated_bytes <= budget
        cache.check()


def put(cache: BlockCache, domain: str, count: int, *, size: int = PAGE, first: int = 0) -> list[Slot]:
    """Payloads that nobody pins, in slots of their own, as far as there is room."""
    slots = []
    for number in range(first, first + count):
        slot = cache.begin(domain, (ord(domain[0]), number, size), room_bytes=size)
        if slot is not None:
            cache.finish(slot, begin=0, length=size)
            cache.unpin([slot])
            slots.append(slot)
    return slots


def in_memory(cache: BlockCache, domain: str, count: int, *, size: int = PAGE) -> int:
    slots = [cache.find(domain, (ord(domain[0]), number, size)) for number in range(count)]
    cache.unpin(slot for slot in slots if slot is not None)
    return sum(slot is not None for slot in slots)


def extents_of(slots: Sequence[Slot]) -> list[Extent]:
    return list(dict.fromkeys(slot.extent for slot in slots))


# ---- what writers fill -----------------------------------------------------------------------------------------------


def begun(cache: BlockCache, domain: str, sizes: Sequence[int]) -> list[Slot]:
    """Slots that a writer has begun and does not fill, one of each size."""
    slots = [
        cache.begin(domain, (900 + ord(domain), number, size), room_bytes=size, for_writer=True)
        for number, size in enumerate(sizes)
    ]
    cache.check()
    return [slot for slot in slots if slot is not None]


def test_a_few_slots_that_a_writer_begins_do_not_keep_all_of_the_cache_from_others() -> None:
    cache = BlockCache(16 * 16 * PAGE, extent_bytes=16 * PAGE)
    put(cache, "a", 16 * 15)
    sizes = [pages * PAGE for pages in (1, 2, 3)]
    slots = [slot for domain in "bcdefg" for slot in begun(cache, domain, sizes)]
    assert 4 <= len(slots) <= 8, "each keeps an extent, and half of all is for those that end when we say so"
    put(cache, "a", 16 * 15)
    assert in_memory(cache, "a", 16 * 15) >= 15 * 7
    for slot in slots[::2]:
        cache.abandon(slot)
    for slot in slots[1::2]:
        cache.finish(slot, begin=0, length=PAGE)
        cache.unpin([slot])
    cache.check()
    put(cache, "a", 16 * 15)
    assert in_memory(cache, "a", 16 * 15) >= 15 * 15
    assert len(begun(cache, "b", [PAGE])) == 1


def test_a_writer_that_is_alone_has_all_of_the_cache() -> None:
    cache = BlockCache(16 * 16 * PAGE, extent_bytes=16 * PAGE)
    assert len(begun(cache, "a", [PAGE] * 1000)) == 16 * 15


# ---- what sessions have ---------------------------------------------------------------------------------------------


def test_an_extent_that_a_session_has_is_not_given_up_until_the_last_of_them_ends() -> None:
    cache = BlockCache(16 * 16 * PAGE, extent_bytes=16 * PAGE)
    mine = put(cache, "a", 16 * 15)
    assert len(mine) == 16 * 15
    for _ in range(2):
        for extent in extents_of(mine):
            cache.give(extent)
    assert put(cache, "b", 20) == []
    assert put(cache, "a", 20, size=3 * PAGE) == []
    cache.check()
    cache.take_back(extents_of(mine))
    assert put(cache, "b", 20) == []
    assert in_memory(cache, "a", 16 * 15) == 16 * 15
    cache.take_back(extents_of(mine))
    assert len(put(cache, "b", 20)) == 20
    cache.check()


def test_what_a_session_has_and_does_not_pin_goes_for_others_of_its_shelf() -> None:
    cache = BlockCache(16 * PAGE, extent_bytes=16 * PAGE)
    mine = put(cache, "a", 15)
    cache.give(mine[0].extent)
    generations = [slot.generation for slot in mine]
    assert len(put(cache, "a", 15, first=15)) == 15
    assert all(slot.generation != generation for slot, generation in zip(mine, generations, strict=True))
    cache.check()


def test_what_is_given_up_leaves_neither_memory_nor_descriptors_at_once() -> None:
    cache = BlockCache(16 * PAGE, extent_bytes=16 * PAGE)

    def files() -> int:
        return len(os.listdir("/proc/self/fd"))

    mine = put(cache, "a", 3)
    before = files()
    gc.disable()
    try:
        for domain in "bcdefg":
            assert put(cache, domain, 3)
            assert files() == before
    finally:
        gc.enable()
    assert mine[0].extent.descriptor == -1


# ---- what is given up, and what for ---------------------------------------------------------------------------------


@pytest.mark.parametrize("pages", [640, 1024, 4096])
def test_what_can_never_fit_costs_nobody_anything(pages: int) -> None:
    cache = BlockCache(8 << 20, extent_bytes=512 << 10)
    count = len(put(cache, "a", 1900))
    for number in range(40):
        assert cache.begin("b", (2, number, 1), room_bytes=pages * PAGE) is None
    assert cache.evicted_total == 0
    assert in_memory(cache, "a", 1900) == count
    assert cache.refused_total >= 40
    cache.check()


def test_what_does_not_fit_beside_what_is_pinned_costs_nobody_anything() -> None:
    cache = BlockCache(64 * PAGE, extent_bytes=16 * PAGE)
    mine = put(cache, "a", 60)
    # Two of four extents: not enough for four slots of ten pages.
    cache.pin([mine[0], mine[20]])
    for number in range(20):
        assert cache.begin("b", (2, number, 1), room_bytes=10 * PAGE) is None
    assert in_memory(cache, "a", 60) == 60
    cache.unpin([mine[20]])
    assert cache.begin("b", (2, 99, 1), room_bytes=10 * PAGE) is not None
    assert in_memory(cache, "a", 60) == 15
    cache.check()


def test_as_many_extents_are_given_up_as_are_needed_the_longest_unused_first() -> None:
    cache = BlockCache(64 * PAGE, extent_bytes=16 * PAGE)
    mine = put(cache, "a", 60)
    first, second, third, fourth = extents_of(mine)
    slot = next(slot for slot in mine if slot.extent is first)
    cache.pin([slot])
    cache.unpin([slot])
    assert cache.begin("b", (2, 1, 1), room_bytes=6 * PAGE) is not None
    assert [extent.descriptor >= 0 for extent in (first, second, third, fourth)] == [True, False, False, True]
    cache.check()


def test_a_shelf_that_others_have_used_since_takes_from_its_own_oldest() -> None:
    cache = BlockCache(32 * PAGE, extent_bytes=16 * PAGE)
    mine = put(cache, "a", 15)
    theirs = put(cache, "b", 15)
    assert len(put(cache, "a", 1, first=15)) == 1
    assert in_memory(cache, "b", 15) == 15
    assert in_memory(cache, "a", 16) == 15
    cache.pin(mine[5:6])
    cache.unpin(mine[5:6])
    # And now those have used nothing since the oldest here was used.
    assert len(put(cache, "a", 40, first=16)) == 40
    assert theirs[0].extent.descriptor == -1
    cache.check()


def test_nothing_is_kept_of_domains_that_have_no_memory_any_more() -> None:
    cache = BlockCache(64 * PAGE, extent_bytes=16 * PAGE)
    for number in range(300):
        slot = cache.begin(f"domain {number}", (1, number, 1), room_bytes=1)
        assert slot is not None
        cache.finish(slot, begin=0, length=1)
        cache.unpin([slot])
        assert len(cache._shelves) <= 4
    held = [cache.begin(f"pinned {number}", (2, number, 1), room_bytes=1) for number in range(4)]
    assert None not in held
    for number in range(300):
        assert cache.begin(f"refused {number}", (3, number, 1), room_bytes=1) is None
    assert len(cache._shelves) == 4
    cache.check()


def test_a_miss_costs_no_more_after_many_tenants_than_after_few() -> None:
    def seconds(tenants: int) -> float:
        cache = BlockCache(4 << 20, extent_bytes=256 << 10)
        for number in range(tenants):
            put(cache, chr(1000 + number), 1)
        put(cache, "busy", 2000)
        taken = []
        for turn in range(1, 8):
            begin = time.thread_time()
            put(cache, "busy", 200, first=2000 * turn)
            taken.append(time.thread_time() - begin)
        return min(taken)

    # What it is for one that looks at all tenants is hundreds of times.
    assert seconds(4000) < 10 * seconds(10)


def test_a_smaller_budget_takes_what_is_used_longest_ago_and_the_rest_when_it_may_go() -> None:
    room = PAGE + SLOTS_MIN * PAGE
    cache = BlockCache(4 * room, extent_bytes=room)
    for domain in "abcd":
        assert len(put(cache, domain, SLOTS_MIN)) == SLOTS_MIN
    read, given = (cache.find(domain, (ord(domain), 0, PAGE)) for domain in "ab")
    assert read is not None
    assert given is not None
    cache.give(given.extent)
    cache.unpin([given])
    cache.resize(3 * room)
    assert [in_memory(cache, domain, SLOTS_MIN) for domain in "cd"] == [0, SLOTS_MIN]
    cache.resize(room)
    assert cache.allocated_bytes == 2 * room, "one is read, one is a session's"
    assert in_memory(cache, "d", SLOTS_MIN) == 0
    assert put(cache, "d", 1) == [], "and nothing comes in their place"
    cache.check()
    cache.take_back([given.extent])
    assert cache.allocated_bytes == room
    cache.resize(0)
    cache.unpin([read])
    assert cache.allocated_bytes == 0
    cache.resize(4 * room)
    assert len(put(cache, "e", 4 * SLOTS_MIN)) == 4 * SLOTS_MIN
    cache.check()
