from __future__ import annotations

import pytest

from kvstore.core import Limits, ReserveItem, ReserveOutcome
from kvstore.errors import (
    GeometryMismatch,
    InvalidArgument,
    LimitExceeded,
    UnknownNamespace,
    UnknownReservation,
)
from kvstore.types import BlockKey, ItemId, ItemKind, Lineage
from tests.support.core import TINY, B, CoreRig, checks_of

GRANTED, HELD, IN_FLIGHT, PARENT_MISSING = ReserveOutcome


@pytest.fixture
def rig() -> CoreRig:
    return CoreRig()


def outcomes(rig: CoreRig, items: list[ReserveItem], session: str = "w") -> list[ReserveOutcome]:
    return [each.outcome for each in rig.reserve(items, session=session).outcomes]


def seen(rig: CoreRig, tokens: range) -> int:
    return rig.lookup(rig.keys(tokens), len(tokens) + 1, lease=False).coverage.blocks


def test_what_is_reserved_is_invisible_until_commit_and_visible_after(rig: CoreRig) -> None:
    tokens = range(3 * B)
    made = rig.reserve(rig.block_items(rig.keys(tokens)))
    assert seen(rig, tokens) == 0
    assert made.reservation_id is not None
    assert [each.index for each in rig.core.granted(made.reservation_id, "w")] == [0, 1, 2]
    report = rig.commit(made.reservation_id)
    assert [item.key for item in report.visible] == rig.keys(tokens)
    assert report.bytes == 3 * TINY.block_bytes
    assert seen(rig, tokens) == 3
    with pytest.raises(UnknownReservation):
        rig.core.commit_list(made.reservation_id, "w")
    rig.core.check_integrity()


def test_one_writer_per_key_and_the_others_are_told_its_age(rig: CoreRig) -> None:
    items = rig.block_items(rig.keys(range(3 * B)))
    first = rig.reserve(items[:2], session="a")
    rig.clock.advance(7)
    second = rig.reserve(items, session="b")
    assert [each.outcome for each in second.outcomes] == [IN_FLIGHT, IN_FLIGHT, PARENT_MISSING]
    assert [each.owner_age_seconds for each in second.outcomes] == [7, 7, 0]
    assert second.reservation_id is None
    assert first.reservation_id is not None
    back = rig.core.abort(first.reservation_id, "a")
    assert [each.item.key for each in back] == [item.key for item in items[:2]]
    assert rig.core.abort(first.reservation_id, "a") == []
    assert outcomes(rig, items, "b") == [GRANTED] * 3
    rig.core.check_integrity()


def test_a_child_may_follow_a_parent_that_its_own_session_is_writing(rig: CoreRig) -> None:
    items = rig.block_items(rig.keys(range(4 * B)))
    first = rig.reserve(items[:2], session="a")
    assert outcomes(rig, items[2:3], "b") == [PARENT_MISSING]
    second = rig.reserve(items[2:], session="a")
    assert [each.outcome for each in second.outcomes] == [GRANTED, GRANTED]
    assert first.reservation_id is not None
    assert second.reservation_id is not None
    rig.commit(first.reservation_id, session="a")
    assert len(rig.commit(second.reservation_id, session="a").visible) == 2


def test_a_child_whose_parent_was_not_written_does_not_become_visible(rig: CoreRig) -> None:
    tokens = range(4 * B)
    keys = rig.keys(tokens)
    made = rig.reserve([*rig.block_items(keys), rig.state_item(keys, 3 * B)])
    assert made.reservation_id is not None
    report = rig.commit(made.reservation_id, without=[ItemId(keys[1], ItemKind.BLOCK)])
    assert report.visible == [ItemId(keys[0], ItemKind.BLOCK)]
    assert len(report.discard) == 3, "two blocks and a state lost their parent"
    assert rig.core.statistics().totals["parent_lost_total"] == 3
    assert outcomes(rig, rig.block_items(keys)) == [HELD, GRANTED, GRANTED, GRANTED]
    rig.core.check_integrity()


def test_a_parent_lost_to_damage_while_its_child_is_written_takes_the_child_along(rig: CoreRig) -> None:
    keys = rig.keys(range(3 * B))
    items = rig.block_items(keys)
    rig.write(items[:2])
    made = rig.reserve(items[2:])
    assert rig.evict(50) == [], "what a reservation builds on is not evicted"
    rig.core.forget(rig.main, ItemId(keys[0], ItemKind.BLOCK))
    rig.core.check_integrity()
    rig.store(range(8000, 8000 + 4 * B))
    assert made.reservation_id is not None
    report = rig.commit(made.reservation_id)
    assert (report.visible, len(report.discard)) == ([], 1)
    rig.core.check_integrity()


def test_what_a_reservation_builds_on_stays_from_when_it_is_there_until_the_reservation_ends(
    rig: CoreRig,
) -> None:
    keys = rig.keys(range(2 * B))
    items = rig.block_items(keys)
    first = rig.reserve(items[:1])
    child = rig.reserve(items[1:])
    state = rig.reserve([rig.state_item(keys, B)])
    assert first.reservation_id is not None
    assert child.reservation_id is not None
    assert state.reservation_id is not None
    rig.commit(first.reservation_id)
    for ends in (child.reservation_id, state.reservation_id):
        assert rig.evict(5) == []
        rig.core.check_integrity()
        rig.core.abort(ends, "w")
    assert rig.evict(5) == [items[0].item_id]


