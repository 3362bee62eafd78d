"""What is held of a prompt: its blocks, and what a resume can start from."""

from __future__ import annotations

from array import array
from itertools import compress, islice

from kvstore.core.index import BOUNDED, HAS_ROWS, HAS_STATE, NO_SLOT, ROWS_OVERLAP, BlockIndex
from kvstore.core.live import Live
from kvstore.core.namespaces import NamespaceInfo
from kvstore.core.steps import Steps
from kvstore.core.windows import deepest_edge
from kvstore.plan.base import Coverage
from kvstore.plan.coverage import longest_restore
from kvstore.prefix.joined import JoinedKeys
from kvstore.types import KEY_BYTES, BlockKey, ItemKind, Lineage

SLOTS_AT_ONCE = 3_000
"""Blocks of a prompt in one step: less than a millisecond where nothing of them is in the processor's caches."""

# Column values to 0 or 1, so that the first block with a flag is found by bytes.find.
_IS_BOUNDED = bytes(bool(value & BOUNDED) for value in range(256))
_HAS_STATE = bytes(bool(value & HAS_STATE) for value in range(256))
_HAS_BARE_ROWS = bytes(value & (HAS_ROWS | ROWS_OVERLAP) == HAS_ROWS for value in range(256))
_HAS_ANY = bytes(bool(value & (HAS_STATE | HAS_ROWS | ROWS_OVERLAP)) for value in range(256))
_PLAIN = bytes(value for value in range(256) if not value & (BOUNDED | HAS_STATE | HAS_ROWS | ROWS_OVERLAP))
"""Flags of exact blocks with nothing on SSD beside them."""
_HAS_ROWS_AND_OVERLAP = bytes(bool(value & ROWS_OVERLAP) for value in range(256))


def held_prefix(live: Live, info: NamespaceInfo, keys: JoinedKeys) -> array[int]:
    """Slots of the longest run of held blocks from the start of the prompt.

    A block is held only with all before it, so the run's end is found by bisection, and the chain that leads to it is
    then compared with the keys. Keys that are no chain (a caller's mistake) fail that comparison and are walked.
    """
    index, space, joined = live.index, info.number, keys.joined
    low, deepest = _deepest_held(index, space, joined)
    if not low:
        return array("i")
    if index.number[deepest] == low - 1:
        slots = index.chain(deepest)
        if index.is_chain_of(slots, joined[: low * KEY_BYTES]):
            return slots
    return _walked(index, space, keys, array("i"))


def finding(live: Live, info: NamespaceInfo, keys: JoinedKeys) -> Steps[None, array[int]]:
    """As held_prefix, in steps. The slots are good until anything else happens to the index."""
    index, space, joined = live.index, info.number, keys.joined
    count, deepest = _deepest_held(index, space, joined)
    if count <= SLOTS_AT_ONCE or index.number[deepest] != count - 1:
        return held_prefix(live, info, keys)
    # While this block is here all those before it are, where they were: only childless ones leave.
    mark = index.key(deepest)
    path = [deepest]
    while len(path) < count:
        _climb(index, path, min(SLOTS_AT_ONCE, count - len(path)))
        yield
        if not _is_still(index, deepest, mark):
            return held_prefix(live, info, keys)
    path.reverse()
    slots = array("i", path)
    for first in range(0, count, SLOTS_AT_ONCE):
        part = slice(first * KEY_BYTES, min(first + SLOTS_AT_ONCE, count) * KEY_BYTES)
        if not index.is_chain_of(slots[first : first + SLOTS_AT_ONCE], joined[part]):
            return held_prefix(live, info, keys)
        yield
        if not _is_still(index, deepest, mark):
            return held_prefix(live, info, keys)
    # What has come meanwhile.
    return _walked(index, space, keys, slots)


def _climb(index: BlockIndex, path: list[int], count: int) -> None:
    """Extend `path`, in which each slot is the parent of the one before it, by `count` more."""
    # As in BlockIndex.chain: the list grows by what it is read for.
    path.extend(islice(map(index.parent.__getitem__, islice(path, len(path) - 1, None)), count))


def _is_still(index: BlockIndex, slot: int, key: BlockKey) -> bool:
    """Whether the block in `slot`, whose key was the object `key`, has not left: who comes brings a key of its own."""
    return index.key(slot) is key


def _walked(index: BlockIndex, space: int, keys: JoinedKeys, slots: array[int]) -> array[int]:
    """`slots` of the first blocks, and those of the held ones right after them."""
    before = slots[-1] if slots else NO_SLOT
    for number in range(len(slots), len(keys)):
        slot = index.find(space, keys[number])
        if slot == NO_SLOT or index.parent[slot] != before:
            break
        slots.append(slot)
        before = slot
    return slots


def _deepest_held(index: BlockIndex, space: int, joined: bytes) -> tuple[int, int]:
    """(Blocks up to one that is held, that one's slot), where the next one is not; (0, NO_SLOT) where the first is not."""
    high, find = len(joined) // KEY_BYTES, index.finder(space)
    first = find(joined[:KEY_BYTES])
    if first == NO_SLOT:
        return 0, NO_SLOT
    # Nothing or all of it is what is held most often.
    slot = find(joined[-KEY_BYTES:])
    if slot != NO_SLOT and index.number[slot] == high - 1:
        return high, slot
    low, deepest = 1, first
    while low < high:
        middle = (low + high + 1) // 2
        slot = find(joined[(middle - 1) * KEY_BYTES : middle * KEY_BYTES])
        if slot == NO_SLOT:
            high = middle - 1
        else:
            low, deepest = middle, slot
    return low, deepest


