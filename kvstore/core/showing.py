"""Commit: what is durable becomes visible, parents first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvstore.core.accepted import is_accepted
from kvstore.core.base import CommitReport, ReserveItem, Written
from kvstore.core.index import NO_SLOT
from kvstore.core.live import Live
from kvstore.core.namespaces import NamespaceInfo
from kvstore.core.reservations import Reservation
from kvstore.core.states import StateEntry, handle_of
from kvstore.core.steps import ITEMS_AT_ONCE, Steps
from kvstore.pool.states import PooledState
from kvstore.store.base import Place
from kvstore.types import BlockKey, ItemId, ItemKind, Lineage


def commit(
    live: Live,
    reservation: Reservation,
    results: Mapping[ItemId, Written],
    *,
    now_mono: float,
    now_wall: float,
) -> Steps[None, CommitReport]:
    """See Core.committing."""
    assert reservation.writing, "commit_list comes before committed"
    try:
        return (yield from _show(live, reservation, results, now_mono=now_mono, now_wall=now_wall))
    finally:
        # Ended last: until then its session may build on what it was promised.
        live.reservations.end(reservation)


def _show(
    live: Live,
    reservation: Reservation,
    results: Mapping[ItemId, Written],
    *,
    now_mono: float,
    now_wall: float,
) -> Steps[None, CommitReport]:
    info = live.namespaces.find(reservation.namespace)
    visible: list[ItemId] = []
    left_out: list[int] = []
    discard: list[Place] = []
    unleased: set[int] = set()
    total = 0
    for number, granted in enumerate(reservation.granted, 1):
        if number % ITEMS_AT_ONCE == 0:
            yield
            # Others may have leased it meanwhile.
            unleased.clear()
        item = granted.item
        name = item.item_id
        written = results.get(name)
        if written is None:
            continue
        _check_written(item, written)
        if reservation.void or info is None:
            kept, dropped = False, [written.place] if written.place is not None else []
        elif name in reservation.settled and _has_left(live, info, item, written.place):
            # Who took it out has given its place back.
            kept, dropped = False, []
        elif item.kind is ItemKind.BLOCK:
            kept, dropped = _show_block(live, info, item, written, unleased=unleased, now_wall=now_wall)
        else:
            kept, dropped = _show_state(live, info, item, written, now_mono=now_mono, now_wall=now_wall)
        discard += dropped
        if kept:
            visible.append(name)
            total += item.length
        else:
            left_out.append(granted.index)
    return CommitReport(visible, discard, total, left_out)


def may_replace_block(live: Live, slot: int, lineage: Lineage, unleased: set[int]) -> bool:
    """EXACT bytes may take the place of BOUNDED ones that nobody leases; else the first writer wins. `unleased` is what
    earlier blocks of the same call have shown: a lease covers its chain from the root, so that nothing below a block
    without one has one, and all leases are walked once a chain instead of once a block."""
    if not (lineage is Lineage.EXACT and live.index.lineage(slot) is Lineage.BOUNDED):
        return False
    if live.index.parent[slot] not in unleased and live.leases.covers(slot, live.index.number[slot]):
        return False
    unleased.add(slot)
    return True


def may_replace_state(held: StateEntry, item: ReserveItem) -> bool:
    """EXACT may take the place of BOUNDED, and of equal lineage rows with the overlap that of rows without; neither
    where someone leases what is held."""
    before = (held.lineage is Lineage.EXACT, held.place.length)
    return not held.leases and (item.lineage is Lineage.EXACT, item.length) > before


def _check_written(item: ReserveItem, written: Written) -> None:
    assert (written.place is not None) == item.to_ssd, "an item for SSD has a place there"
    assert (written.payload is not None) == item.to_pool, "an item for the pool has its payload"
    assert written.place is None or written.place.length == item.length, "the log keeps payloads as they are"


def _has_left(live: Live, info: NamespaceInfo, item: ReserveItem, place: Place | None) -> bool:
    """Whether what was settled at this place lies there no more."""
    slot = live.index.find(info.number, item.key)
    if slot == NO_SLOT:
        return True
    if item.kind is ItemKind.BLOCK:
        return live.place(slot) != place
    entry = live.states.get(handle_of(slot, item.kind))
    return entry is None or entry.place != place


def _show_block(
    live: Live,
    info: NamespaceInfo,
    item: ReserveItem,
    written: Written,
    *,
    unleased: set[int],
    now_wall: float,
) -> tuple[bool, list[Place]]:
    """(Whether it is visible now, places that nothing refers to.)"""
    place = written.place
    assert place is not None, "a block goes to SSD"
    slot = live.index.find(info.number, item.key)
    if slot != NO_SLOT:
        live.touch(slot, now_wall)
        if live.place(slot) == place:
            # It was accepted, and has been settled.
            return True, []
        if not may_replace_block(live, slot, item.lineage, unleased):
            # What is there is as good, or is leased as BOUNDED and stays so.
            return live.index.lineage(slot) <= item.lineage, [place]
        return True, [live.replace_block(slot, place, checks=written.checks, lineage=item.lineage)]
    parent = NO_SLOT
    if item.parent != info.digest:
        parent = live.index.find(info.number, item.parent)
        if parent == NO_SLOT or is_accepted(live.index.segment[parent]):
            # One that is not durable yet: its commit began later.
            live.totals["parent_lost_total"] += 1
            return False, [place]
    live.insert_block(
        info, item.key, parent, place, checks=written.checks, lineage=item.lineage, now=now_wall
    )
    live.totals["stored_blocks_total"] += 1
    return True, []


def _show_state(
    live: Live, info: NamespaceInfo, item: ReserveItem, written: Written, *, now_mono: float, now_wall: float
) -> tuple[bool, list[Place]]:
    slot = live.index.find(info.number, item.key)
    if slot == NO_SLOT:
        live.totals["parent_lost_total"] += 1
        return False, [written.place] if written.place is not None else []
    live.touch(slot, now_wall)
    dropped: list[Place] = []
    placed = written.place is not None
    if written.place is not None:
        handle = handle_of(slot, item.kind)
        entry = live.states.get(handle)
        if is_accepted(live.index.segment[slot]):
            # Its block is not durable yet: that one's commit began later.
            live.totals["parent_lost_total"] += 1
            dropped.append(written.place)
            placed = False
        elif entry is not None and entry.place == written.place:
            # It was accepted, and has been settled.
            pass
        elif entry is not None and not may_replace_state(entry, item):
            dropped.append(written.place)
            placed = entry.lineage <= item.lineage and entry.place.length >= item.length
        else:
            if entry is not None:
                dropped.append(live.remove_state(handle).place)
            made = StateEntry(written.place, written.checks, item.lineage, live.second(now_wall))
            live.insert_state(slot, item.kind, made)
            live.totals["stored_states_total"] += 1
            live.totals["stored_rows_total"] += item.kind is ItemKind.ROWS
    pooled = written.payload is not None and pool_state(live, slot, item, written, now_mono)
    return pooled or placed, dropped


def pool_state(live: Live, slot: int, item: ReserveItem, written: Written, now_mono: float) -> bool:
    """Whether the pool holds a state of this block now."""
    info = live.info(slot)
    assert written.payload is not None, "an item for the pool has its payload"
    state = PooledState(written.payload, item.position, item.lineage, written.checks)
    return live.pool.put(info.digest, item.key, state, now=now_mono, after=_earlier_state(live, info, slot))


def _earlier_state(live: Live, info: NamespaceInfo, slot: int) -> BlockKey | None:
    """The nearest block before this one in its chain that has a state in the pool."""
    parent, key = live.index.parent, live.index.key

    def ancestors() -> Iterator[BlockKey]:
        at = parent[slot]
        while at != NO_SLOT:
            yield key(at)
            at = parent[at]

    return live.pool.nearest(info.digest, ancestors())
