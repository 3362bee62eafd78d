"""Reserve: who may write what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.core.accepted import is_accepted
from kvstore.core.base import (
    Granted,
    Outcome,
    ReserveItem,
    ReserveOutcome,
    ReserveResult,
)
from kvstore.core.index import NO_SLOT
from kvstore.core.live import Live
from kvstore.core.namespaces import NamespaceInfo
from kvstore.core.reservations import Reservation
from kvstore.core.showing import may_replace_block, may_replace_state
from kvstore.core.states import STATE_KINDS, handle_of
from kvstore.core.steps import ITEMS_AT_ONCE, Steps
from kvstore.errors import GeometryMismatch, InvalidArgument, LimitExceeded, UnknownReservation
from kvstore.types import KEY_BYTES, BlockKey, ItemId, ItemKind, Lineage

GRANTED, HELD = Outcome(ReserveOutcome.GRANTED), Outcome(ReserveOutcome.HELD)


@dataclass(slots=True)
class _Claim:
    """A reserve call under way. `promised`: position of each block granted in it; `builds_on`: slot, or None while it is
    being written, of each other block that the granted items follow; `used`: slots that the call is interested in;
    `unleased`: slots that no lease was found to cover."""

    info: NamespaceInfo
    session: str
    now: float
    granted: list[Granted] = field(default_factory=list)
    promised: dict[BlockKey, int] = field(default_factory=dict)
    builds_on: dict[BlockKey, int | None] = field(default_factory=dict)
    used: list[int] = field(default_factory=list)
    unleased: set[int] = field(default_factory=set)


def reserve(
    live: Live,
    session: str,
    namespace: bytes,
    items: Sequence[ReserveItem],
    *,
    now_mono: float,
    now_wall: float,
) -> Steps[None, ReserveResult]:
    """See Core.reserving."""
    info = live.namespaces.get(namespace)
    if len(items) > live.limits.reserved_items:
        raise LimitExceeded(
            "too many items in one reservation",
            field="items",
            value=len(items),
            allowed=f"{live.limits.reserved_items}",
        )
    named: set[tuple[bytes, int]] = set()
    for index, item in enumerate(items):
        _check_item(info, index, item)
        named.add((item.key, item.kind))
        if index % ITEMS_AT_ONCE == ITEMS_AT_ONCE - 1:
            yield
    if len(named) != len(items):
        raise InvalidArgument(
            "an item is named twice", field="items", value=len(items), allowed="each item once"
        )
    live.reservations.check_room(session, len(items))
    made = live.reservations.begin(
        live.next_number(), session, info.digest, undecided=len(items), now=now_mono
    )
    try:
        outcomes = yield from _claim(live, made, info, items, now_wall)
    except BaseException:
        if not made.over:
            live.reservations.end(made)
        raise
    if not made.granted:
        live.reservations.end(made)
        return ReserveResult(None, outcomes)
    return ReserveResult(made.reservation_id, outcomes)


def _claim(
    live: Live, made: Reservation, info: NamespaceInfo, items: Sequence[ReserveItem], now_wall: float
) -> Steps[None, list[Outcome]]:
    """Decide about each item, and give the reservation what it is granted."""
    claim = _Claim(info, made.session, made.born)
    outcomes: list[Outcome] = []
    for first in range(0, len(items), ITEMS_AT_ONCE):
        if first:
            yield
            _check_not_over(made)
            # Others may have leased it meanwhile.
            claim.unleased.clear()
        for index in range(first, min(first + ITEMS_AT_ONCE, len(items))):
            outcomes.append(_decide(live, claim, index, items[index]))
        live.reservations.grant(made, claim.granted, claim.builds_on, undecided=len(items) - len(outcomes))
        claim.granted, claim.builds_on = [], {}
    for number, slot in enumerate(claim.used, 1):
        if number % ITEMS_AT_ONCE == 0:
            yield
            _check_not_over(made)
        # A clear may have come in between.
        if live.index.is_live(slot):
            live.touch(slot, now_wall)
    return outcomes


def _check_not_over(made: Reservation) -> None:
    if made.over:
        raise UnknownReservation(
            "the reservation ended while it was being made, with its session or by a clear",
            field="reservation_id",
            value=made.reservation_id,
            allowed="reserving again",
        )


def _check_item(info: NamespaceInfo, index: int, item: ReserveItem) -> None:
    if not _is_plain(info, item):
        _check_closely(info, index, item)


def _is_plain(info: NamespaceInfo, item: ReserveItem) -> bool:
    """Whether it is a block of a prompt with nothing to be said against it. Most items are."""
    key, kind, parent, position, length, to_pool, to_ssd, lineage = item
    size = info.figures.block_tokens
    return (
        kind is ItemKind.BLOCK
        and type(key) is type(parent) is bytes
        and len(key) == len(parent) == KEY_BYTES
        and type(position) is int
        and position > size
        and not position % size
        and parent != info.digest
        and length == info.figures.block_bytes
        and to_ssd
        and not to_pool
        and lineage in (Lineage.EXACT, Lineage.BOUNDED)
        and not info.profile.is_keyed
    )


def _check_closely(info: NamespaceInfo, index: int, item: ReserveItem) -> None:
    figures, at = info.figures, f"items[{index}]"
    if info.profile.is_keyed and (item.kind is not ItemKind.BLOCK or item.position != 1):
        raise InvalidArgument(
            "in a keyed namespace each block stands for itself",
            field=f"{at}.{'position' if item.kind is ItemKind.BLOCK else 'kind'}",
            value=item.position if item.kind is ItemKind.BLOCK else item.kind,
            allowed="BLOCK at position 1, whose parent is the namespace digest",
        )
    if item.kind is not ItemKind.BLOCK and item.kind not in STATE_KINDS:
        raise InvalidArgument(
            "unknown kind of item", field=f"{at}.kind", value=item.kind, allowed="BLOCK, STATE, ROWS"
        )
    is_block = item.kind is ItemKind.BLOCK
    keys = (("key", item.key), ("parent", item.parent)) if is_block else (("key", item.key),)
    for name, value in keys:
        if not isinstance(value, bytes) or len(value) != KEY_BYTES:
            raise InvalidArgument(
                "not a key", field=f"{at}.{name}", value=repr(value), allowed=f"{KEY_BYTES} bytes"
            )
    if not isinstance(item.position, int) or item.position < 1 or item.position % figures.block_tokens:
        raise InvalidArgument(
            "an item ends at a block edge",
            field=f"{at}.position",
            value=item.position,
            allowed=f"positive multiples of {figures.block_tokens}",
        )
    wanted = info.lengths(item.kind)
    if item.length not in wanted:
        raise GeometryMismatch(
            f"a {item.kind.name.lower()} of namespace {info.name!r} has another length",
            field=f"{at}.length",
            value=item.length,
            allowed=f"{' or '.join(map(str, dict.fromkeys(wanted)))} bytes",
        )
    if item.lineage not in (Lineage.EXACT, Lineage.BOUNDED):
        raise InvalidArgument(
            "unknown lineage", field=f"{at}.lineage", value=item.lineage, allowed="EXACT, BOUNDED"
        )
    if is_block and (item.position == figures.block_tokens) != (item.parent == info.digest):
        raise InvalidArgument(
            "the parent of a first block, and of no other, is the namespace",
            field=f"{at}.parent",
            value=item.parent,
            allowed="the namespace digest at the first edge, the key of the block before elsewhere",
        )
    if item.kind is not ItemKind.STATE:
        if item.to_pool or not item.to_ssd:
            raise InvalidArgument(
                "blocks and rows go to SSD", field=f"{at}.to_pool", value=item.to_pool, allowed="to_ssd alone"
            )
    elif not (item.to_pool or item.to_ssd):
        raise InvalidArgument(
            "a state goes somewhere", field=f"{at}.to_pool", value=False, allowed="to_pool, to_ssd or both"
        )


def _decide(live: Live, claim: _Claim, index: int, item: ReserveItem) -> Outcome:
    slot = live.index.find(claim.info.number, item.key)
    if slot != NO_SLOT and live.position(slot) != item.position:
        raise InvalidArgument(
            "the block is known at another position",
            field=f"items[{index}].position",
            value=item.position,
            allowed=f"{live.position(slot)}",
        )
    if item.kind is ItemKind.BLOCK:
        return _decide_block(live, claim, index, item, slot)
    return _decide_state(live, claim, index, item, slot)


def _decide_block(live: Live, claim: _Claim, index: int, item: ReserveItem, slot: int) -> Outcome:
    info = claim.info
    if slot != NO_SLOT:
        before = live.index.parent[slot]
        if item.parent != (info.digest if before == NO_SLOT else live.index.key(before)):
            raise InvalidArgument(
                "the block is known with another parent",
                field=f"items[{index}].parent",
                value=item.parent,
                allowed="the key of the block before it",
            )
        claim.used.append(slot)
        if not may_replace_block(live, slot, item.lineage, claim.unleased):
            waiting = _in_flight(live, claim, item) if is_accepted(live.index.segment[slot]) else None
            return waiting or HELD
    flight = _in_flight(live, claim, item)
    if flight is not None:
        return flight
    edge = item.position - info.figures.block_tokens
    if edge:
        parent = live.index.find(info.number, item.parent)
        if parent != NO_SLOT:
            _check_parent(index, live.position(parent), edge)
            claim.builds_on[BlockKey(item.parent)] = parent
            claim.used.append(parent)
        else:
            promised = _promised(live, claim, item.parent)
            if promised is None:
                return Outcome(ReserveOutcome.PARENT_MISSING)
            _check_parent(index, promised, edge)
            _build_on(claim, BlockKey(item.parent))
    claim.promised[item.key] = item.position
    claim.granted.append(Granted(index, item))
    return GRANTED


def _decide_state(live: Live, claim: _Claim, index: int, item: ReserveItem, slot: int) -> Outcome:
    info = claim.info
    if slot == NO_SLOT:
        promised = _promised(live, claim, item.key)
        if promised is None:
            return Outcome(ReserveOutcome.PARENT_MISSING)
        if promised != item.position:
            raise InvalidArgument(
                "the state's block ends elsewhere",
                field=f"items[{index}].position",
                value=item.position,
                allowed=f"{promised}",
            )
        to_pool, to_ssd = item.to_pool, item.to_ssd
    else:
        claim.used.append(slot)
        entry = live.states.get(handle_of(slot, item.kind))
        to_pool = item.to_pool and live.pool.lacks(info.digest, item.key, item.lineage, now=claim.now)
        to_ssd = item.to_ssd and (entry is None or may_replace_state(entry, item))
        if not (to_pool or to_ssd):
            waits = item.to_ssd and entry is not None and is_accepted(entry.place.segment_id)
            return (_in_flight(live, claim, item) if waits else None) or HELD
    flight = _in_flight(live, claim, item)
    if flight is not None:
        return flight
    if slot != NO_SLOT:
        claim.builds_on[item.key] = slot
    else:
        _build_on(claim, item.key)
    claim.granted.append(Granted(index, item._replace(to_pool=to_pool, to_ssd=to_ssd)))
    return GRANTED


def _in_flight(live: Live, claim: _Claim, item: ReserveItem) -> Outcome | None:
    found = live.reservations.promise(claim.info.digest, item.item_id)
    return None if found is None else Outcome(ReserveOutcome.IN_FLIGHT, max(claim.now - found[0].born, 0.0))


def _promised(live: Live, claim: _Claim, key: bytes) -> int | None:
    """Position of a block that this session is writing: in this call, or in another reservation that can still commit."""
    position = claim.promised.get(BlockKey(key))
    if position is not None:
        return position
    promise = live.reservations.promise(claim.info.digest, ItemId(BlockKey(key), ItemKind.BLOCK))
    if promise is None:
        return None
    owner, granted = promise
    return None if owner.session != claim.session or owner.void else granted.item.position


def _build_on(claim: _Claim, key: BlockKey) -> None:
    """A granted item follows a block that is being written, in this call or in another reservation of the session."""
    if key not in claim.promised:
        claim.builds_on[key] = None


def _check_parent(index: int, position: int, edge: int) -> None:
    if position != edge:
        raise InvalidArgument(
            "the parent ends elsewhere",
            field=f"items[{index}].position",
            value=edge,
            allowed=f"{position} plus one block",
        )
