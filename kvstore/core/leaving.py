"""How items leave: eviction, expiry, damage, clearing. Every route removes children before parents."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from kvstore.core.accepted import is_accepted
from kvstore.core.base import Dropped, Gone, Relocated
from kvstore.core.index import NO_SLOT
from kvstore.core.live import Live
from kvstore.core.namespaces import NamespaceInfo
from kvstore.core.states import handle_of, slot_of
from kvstore.core.steps import ITEMS_AT_ONCE, VISITS_AT_ONCE, Steps
from kvstore.core.walks import oldest, tails_first
from kvstore.store.base import Place
from kvstore.types import ItemKind, Tier

BEGINS_MAX = 4
"""How often a search for what may go begins anew, since others have changed what it had come to."""


def evict(live: Live, need_bytes: int, *, prefer_states: bool, now_wall: float) -> Steps[list[Gone], None]:
    """See Core.eviction. A step ends with what it took out, or with nothing after many that may not go."""
    freed = 0
    left: list[Gone] = []
    if prefer_states:
        while freed < need_bytes and (oldest := live.states.victim()) is not None:
            left.append(_evict_state(live, oldest))
            freed += left[-1].place.length
            if len(left) >= ITEMS_AT_ONCE:
                yield left
                left = []
    # The walk that goes on at `start` has passed over what lies before that; it begins anew, a few times at most, where
    # that block has been used or has left, or another policy decides meanwhile.
    if left:
        yield left
    begins, start = 0, NO_SLOT
    while begins < BEGINS_MAX:
        gone, start = _evict_blocks(live, start, need_bytes - freed, now_wall)
        freed += sum(each.place.length for each in gone)
        if start == NO_SLOT:
            yield gone
            return
        mark = live.ranks.mark(start)
        yield gone
        if not live.index.is_live(start) or live.ranks.mark(start) != mark:
            start, begins = NO_SLOT, begins + (not gone)


def _evict_blocks(live: Live, start: int, need_bytes: int, now_wall: float) -> tuple[list[Gone], int]:
    """What one step took out, from `start` on, and the block to go on with; NO_SLOT where enough has gone, or nothing is left."""
    index, freed = live.index, 0
    left: list[Gone] = []
    for seen, slot in enumerate(live.ranks.victims(start)):
        if freed >= need_bytes:
            break
        if seen >= VISITS_AT_ONCE or len(left) >= ITEMS_AT_ONCE:
            return left, slot
        # Older than its children by no route: what still has a child here, a held child keeps.
        if index.is_childless(slot) and not live.holds.is_held(slot):
            gone = _evict_block(live, slot, now_wall)
            for each in gone:
                freed += each.place.length
            left += gone
    return left, NO_SLOT


def evict_of(
    live: Live, numbers: Collection[int], need_bytes: int, *, now_wall: float
) -> Steps[list[Gone], int]:
    """See Core.eviction_of."""
    freed = 0
    left: list[Gone] = []
    for handle in _idle_states(live, numbers, need_bytes):
        entry = live.states.get(handle)
        if entry is None or entry.leases:
            continue
        left.append(_evict_state(live, handle))
        live.totals["quota_evicted_states_total"] += 1
        freed += left[-1].place.length
        if len(left) >= ITEMS_AT_ONCE:
            yield left
            left = []
    yield left
    count = ITEMS_AT_ONCE
    while freed < need_bytes:
        found, went = oldest(live.index, numbers, count), 0
        for first in range(0, len(found), ITEMS_AT_ONCE):
            left = []
            for slot in found[first : first + ITEMS_AT_ONCE]:
                if freed >= need_bytes:
                    break
                # Others had a turn: it may have left, and its slot may be another namespace's.
                is_own = live.index.is_live(slot) and live.index.space[slot] in numbers
                if is_own and live.index.is_childless(slot) and not live.holds.is_held(slot):
                    gone = _evict_block(live, slot, now_wall)
                    live.totals["quota_evicted_blocks_total"] += 1
                    live.totals["quota_evicted_states_total"] += len(gone) - 1
                    freed += sum(each.place.length for each in gone)
                    left += gone
                    went += 1
            yield left
        if len(found) < count:
            break
        if not went:
            # All of these are held, or have children that are.
            count *= 4
    return freed


def _idle_states(live: Live, numbers: Collection[int], need_bytes: int) -> list[int]:
    """Handles of states of these namespaces that nobody leases, the oldest first, as many as have so many bytes."""
    handles: list[int] = []
    found = 0
    for handle, entry in live.states.oldest():
        if found >= need_bytes:
            break
        if live.index.space[slot_of(handle)] in numbers and live.states.may_go(handle):
            handles.append(handle)
            found += entry.place.length
    return handles


def states_over_share(live: Live, limit_bytes: int) -> Steps[list[Gone], None]:
    """See Core.states_over_share."""
    left: list[Gone] = []
    while live.states.bytes > limit_bytes and (oldest := live.states.victim()) is not None:
        left.append(_evict_state(live, oldest))
        if len(left) >= ITEMS_AT_ONCE:
            yield left
            left = []
    if left:
        yield left


def expire(live: Live, now_wall: float, limit: int) -> list[Gone]:
    """See Core.expire_blocks."""
    left: list[Gone] = []
    count = 0
    # By age, whatever goes first where room is wanted: the first block whose time is not over ends the search.
    for slot in live.ranks.oldest():
        if count >= limit or live.index.used[slot] + live.retention_seconds > now_wall:
            break
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
        return [lose_state(live, handle)]
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
            gone += [lose_state(live, handle)] if handle < 0 else _remove_tree(live, handle)
    return gone


def relocate(live: Live, segment_id: int, moved: Mapping[Place, Place]) -> Steps[None, Relocated]:
    """See Core.relocation."""
    unused = dict(moved)
    count = 0
    lost: list[int] = []
    for number, handle in enumerate(live.segments.members(segment_id), 1):
        if number % ITEMS_AT_ONCE == 0:
            yield
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
    for number, handle in enumerate(lost, 1):
        if number % ITEMS_AT_ONCE == 0:
            yield
        old = _lies_at(live, handle)
        # One loss may have taken others with it: a block's descendants and their states.
        if old is not None and old.segment_id == segment_id:
            live.totals["damaged_states_total" if handle < 0 else "damaged_blocks_total"] += 1
            gone += [lose_state(live, handle)] if handle < 0 else _remove_tree(live, handle)
    return Relocated(count, gone, list(unused.values()))


def clear(live: Live, infos: Iterable[NamespaceInfo]) -> Steps[list[Gone], tuple[int, int]]:
    """See Core.clearing."""
    blocks = states = 0
    for info in infos:
        states += live.pool.clear(info.digest)[0]
        left: list[Gone] = []
        for slots in tails_first(live.index, info.number):
            for slot in slots:
                # Its time may have been over meanwhile.
                if live.index.is_live(slot):
                    left += live.remove_block(slot)
                    blocks += 1
                    live.totals["cleared_blocks_total"] += 1
                if len(left) >= ITEMS_AT_ONCE:
                    states += _states_among(left)
                    yield left
                    left = []
        states += _states_among(left)
        yield left
    return blocks, states


def _states_among(gone: Sequence[Gone]) -> int:
    return sum(each.item.kind is not ItemKind.BLOCK for each in gone)


def drop_states(live: Live, info: NamespaceInfo | None, tier: Tier | None) -> Steps[list[Gone], Dropped]:
    """See Core.dropping. The result's `gone` is left empty: that is what the steps tell."""
    dropped = kept = 0
    gone: list[Gone] = []
    kept_in = set()
    if tier in (None, Tier.POOL):
        dropped, kept = live.pool.clear(None if info is None else info.digest, spare_pinned=True)
        live.totals["dropped_states_total"] += dropped
    if tier in (None, Tier.SSD):
        for count, handle in enumerate(live.states.handles(), 1):
            if count % ITEMS_AT_ONCE == 0:
                yield gone
                gone = []
            entry = live.states.get(handle)
            if entry is None:
                continue
            number = live.index.space[slot_of(handle)]
            if info is not None and number != info.number:
                continue
            if entry.leases:
                kept += 1
                kept_in.add(live.namespaces.by_number(number).digest)
            else:
                gone.append(live.remove_state(handle))
                dropped += 1
                live.totals["dropped_states_total"] += 1
    yield gone
    return Dropped(dropped, kept, [], frozenset(kept_in))