def test_the_block_of_a_reserved_state_stays(rig: CoreRig) -> None:
    keys = rig.store(range(2 * B))
    made = rig.reserve([rig.state_item(keys, 2 * B)])
    assert made.reservation_id is not None
    assert rig.evict(5) == []
    assert len(rig.commit(made.reservation_id).visible) == 1
    assert len(rig.evict(5)) == 3


def test_held_states_are_asked_for_by_tier(rig: CoreRig) -> None:
    keys = rig.store(range(2 * B), ssd=[B], pool=[2 * B])
    cases = [
        (rig.state_item(keys, B), HELD, None),
        (rig.state_item(keys, 2 * B, pool=True, ssd=False), HELD, None),
        (rig.state_item(keys, B, pool=True), GRANTED, (True, False)),
        (rig.state_item(keys, 2 * B, pool=True), GRANTED, (False, True)),
    ]
    for item, outcome, tiers in cases:
        made = rig.reserve([item])
        assert made.outcomes[0].outcome is outcome
        if tiers is not None:
            assert made.reservation_id is not None
            [granted] = rig.core.granted(made.reservation_id, "w")
            assert (granted.item.to_pool, granted.item.to_ssd) == tiers
            rig.core.abort(made.reservation_id, "w")
    rig.core.check_integrity()


def test_a_state_needs_its_block(rig: CoreRig) -> None:
    keys = rig.keys(range(2 * B))
    state = rig.state_item(keys, 2 * B)
    assert outcomes(rig, [state]) == [PARENT_MISSING]
    assert outcomes(rig, [state, *rig.block_items(keys)]) == [PARENT_MISSING, GRANTED, GRANTED]
    assert outcomes(rig, [state]) == [GRANTED], "its block is on its way in this session"
    assert outcomes(rig, [state], "other") == [PARENT_MISSING], (
        "nothing of what another session writes can be relied on"
    )


def test_exact_replaces_bounded_and_never_the_reverse(rig: CoreRig) -> None:
    keys = rig.store(range(2 * B), ssd=[2 * B], lineage=Lineage.BOUNDED)
    assert rig.core.statistics().bounded_blocks == 2
    items = [*rig.block_items(keys), rig.state_item(keys, 2 * B)]
    report = rig.write(items)
    assert len(report.visible) == len(report.discard) == 3, "the old places are given back"
    assert rig.core.statistics().bounded_blocks == 0
    bounded = [item._replace(lineage=Lineage.BOUNDED) for item in items]
    assert outcomes(rig, bounded) == [HELD] * 3
    assert outcomes(rig, items) == [HELD] * 3
    assert rig.lookup(keys, 2 * B + 1, lease=False).coverage.checkpoints == (2 * B,)
    rig.core.check_integrity()


def test_reservations_end_at_their_deadline_unless_they_are_being_written(rig: CoreRig) -> None:
    items = rig.block_items(rig.keys(range(2 * B)))
    idle = rig.reserve(items[:1], session="a")
    busy = rig.reserve(rig.block_items(rig.keys(range(700, 700 + B))), session="a")
    assert idle.reservation_id is not None
    assert busy.reservation_id is not None
    rig.core.commit_list(busy.reservation_id, "a")
    assert rig.core.expire_reservations(rig.clock.monotonic() + 59.9) == []
    back = rig.core.expire_reservations(rig.clock.monotonic() + 60)
    assert [each.item for each in back] == [items[0].item_id]
    ended = rig.core.end_session("a", rig.clock.monotonic())
    assert ended.reservations == 0
    assert rig.core.statistics().in_flight == 1
    report = rig.commit(busy.reservation_id, session="a")
    assert len(report.visible) == 1
    assert rig.core.statistics().in_flight == 0
    rig.core.check_integrity()


def test_the_end_of_a_session_gives_its_keys_back(rig: CoreRig) -> None:
    items = rig.block_items(rig.keys(range(3 * B)))
    rig.reserve(items, session="dies")
    ended = rig.core.end_session("dies", rig.clock.monotonic())
    assert [each.item for each in ended.given_back] == [item.item_id for item in items]
    assert outcomes(rig, items, "heir") == [GRANTED] * 3


def test_another_session_cannot_commit_or_abort(rig: CoreRig) -> None:
    made = rig.reserve(rig.block_items(rig.keys(range(B))), session="mine")
    assert made.reservation_id is not None
    with pytest.raises(UnknownReservation, match="another session"):
        rig.core.commit_list(made.reservation_id, "thief")
    assert rig.core.abort(made.reservation_id, "thief") == []
    assert rig.core.statistics().reservations == 1


