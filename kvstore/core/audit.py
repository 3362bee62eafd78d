"""Statistics, and the laws that hold after every call."""

from __future__ import annotations

from kvstore.core.accepted import accepted_segment, is_accepted
from kvstore.core.base import CoreStatistics
from kvstore.core.index import HAS_ROWS, HAS_STATE, ROWS_OVERLAP
from kvstore.core.live import Live
from kvstore.core.states import handle_of, kind_of, slot_of
from kvstore.types import ItemKind, Lineage

TOTALS = (
    "stored_blocks_total",
    "stored_states_total",
    "stored_rows_total",
    "parent_lost_total",
    "accepted_lost_total",
    "evicted_blocks_total",
    "evicted_states_total",
    "expired_blocks_total",
    "retention_shortfall_total",
    "cleared_blocks_total",
    "dropped_states_total",
    "quota_evicted_blocks_total",
    "quota_evicted_states_total",
    "damaged_blocks_total",
    "damaged_states_total",
    "orphaned_blocks_total",
    "unreadable_namespaces_total",
)


def statistics(live: Live) -> CoreStatistics:
    held = len(live.index)
    waiting, waiting_bytes = live.accepted, live.accepted_bytes
    accepted_blocks, accepted_block_bytes = waiting[ItemKind.BLOCK], waiting_bytes[ItemKind.BLOCK]
    accepted_rows, accepted_rows_bytes = waiting[ItemKind.ROWS], waiting_bytes[ItemKind.ROWS]
    accepted_states = accepted_rows + waiting[ItemKind.STATE]
    accepted_state_bytes = accepted_rows_bytes + waiting_bytes[ItemKind.STATE]
    index_bytes = live.index.memory_bytes() + live.ranks.memory_bytes() + live.segments.memory_bytes()
    return CoreStatistics(
        namespaces=len(live.namespaces),
        blocks=held - accepted_blocks,
        block_bytes=live.block_bytes - accepted_block_bytes,
        bounded_blocks=live.bounded_blocks - live.accepted_bounded,
        ssd_states=len(live.states) - accepted_states,
        ssd_state_bytes=live.states.bytes - accepted_state_bytes,
        rows=live.states.rows - accepted_rows,
        rows_bytes=live.states.rows_bytes - accepted_rows_bytes,
        accepted_blocks=accepted_blocks,
        accepted_states=accepted_states,
        accepted_bytes=accepted_block_bytes + accepted_state_bytes,
        leases=len(live.leases),
        reservations=len(live.reservations),
        in_flight=live.reservations.in_flight,
        index_bytes=index_bytes + live.states.memory_bytes(),
        index_bytes_per_block=index_bytes / held if held else 0.0,
        pool=live.pool.statistics(),
        totals={name: live.totals[name] for name in TOTALS},
    )


def check_integrity(live: Live) -> None:
    """Raise AssertionError unless every law holds. Walks everything."""
    index = live.index
    index.check_integrity()
    live.states.check_integrity()
    live.pool.check_integrity()
    live.ranks.check_integrity()
    slots = list(index.slots())
    _check_ranks(live, slots)
    _check_flags(live, slots)
    assert live.block_bytes == sum(live.place(slot).length for slot in slots), "bytes of blocks"
    _check_spaces(live, slots)
    bounded = [slot for slot in slots if index.lineage(slot) is Lineage.BOUNDED]
    assert live.bounded_blocks == len(bounded), "bounded blocks"
    _check_segments(live, slots)
    _check_accepted(live, slots)
    _check_pool(live)
    _check_holds(live)
    assert set(live.totals) <= set(TOTALS), "every total has a name that is reported"


def _check_spaces(live: Live, slots: list[int]) -> None:
    """What each namespace has on the disk, and what reservations may add to that."""
    sizes = dict.fromkeys((info.number for info in live.namespaces.all()), 0)
    places = [(slot, live.place(slot)) for slot in slots]
    places += [(slot_of(handle), entry.place) for handle, entry in live.states.oldest()]
    for slot, place in places:
        if not is_accepted(place.segment_id):
            sizes[live.index.space[slot]] += place.length
    counted = {number: size for number, size in live.space_bytes.items() if size}
    assert counted == {number: size for number, size in sizes.items() if size}, "bytes of namespaces"
    promised: dict[bytes, int] = {}
    for each in live.reservations.all():
        size = sum(granted.item.length for granted in each.granted if granted.item.to_ssd)
        promised[each.namespace] = promised.get(each.namespace, 0) + size
    assert {key: size for key, size in promised.items() if size} == {
        key: size for key, size in live.reservations.ssd_bytes.items() if size
    }, "bytes of reservations"


