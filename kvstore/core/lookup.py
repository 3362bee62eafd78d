"""Lookup and fetch: what is held of a prompt, what to do with it, and the items that a lease covers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvstore.core.base import FetchItem, LookupResult
from kvstore.core.index import BOUNDED, HAS_STATE, NO_SLOT
from kvstore.core.leases import Lease
from kvstore.core.live import Live
from kvstore.core.namespaces import NamespaceInfo
from kvstore.core.states import StateRow
from kvstore.errors import InvalidArgument, LimitExceeded
from kvstore.plan.base import Costs, Coverage
from kvstore.plan.coverage import whole_blocks
from kvstore.plan.planner import plan
from kvstore.types import KEY_BYTES, BlockKey, ItemId, ItemKind, Lineage, StateSource

# Column values to 0 or 1, so that the first block with a flag is found by bytes.find.
_IS_BOUNDED = bytes(bool(value & BOUNDED) for value in range(256))
_HAS_STATE = bytes(bool(value & HAS_STATE) for value in range(256))


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
    keys = list(keys)
    _check_prompt(live, info, keys, prompt_tokens)
    slots = _unexpired(live, _held_prefix(live, info, keys), now_wall)
    everything, exact = _coverage(live, info, keys, slots, now_mono)
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
    if not lease or not used:
        return LookupResult(chosen, None, coverage)
    live.leases.check_room(session, used)
    granted = live.leases.grant(
        live.next_number(),
        session,
        info.digest,
        slots=slots[:used],
        now=now_mono,
        state_at=chosen.state_at if chosen.state_source in (StateSource.POOL, StateSource.CHECKPOINT) else 0,
    )
    live.touch(slots[used - 1], now_wall)
    if granted.state_at:
        _protect_state(live, info, granted, keys, chosen.state_source, now_mono=now_mono, now_wall=now_wall)
    return LookupResult(chosen, granted.lease_id, coverage)


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
        items.append(_state_item(live, lease))
    return items


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
    if want_state and not lease.state_at:
        raise InvalidArgument("the lease covers no state", field="state", value=want_state, allowed="false")


def _state_item(live: Live, lease: Lease) -> FetchItem | None:
    pin, row = lease.pool_pin, lease.state_row
    if pin is not None:
        state = live.pool.pinned(pin)
        if state is not None:
            return FetchItem(
                ItemId(pin.key, ItemKind.STATE),
                state.position,
                state.lineage,
                state.checks,
                payload=state.payload,
            )
        return None
    # While its block is intact the slot is still that block's; the row tells whether the state is still the one.
    assert row is not None, "a lease with a state holds it in one tier"
    if lease.state_number < lease.intact:
        slot = lease.slots[lease.state_number]
        if live.states.get(slot) is row:
            key = live.index.key(slot)
            return FetchItem(
                ItemId(key, ItemKind.STATE), lease.state_at, row.lineage, row.checks, place=row.place
            )
    return None


def _check_prompt(live: Live, info: NamespaceInfo, keys: list[bytes], prompt_tokens: int) -> None:
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
    if not (set(map(type, keys)) <= {bytes} and set(map(len, keys)) <= {KEY_BYTES}):
        index = next(i for i, key in enumerate(keys) if not isinstance(key, bytes) or len(key) != KEY_BYTES)
        raise InvalidArgument(
            "not a block key", field=f"keys[{index}]", value=repr(keys[index]), allowed=f"{KEY_BYTES} bytes"
        )


def _held_prefix(live: Live, info: NamespaceInfo, keys: list[bytes]) -> array[int]:
    """Slots of the longest run of held blocks from the start of the prompt.

    A block is held only with all before it, so the run's end is found by bisection, and the chain that leads to it is
    then compared with the keys. Keys that are no chain (a caller's mistake) fail that comparison and are walked.
    """
    index, space = live.index, info.number
    low, high, deepest = 0, len(keys), NO_SLOT
    while low < high:
        middle = (low + high + 1) // 2
        slot = index.find(space, keys[middle - 1])
        if slot == NO_SLOT:
            high = middle - 1
        else:
            low, deepest = middle, slot
    if not low:
        return array("i")
    if index.number[deepest] == low - 1:
        slots = index.chain(deepest)
        if index.is_chain_of(slots, keys[:low]):
            return slots
    slots, before = array("i"), NO_SLOT
    for key in keys:
        slot = index.find(space, key)
        if slot == NO_SLOT or index.parent[slot] != before:
            break
        slots.append(slot)
        before = slot
    return slots


def _unexpired(live: Live, slots: array[int], now_wall: float) -> array[int]:
    """Without the blocks at the end whose time is over: uses do not increase along a chain."""
    used, count = live.index.used, len(slots)
    while count and used[slots[count - 1]] + live.retention_seconds <= now_wall:
        count -= 1
    return slots if count == len(slots) else slots[:count]


def _coverage(
    live: Live, info: NamespaceInfo, keys: list[bytes], slots: array[int], now_mono: float
) -> tuple[Coverage, Coverage]:
    """What is held of any lineage, and the EXACT part of it."""
    size = info.figures.block_tokens
    flags = live.index.flags
    marks = bytes([flags[slot] for slot in slots])
    bounded = marks.translate(_IS_BOUNDED).find(1)
    exact_end = (len(slots) if bounded < 0 else bounded) * size
    checkpoints = [
        (number, _row(live, slots[number]).lineage) for number in _places(marks.translate(_HAS_STATE))
    ]
    known = [BlockKey(key) for key in keys[: len(slots)]]
    pooled = live.pool.held_along(info.digest, known, block_tokens=size, now=now_mono)
    everything = Coverage(
        len(slots),
        tuple((number + 1) * size for number, _ in pooled),
        tuple((number + 1) * size for number, _ in checkpoints),
    )
    if bounded < 0 and all(lineage is Lineage.EXACT for _, lineage in (*pooled, *checkpoints)):
        return everything, everything
    exact = [
        tuple(
            (number + 1) * size
            for number, lineage in found
            if lineage is Lineage.EXACT and (number + 1) * size <= exact_end
        )
        for found in (pooled, checkpoints)
    ]
    return everything, Coverage(exact_end // size, exact[0], exact[1])


def _places(marks: bytes) -> list[int]:
    """Where the ones are."""
    found, at = [], marks.find(1)
    while at >= 0:
        found.append(at)
        at = marks.find(1, at + 1)
    return found


def _row(live: Live, slot: int) -> StateRow:
    row = live.states.get(slot)
    assert row is not None, "a block with the state flag has a state"
    return row


def _in_flight_elsewhere(
    live: Live, info: NamespaceInfo, keys: list[bytes], first: int, session: str
) -> tuple[int, ...]:
    """Indices of the blocks just past the coverage that other sessions are writing."""
    found = []
    for number in range(first, len(keys)):
        owner = live.reservations.owner(info.digest, ItemId(BlockKey(keys[number]), ItemKind.BLOCK))
        if owner is None or owner.session == session:
            break
        found.append(number)
    return tuple(found)


def _protect_state(
    live: Live,
    info: NamespaceInfo,
    lease: Lease,
    keys: list[bytes],
    source: StateSource,
    *,
    now_mono: float,
    now_wall: float,
) -> None:
    number = lease.state_number = lease.state_at // info.figures.block_tokens - 1
    if source is StateSource.POOL:
        lease.pool_pin = live.pool.pin(info.digest, BlockKey(keys[number]), now=now_mono)
        assert lease.pool_pin is not None, "the coverage named a state of the pool"
        return
    slot = lease.slots[number]
    lease.state_row = _row(live, slot)
    lease.state_row.leases += 1
    live.touch_state(slot, now_wall)
