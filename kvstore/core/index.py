"""The block index: a struct of arrays. A slot is a place in the columns, used again after its block has left."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterator
from itertools import islice, pairwise
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.core.keytable import SHARDS, KeyTable, SlotNumbers, shards_of
from kvstore.errors import InvalidArgument
from kvstore.store.base import Place
from kvstore.types import KEY_BYTES, BlockKey, Checks, Lineage

NO_SLOT = -1

# Bits of the flags column.
BOUNDED = 1
HAS_XXH3 = 2
HAS_STATE = 4
USE_QUEUED = 8
USE_NOTED = 16
LIVE = 32
HAS_ROWS = 64
ROWS_OVERLAP = 128

MANY_SLOTS = 200
"""From here on columns are faster than a loop."""

_MANY = -2
_TABLES_ASKED = 64
_BRANCH_BYTES = 320
"""Of the set of a block's children, where they are few."""
_U32 = 2**32 - 1


class Filling(NamedTuple):
    """Blocks to fill an index with, in columns. key: (n, 4) words; parent: which of them is each one's parent, or NO_SLOT; used: seconds."""

    key: NDArray[np.uint64]
    parent: NDArray[np.int64]
    number: NDArray[np.int64]
    space: NDArray[np.uint32]
    segment: NDArray[np.uint64]
    offset: NDArray[np.uint64]
    used: NDArray[np.int64]
    crc32: NDArray[np.uint32]
    xxh3_64: NDArray[np.uint64]
    bounded: NDArray[np.bool_]
    has_xxh3: NDArray[np.bool_]


class Frozen(NamedTuple):
    """Columns of an index as they were at one moment, by slot."""

    parent: array[int]
    number: array[int]
    space: array[int]
    flags: bytes
    keys: list[bytes]


