"""Lookup and fetch: what is held of a prompt, what to do with it, and the items that a lease covers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from kvstore.core.base import FetchItem, LookupResult
from kvstore.core.held import covered, held_prefix, unexpired
from kvstore.core.index import NO_SLOT
from kvstore.core.leases import Lease
from kvstore.core.live import Live
from kvstore.core.namespaces import NamespaceInfo
from kvstore.core.states import StateEntry, handle_of
from kvstore.errors import InvalidArgument, LimitExceeded
from kvstore.plan.base import Costs, RestorePlan
from kvstore.plan.coverage import whole_blocks
from kvstore.plan.planner import plan
from kvstore.prefix.joined import JoinedKeys
from kvstore.profile.layout import rows_edge, rows_needed
from kvstore.store.base import Place
from kvstore.types import KEY_BYTES, BlockKey, ItemId, ItemKind, StateSource

WAIT_FOR_MAX = 256
_NOTHING = np.empty(0, np.int32)

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
    held: array[int] | None,
) -> LookupResult:
    """See Core.lookup."""
    info = live.namespaces.get(namespace)
    info.check_prefix()
    keys = _checked(live, info, keys, prompt_tokens)
    if held is None:
        held = held_prefix(live, info, keys)
    slots = unexpired(live, held, now_wall)
    coverage, exact = covered(live, info, keys, held, slots, prompt_tokens=prompt_tokens, now_mono=now_mono)
    if exact_only:
        coverage = exact
    chosen = plan(
        info.profile,
        coverage,
        prompt_tokens=prompt_tokens,
        costs=costs,
        policy=info.policy,
        exact_only=exact_only,
        exact_coverage=exact,
        wait_for=_in_flight_elsewhere(live, info, keys, coverage.blocks, session)
        if coverage.blocks < len(keys)
        else (),
    )
    way = chosen.chosen
    used = way.compute_from // info.figures.block_tokens
    if lease and not used:
        live.ranks.on_request(_NOTHING, now_wall)
    if not lease or not used:
        return LookupResult(chosen, None, coverage, costs)
    live.leases.check_room(session, used)
    granted = live.leases.grant(
        live.next_number(),
        session,
        info.digest,
        slots=slots[:used],
        now=now_mono,
        state_at=0 if way.state_source in _STATELESS else way.state_at,
    )
    live.touch_chain(granted.slots, now_wall)
    if way.state_source not in _STATELESS:
        _protect_state(live, info, granted, keys, chosen, now_mono=now_mono, now_wall=now_wall)
    return LookupResult(chosen, granted.lease_id, coverage, costs)


def fetch_list(
    live: Live, lease: Lease, *, first_block: int, block_count: int, want_state: bool
) -> list[FetchItem | None]:
    """See Core.fetch_list."""
    check_fetch(lease, first_block=first_block, block_count=block_count, want_state=want_state)
    index, end = live.index, first_block + block_count
    slots = lease.slots[first_block : min(end, lease.intact)]
    held = next((slot for slot in slots if slot != NO_SLOT), NO_SLOT)
    items: list[FetchItem | None]
    if held == NO_SLOT:
        items = [None] * block_count
    else:
        # All of a lease are of one namespace.
        figures, number = live.info(held).figures, index.number
        tokens, length = figures.block_tokens, figures.block_bytes
        items = [
            None
            if slot == NO_SLOT
            else FetchItem(
                ItemId(index.key(slot), ItemKind.BLOCK),
                (number[slot] + 1) * tokens,
                index.lineage(slot),
                index.checks(slot),
                Place(index.segment[slot], index.offset[slot], length),
            )
            for slot in slots
        ]
        items += [None] * (block_count - len(items))
    if want_state:
        items += _state_items(live, lease)
    return items


def fetch_places(
    live: Live, lease: Lease, *, first_block: int, block_count: int
) -> list[tuple[int, int, int]]:
    """See Core.fetch_places."""
    check_fetch(lease, first_block=first_block, block_count=block_count, want_state=False)
    slots = lease.slots[first_block : min(first_block + block_count, lease.intact)]
    if lease.apart and NO_SLOT in slots:
        slots = slots[: slots.index(NO_SLOT)]
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
    count, limits = len(keys), live.limits
    if prompt_tokens > limits.prompt_tokens or count > limits.keys:
        field, value, most = (
            ("prompt_tokens", prompt_tokens, limits.prompt_tokens)
            if prompt_tokens > limits.prompt_tokens
            else ("keys", count, limits.keys)
        )
        raise LimitExceeded(
            "the prompt is too long for one lookup", field=field, value=value, allowed=f"{most}"
        )
    most = whole_blocks(info.profile, prompt_tokens)
    if count > most:
        raise InvalidArgument(
            f"more keys than {prompt_tokens} tokens have whole blocks",
            field="keys",
            value=count,
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


def _entry(live: Live, slot: int, kind: ItemKind) -> StateEntry:
    entry = live.states.get(handle_of(slot, kind))
    assert entry is not None, "what a block's flags say it has is held"
    return entry


def _in_flight_elsewhere(
    live: Live, info: NamespaceInfo, keys: JoinedKeys, first: int, session: str
) -> tuple[int, ...]:
    """Indices of the blocks just past the coverage that other sessions are writing; the first WAIT_FOR_MAX of them."""
    count = len(keys)
    if first >= count:
        return ()
    found = []
    for number in range(first, min(count, first + WAIT_FOR_MAX)):
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
