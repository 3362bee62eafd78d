"""How items leave: eviction, expiry, damage, clearing. Every route removes children before parents."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kvstore.core.base import Cleared, Dropped, Gone, Relocated
from kvstore.core.index import NO_SLOT
from kvstore.core.live import Live
from kvstore.core.namespaces import NamespaceInfo
from kvstore.core.states import handle_of, slot_of
from kvstore.store.base import Place
from kvstore.types import ItemKind, Tier


def evict(live: Live, need_bytes: int, *, prefer_states: bool, now_wall: float) -> list[Gone]:
    """See Core.plan_eviction."""
    left: list[Gone] = []
    freed = 0
    if prefer_states:
        while freed < need_bytes and (oldest := live.states.victim()) is not None:
            left.append(_evict_state(live, oldest))
            freed += left[-1].place.length
    for slot in live.ranks.victims():
        if freed >= need_bytes:
            break
        # Older than its children by no route: what still has a child here, a held child keeps.
        if live.index.is_childless(slot) and not live.holds.is_held(slot):
            early = live.index.used[slot] + live.retention_seconds > now_wall
            gone = live.remove_block(slot)
            live.totals["retention_shortfall_total" if early else "expired_blocks_total"] += 1
            live.totals["evicted_blocks_total"] += early
            live.totals["evicted_states_total"] += len(gone) - 1
            freed += sum(each.place.length for each in gone)
            left += gone
    return left


def states_over_share(live: Live, limit_bytes: int) -> list[Gone]:
    """See Core.states_over_share."""
    left: list[Gone] = []
    while live.states.bytes > limit_bytes and (oldest := live.states.victim()) is not None:
        left.append(_evict_state(live, oldest))
    return left


def expire(live: Live, now_wall: float, limit: int) -> list[Gone]:
    """See Core.expire_blocks."""
    left: list[Gone] = []
    count = 0
    for slot in live.ranks.victims():
        is_young = live.index.used[slot] + live.retention_seconds > now_wall
        # Where ranks follow last uses, the first block whose time is not over ends the search.
        if count >= limit or (is_young and live.ranks.follows_uses):
            break
        if is_young:
            continue
        if live.index.is_childless(slot) and not live.holds.is_held(slot):
            left += live.remove_block(slot)
            count += 1
    live.totals["expired_blocks_total"] += count
    return left


def forget(live: Live, info: NamespaceInfo, key: bytes, kind: ItemKind, place: Place | None) -> list[Gone]:
    """See Core.forget."""
    slot = live.index.find(info.number, key)
    if slot == NO_SLOT:
        return []
    if kind is not ItemKind.BLOCK:
        handle = handle_of(slot, kind)
        entry = live.states.get(handle)
        if entry is None or place not in (None, entry.place):
            return []
        live.totals["damaged_states_total"] += 1
        return [live.remove_state(handle)]
    if place not in (None, live.place(slot)):
        return []
    live.totals["damaged_blocks_total"] += 1
    return _remove_tree(live, slot)


def forget_places(live: Live, places: Collection[Place]) -> list[Gone]:
    """See Core.forget_places."""
    wanted = set(places)
    doomed = [
        handle
        for segment_id in {place.segment_id for place in wanted}
        for handle in live.segments.members(segment_id)
        if _lies_at(live, handle) in wanted
    ]
    gone: list[Gone] = []
    for handle in doomed:
        # One loss may have taken others with it: a block's descendants and their states.
        if _lies_at(live, handle) in wanted:
            live.totals["damaged_states_total" if handle < 0 else "damaged_blocks_total"] += 1
            gone += [live.remove_state(handle)] if handle < 0 else _remove_tree(live, handle)
    return gone


def relocate(live: Live, segment_id: int, moved: Mapping[Place, Place]) -> Relocated:
    """See Core.relocate."""
    unused = dict(moved)
    count = 0
    lost: list[int] = []
    for handle in live.segments.members(segment_id):
        old = _lies_at(live, handle)
        if old is None or old.segment_id != segment_id:
            continue
        new = unused.pop(old, None)
        if new is None:
            lost.append(handle)
            continue
        if handle < 0:
            live.states.move(handle, new)
        else:
            live.index.move(handle, new)
        live.segments.add(new.segment_id, handle)
        live.segments.remove(segment_id)
        count += 1
    gone: list[Gone] = []
    for handle in lost:
        old = _lies_at(live, handle)
        # One loss may have taken others with it: a block's descendants and their states.
        if old is not None and old.segment_id == segment_id:
            live.totals["damaged_states_total" if handle < 0 else "damaged_blocks_total"] += 1
            gone += [live.remove_state(handle)] if handle < 0 else _remove_tree(live, handle)
    return Relocated(count, gone, list(unused.values()))


def clear(live: Live, infos: list[NamespaceInfo]) -> Cleared:
    """See Core.clear."""
    gone: list[Gone] = []
    blocks = pooled = 0
    for info in infos:
        slots = live.index.slots_of(info.number)
        blocks += len(slots)
        pooled += live.pool.clear(info.digest)[0]
        for slot in slots:
            gone += live.remove_block(slot)
    live.totals["cleared_blocks_total"] += blocks
    return Cleared(blocks, len(gone) - blocks + pooled, gone)


def drop_states(live: Live, info: NamespaceInfo | None, tier: Tier | None) -> Dropped:
    """See Core.drop_states."""
    dropped = kept = 0
    gone: list[Gone] = []
    kept_in = set()
    if tier in (None, Tier.POOL):
        dropped, kept = live.pool.clear(None if info is None else info.digest, spare_pinned=True)
    if tier in (None, Tier.SSD):
        for handle, entry in list(live.states.oldest()):
            number = live.index.space[slot_of(handle)]
            if info is not None and number != info.number:
                continue
            if entry.leases:
                kept += 1
                kept_in.add(live.namespaces.by_number(number).digest)
            else:
                gone.append(live.remove_state(handle))
    live.totals["dropped_states_total"] += dropped + len(gone)
    return Dropped(dropped + len(gone), kept, gone, frozenset(kept_in))


def _evict_state(live: Live, handle: int) -> Gone:
    live.totals["evicted_states_total"] += 1
    return live.remove_state(handle)


def _remove_tree(live: Live, slot: int) -> list[Gone]:
    """The block and all below it, leased or not, tails first."""
    left: list[Gone] = []
    doomed = live.index.descendants(slot)
    for each in reversed(doomed):
        left += live.remove_block(each)
    live.totals["orphaned_blocks_total"] += len(doomed) - 1
    return left


def _lies_at(live: Live, handle: int) -> Place | None:
    """Where the item is now; None when the slot is free or has nothing of that kind."""
    if handle < 0:
        entry = live.states.get(handle)
        return None if entry is None else entry.place
    return live.place(handle) if live.index.is_live(handle) else None