def _evict_block(live: Live, slot: int, now_wall: float) -> list[Gone]:
    """Childless, and held by nobody."""
    early = live.index.used[slot] + live.retention_seconds > now_wall
    gone = live.remove_block(slot)
    live.totals["retention_shortfall_total" if early else "expired_blocks_total"] += 1
    live.totals["evicted_blocks_total"] += early
    live.totals["evicted_states_total"] += len(gone) - 1
    return gone


def _evict_state(live: Live, handle: int) -> Gone:
    live.totals["evicted_states_total"] += 1
    return live.remove_state(handle)


def _remove_tree(live: Live, slot: int) -> list[Gone]:
    """Of a block that turned out damaged."""
    live.totals["orphaned_blocks_total"] += len(live.index.descendants(slot)) - 1
    return remove_tree(live, slot)


def remove_tree(live: Live, slot: int) -> list[Gone]:
    """The block and all below it, leased or not, tails first. What of it was accepted is lost: it never becomes durable."""
    left: list[Gone] = []
    for each in reversed(live.index.descendants(slot)):
        left += live.remove_block(each)
    live.totals["accepted_lost_total"] += sum(is_accepted(gone.place.segment_id) for gone in left)
    return left


def lose_state(live: Live, handle: int) -> Gone:
    """The same of a state alone."""
    gone = live.remove_state(handle)
    live.totals["accepted_lost_total"] += is_accepted(gone.place.segment_id)
    return gone


def _lies_at(live: Live, handle: int) -> Place | None:
    """Where the item is now; None when the slot is free or has nothing of that kind."""
    if handle < 0:
        entry = live.states.get(handle)
        return None if entry is None else entry.place
    return live.place(handle) if live.index.is_live(handle) else None
