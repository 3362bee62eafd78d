"""Load, record by record: what the load of columns must agree with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from operator import attrgetter

from kvstore.core.base import LoadReport
from kvstore.core.index import NO_SLOT
from kvstore.core.live import Live
from kvstore.core.namespaces import NamespaceInfo, parse_description
from kvstore.core.states import StateEntry, handle_of
from kvstore.errors import KvstoreError
from kvstore.store.base import Found, Place, RecordKind
from kvstore.types import ItemKind, Lineage, NamespaceDigest


def load(
    live: Live, records: Iterable[Found], policies: Mapping[NamespaceDigest, str], *, now_wall: float
) -> LoadReport:
    """The live index from what recovery found in the log; see Core.load."""
    assert not len(live.index), "a core is loaded once, before anything else"
    blocks: list[Found] = []
    states: list[Found] = []
    discard: list[Place] = []
    infos: dict[NamespaceDigest, NamespaceInfo] = {}
    for found in records:
        if found.kind is RecordKind.BLOCK:
            blocks.append(found)
        elif found.kind in (RecordKind.STATE, RecordKind.ROWS):
            states.append(found)
        elif found.kind is RecordKind.NAMESPACE:
            info = _open(live, found, policies)
            if info is None:
                discard.append(found.place)
            else:
                infos[info.digest] = info
    latest = live.second(now_wall)
    discard += _load_blocks(live, infos, blocks, latest)
    discard += _load_states(live, infos, states, latest)
    _repair_uses(live)
    _rank(live)
    return LoadReport(len(infos), len(live.index), len(live.states), discard)


def _open(live: Live, found: Found, policies: Mapping[NamespaceDigest, str]) -> NamespaceInfo | None:
    """None for a description that is not of the digest under which it lies: its bytes were right, its sense is not."""
    try:
        identity, name, policy = parse_description(found.payload)
        if identity.digest() != found.namespace:
            return None
        known = live.namespaces.find(found.namespace)
        if known is None:
            known = live.namespaces.open(name, identity, policy, is_found=True)
        return live.namespaces.set_policy(known.digest, policies.get(found.namespace, policy))
    except KvstoreError:
        live.totals["unreadable_namespaces_total"] += 1
        return None


def _load_blocks(
    live: Live, infos: Mapping[NamespaceDigest, NamespaceInfo], blocks: list[Found], latest: int
) -> list[Place]:
    """Insert every block whose chain is whole. Writers append parents first, but cleaning copies forward what it finds,
    so that a parent may come after its child: those that wait are tried again by position, where parents come first."""
    waiting = [found for found in blocks if not _load_block(live, infos, found, latest)]
    waiting.sort(key=attrgetter("position"))
    orphans = [found for found in waiting if not _load_block(live, infos, found, latest)]
    return [found.place for found in orphans]


def _load_block(
    live: Live, infos: Mapping[NamespaceDigest, NamespaceInfo], found: Found, latest: int
) -> bool:
    info = infos.get(found.namespace)
    if info is None:
        return False
    index, figures, place = live.index, info.figures, found.place
    parent, edge = NO_SLOT, 0
    if bytes(found.parent) != info.digest:
        parent = index.find(info.number, found.parent)
        if parent == NO_SLOT:
            return False
        edge = (index.number[parent] + 1) * figures.block_tokens
    if (
        found.position != edge + figures.block_tokens
        or place.length != figures.block_bytes
        or index.find(info.number, found.key) != NO_SLOT
    ):
        return False
    slot = index.insert(
        info.number,
        found.key,
        parent,
        place,
        checks=found.checks,
        lineage=found.lineage,
        used=min(math.ceil(found.last_use), latest),
    )
    live.segments.add(place.segment_id, slot)
    live.block_bytes += place.length
    live.bounded_blocks += found.lineage is Lineage.BOUNDED
    return True


def _load_states(
    live: Live, infos: Mapping[NamespaceDigest, NamespaceInfo], states: list[Found], latest: int
) -> list[Place]:
    """States and rows, oldest use first, which is the order that they are evicted in."""
    discard: list[Place] = []
    for found in sorted(states, key=attrgetter("last_use")):
        info = infos.get(found.namespace)
        slot = NO_SLOT if info is None else live.index.find(info.number, found.key)
        kind = ItemKind(found.kind)
        if (
            info is None
            or slot == NO_SLOT
            or live.states.get(handle_of(slot, kind)) is not None
            or found.position != live.position(slot)
            or found.place.length not in info.lengths(kind)
        ):
            discard.append(found.place)
            continue
        used = min(math.ceil(found.last_use), latest)
        live.insert_state(slot, kind, StateEntry(found.place, found.checks, found.lineage, used))
    return discard


def _repair_uses(live: Live) -> None:
    """A parent was used whenever a child was: last uses are persisted by the segment and may say otherwise.

    From each tail upwards, the latest first, so that a walk ends at the first block that needs nothing.
    """
    index, used, parent = live.index, live.index.used, live.index.parent
    tails = [slot for slot in index.slots() if index.is_childless(slot)]
    tails.sort(key=used.__getitem__, reverse=True)
    seen = bytearray(len(used))
    for tail in tails:
        slot, latest = tail, used[tail]
        while slot != NO_SLOT:
            if used[slot] < latest:
                used[slot] = latest
            elif seen[slot]:
                break
            latest = used[slot]
            seen[slot] = 1
            slot = parent[slot]


def _rank(live: Live) -> None:
    """By last use; among equal ones, which are many since last uses are persisted by the hour, chain by chain as they
    lie in the log, each from its tail to its root. Children rank before their parents, and evicting in this order
    empties one segment after the other instead of thinning out all of them."""
    index = live.index
    used, parent = index.used, index.parent
    turn = [0] * len(used)
    seen = bytearray(len(used))
    left = len(used)
    tails = [slot for slot in index.slots() if index.is_childless(slot)]
    segment, offset = index.segment, index.offset
    tails.sort(key=lambda slot: (segment[slot], offset[slot]))
    # The newest chain takes its ancestors with it to the end of the order; an older branch keeps only its own blocks.
    for tail in reversed(tails):
        path = []
        slot = tail
        while slot != NO_SLOT and not seen[slot]:
            seen[slot] = 1
            path.append(slot)
            slot = parent[slot]
        for slot in reversed(path):
            left -= 1
            turn[slot] = left
    rank = [(second << 32) + number for second, number in zip(used, turn, strict=True)]
    live.ranks.start(sorted(index.slots(), key=rank.__getitem__))
