"""Lookup and fetch: what is held of a prompt, what to do with it, and the items that a lease covers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import compress

import numpy as np

from kvstore.core.base import FetchItem, LookupResult
from kvstore.core.index import BOUNDED, HAS_ROWS, HAS_STATE, NO_SLOT, ROWS_OVERLAP, BlockIndex
from kvstore.core.leases import Lease
from kvstore.core.live import Live
from kvstore.core.namespaces import NamespaceInfo
from kvstore.core.states import StateEntry, handle_of
from kvstore.core.windows import deepest_edge
from kvstore.errors import InvalidArgument, LimitExceeded
from kvstore.plan.base import Costs, Coverage, RestorePlan
from kvstore.plan.coverage import longest_restore, whole_blocks
from kvstore.plan.planner import plan
from kvstore.prefix.joined import JoinedKeys
from kvstore.profile.layout import rows_edge, rows_needed
from kvstore.types import KEY_BYTES, BlockKey, ItemId, ItemKind, Lineage, StateSource

WAIT_FOR_MAX = 256
_NOTHING = np.empty(0, np.int32)

# Column values to 0 or 1, so that the first block with a flag is found by bytes.find.
_IS_BOUNDED = bytes(bool(value & BOUNDED) for value in range(256))
_HAS_STATE = bytes(bool(value & HAS_STATE) for value in range(256))
_HAS_BARE_ROWS = bytes(value & (HAS_ROWS | ROWS_OVERLAP) == HAS_ROWS for value in range(256))
_HAS_ANY = bytes(bool(value & (HAS_STATE | HAS_ROWS | ROWS_OVERLAP)) for value in range(256))
_HAS_ROWS_AND_OVERLAP = bytes(bool(value & ROWS_OVERLAP) for value in range(256))

_STATELESS = (StateSource.REPLAY, StateSource.NONE)


def lookup(
    live: Live,
    namespace: bytes,
    keys: Sequence[bytes],
    *,
    prompt_tokens: int,
    costs: Costs,
    session: str,
    now_mono: float,
    now_wall: float,
    lease: bool,
    exact_only: bool,
) -> LookupResult:
    """See Core.lookup."""
    info = live.namespaces.get(namespace)
    keys = _checked(live, info, keys, prompt_tokens)
    held = _held_prefix(live, info, keys)
    slots = _unexpired(live, held, now_wall)
    found = _Found(live, info, keys=keys, held=held, slots=slots, prompt_tokens=prompt_tokens)
    everything, exact = found.coverage(now_mono)
    coverage = exact if exact_only else everything
    chosen = plan(
        info.profile,
        coverage,
        prompt_tokens=prompt_tokens,
        costs=costs,
        policy=info.policy,
        exact_only=exact_only,
        exact_coverage=exact,
        wait_for=_in_flight_elsewhere(live, info, keys, coverage.blocks, session),
    )
    used = chosen.compute_from // info.figures.block_tokens
    if lease and not used:
        live.ranks.on_request(_NOTHING)
    if not lease or not used:
        return LookupResult(chosen, None, coverage, costs)
    live.leases.check_room(session, used)
    granted = live.leases.grant(
        live.next_number(),
        session,
        info.digest,
        slots=slots[:used],
        now=now_mono,
        state_at=0 if chosen.state_source in _STATELESS else chosen.state_at,
    )
    live.touch_chain(granted.slots, now_wall)
    _protect_state(live, info, granted, keys, chosen, now_mono=now_mono, now_wall=now_wall)
    return LookupResult(chosen, granted.lease_id, coverage, costs)


def fetch_list(
    live: Live, lease: Lease, *, first_block: int, block_count: int, want_state: bool
) -> list[FetchItem | None]:
    """See Core.fetch_list."""
    check_fetch(lease, first_block=first_block, block_count=block_count, want_state=want_state)
    items: list[FetchItem | None] = []
    for number in range(first_block, first_block + block_count):
        if number >= lease.intact:
            items.append(None)
            continue
        slot = lease.slots[number]
        items.append(
            FetchItem(
                ItemId(live.index.key(slot), ItemKind.BLOCK),
                live.position(slot),
                live.index.lineage(slot),
                live.index.checks(slot),
                place=live.place(slot),
            )
        )
    if want_state:
        items += _state_items(live, lease)
    return items


def fetch_places(
    live: Live, lease: Lease, *, first_block: int, block_count: int
) -> list[tuple[int, int, int]]:
    """See Core.fetch_places."""
    check_fetch(lease, first_block=first_block, block_count=block_count, want_state=False)
    slots = lease.slots[first_block : min(first_block + block_count, lease.intact)]
    if not slots:
        return []
    segment, offset, length = live.index.segment, live.index.offset, live.place(slots[0]).length
    return [(segment[slot], offset[slot], length) for slot in slots]


def check_fetch(lease: Lease, *, first_block: int, block_count: int, want_state: bool) -> None:
    """See Core.check_fetch."""
    if not 0 <= first_block <= lease.blocks:
        raise InvalidArgument(
            "not a block of the lease", field="first_block", value=first_block, allowed=f"0 to {lease.blocks}"
        )
    if not 0 <= block_count <= lease.blocks - first_block:
        raise InvalidArgument(
            "more blocks than the lease covers",
            field="block_count",
            value=block_count,
            allowed=f"0 to {lease.blocks - first_block} from block {first_block}",
        )
    if want_state and not lease.covers_state:
        raise InvalidArgument("the lease covers no state", field="state", value=want_state, allowed="false")


def _state_items(live: Live, lease: Lease) -> list[FetchItem | None]:
    """The state in the pool, the checkpoint, or the rows of each block in order."""
    pin = lease.pool_pin
    if pin is None:
        return [_ssd_item(live, lease, *each) for each in lease.states]
    state = live.pool.pinned(pin)
    if state is None:
        return [None]
    item = ItemId(pin.key, ItemKind.STATE)
    return [FetchItem(item, state.position, state.lineage, state.checks, payload=state.payload)]


def _ssd_item(live: Live, lease: Lease, number: int, kind: ItemKind, entry: StateEntry) -> FetchItem | None:
    # While its block is intact the slot is still that block's; the entry tells whether the state is still the one.
    if number >= lease.intact:
        return None
    slot = lease.slots[number]
    if live.states.get(handle_of(slot, kind)) is not entry:
        return None
    item = ItemId(live.index.key(slot), kind)
    return FetchItem(item, live.position(slot), entry.lineage, entry.checks, place=entry.place)


def _checked(live: Live, info: NamespaceInfo, keys: Sequence[bytes], prompt_tokens: int) -> JoinedKeys:
    """The keys of a prompt that may be looked up."""
    if not isinstance(prompt_tokens, int) or prompt_tokens < 0:
        raise InvalidArgument(
            "a prompt has a length", field="prompt_tokens", value=prompt_tokens, allowed=">= 0"
        )
    for field, value, most in (
        ("prompt_tokens", prompt_tokens, live.limits.prompt_tokens),
        ("keys", len(keys), live.limits.keys),
    ):
        if value > most:
            raise LimitExceeded(
                "the prompt is too long for one lookup", field=field, value=value, allowed=f"{most}"
            )
    most = whole_blocks(info.profile, prompt_tokens)
    if len(keys) > most:
        raise InvalidArgument(
            f"more keys than {prompt_tokens} tokens have whole blocks",
            field="keys",
            value=len(keys),
            allowed=f"0 to {most}",
        )
    if isinstance(keys, JoinedKeys):
        return keys
    if not (set(map(type, keys)) <= {bytes} and set(map(len, keys)) <= {KEY_BYTES}):
        index = next(i for i, key in enumerate(keys) if not isinstance(key, bytes) or len(key) != KEY_BYTES)
        raise InvalidArgument(
            "not a block key", field=f"keys[{index}]", value=repr(keys[index]), allowed=f"{KEY_BYTES} bytes"
        )
    return JoinedKeys(b"".join(keys))


def _held_prefix(live: Live, info: NamespaceInfo, keys: JoinedKeys) -> array[int]:
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
    slots, before = array("i"), NO_SLOT
    for key in keys:
        slot = index.find(space, key)
        if slot == NO_SLOT or index.parent[slot] != before:
            break
        slots.append(slot)
        before = slot
    return slots


def _deepest_held(index: BlockIndex, space: int, joined: bytes) -> tuple[int, int]:
    """(Blocks up to one that is held, that one's slot), where the next one is not; (0, NO_SLOT) where the first is not."""
    high = len(joined) // KEY_BYTES
    first = index.find(space, joined[:KEY_BYTES])
    if first == NO_SLOT:
        return 0, NO_SLOT
    # Nothing or all of it is what is held most often.
    slot = index.find(space, joined[-KEY_BYTES:])
    if slot != NO_SLOT and index.number[slot] == high - 1:
        return high, slot
    low, deepest = 1, first
    while low < high:
        middle = (low + high + 1) // 2
        slot = index.find(space, joined[(middle - 1) * KEY_BYTES : middle * KEY_BYTES])
        if slot == NO_SLOT:
            high = middle - 1
        else:
            low, deepest = middle, slot
    return low, deepest


def _unexpired(live: Live, slots: array[int], now_wall: float) -> array[int]:
    """Without the blocks at the end whose time is over: uses do not increase along a chain."""
    used, count = live.index.used, len(slots)
    while count and used[slots[count - 1]] + live.retention_seconds <= now_wall:
        count -= 1
    return slots if count == len(slots) else slots[:count]


class _Found:
    """What is held for one prompt: `slots` of its blocks, of which `held` has further ones whose time is over."""

    def __init__(
        self,
        live: Live,
        info: NamespaceInfo,
        *,
        keys: JoinedKeys,
        held: array[int],
        slots: array[int],
        prompt_tokens: int,
    ) -> None:
        self._live = live
        self._info = info
        self._keys = keys
        self._held = held
        self._slots = slots
        self._prompt_tokens = prompt_tokens
        self._marks = live.index.marks(slots)
        self._on_ssd = 1 in self._marks.translate(_HAS_ANY)

    def coverage(self, now_mono: float) -> tuple[Coverage, Coverage]:
        """What is held of any lineage, and the EXACT part of it."""
        live, count = self._live, len(self._slots)
        size = self._info.figures.block_tokens
        pooled = live.pool.held_along(self._info.digest, self._keys[:count], block_tokens=size, now=now_mono)
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
        branch_at = self._branch_at(blocks)
        if not self._on_ssd:
            return Coverage(blocks, in_pool, branch_at=branch_at)
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

    def _branch_at(self, blocks: int) -> int:
        """The end of the last block of `blocks`, where something else than this prompt goes on after it."""
        if not 0 < blocks < len(self._keys):
            # Nothing is held, all of it, or all whose keys are known.
            return 0
        own = self._held[blocks] if blocks < len(self._held) else NO_SLOT
        children = self._live.index.children(self._slots[blocks - 1])
        goes_on = any(child != own for child in children) if children else False
        return blocks * self._info.figures.block_tokens if goes_on else 0


def _entry(live: Live, slot: int, kind: ItemKind) -> StateEntry:
    entry = live.states.get(handle_of(slot, kind))
    assert entry is not None, "what a block's flags say it has is held"
    return entry


def _in_flight_elsewhere(
    live: Live, info: NamespaceInfo, keys: JoinedKeys, first: int, session: str
) -> tuple[int, ...]:
    """Indices of the blocks just past the coverage that other sessions are writing; the first WAIT_FOR_MAX of them."""
    found = []
    for number in range(first, min(len(keys), first + WAIT_FOR_MAX)):
        owner = live.reservations.owner(info.digest, ItemId(BlockKey(keys[number]), ItemKind.BLOCK))
        if owner is None or owner.session == session:
            break
        found.append(number)
    return tuple(found)


def _protect_state(
    live: Live,
    info: NamespaceInfo,
    lease: Lease,
    keys: JoinedKeys,
    chosen: RestorePlan,
    *,
    now_mono: float,
    now_wall: float,
) -> None:
    """What the plan's window state is made of is used now, and protected."""
    last = chosen.state_at // info.figures.block_tokens - 1
    if chosen.state_source is StateSource.POOL:
        lease.pool_pin = live.pool.pin(info.digest, BlockKey(keys[last]), now=now_mono)
        assert lease.pool_pin is not None, "the coverage named a state of the pool"
        return
    if chosen.state_source is StateSource.CHECKPOINT:
        wanted, kind = range(last, last + 1), ItemKind.STATE
    elif chosen.state_source is StateSource.ROWS:
        edge, overlap = rows_edge(info.profile, chosen.state_at)
        needed = rows_needed(info.profile, edge, overlap=overlap)
        wanted, kind = range(needed.first_block, needed.first_block + needed.blocks), ItemKind.ROWS
    else:
        return
    lease.states = tuple((number, kind, _entry(live, lease.slots[number], kind)) for number in wanted)
    for number, _, entry in lease.states:
        entry.leases += 1
        live.touch_state(handle_of(lease.slots[number], kind), now_wall)
