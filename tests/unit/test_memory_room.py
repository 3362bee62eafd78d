"""Extents of few large slots, which are as large as all of them and the page of their generations."""

from __future__ import annotations

import pytest

from kvstore.memory import BlockCache, why_not_mapped
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
