"""Large calls cost what their items cost, and not the square of it."""

from __future__ import annotations

import pytest

from kvstore.core import ReserveItem, ReserveOutcome
from kvstore.types import ItemKind
from tests.support.core import TINY, B, CoreRig

COUNT = 20_000


@pytest.mark.timeout(60)
def test_states_on_blocks_of_another_large_reservation_are_decided_one_by_one() -> None:
    rig = CoreRig()
    keys = rig.keys([i % 50_000 for i in range(COUNT * B)])
    parents = [rig.main, *keys[:-1]]
    blocks = [
        ReserveItem(key, ItemKind.BLOCK, parent, (i + 1) * B, TINY.block_bytes)
        for i, (key, parent) in enumerate(zip(keys, parents, strict=True))
    ]
    states = [
        ReserveItem(key, ItemKind.STATE, b"", (i + 1) * B, TINY.state_bytes, to_pool=True, to_ssd=False)
        for i, key in enumerate(keys)
    ]
    for items in (blocks, states):
        result = rig.core.reserve("writer", rig.main, items, **rig.now)
        assert {each.outcome for each in result.outcomes} == {ReserveOutcome.GRANTED}