def _check_flags(live: Live, slots: list[int]) -> None:
    handles = set()
    for slot in slots:
        flags = live.index.flags[slot]
        if flags & HAS_STATE:
            handles.add(handle_of(slot, ItemKind.STATE))
        if flags & HAS_ROWS:
            handles.add(handle_of(slot, ItemKind.ROWS))
            entry = live.states.get(handle_of(slot, ItemKind.ROWS))
            has_overlap = (
                entry is not None and entry.place.length == live.info(slot).figures.rows_overlap_block_bytes
            )
            assert bool(flags & ROWS_OVERLAP) == has_overlap, "rows and their overlap"
        else:
            assert not flags & ROWS_OVERLAP, "an overlap without rows"
    assert handles == {handle for handle, _ in live.states.oldest()}, "states and their flags"


def _check_ranks(live: Live, slots: list[int]) -> None:
    order = list(live.ranks.oldest())
    assert sorted(order) == slots, "every block is ranked once"
    place = {slot: at for at, slot in enumerate(order)}
    uses = [live.index.used[slot] for slot in order]
    assert uses == sorted(uses), "ranks follow last uses"
    for slot in slots:
        parent = live.index.parent[slot]
        assert parent < 0 or place[slot] < place[parent], "a child ranks before its parent"


def _check_segments(live: Live, slots: list[int]) -> None:
    handles: dict[int, set[int]] = {}
    for slot in slots:
        handles.setdefault(live.index.segment[slot], set()).add(slot)
    for handle, entry in live.states.oldest():
        handles.setdefault(entry.place.segment_id, set()).add(handle)
    assert {segment: len(found) for segment, found in handles.items()} == live.segments.counts(), (
        "items per segment"
    )
    for segment, found in handles.items():
        assert found <= set(live.segments.members(segment)), "every item is found by its segment"


def _check_accepted(live: Live, slots: list[int]) -> None:
    segment, waiting = live.index.segment, dict.fromkeys(ItemKind, 0)
    for slot in slots:
        parent = live.index.parent[slot]
        if is_accepted(segment[slot]):
            waiting[ItemKind.BLOCK] += 1
        else:
            assert parent < 0 or not is_accepted(segment[parent]), "what is durable has durable ancestors"
    for handle, entry in live.states.oldest():
        if is_accepted(entry.place.segment_id):
            waiting[kind_of(handle)] += 1
        else:
            assert not is_accepted(segment[slot_of(handle)]), "what is durable has a durable block"
    bounded = [
        slot for slot in slots if is_accepted(segment[slot]) and live.index.lineage(slot) is Lineage.BOUNDED
    ]
    assert live.accepted_bounded == len(bounded), "bounded blocks that are not durable"
    assert all(live.accepted[kind] == count for kind, count in waiting.items()), "what is not durable"
    writing = {accepted_segment(each.reservation_id) for each in live.reservations.all() if each.accepted}
    known = {number for number in live.segments.counts() if is_accepted(number)}
    assert known <= writing, "what is not durable is being written"


def _check_pool(live: Live) -> None:
    for info in live.namespaces.all():
        for key, position in live.pool.keys(info.digest):
            slot = live.index.find(info.number, key)
            assert slot >= 0, "a state's block is held"
            assert live.position(slot) == position, "a state lies at the end of its block"


def _check_holds(live: Live) -> None:
    wanted = set()
    protected: dict[int, int] = {}
    for lease in live.leases.all():
        covered = lease.held_slots if lease.apart else lease.slots[: lease.intact]
        assert all(live.index.is_live(slot) for slot in covered), "leased blocks are held"
        wanted |= {(slot, lease.lease_id) for slot in lease.held_slots}
        for _, _, entry in lease.states:
            protected[id(entry)] = protected.get(id(entry), 0) + 1
    for reservation in live.reservations.all():
        wanted |= {(slot, reservation.reservation_id) for slot in reservation.held_slots}
    assert wanted == live.holds.pairs(), "holds are those of leases and reservations"
    for _, entry in live.states.oldest():
        assert entry.leases == protected.get(id(entry), 0), "leases of states"