class BlockIndex:
    """Blocks of all namespaces, and the tree that they form.

    Laws: a block's parent is in the index (a first block's is NO_SLOT), its number is its parent's plus one, and it was
    last used no later than its parent. Only childless blocks are removed. Columns are open to the modules of this
    package to read in loops; they are written here only, but for `used` and `flags`.
    """

    def __init__(self) -> None:
        self.parent = array("i")
        self.number = array("i")
        """Place of the block in its chain, the first is 0."""
        self.space = array("H")
        """Number of its namespace."""
        self.segment = array("I")
        self.offset = array("I")
        self.used = array("I")
        """Last use, in whole wall seconds, rounded up."""
        self.flags = bytearray()
        self._child = array("i")
        self._crc32 = array("I")
        self._xxh3 = array("Q")
        self._keys: list[bytes] = []
        # Children of the blocks that have more than one; a sole child is in its column.
        self._branches: dict[int, set[int]] = {}
        self._numbers = SlotNumbers()
        self._tables: dict[int, KeyTable] = {}
        self._newest, self._newest_space, self._newest_key = NO_SLOT, 0, b""
        """The block that was inserted last, while it is here."""
        self._sizes: dict[int, int] = {}
        """Of tables, those that were asked longest ago first."""

    def __len__(self) -> int:
        return len(self._numbers)

    # ---- reading --------------------------------------------------------------------------------------------

    def find(self, space: int, key: bytes) -> int:
        # Who writes a chain asks for each block's parent, which came right before it.
        if key == self._newest_key and space == self._newest_space:
            return self._newest
        table = self._tables.get(space)
        return NO_SLOT if table is None else table.find(key)

    def finder(self, space: int) -> Callable[[bytes], int]:
        """`find` in one namespace, for who asks for several keys at once."""
        table = self._tables.get(space)
        return (lambda key: NO_SLOT) if table is None else table.find

    def key(self, slot: int) -> BlockKey:
        return BlockKey(self._keys[slot])

    def checks(self, slot: int) -> Checks:
        return Checks(self._crc32[slot], self._xxh3[slot], bool(self.flags[slot] & HAS_XXH3))

    def lineage(self, slot: int) -> Lineage:
        return Lineage.BOUNDED if self.flags[slot] & BOUNDED else Lineage.EXACT

    def is_live(self, slot: int) -> bool:
        return bool(self.flags[slot] & LIVE)

    def is_childless(self, slot: int) -> bool:
        return self._child[slot] == NO_SLOT

    def children(self, slot: int) -> tuple[int, ...]:
        child = self._child[slot]
        if child == _MANY:
            return tuple(self._branches[slot])
        return () if child == NO_SLOT else (child,)

    def chain(self, slot: int) -> array[int]:
        """Slots from the first block to `slot`."""
        parent, above = self.parent, self.number[slot]
        if above < MANY_SLOTS:
            last = slot
            few = [slot := parent[slot] for _ in range(above)]
            few.reverse()
            few.append(last)
            return array("i", few)
        slots = [slot]
        # The list grows by what it is read for: each block's parent is looked up in its turn, without a step in Python.
        slots.extend(islice(map(parent.__getitem__, slots), above))
        slots.reverse()
        return array("i", slots)

    def is_chain_of(self, slots: array[int], keys: bytes) -> bool:
        """Whether the blocks in `slots` have exactly these keys, in order; `keys` are joined."""
        if 1 < len(slots) < MANY_SLOTS:
            return b"".join(itemgetter(*slots)(self._keys)) == keys
        return b"".join(map(self._keys.__getitem__, slots)) == keys

    def marks(self, slots: array[int]) -> bytes:
        """The flags of each of `slots`."""
        if 1 < len(slots) < MANY_SLOTS:
            # A method of a column that is called by `map` takes longer.
            return bytes(itemgetter(*slots)(self.flags))
        if len(slots) < MANY_SLOTS:
            return bytes(map(self.flags.__getitem__, slots))
        return np.frombuffer(self.flags, np.uint8)[np.frombuffer(slots, np.int32)].tobytes()

    def descendants(self, slot: int) -> list[int]:
        """`slot` and all below it, each after its parent."""
        found = [slot]
        for each in found:
            found.extend(self.children(each))
        return found

    def slots(self) -> Iterator[int]:
        """All slots in use, ascending."""
        return (slot for slot, flags in enumerate(self.flags) if flags & LIVE)

    def frozen(self) -> Frozen:
        """All blocks at this moment; what happens later does not change it. It takes 19 bytes a block."""
        return Frozen(self.parent[:], self.number[:], self.space[:], bytes(self.flags), self._keys.copy())

    def count(self, space: int) -> int:
        table = self._tables.get(space)
        return 0 if table is None else len(table)

    # ---- changing -------------------------------------------------------------------------------------------

    def insert(
        self,
        space: int,
        key: BlockKey,
        parent: int,
        place: Place,
        *,
        checks: Checks,
        lineage: Lineage,
        used: int,
    ) -> int:
        """The slot of the new block. `parent` is a slot or NO_SLOT; the key is not in the index yet."""
        check_place(place)
        table = self._tables.get(space)
        if table is None:
            table = self._tables[space] = KeyTable(self._numbers)
        slot = table.add(key)
        if slot >= len(self._keys):
            self._grow()
        self._keys[slot] = key
        self.space[slot] = space
        self.segment[slot] = place.segment_id
        self.offset[slot] = place.offset
        self._crc32[slot] = checks.crc32
        self._xxh3[slot] = checks.xxh3_64
        self.used[slot] = used
        self.flags[slot] = LIVE | _mark(checks, lineage)
        self.parent[slot] = parent
        self._child[slot] = NO_SLOT
        if parent == NO_SLOT:
            self.number[slot] = 0
        else:
            self.number[slot] = self.number[parent] + 1
            self._adopt(parent, slot)
        self._newest, self._newest_space, self._newest_key = slot, space, key
        return slot

    def fill(self, blocks: Filling) -> NDArray[np.int32]:
        """Insert blocks, one at least, into an empty index at once; their slots, in the order given."""
        assert not len(self), "an index is filled once, before anything else"
        _check_places(blocks)
        shards = shards_of(_bytes_of(blocks.key))
        group = blocks.space * np.uint32(SHARDS) + shards
        # Of sixteen bits each they are sorted in one pass.
        order = np.argsort(group.astype(np.min_scalar_type(group.max())), kind="stable")
        ordered = group[order]
        begins = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
        # Made anew in this order, keys that are looked up together lie together.
        keys = _bytes_of(blocks.key[order])
        slots = np.empty(len(order), np.int64)
        filled: list[tuple[slice, list[bytes]]] = []
        edges = [0, *begins.tolist(), len(order)]
        for begin, end in pairwise(edges):
            space, shard = divmod(int(ordered[begin]), SHARDS)
            table = self._tables.setdefault(space, KeyTable(self._numbers))
            own = table.fill(shard, keys[begin:end])
            slots[order[begin:end]] = np.arange(own.start, own.stop, own.step)
            filled.append((own, keys[begin:end]))
        rows = len(self._numbers.rows) * SHARDS
        self._keys = [b""] * rows
        for own, members in filled:
            self._keys[own] = members
        parent = np.where(blocks.parent == NO_SLOT, NO_SLOT, slots[blocks.parent])
        marks = LIVE | blocks.bounded * np.uint8(BOUNDED) | blocks.has_xxh3 * np.uint8(HAS_XXH3)
        self.parent = _column("i", rows, slots, parent)
        self.number = _column("i", rows, slots, blocks.number)
        self.space = _column("H", rows, slots, blocks.space)
        self.segment = _column("I", rows, slots, blocks.segment)
        self.offset = _column("I", rows, slots, blocks.offset)
        self.used = _column("I", rows, slots, blocks.used)
        self._crc32 = _column("I", rows, slots, blocks.crc32)
        self._xxh3 = _column("Q", rows, slots, blocks.xxh3_64)
        self.flags = bytearray(_column("B", rows, slots, marks))
        self._adopt_all(slots, parent)
        return slots.astype(np.int32)

    def rewrite(self, slot: int, place: Place, checks: Checks, lineage: Lineage) -> None:
        """Other bytes for the same block."""
        self.move(slot, place)
        self._crc32[slot] = checks.crc32
        self._xxh3[slot] = checks.xxh3_64
        self.flags[slot] = self.flags[slot] & ~(BOUNDED | HAS_XXH3) | _mark(checks, lineage)

    def move(self, slot: int, place: Place) -> None:
        """The same bytes at another place."""
        check_place(place)
        self.segment[slot] = place.segment_id
        self.offset[slot] = place.offset

    def remove(self, slot: int) -> None:
        """Take out a childless block; its slot may be given to another."""
        assert self._child[slot] == NO_SLOT, "tails first: a block leaves before its parent"
        if slot == self._newest:
            self._newest, self._newest_space, self._newest_key = NO_SLOT, 0, b""
        if self.parent[slot] != NO_SLOT:
            self._disown(self.parent[slot], slot)
        self._tables[self.space[slot]].remove(self._keys[slot], slot)
        self._keys[slot] = b""
        self.flags[slot] = 0

    def drop_space(self, space: int) -> None:
        """Forget a namespace in which nothing is left."""
        self._sizes.pop(space, None)
        table = self._tables.pop(space, None)
        assert not table, "a namespace is emptied first"

    def memory_bytes(self) -> int:
        """Bytes of all columns, tables and the objects that they refer to. Where there are many namespaces, what their tables
        take is as it was some calls ago."""
        columns = (
            self.parent,
            self.number,
            self.space,
            self.segment,
            self.offset,
            self.used,
            self.flags,
            self._child,
            self._crc32,
            self._xxh3,
            self._keys,
            self._branches,
        )
        branches = len(self._branches) * _BRANCH_BYTES
        tables = self._numbers.memory_bytes() + self._table_bytes()
        return sum(map(sys.getsizeof, columns)) + branches + tables

    def _table_bytes(self) -> int:
        """Some tables are asked in turn, and those that were never asked."""
        sizes = self._sizes
        asked = [space for space in self._tables if space not in sizes][:_TABLES_ASKED]
        for _ in range(min(_TABLES_ASKED - len(asked), len(sizes))):
            asked.append(space := next(iter(sizes)))
            del sizes[space]
        for space in asked:
            if (table := self._tables.get(space)) is not None:
                sizes[space] = table.memory_bytes()
        return sum(sizes.values())

    def check_integrity(self) -> None:
        """Raise AssertionError unless the laws above hold and the columns agree with one another."""
        living = set(self.slots())
        assert len(living) == len(self), "slots in use"
        free = self._numbers.free()
        assert living.isdisjoint(free), "a free slot is in use"
        assert len(set(free)) == len(free), "a slot is free twice"
        keyed = {slot: (space, key) for space, table in self._tables.items() for key, slot in table.items()}
        assert keyed.keys() == living, "keys"
        if self._newest != NO_SLOT:
            assert keyed[self._newest] == (self._newest_space, self._newest_key), "the newest block"
        children: dict[int, set[int]] = {}
        for slot in living:
            assert keyed[slot] == (self.space[slot], self.key(slot)), "a key and its slot disagree"
            parent = self.parent[slot]
            if parent == NO_SLOT:
                assert self.number[slot] == 0, "a first block has number 0"
                continue
            assert parent in living, "a block's parent is held"
            assert self.space[parent] == self.space[slot], "a block and its parent share a namespace"
            assert self.number[slot] == self.number[parent] + 1, "numbers follow the chain"
            assert self.used[slot] <= self.used[parent], "a parent was used no earlier than its child"
            children.setdefault(parent, set()).add(slot)
        for slot in living:
            assert set(self.children(slot)) == children.get(slot, set()), "children"
        assert all(len(members) > 1 for members in self._branches.values()), (
            "a branch has two children or more"
        )

    def _grow(self) -> None:
        """One more row of every shard."""
        for column in (
            self.parent,
            self.number,
            self.segment,
            self.offset,
            self.used,
            self._child,
            self._crc32,
        ):
            column.frombytes(bytes(4 * SHARDS))
        self.space.frombytes(bytes(2 * SHARDS))
        self._xxh3.frombytes(bytes(8 * SHARDS))
        self.flags += bytes(SHARDS)
        self._keys += [b""] * SHARDS

    def _adopt(self, parent: int, slot: int) -> None:
        child = self._child[parent]
        if child == NO_SLOT:
            self._child[parent] = slot
        elif child == _MANY:
            self._branches[parent].add(slot)
        else:
            self._branches[parent] = {child, slot}
            self._child[parent] = _MANY

    def _adopt_all(self, slots: NDArray[np.int64], parent: NDArray[np.int64]) -> None:
        """Enter the children of all blocks."""
        inner = parent != NO_SLOT
        slots, parent = slots[inner], parent[inner]
        counts = np.bincount(parent, minlength=len(self.flags))
        child = np.full(len(self.flags), NO_SLOT, np.int32)
        child[parent] = slots
        child[counts > 1] = _MANY
        self._child = array("i", child.tobytes())
        many = counts[parent] > 1
        for slot, above in zip(slots[many].tolist(), parent[many].tolist(), strict=True):
            self._branches.setdefault(above, set()).add(slot)

    def _disown(self, parent: int, slot: int) -> None:
        if self._child[parent] != _MANY:
            assert self._child[parent] == slot, "a sole child is in its parent's column"
            self._child[parent] = NO_SLOT
            return
        children = self._branches[parent]
        children.remove(slot)
        if len(children) == 1:
            self._child[parent] = children.pop()
            del self._branches[parent]


