"""Which payloads are in memory: recent ones by their place in the log, least recently used out first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from kvstore.memory.extent import GENERATION_BYTES, PAGE, Extent, Slot, whole_pages
from kvstore.memory.lent import Lent

EXTENT_BYTES = 64 << 20
SLOTS_MIN = 4
"""In an extent, whatever their size."""

SLOTS_MAX = 4096
"""To make more of them at once would hold up everybody else for milliseconds."""

EXTENTS_MIN = 16
"""A small cache is cut into smaller extents: sizes and domains do not share one."""

Key = tuple[int, int, int]
"""A place in the log: segment, offset, length. No other payload ever lies there, whatever its domain."""

K = TypeVar("K", bound=Key)


def extent_bytes_for(budget_bytes: int) -> int:
    return min(EXTENT_BYTES, budget_bytes // EXTENTS_MIN)


@dataclass(eq=False, slots=True)
class _Shelf:
    """The slots of one size of one domain, for as long as it has extents. `idle`: held, unpinned, least recently used first.
    `free`: by extent, where it has any. `spare`: extents in which nothing is pinned, and which no session has."""

    domain: str
    slot_bytes: int
    extents: set[Extent] = field(default_factory=set)
    free: dict[Extent, list[Slot]] = field(default_factory=dict)
    idle: OrderedDict[Key, Slot] = field(default_factory=OrderedDict)
    spare: set[Extent] = field(default_factory=set)
    spare_bytes: int = 0
    used: int = 0
    """The tick of the last use of any of them, or of when the first of `spare` became so."""


class BlockCache:
    """Payloads in extents, within `budget_bytes` but for what a `resize` still owes; one set of extents for each trust
    domain, since who maps one can read all of it. For one thread, but for the bytes of slots that were begun.

    An extent that a session was given is not given up while the session lasts: its memory would live on with whoever maps
    it, and count for nobody.
    """

    def __init__(self, budget_bytes: int, *, extent_bytes: int = EXTENT_BYTES) -> None:
        self._budget = budget_bytes
        self._extent_bytes = extent_bytes
        self._shelves: dict[tuple[str, int], _Shelf] = {}
        self._spare: OrderedDict[_Shelf, None] = OrderedDict()
        """Those that could give up an extent, least recently used first."""
        self._spare_bytes = 0
        self._held: dict[Key, Slot] = {}
        self._keys: dict[Slot, Key] = {}
        self._filling: dict[Key, Slot] = {}
        self._doomed: set[Slot] = set()
        """Begun, and forgotten before they were finished."""
        self._lent = Lent()
        self._next_number = 1
        self._ticks = 0
        self.allocated_bytes = self.held_bytes = 0
        self.hits_total = self.misses_total = self.evicted_total = self.refused_total = 0

    def __len__(self) -> int:
        return len(self._held)

    @property
    def budget_bytes(self) -> int:
        return self._budget

    def resize(self, budget_bytes: int, *, extent_bytes: int | None = None) -> None:
        """Another budget from now on, and another size of extents that are made from now on. What is more than the budget
        goes at once where nothing is pinned in it and no session has it, used longest ago first; the rest as soon as that is
        so."""
        self._budget = budget_bytes
        self._extent_bytes = extent_bytes or self._extent_bytes
        self._shrink()

    def find(self, domain: str, key: Key) -> Slot | None:
        """The slot that holds it, pinned."""
        slot = self._held.get(key)
        if slot is None or slot.extent.domain != domain:
            self.misses_total += 1
            return None
        self.hits_total += 1
        self.pin((slot,))
        return slot

    def find_all(self, domain: str, keys: Iterable[Key]) -> list[Slot] | None:
        """The slots that hold them, in order and not pinned; None, and nothing counted, unless all are held."""
        try:
            slots = list(map(self._held.__getitem__, keys))
        except KeyError:
            return None
        if any(extent.domain != domain for extent in {slot.extent for slot in slots}):
            return None
        self.hits_total += len(slots)
        return slots

    def begin(self, domain: str, key: Key, *, room_bytes: int, for_writer: bool = False) -> Slot | None:
        """A slot of at least so many bytes to read it into, pinned, its generation odd. None where it is being read by
        another or there is no room: what is pinned stays. `finish` or `abandon` it. `for_writer`: nobody here says when that is; so
        extents with such slots are only a part of what several domains, or sizes, share."""
        if key in self._filling or key in self._held:
            return None
        slot_bytes = whole_pages(max(room_bytes, 1))
        shelf = self._shelves.get((domain, slot_bytes)) or _Shelf(domain, slot_bytes)
        slot = self._take(shelf)
        if slot is not None and for_writer and not self._may_lend(slot.extent):
            self._free(slot)
            slot = None
        if slot is None:
            self.refused_total += 1
            return None
        if for_writer:
            self._lent.take(slot)
        self._withdraw(shelf, slot.extent)
        slot.extent.step(slot.index)
        slot.pins = 1
        slot.extent.pinned += 1
        self._filling[key] = slot
        self._keys[slot] = key
        return slot

    def finish(self, slot: Slot, *, begin: int, length: int) -> None:
        """The payload lies there, `begin` bytes behind the slot's beginning. It stays pinned for who began it. What was
        forgotten meanwhile is not found by others, and goes when nobody pins it any more."""
        key = self._keys[slot]
        slot.begin, slot.length = begin, length
        slot.extent.step(slot.index)
        self._lent.give_back(slot)
        del self._filling[key]
        if slot in self._doomed:
            self._doomed.remove(slot)
            return
        self._held[key] = slot
        self.held_bytes += length
        self._use(slot)

    def abandon(self, slot: Slot) -> None:
        """What was to lie there did not come. Nothing is written into it any more."""
        del self._filling[self._keys.pop(slot)]
        self._doomed.discard(slot)
        self._lent.give_back(slot)
        slot.pins = 0
        slot.extent.pinned -= 1
        slot.extent.step(slot.index)
        self._free(slot)
        self._offer(slot.extent)

    def give(self, extent: Extent) -> None:
        """One more session has it, and can read it until it ends."""
        self._withdraw(self._shelf(extent), extent)
        extent.given += 1

    def take_back(self, extents: Iterable[Extent]) -> None:
        """A session that was given each of them has ended."""
        for extent in extents:
            extent.given -= 1
            assert extent.given >= 0
            self._offer(extent)

    def pin(self, slots: Iterable[Slot]) -> None:
        """They are used now, and stay until they are unpinned. Each holds something."""
        self._ticks = tick = self._ticks + 1
        keys = self._keys
        extent, shelf = None, None
        # Thousands of a prompt at a time: neighbours are mostly of one extent.
        for slot in slots:
            if slot.extent is not extent or shelf is None:
                extent = slot.extent
                shelf = self._shelf(extent)
                self._withdraw(shelf, extent)
                self._touch(shelf, extent)
            if slot.pins == 0:
                del shelf.idle[keys[slot]]
                extent.pinned += 1
            slot.pins += 1
            slot.tick = tick

    def unpin(self, slots: Iterable[Slot]) -> None:
        """Each once for each pin. Of those that were used together the first ones here go first."""
        for slot in slots:
            slot.pins -= 1
            assert slot.pins >= 0
            if slot.pins:
                continue
            extent = slot.extent
            extent.pinned -= 1
            key = self._keys[slot]
            if self._held.get(key) is slot:
                self._shelf(extent).idle[key] = slot
            else:
                # It was forgotten while somebody read it.
                self._release(slot)
            if extent.pinned == 0:
                self._offer(extent)

    def forget(self, keys: Iterable[Key]) -> None:
        """They are not to be handed out any more. Who pins one keeps it until then."""
        for key in keys:
            slot = self._held.pop(key, None)
            if slot is None:
                if (filling := self._filling.get(key)) is not None:
                    self._doomed.add(filling)
                continue
            self.held_bytes -= slot.length
            if slot.pins == 0:
                del self._shelf(slot.extent).idle[key]
                self._release(slot)

    def move(self, moves: Mapping[K, K]) -> None:
        """The same payloads lie at other places now. Nothing is held under the new ones."""
        for old in moves.keys() & self._held.keys():
            new, slot = moves[old], self._held.pop(old)
            if slot.pins == 0:
                idle = self._shelf(slot.extent).idle
                del idle[old]
                idle[new] = slot
            self._held[new] = slot
            self._keys[slot] = new
        for old in moves.keys() & self._filling.keys():
            new, slot = moves[old], self._filling.pop(old)
            self._filling[new] = slot
            self._keys[slot] = new

    def check(self) -> None:
        """Raise AssertionError unless the books add up."""
        extents = [extent for shelf in self._shelves.values() for extent in shelf.extents]
        assert self.allocated_bytes == sum(extent.bytes for extent in extents)
        assert self.allocated_bytes <= self._budget or not self._spare, "what could go is gone"
        slots = {slot for extent in extents for slot in extent.slots}
        free = {slot for shelf in self._shelves.values() for each in shelf.free.values() for slot in each}
        assert free | set(self._keys) == slots
        assert not free & set(self._keys)
        assert all(slot.pins == 0 for slot in free)
        assert all(self._keys[slot] == key for key, slot in (self._held | self._filling).items())
        assert not self._held.keys() & self._filling.keys()
        assert self._doomed <= set(self._filling.values())
        assert self.held_bytes == sum(slot.length for slot in self._held.values())
        for extent in extents:
            assert extent.pinned == sum(slot.pins > 0 for slot in extent.slots)
        for shelf in self._shelves.values():
            assert shelf.extents
            assert shelf.spare == {each for each in shelf.extents if not (each.pinned or each.given)}
            assert shelf.spare_bytes == sum(extent.bytes for extent in shelf.spare)
            assert all(
                slots and all(slot.extent is extent for slot in slots) for extent, slots in shelf.free.items()
            )
            assert all(
                slot.pins == 0 and self._held[key] is slot and slot.extent.domain == shelf.domain
                for key, slot in shelf.idle.items()
            )
        assert self._spare.keys() == {shelf for shelf in self._shelves.values() if shelf.spare}
        used = [shelf.used for shelf in self._spare]
        assert used == sorted(used)
        assert self._spare_bytes == sum(shelf.spare_bytes for shelf in self._spare)
        idle = sum(len(shelf.idle) for shelf in self._shelves.values())
        assert idle == sum(slot.pins == 0 for slot in self._keys)
        self._lent.check()

    # ---- inside -------------------------------------------------------------------------------------------------

    def _may_lend(self, extent: Extent) -> bool:
        # Where there is one shelf, its other slots serve everybody.
        return len(self._shelves) == 1 or self._lent.allows(extent, self._budget)

    def _shelf(self, extent: Extent) -> _Shelf:
        return self._shelves[extent.domain, extent.slot_bytes]

    def _use(self, slot: Slot) -> None:
        self._ticks += 1
        slot.tick = self._ticks
        self._touch(self._shelf(slot.extent), slot.extent)

    def _touch(self, shelf: _Shelf, extent: Extent) -> None:
        """They are used at this tick."""
        shelf.used = extent.tick = self._ticks
        if shelf.spare:
            self._spare.move_to_end(shelf)

    def _take(self, shelf: _Shelf) -> Slot | None:
        """A free slot; made, or of what was used least recently, or of shelves that nobody has used for longer."""
        if not shelf.free and not self._grow(shelf):
            oldest = next(iter(shelf.idle.values()), None)
            gain = self._gain(shelf, before=None if oldest is None else oldest.tick)
            for extent in gain:
                self._give_up(extent)
            if not (gain and self._grow(shelf)) and oldest is not None:
                # The rule where memory is full: it goes from hand to hand, and what it was is over with its next generation.
                self._drop(shelf, self._keys[oldest])
                del self._keys[oldest]
                return oldest
        if not shelf.free:
            return None
        extent, slots = next(reversed(shelf.free.items()))
        slot = slots.pop()
        if not slots:
            del shelf.free[extent]
        return slot

    def _lacking(self, shelf: _Shelf) -> int:
        """Bytes of the budget that are not there for another extent, of as few slots as there may be."""
        return PAGE + SLOTS_MIN * shelf.slot_bytes - (self._budget - self.allocated_bytes)

    def _grow(self, shelf: _Shelf) -> bool:
        """Where the budget has room for another extent; a smaller one at its end."""
        if self._lacking(shelf) > 0:
            return False
        least = PAGE + SLOTS_MIN * shelf.slot_bytes
        room = min(self._budget - self.allocated_bytes, max(self._extent_bytes, least))
        slots = room // (shelf.slot_bytes + GENERATION_BYTES)
        # A page more or less of generations.
        while whole_pages(GENERATION_BYTES * slots) + slots * shelf.slot_bytes > room:
            slots -= 1
        slots = min(slots, SLOTS_MAX)
        try:
            extent = Extent(self._next_number, domain=shelf.domain, slot_bytes=shelf.slot_bytes, slots=slots)
        except OSError:
            # The system has less than the budget: what there is goes on.
            return False
        self._next_number += 1
        self.allocated_bytes += extent.bytes
        self._shelves[shelf.domain, shelf.slot_bytes] = shelf
        shelf.extents.add(extent)
        shelf.free[extent] = extent.slots[::-1]
        self._offer(extent)
        return True

    def _gain(self, shelf: _Shelf, *, before: int | None) -> list[Extent]:
        """Spare extents of others, those used longest ago, without which there is room for another one of this shelf. None
        unless there is, nor of who used any of theirs since the tick `before`."""
        if self._spare_bytes == shelf.spare_bytes:
            return []
        lacking = self._lacking(shelf)
        if not 0 < lacking <= self._spare_bytes - shelf.spare_bytes:
            return []
        gain: list[Extent] = []
        for other in self._spare:
            if before is not None and other.used >= before:
                break
            if other is shelf:
                continue
            for extent in sorted(other.spare, key=lambda each: each.tick):
                gain.append(extent)
                lacking -= extent.bytes
                if lacking <= 0:
                    return gain
        return []

    def _give_up(self, extent: Extent) -> None:
        """A spare one."""
        shelf = self._shelf(extent)
        for slot in extent.slots:
            key = self._keys.get(slot)
            if key is not None:
                self._evict(shelf, key)
        self._withdraw(shelf, extent)
        del shelf.free[extent]
        shelf.extents.remove(extent)
        if not shelf.extents:
            del self._shelves[shelf.domain, shelf.slot_bytes]
        self.allocated_bytes -= extent.bytes
        extent.close()

    def _offer(self, extent: Extent) -> None:
        """It may go for others, if nothing of it is pinned and no session has it."""
        if extent.pinned or extent.given:
            return
        shelf = self._shelf(extent)
        if not shelf.spare:
            self._ticks += 1
            shelf.used = self._ticks
            self._spare[shelf] = None
        shelf.spare.add(extent)
        shelf.spare_bytes += extent.bytes
        self._spare_bytes += extent.bytes
        self._shrink()

    def _shrink(self) -> None:
        while self.allocated_bytes > self._budget and self._spare:
            shelf = next(iter(self._spare))
            self._give_up(min(shelf.spare, key=lambda extent: extent.tick))

    def _withdraw(self, shelf: _Shelf, extent: Extent) -> None:
        """It stays, if it was spare."""
        if extent not in shelf.spare:
            return
        shelf.spare.remove(extent)
        shelf.spare_bytes -= extent.bytes
        self._spare_bytes -= extent.bytes
        if not shelf.spare:
            del self._spare[shelf]

    def _evict(self, shelf: _Shelf, key: Key) -> None:
        self._release(self._drop(shelf, key))

    def _drop(self, shelf: _Shelf, key: Key) -> Slot:
        """The slot, which others find no more."""
        slot = shelf.idle.pop(key)
        del self._held[key]
        self.held_bytes -= slot.length
        self.evicted_total += 1
        return slot

    def _release(self, slot: Slot) -> None:
        """Its generation moves on at once: who still reads it without a right to learns so."""
        del self._keys[slot]
        slot.extent.step(slot.index)
        slot.extent.step(slot.index)
        self._free(slot)

    def _free(self, slot: Slot) -> None:
        self._shelf(slot.extent).free.setdefault(slot.extent, []).append(slot)
