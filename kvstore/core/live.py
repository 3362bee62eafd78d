"""What is live: index, states, ranks, leases and reservations, and the few steps that keep them in agreement."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from kvstore.core.accepted import is_accepted
from kvstore.core.base import Gone, Limits
from kvstore.core.changes import BlockCame, BlockWent, Journal, state_came, state_went
from kvstore.core.holds import Holds
from kvstore.core.index import (
    BOUNDED,
    HAS_ROWS,
    HAS_STATE,
    MANY_SLOTS,
    NO_SLOT,
    ROWS_OVERLAP,
    USE_NOTED,
    USE_QUEUED,
    BlockIndex,
    Filling,
)
from kvstore.core.leases import Lease, LeaseTable
from kvstore.core.namespaces import NamespaceInfo, NamespaceTable, StatesShare
from kvstore.core.ranking import Ranking
from kvstore.core.reservations import ReservationTable
from kvstore.core.segments import SegmentMap
from kvstore.core.states import STATE_KINDS, StateEntry, StateTable, handle_of, kind_of, slot_of
from kvstore.policy.base import EvictionPolicy
from kvstore.pool.states import StatePool
from kvstore.store.base import Place
from kvstore.types import BlockKey, Checks, ItemId, ItemKind, Lineage

HOUR = 3600
_HAS_STATES = HAS_STATE | HAS_ROWS


class Live:
    """The parts, and every step that changes more than one of them. Handles in segments and uses are those of
    `kvstore.core.states`."""

    def __init__(
        self,
        *,
        pool: StatePool,
        limits: Limits,
        retention_seconds: float,
        lease_seconds: float,
        longest_lease_seconds: float,
        reservation_seconds: float,
        default_policy: str,
        share: StatesShare,
        on_lease_end: Callable[[int], None],
        eviction: EvictionPolicy,
        journal: Journal | None,
    ) -> None:
        self.pool = pool
        self.journal = journal
        self.limits = limits
        self.retention_seconds = retention_seconds
        self.namespaces = NamespaceTable(default_policy=default_policy, most=limits.namespaces, share=share)
        self.index = BlockIndex()
        self.states = StateTable()
        self.segments = SegmentMap()
        self.ranks = Ranking(self.index, eviction)
        self.holds = Holds()
        self.leases = LeaseTable(
            self.holds,
            seconds=lease_seconds,
            longest_seconds=longest_lease_seconds,
            most=limits.leases,
            most_per_session=limits.leases_per_session,
            most_blocks=limits.leased_blocks,
            most_blocks_per_session=limits.leased_blocks_per_session,
        )
        self.reservations = ReservationTable(
            self.holds,
            seconds=reservation_seconds,
            most=limits.reservations,
            most_per_session=limits.reservations_per_session,
            most_items=limits.reserved_items_in_all,
            most_items_per_session=limits.reserved_items_per_session,
        )
        self._on_lease_end = on_lease_end
        self.totals: Counter[str] = Counter()
        self.block_bytes = 0
        self.bounded_blocks = 0
        self.accepted: Counter[ItemKind] = Counter()
        """Items by kind that are visible and not durable yet."""
        self.accepted_bounded = 0
        """Blocks among them that are BOUNDED."""
        self.accepted_bytes: Counter[ItemKind] = Counter()
        self.space_bytes: Counter[int] = Counter()
        """Payload bytes of blocks and states that are durable, by number of their namespace."""
        self._last_number = 0
        self._latest = 0
        # Handles whose last use is to be persisted: at most one entry per use that is not persisted yet.
        self._uses = array("i")

    def next_number(self) -> int:
        """For leases and reservations alike, so that no hold is ever taken for another's. Never 0."""
        self._last_number += 1
        return self._last_number

    def second(self, now_wall: float) -> int:
        """The second that a use at `now_wall` counts for: rounded up, so that nothing expires before its time, and never
        before an earlier use, so that ranks follow last uses whatever the clock does."""
        second = math.ceil(now_wall)
        self._latest = max(self._latest, second)
        return self._latest

    # ---- places ---------------------------------------------------------------------------------------------

    def info(self, slot: int) -> NamespaceInfo:
        return self.namespaces.by_number(self.index.space[slot])

    def place(self, slot: int) -> Place:
        index = self.index
        figures = self.namespaces.by_number(index.space[slot]).figures
        return Place(index.segment[slot], index.offset[slot], figures.block_bytes)

    def position(self, slot: int) -> int:
        return (self.index.number[slot] + 1) * self.info(slot).figures.block_tokens

    def gone(self, slot: int, kind: ItemKind, place: Place) -> Gone:
        return Gone(self.info(slot).digest, ItemId(self.index.key(slot), kind), place)

    # ---- blocks ---------------------------------------------------------------------------------------------

    def insert_block(
        self,
        info: NamespaceInfo,
        key: BlockKey,
        parent: int,
        place: Place,
        *,
        checks: Checks,
        lineage: Lineage,
        now: float,
    ) -> int:
        """A new block, used now: so is its chain."""
        used = self.second(now)
        if parent != NO_SLOT and self.index.used[parent] < used:
            self.touch(parent, now)
        slot = self.index.insert(info.number, key, parent, place, checks=checks, lineage=lineage, used=used)
        self.ranks.on_insert(slot, below=parent)
        self.segments.add(place.segment_id, slot)
        self.block_bytes += place.length
        self.bounded_blocks += lineage is Lineage.BOUNDED
        self._count(slot, ItemKind.BLOCK, place, 1)
        if self.journal is not None:
            above = None if parent == NO_SLOT else self.index.key(parent)
            self.journal.note(BlockCame(info.digest, key, above, info.figures.block_tokens))
        self.reservations.block_inserted(info.digest, key, slot)
        return slot

    def fill(self, blocks: Filling, oldest: NDArray[np.int64]) -> None:
        """All blocks of a start at once, as rows of `blocks`, and in which order they go, the first to go first."""
        if not len(blocks.key):
            return
        slots = self.index.fill(blocks)
        self.segments.fill(blocks.segment, slots)
        counts = np.bincount(blocks.space)
        for number in np.flatnonzero(counts).tolist():
            size = int(counts[number]) * self.namespaces.by_number(number).figures.block_bytes
            self.block_bytes += size
            self.space_bytes[number] += size
        self.bounded_blocks += int(np.count_nonzero(blocks.bounded))
        self.ranks.start(slots[oldest])

    def replace_block(self, slot: int, place: Place, *, checks: Checks, lineage: Lineage) -> Place:
        """Other bytes for a block; returns the old place."""
        old = self.place(slot)
        self.bounded_blocks += (lineage is Lineage.BOUNDED) - (self.index.lineage(slot) is Lineage.BOUNDED)
        self.index.rewrite(slot, place, checks, lineage)
        self.segments.add(place.segment_id, slot)
        self.segments.remove(old.segment_id)
        return old

    def settle_block(self, slot: int, place: Place) -> None:
        """What was accepted is durable, and lies there."""
        old = self.place(slot)
        self.index.move(slot, place)
        # Whoever was told of a use was told of a place that no log knows.
        self.index.flags[slot] &= ~USE_NOTED
        self.segments.add(place.segment_id, slot)
        self.segments.remove(old.segment_id)
        self._count(slot, ItemKind.BLOCK, old, -1)
        self._count(slot, ItemKind.BLOCK, place, 1)

    def _count(self, slot: int, kind: ItemKind, place: Place, count: int) -> None:
        """One more, or one fewer, of the block in `slot` at this place: accepted, or on the disk for its namespace."""
        if is_accepted(place.segment_id):
            if kind is ItemKind.BLOCK:
                self.accepted_bounded += count * (self.index.lineage(slot) is Lineage.BOUNDED)
            self.accepted[kind] += count
            self.accepted_bytes[kind] += count * place.length
        else:
            self.space_bytes[self.index.space[slot]] += count * place.length

    def remove_block(self, slot: int) -> list[Gone]:
        """Take out a childless block; its states, in both tiers, go first. What left the SSD, in that order."""
        index = self.index
        info, key, flags = self.info(slot), index.key(slot), index.flags[slot]
        left = [self.remove_state(handle) for handle in self.states_of(slot)] if flags & _HAS_STATES else []
        self.pool.remove(info.digest, key)
        place = Place(index.segment[slot], index.offset[slot], info.figures.block_bytes)
        left.append(Gone(info.digest, ItemId(key, ItemKind.BLOCK), place))
        if self.holds.is_held(slot):
            for owner in sorted(self.holds.removed(slot)):
                self.leases.block_removed(owner, slot, index.number[slot])
                self.reservations.block_removed(owner, slot)
        self.ranks.on_remove(slot)
        self.segments.remove(place.segment_id)
        self.block_bytes -= place.length
        self._count(slot, ItemKind.BLOCK, place, -1)
        self.bounded_blocks -= bool(flags & BOUNDED)
        index.remove(slot)
        if self.journal is not None:
            self.journal.note(BlockWent(info.digest, key))
        return left

    def touch(self, slot: int, now: float) -> None:
        """The block was used, and so was its whole chain; the root ranks last.

        A chain that was touched within this second is not walked again: the walk ends at the first block whose last
        use is this second, since no block was used later than its parent, and the blocks below it rank next to it.
        That makes many small commits to one long chain cheap, for an order of eviction that is true to the second.
        """
        index, second = self.index, self.second(now)
        used, parent, flags = index.used, index.parent, index.flags
        path = []
        while slot != NO_SLOT and used[slot] < second:
            path.append(slot)
            if not flags[slot] & USE_QUEUED and (
                not flags[slot] & USE_NOTED or hour_after(used[slot]) < second
            ):
                flags[slot] |= USE_QUEUED
                self._uses.append(slot)
            used[slot] = second
            slot = parent[slot]
        if path:
            self.ranks.on_touch(path, below=slot)

    def touch_chain(self, slots: array[int], now: float) -> None:
        """A request reads `slots`, the whole chain of the last of them, first block first: else as `touch` of that one."""
        if self.ranks.hear_requests:
            self.ranks.on_request(np.frombuffer(slots, np.int32), now)
        used, second = self.index.used, self.second(now)
        # Uses do not increase along a chain.
        if used[slots[-1]] >= second:
            return
        first = bisect_left(slots, True, key=lambda slot: used[slot] < second)
        if len(slots) - first < MANY_SLOTS:
            self.touch(slots[-1], now)
            return
        path = np.frombuffer(slots, np.int32)[first:][::-1]
        flags, uses = np.frombuffer(self.index.flags, np.uint8), np.frombuffer(used, np.uint32)
        marks, last = flags[path], uses[path].astype(np.int64)
        due = path[~_is(marks, USE_QUEUED) & (~_is(marks, USE_NOTED) | (-(-last // HOUR) * HOUR < second))]
        flags[due] |= USE_QUEUED
        self._uses.frombytes(due.tobytes())
        uses[path] = second
        self.ranks.on_touch_many(path, below=slots[first - 1] if first else NO_SLOT)

    # ---- states ---------------------------------------------------------------------------------------------

    def states_of(self, slot: int) -> list[int]:
        """Handles of what the block has on SSD."""
        return [
            handle
            for handle in (handle_of(slot, kind) for kind in STATE_KINDS)
            if self.states.get(handle) is not None
        ]

    def insert_state(self, slot: int, kind: ItemKind, entry: StateEntry) -> None:
        """The state at the end of a block, or its rows, where it has none of that kind on SSD."""
        handle = handle_of(slot, kind)
        self.states.add(handle, entry)
        self.index.flags[slot] |= self._flags_of(slot, kind, entry.place.length)
        self.segments.add(entry.place.segment_id, handle)
        self._count(slot, kind, entry.place, 1)
        if self.journal is not None:
            overlap = bool(self.index.flags[slot] & ROWS_OVERLAP)
            info, key = self.info(slot), self.index.key(slot)
            self.journal.note(state_came(info, key, kind, self.position(slot), overlap=overlap))

    def settle_state(self, handle: int, place: Place) -> None:
        """As settle_block."""
        entry = self.states.get(handle)
        assert entry is not None, "what is settled is held"
        old, entry.noted_until = entry.place, 0
        self.states.move(handle, place)
        self.segments.add(place.segment_id, handle)
        self.segments.remove(old.segment_id)
        slot, kind = slot_of(handle), kind_of(handle)
        self._count(slot, kind, old, -1)
        self._count(slot, kind, place, 1)

    def remove_state(self, handle: int) -> Gone:
        """Leases on it find it gone."""
        slot, kind = slot_of(handle), kind_of(handle)
        entry = self.states.remove(handle)
        self.index.flags[slot] &= ~(HAS_STATE if kind is ItemKind.STATE else HAS_ROWS | ROWS_OVERLAP)
        self.segments.remove(entry.place.segment_id)
        self._count(slot, kind, entry.place, -1)
        if self.journal is not None:
            self.journal.note(state_went(self.info(slot), self.index.key(slot), kind))
        return self.gone(slot, kind, entry.place)

    def touch_state(self, handle: int, now: float) -> None:
        entry = self.states.get(handle)
        assert entry is not None, "a state that is used is held"
        second = self.second(now)
        if not entry.use_queued and entry.noted_until < second:
            entry.use_queued = True
            self._uses.append(handle)
        self.states.touch(handle, second)

    def _flags_of(self, slot: int, kind: ItemKind, length: int) -> int:
        if kind is ItemKind.STATE:
            return HAS_STATE
        # Where no layer has an overlap the two lengths are one, and nothing is missing.
        with_overlap = length == self.info(slot).figures.rows_overlap_block_bytes
        return HAS_ROWS | ROWS_OVERLAP if with_overlap else HAS_ROWS

    # ---- leases ---------------------------------------------------------------------------------------------

    def end_leases(self, leases: list[Lease], now_mono: float) -> None:
        """Take the protection off the states of leases that have ended."""
        for lease in leases:
            if lease.pool_pin is not None:
                self.pool.unpin(lease.pool_pin, now=now_mono)
            for _, _, entry in lease.states:
                entry.leases -= 1
            self._on_lease_end(lease.lease_id)

    # ---- last uses ------------------------------------------------------------------------------------------

    @property
    def uses_waiting(self) -> int:
        return len(self._uses)

    def take_uses(self, limit: int | None = None) -> Iterator[tuple[Place, float]]:
        """Place and last use of everything used since the last call, or of the first `limit` of that, the use rounded up to a
        whole hour, so that further uses within that hour need not be told."""
        queued, self._uses = self._uses[:limit], self._uses[len(self._uses) if limit is None else limit :]
        flags = self.index.flags
        for handle in queued:
            if handle >= 0 and flags[handle] & USE_QUEUED:
                flags[handle] = flags[handle] & ~USE_QUEUED | USE_NOTED
                yield self.place(handle), float(hour_after(self.index.used[handle]))
            elif handle < 0:
                entry = self.states.get(handle)
                if entry is not None and entry.use_queued:
                    entry.use_queued = False
                    entry.noted_until = hour_after(entry.used)
                    yield entry.place, float(entry.noted_until)


def _is(marks: NDArray[np.uint8], flag: int) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = np.not_equal(marks & np.uint8(flag), 0)
    return found


def hour_after(second: int) -> int:
    return -(-second // HOUR) * HOUR