def check_place(place: Place) -> None:
    """Places are kept in 32-bit columns; a log that outgrows them is refused by name."""
    if 0 <= place.segment_id <= _U32 and 0 <= place.offset <= _U32:
        return
    for field, value in (("segment_id", place.segment_id), ("offset", place.offset)):
        if not 0 <= value <= _U32:
            raise InvalidArgument(
                "the index keeps 32-bit places", field=field, value=value, allowed=f"0 to {_U32}"
            )


def _check_places(blocks: Filling) -> None:
    for row in np.flatnonzero((blocks.segment > _U32) | (blocks.offset > _U32))[:1].tolist():
        check_place(Place(int(blocks.segment[row]), int(blocks.offset[row]), 0))


def _bytes_of(words: NDArray[np.uint64]) -> list[bytes]:
    keys: list[bytes] = np.ascontiguousarray(words).view(f"V{KEY_BYTES}").ravel().tolist()
    return keys


def _column(code: str, rows: int, slots: NDArray[np.int64], values: NDArray[np.integer[Any]]) -> array[int]:
    whole = np.zeros(rows, code)
    whole[slots] = values
    column = array(code)
    column.frombytes(whole.view(np.uint8).data)
    return column


def _mark(checks: Checks, lineage: Lineage) -> int:
    return (BOUNDED if lineage is Lineage.BOUNDED else 0) | (HAS_XXH3 if checks.has_xxh3 else 0)
