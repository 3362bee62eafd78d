"""Large calls cost what their items cost, and not the square of it."""

from __future__ import annotations

import time

import pytest

from kvstore.core import Limits, ReserveItem, ReserveOutcome
from kvstore.errors import LimitExceeded
from kvstore.types import ItemKind, Lineage, StateSource
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


def test_a_million_tokens_with_rows_of_every_block_are_looked_up_in_a_few_milliseconds() -> None:
    rig = CoreRig()
    keys = rig.keys(range(7_812 * B))
    for start in range(0, len(keys), 512):
        rig.write(rig.block_items(keys)[start : start + 512])
        rig.write([rig.rows_item(keys, at) for at in range(start, min(start + 512, len(keys)))])
    # One row that is not exact makes every other one be looked at.
    rig.write(
        [rig.rows_item(rig.store(range(1, 1 + B), lineage=Lineage.BOUNDED), 0, lineage=Lineage.BOUNDED)]
    )
    spent = []
    for _ in range(9):
        rig.clock.advance(2)
        start_at = time.thread_time()
        result = rig.lookup(keys, 7_812 * B + 1)
        spent.append(time.thread_time() - start_at)
        assert result.coverage.rows == (7_812 * B,)
        assert result.plan.state_source is StateSource.ROWS
        rig.core.release(result.lease_id or 0, "r", rig.clock.monotonic())
    # Processor time, the aim is 5 ms; a machine that runs other tests beside this one gets some room.
    assert min(spent) < 0.015, f"{min(spent) * 1e3:.2f} ms"


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
