"""Cores with as many blocks as a service may have, made by columns in seconds."""

from __future__ import annotations

import numpy as np

from kvstore.core import Core, Limits, describe
from kvstore.pool import StatePool
from kvstore.store.base import RecordKind
from kvstore.store.records import Columns, Records
from kvstore.types import BlockKey, NamespaceDigest
from tests.support.core import TINY, B, identity

NOW = 1_800_000_000.0
CHAIN_BLOCKS = 256
SEGMENT_BLOCKS = 4096


def big_core(
    blocks: int, *, states: int = 0, namespaces: int = 1, limits: Limits | None = None
) -> tuple[Core, list[NamespaceDigest], list[BlockKey]]:
    """A core with so many blocks, in chains of CHAIN_BLOCKS, in namespaces by turns; the first `states` of them have a state
    on SSD. Its namespaces, and the keys of all blocks in the order of the log."""
    rng = np.random.default_rng(7)
    identities = [identity(tenant_salt=f"t{number}") for number in range(namespaces)]
    digests = [each.digest() for each in identities]
    rows = Columns.room(namespaces + blocks + states)
    roots = np.frombuffer(b"".join(digests), "<u8").reshape(-1, 4)
    at = np.arange(blocks)
    space = (at // CHAIN_BLOCKS % namespaces).astype(np.uint32)
    keys = rng.integers(0, 2**63, (blocks, 4), np.uint64)
    parents = np.where((at % CHAIN_BLOCKS == 0)[:, None], roots[space], np.roll(keys, 1, axis=0))
    own, block, state = (
        slice(0, namespaces),
        slice(namespaces, namespaces + blocks),
        slice(namespaces + blocks, None),
    )
    rows.kind[own], rows.kind[block], rows.kind[state] = (
        RecordKind.NAMESPACE,
        RecordKind.BLOCK,
        RecordKind.STATE,
    )
    rows.space[own], rows.space[block], rows.space[state] = np.arange(namespaces), space, space[:states]
    rows.key[own], rows.key[block], rows.key[state] = roots, keys, keys[:states]
    rows.parent[own], rows.parent[block], rows.parent[state] = 0, parents, keys[:states]
    ends = (at % CHAIN_BLOCKS + 1) * B
    rows.position[own], rows.position[block], rows.position[state] = 0, ends, ends[:states]
    rows.bounded[:] = rows.has_xxh3[:] = False
    rows.crc32[:] = rows.xxh3_64[:] = 0
    everything = np.arange(len(rows.kind))
    rows.segment[:] = 1 + everything // SEGMENT_BLOCKS
    rows.offset[:] = 4096 * (1 + everything % SEGMENT_BLOCKS)
    rows.length[own], rows.length[block], rows.length[state] = 64, TINY.block_bytes, TINY.state_bytes
    rows.sequence[:] = everything
    rows.last_use[:] = NOW - 7200.0 + everything * (3600.0 / len(everything))
    payloads = {row: describe(each, f"n{row}", "endpoints") for row, each in enumerate(identities)}
    core = Core(pool=StatePool(1 << 20, 600.0), limits=limits)
    report = core.load(Records(digests, rows, payloads), {}, now_wall=NOW)
    assert (report.namespaces, report.blocks, report.states) == (namespaces, blocks, states), report
    return core, digests, [BlockKey(key) for key in keys.view("V32").ravel().tolist()]
