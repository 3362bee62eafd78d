"""Load: the live index from what recovery found in the log."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter

import numpy as np

from kvstore.core.base import LoadReport
from kvstore.core.forest import NONE, Candidates, Rows, settle, whole_chains
from kvstore.core.index import NO_SLOT, Filling
from kvstore.core.live import Live
from kvstore.core.namespaces import NamespaceInfo, parse_description
from kvstore.core.states import StateEntry, handle_of
from kvstore.errors import FormatTooNew, KvstoreError
from kvstore.store.base import Found, Place, RecordKind
from kvstore.store.records import Columns, Records
from kvstore.types import ItemKind, NamespaceDigest

assert NONE == NO_SLOT

_FARTHEST = 2**62
"""A position beyond it is no block's."""


def load(
    live: Live, records: Iterable[Found], policies: Mapping[NamespaceDigest, str], *, now_wall: float
) -> LoadReport:
    """See Core.load."""
    assert not len(live.index), "a core is loaded once, before anything else"
    found = records if isinstance(records, Records) else Records.of(records)
    discard: list[Place] = []
    infos: dict[NamespaceDigest, NamespaceInfo] = {}
    for each in found.of_kind(RecordKind.NAMESPACE):
        info = _open(live, each, policies)
        if info is None:
            discard.append(each.place)
        else:
            infos[info.digest] = info
    latest = live.second(now_wall)
    discard += _load_blocks(live, infos, found, latest)
    states = found.of_kind(RecordKind.STATE, RecordKind.ROWS)
    discard += _load_states(live, infos, states, latest)
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
    except FormatTooNew:
        # What a later release has written is not to be given up as if it were damaged.
        raise
    except KvstoreError:
        live.totals["unreadable_namespaces_total"] += 1
        return None


def _load_blocks(
    live: Live, infos: Mapping[NamespaceDigest, NamespaceInfo], found: Records, latest: int
) -> list[Place]:
    """Insert every block whose chain is whole; the places of the others."""
    blocks = found.rows_of(RecordKind.BLOCK)
    kept, filling, oldest = _chains(infos, found, blocks, latest)
    live.fill(filling, oldest)
    return [found.place(row) for row in np.setdiff1d(blocks, kept, assume_unique=True).tolist()]


def _chains(
    infos: Mapping[NamespaceDigest, NamespaceInfo], found: Records, blocks: Rows, latest: int
) -> tuple[Rows, Filling, Rows]:
    """Those of the rows `blocks` whose chain is whole, what the index is filled with, and in which order they go. What
    it takes to find out is let go of before the index is filled."""
    at = found.columns
    rows, candidates = _candidates(infos, found.namespaces, at, blocks)
    whole = whole_chains(candidates)
    kept = rows[whole.rows]
    number = candidates.position[whole.rows] // candidates.step[whole.rows] - 1
    space = candidates.space[whole.rows]
    del candidates
    used = np.minimum(np.ceil(at.last_use[kept]), latest).astype(np.int64)
    place = at.segment[kept] << np.uint64(32) | at.offset[kept]
    order = settle(whole.parent, number, used, place)
    filling = Filling(
        key=at.key[kept],
        parent=whole.parent,
        number=number,
        space=space,
        segment=at.segment[kept],
        offset=at.offset[kept],
        used=order.used,
        crc32=at.crc32[kept],
        xxh3_64=at.xxh3_64[kept],
        bounded=at.bounded[kept],
        has_xxh3=at.has_xxh3[kept],
    )
    return kept, filling, order.oldest


def _candidates(
    infos: Mapping[NamespaceDigest, NamespaceInfo],
    namespaces: Sequence[NamespaceDigest],
    at: Columns,
    blocks: Rows,
) -> tuple[Rows, Candidates]:
    """Those of the rows `blocks` that fit their namespace, and what is to be known of them."""
    known = np.array([digest in infos for digest in namespaces], dtype=bool)
    number, step, length = (np.zeros(len(namespaces), np.int64) for _ in range(3))
    for place, info in enumerate(map(infos.get, namespaces)):
        if info is not None:
            figures = info.figures
            number[place], step[place], length[place] = info.number, figures.block_tokens, figures.block_bytes
    space = at.space[blocks]
    fits = known[space] & (at.length[blocks] == length[space]) & (at.position[blocks] <= _FARTHEST)
    rows, space = blocks[fits], space[fits]
    digests = np.frombuffer(b"".join(namespaces), "<u8").reshape(-1, 4)
    parent = at.parent[rows]
    return rows, Candidates(
        space=number[space].astype(np.uint32),
        key=at.key[rows],
        parent=parent,
        position=at.position[rows].astype(np.int64),
        step=step[space],
        root=(parent == digests[space]).all(axis=1),
    )


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