def test_who_comes_too_late_to_commit_is_told(rig: CoreRig) -> None:
    items = rig.block_items(rig.keys(range(B)))
    late = rig.reserve(items, session="late")
    assert late.reservation_id is not None
    rig.clock.advance(60)
    assert len(rig.core.expire_reservations(rig.clock.monotonic())) == 1
    rig.write(items, session="heir")
    with pytest.raises(UnknownReservation, match="past its deadline"):
        rig.core.commit_list(late.reservation_id, "late")
    assert rig.core.statistics().blocks == 1


def bad(rig: CoreRig, number: int) -> tuple[list[ReserveItem], type[Exception], str]:
    keys = rig.keys(range(3 * B))
    one, two, _ = rig.block_items(keys)
    state = rig.state_item(keys, B)
    return [
        ([one._replace(key=BlockKey(b"short"))], InvalidArgument, "items[0].key"),
        ([one, two._replace(parent=b"short")], InvalidArgument, "items[1].parent"),
        ([one._replace(position=0)], InvalidArgument, "items[0].position"),
        ([one._replace(position=B + 1)], InvalidArgument, "items[0].position"),
        ([one._replace(position=-B)], InvalidArgument, "items[0].position"),
        ([one._replace(length=TINY.block_bytes - 1)], GeometryMismatch, "items[0].length"),
        ([state._replace(length=TINY.block_bytes)], GeometryMismatch, "items[0].length"),
        ([one._replace(kind=7)], InvalidArgument, "items[0].kind"),  # type: ignore[arg-type]
        ([one._replace(lineage=0)], InvalidArgument, "items[0].lineage"),  # type: ignore[arg-type]
        ([one._replace(parent=keys[2])], InvalidArgument, "items[0].parent"),
        ([two._replace(parent=rig.main)], InvalidArgument, "items[0].parent"),
        ([one._replace(to_pool=True)], InvalidArgument, "items[0].to_pool"),
        ([one._replace(to_ssd=False)], InvalidArgument, "items[0].to_pool"),
        ([state._replace(to_ssd=False)], InvalidArgument, "items[0].to_pool"),
        ([one, one], InvalidArgument, "items"),
        ([one, two._replace(position=3 * B)], InvalidArgument, "items[1].position"),
        ([one, state._replace(position=2 * B)], InvalidArgument, "items[1].position"),
    ][number]


@pytest.mark.parametrize("number", range(17))
@pytest.mark.parametrize("held", [False, True])
def test_bad_items_are_refused_by_name_and_claim_nothing(rig: CoreRig, number: int, held: bool) -> None:
    if held:
        rig.store(range(B))
    items, error, field = bad(rig, number)
    with pytest.raises(error) as caught:
        rig.reserve(items)
    assert caught.value.field == field  # type: ignore[attr-defined]
    assert rig.core.statistics().in_flight == 0
    rig.core.check_integrity()


def test_a_known_block_is_not_known_at_another_place(rig: CoreRig) -> None:
    keys = rig.store(range(3 * B))
    items = rig.block_items(keys)
    for changed, field in (
        (items[1]._replace(position=3 * B), "position"),
        (items[2]._replace(parent=keys[0]), "parent"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            rig.reserve([changed])
        assert caught.value.field == f"items[0].{field}"


def test_limits_are_refused_by_name() -> None:
    rig = CoreRig(limits=Limits(reservations=2, reservations_per_session=1, reserved_items=2))
    items = rig.block_items(rig.keys(range(3 * B)))
    with pytest.raises(LimitExceeded) as caught:
        rig.reserve(items)
    assert caught.value.field == "items"
    rig.reserve(items[:1], session="a")
    for session, field in (("a", "reservations_per_session"), ("c", "reservations")):
        if session == "c":
            rig.reserve(rig.block_items(rig.keys(range(900, 900 + B))), session="b")
        with pytest.raises(LimitExceeded) as caught:
            rig.reserve(rig.block_items(rig.keys(range(600, 600 + B))), session=session)
        assert caught.value.field == field
    with pytest.raises(UnknownNamespace):
        rig.reserve([], namespace=bytes(32))  # type: ignore[arg-type]


def test_a_pool_that_is_full_of_pinned_states_keeps_what_ssd_has(rig: CoreRig) -> None:
    rig = CoreRig(pool_states=0)
    keys = rig.keys(range(B))
    report = rig.write([*rig.block_items(keys), rig.state_item(keys, B, pool=True, ssd=True)])
    assert len(report.visible) == 2
    assert rig.lookup(keys, B + 1, lease=False).coverage.checkpoints == (B,)
    rig.core.drop_states()
    report = rig.write([rig.state_item(keys, B, pool=True, ssd=False)])
    assert report.visible == [], "refused by the pool and not on SSD: not kept"


def test_writing_a_long_chain_bit_by_bit_keeps_every_ancestor_as_fresh_as_its_tail(rig: CoreRig) -> None:
    rig.store(range(5000, 5000 + 4 * B))
    keys = rig.keys(range(12 * B))
    items = rig.block_items(keys)
    for item in items:
        rig.clock.advance(0.4)
        rig.write([item])
        rig.core.check_integrity()
    left = [item.key for item in rig.evict(16)]
    assert left[4:] == keys[::-1]
    assert checks_of(keys[0]).has_xxh3
