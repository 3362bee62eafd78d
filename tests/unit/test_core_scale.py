"""Large calls cost what their items cost, and not the square of it."""

from __future__ import annotations

import pytest

from kvstore.core import Limits, ReserveItem, ReserveOutcome
from kvstore.errors import LimitExceeded
from kvstore.types import ItemKind, Lineage
from tests.support.core import TINY, B, CoreRig

COUNT = 20_000


@pytest.mark.timeout(60)
def test_states_on_blocks_of_another_large_reservation_are_decided_one_by_one() -> None:
    rig = CoreRig()
    keys = rig.keys(range(COUNT * B))
    states = [rig.state_item(keys, (i + 1) * B, pool=True, ssd=False) for i in range(COUNT)]
    for items in (rig.block_items(keys), states):
        result = rig.reserve(items)
        assert {each.outcome for each in result.outcomes} == {ReserveOutcome.GRANTED}


def test_leases_are_walked_once_for_a_chain_that_exact_bytes_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = CoreRig()
    tokens = range(300 * B)
    keys = rig.store(tokens, lineage=Lineage.BOUNDED)
    assert rig.lookup(keys[:2], 2 * B + 1, exact_only=False).lease_id is not None
    leases = rig.core._live.leases
    covers, walked = leases.covers, []

    def counted(slot: int, number: int) -> bool:
        walked.append(number)
        return covers(slot, number)

    monkeypatch.setattr(leases, "covers", counted)
    rig.store(tokens)
    assert rig.core.statistics().bounded_blocks == 2
    assert sorted(set(walked)) == [0, 1, 2]
    rig.core.check_integrity()


def test_items_of_all_reservations_together_are_bounded_and_room_comes_back() -> None:
    rig = CoreRig(limits=Limits(reserved_items_in_all=5))

    def reserve(session: str, *, first: int, count: int) -> int | None:
        items = [
            ReserveItem(key, ItemKind.BLOCK, rig.main, B, TINY.block_bytes)
            for seed in range(first, first + count)
            for key in rig.keys([seed] * B)
        ]
        return rig.core.reserve(session, rig.main, items, **rig.now).reservation_id

    held = reserve("one", first=0, count=3)
    reserve("two", first=3, count=2)
    with pytest.raises(LimitExceeded, match="reserved_items_in_all=6"):
        reserve("two", first=5, count=1)
    assert held is not None
    rig.core.abort(held, "one")
    assert reserve("two", first=5, count=3) is not None
