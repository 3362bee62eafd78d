"""Accept: what has arrived becomes visible before it is durable; and what becomes of it when its write is over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvstore.core.accepted import accepted_place, is_accepted
from kvstore.core.base import Gone, Granted, Written
from kvstore.core.index import NO_SLOT
from kvstore.core.leaving import lose_state, remove_tree
from kvstore.core.live import Live
from kvstore.core.namespaces import NamespaceInfo
from kvstore.core.reservations import Reservation
from kvstore.core.showing import pool_state
from kvstore.core.states import StateEntry, handle_of
from kvstore.core.steps import ITEMS_AT_ONCE, Steps
from kvstore.store.base import Place
from kvstore.types import ItemId, ItemKind


class _Moment(NamedTuple):
    mono: float
    wall: float


@dataclass(frozen=True, slots=True)
class Settled:
    """What a step has settled. `moved`: from where it was said to lie to where it lies; `gone`: what is taken back."""

    moved: dict[Place, Place] = field(default_factory=dict)
    gone: list[Gone] = field(default_factory=list)


def accept(
    live: Live,
    reservation: Reservation,
    arrived: Sequence[tuple[Granted, Written]],
    *,
    now_mono: float,
    now_wall: float,
) -> list[ItemId]:
    """See Core.accept."""
    assert reservation.writing, "commit_list comes before accept"
    info = live.namespaces.find(reservation.namespace)
    if reservation.void or reservation.settling or info is None:
        return []
    moment = _Moment(now_mono, now_wall)
    visible = []
    for granted, written in arrived:
        if granted.item.kind is ItemKind.BLOCK:
            shown = _accept_block(live, reservation, granted, written, moment)
        else:
            shown = _accept_state(live, reservation, granted, written, moment)
        if shown:
            visible.append(granted.item.item_id)
    return visible


def settle(live: Live, reservation: Reservation, results: Mapping[ItemId, Written]) -> Steps[Settled, None]:
    """See Core.settling."""
    reservation.settling = True
    info = live.namespaces.find(reservation.namespace)
    step = Settled()
    for number, item in enumerate(reservation.accepted, 1):
        written = results.get(item)
        place = None if written is None else written.place
        if info is not None and _settle(live, info, item, place, step):
            reservation.settled.add(item)
        if number % ITEMS_AT_ONCE == 0:
            yield step
            step = Settled()
    yield step


def _accept_block(
    live: Live, reservation: Reservation, granted: Granted, written: Written, moment: _Moment
) -> bool:
    """Only what nothing is held of: what it may replace is durable, and a crash would take both."""
    item, info = granted.item, live.namespaces.get(reservation.namespace)
    if live.index.find(info.number, item.key) != NO_SLOT:
        return False
    parent = NO_SLOT
    if item.parent != info.digest:
        parent = live.index.find(info.number, item.parent)
        if parent == NO_SLOT:
            return False
    slot = live.insert_block(
        info,
        item.key,
        parent,
        accepted_place(reservation.reservation_id, granted.index, item.length),
        checks=written.checks,
        lineage=item.lineage,
        now=moment.wall,
    )
    reservation.accepted.append(item.item_id)
    # To evict it would give back nothing.
    live.reservations.hold(reservation, slot)
    return True


def _accept_state(
    live: Live, reservation: Reservation, granted: Granted, written: Written, moment: _Moment
) -> bool:
    item, info = granted.item, live.namespaces.get(reservation.namespace)
    slot = live.index.find(info.number, item.key)
    if slot == NO_SLOT:
        return False
    if item.to_ssd:
        handle = handle_of(slot, item.kind)
        if live.states.get(handle) is not None:
            return False
        place = accepted_place(reservation.reservation_id, granted.index, item.length)
        made = StateEntry(place, written.checks, item.lineage, live.second(moment.wall))
        live.insert_state(slot, item.kind, made)
        reservation.accepted.append(item.item_id)
    live.touch(slot, moment.wall)
    return written.payload is None or pool_state(live, slot, item, written, moment.mono)


def _settle(live: Live, info: NamespaceInfo, item: ItemId, place: Place | None, step: Settled) -> bool:
    """One that was accepted: durable at `place`, or None. What is durable has durable ancestors. Whether it lies there now."""
    slot = live.index.find(info.number, item.key)
    if slot == NO_SLOT:
        return False
    if item.kind is ItemKind.BLOCK:
        old, above = live.place(slot), live.index.parent[slot]
        if not is_accepted(old.segment_id):
            return False
        if place is None or (above != NO_SLOT and is_accepted(live.index.segment[above])):
            step.gone.extend(remove_tree(live, slot))
            return False
        live.settle_block(slot, place)
        live.totals["stored_blocks_total"] += 1
        step.moved[old] = place
        return True
    handle = handle_of(slot, item.kind)
    entry = live.states.get(handle)
    if entry is None or not is_accepted(entry.place.segment_id):
        return False
    if place is None or is_accepted(live.index.segment[slot]):
        step.gone.append(lose_state(live, handle))
        return False
    step.moved[entry.place] = place
    live.settle_state(handle, place)
    live.totals["stored_states_total"] += 1
    live.totals["stored_rows_total"] += item.kind is ItemKind.ROWS
    return True