def unexpired(live: Live, slots: array[int], now_wall: float) -> array[int]:
    """Without the blocks at the end whose time is over: uses do not increase along a chain."""
    used, count = live.index.used, len(slots)
    while count and used[slots[count - 1]] + live.retention_seconds <= now_wall:
        count -= 1
    return slots if count == len(slots) else slots[:count]


def covered(
    live: Live,
    info: NamespaceInfo,
    keys: JoinedKeys,
    held: array[int],
    slots: array[int],
    *,
    prompt_tokens: int,
    now_mono: float,
) -> tuple[Coverage, Coverage]:
    """What is held of any lineage, and the EXACT part of it. Arguments are those of _Found."""
    marks = live.index.marks(slots)
    if marks.translate(None, _PLAIN) or live.pool.has(info.digest):
        found = _Found(live, info, keys, held, slots, prompt_tokens=prompt_tokens, marks=marks)
        return found.coverage(now_mono)
    whole = Coverage(len(slots), (), (), (), (), _branch_at(live, info, keys, held, len(slots)))
    return whole, whole


def _branch_at(live: Live, info: NamespaceInfo, keys: JoinedKeys, held: array[int], blocks: int) -> int:
    """The end of the last block of `blocks`, where something else than this prompt goes on after it."""
    if not 0 < blocks < len(keys):
        # Nothing is held, all of it, or all whose keys are known.
        return 0
    own = held[blocks] if blocks < len(held) else NO_SLOT
    children = live.index.children(held[blocks - 1])
    goes_on = any(child != own for child in children) if children else False
    return blocks * info.figures.block_tokens if goes_on else 0


class _Found:
    """What is held for one prompt: `slots` of its blocks, of which `held` has further ones whose time is over. `marks`: the
    flags of `slots`."""

    __slots__ = ("_held", "_info", "_keys", "_live", "_marks", "_on_ssd", "_prompt_tokens", "_slots")

    def __init__(
        self,
        live: Live,
        info: NamespaceInfo,
        keys: JoinedKeys,
        held: array[int],
        slots: array[int],
        *,
        prompt_tokens: int,
        marks: bytes,
    ) -> None:
        self._live = live
        self._info = info
        self._keys = keys
        self._held = held
        self._slots = slots
        self._prompt_tokens = prompt_tokens
        self._marks = marks
        self._on_ssd = 1 in marks.translate(_HAS_ANY)

    def coverage(self, now_mono: float) -> tuple[Coverage, Coverage]:
        """What is held of any lineage, and the EXACT part of it."""
        live, count, digest = self._live, len(self._slots), self._info.digest
        pooled: list[tuple[int, Lineage]] = []
        if live.pool.has(digest):
            size = self._info.figures.block_tokens
            pooled = live.pool.held_along(digest, self._keys[:count], block_tokens=size, now=now_mono)
        everything = self._part(count, [number for number, _ in pooled], exact=False)
        bounded = self._marks.translate(_IS_BOUNDED).find(1)
        if (
            bounded < 0
            and not any(live.states.bounded.values())
            and all(lineage is Lineage.EXACT for _, lineage in pooled)
        ):
            return everything, everything
        end = count if bounded < 0 else bounded
        exact_pooled = [number for number, lineage in pooled if lineage is Lineage.EXACT and number < end]
        return everything, self._part(end, exact_pooled, exact=True)

    def _part(self, blocks: int, pooled: list[int], *, exact: bool) -> Coverage:
        """Of the first `blocks` blocks; `pooled` are the numbers of those whose state the pool has."""
        size = self._info.figures.block_tokens
        in_pool = tuple([(number + 1) * size for number in pooled])
        branch_at = _branch_at(self._live, self._info, self._keys, self._held, blocks)
        if not self._on_ssd:
            return Coverage(blocks, in_pool, (), (), (), branch_at)
        edges = range(size, (blocks + 1) * size, size)
        return Coverage(
            blocks,
            in_pool,
            tuple(compress(edges, self._with(blocks, _HAS_STATE, ItemKind.STATE, exact=exact))),
            rows=self._rows(blocks, overlap=False, exact=exact),
            rows_overlap=self._rows(blocks, overlap=True, exact=exact),
            branch_at=branch_at,
        )

    def _rows(self, blocks: int, *, overlap: bool, exact: bool) -> tuple[int, ...]:
        """Of rows of one length only: a resume that reads rows of two would have to tell them apart."""
        profile = self._info.profile
        table = _HAS_ROWS_AND_OVERLAP if overlap else _HAS_BARE_ROWS
        marks = self._with(blocks, table, ItemKind.ROWS, exact=exact)
        longest = longest_restore(profile, Coverage(blocks), self._prompt_tokens) // profile.block_tokens
        edge = deepest_edge(profile, marks, longest_blocks=longest, overlap=overlap)
        return (edge,) if edge else ()

    def _with(self, blocks: int, table: bytes, kind: ItemKind, *, exact: bool) -> bytes:
        """A 1 for each of the first blocks that has what `table` picks out of its flags, and has it EXACT if asked."""
        marks = self._marks[:blocks].translate(table)
        bounded = self._live.states.bounded[kind]
        if not (exact and bounded):
            return marks
        kept = bytearray(marks)
        for number, slot in enumerate(self._slots[:blocks]):
            if slot in bounded:
                kept[number] = 0
        return bytes(kept)
