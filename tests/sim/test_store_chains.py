"""Prefix closure: chains that were written from root to leaf are usable up to what was acknowledged, and no block is
ever found whose ancestors are not."""

from __future__ import annotations

import random

from kvstore.core import Core
from kvstore.core.namespaces import describe
from kvstore.errors import NoSpace
from kvstore.pool import StatePool
from kvstore.prefix import block_keys
from kvstore.store.base import Record, RecordKind, Recovery
from kvstore.store.catalog import Catalog
from kvstore.testing.sim_device import PowerCut, SimCatalog, SimDevice
from kvstore.types import BlockKey, Checks, Lineage
from tests.support.core import EAGER, TINY, B, identity
from tests.support.sim_store import open_sim

BLOCKS = 12
NAMESPACE = identity().digest()
ROOT = BlockKey(NAMESPACE)
DESCRIPTION = Record(
    RecordKind.NAMESPACE,
    NAMESPACE,
    ROOT,
    ROOT,
    0,
    Lineage.EXACT,
    describe(identity(), "main", "zero"),
    Checks(0),
)


def chain(number: int) -> list[Record]:
    """The blocks of one prompt, root first."""
    keys = block_keys(NAMESPACE, [number * 1000 + at for at in range(BLOCKS * B)], block_tokens=B)
    payload = random.Random(number).randbytes(TINY.block_bytes)
    return [
        Record(RecordKind.BLOCK, NAMESPACE, key, parent, (at + 1) * B, Lineage.EXACT, payload, Checks(0))
        for at, (key, parent) in enumerate(zip(keys, [ROOT, *keys], strict=False))
    ]


def usable(recovery: Recovery, chains: list[list[Record]], now: float) -> list[int]:
    """Blocks from the root on that a lookup returns, by chain; and nothing else is in the index."""
    core = Core(pool=StatePool(0, 600.0))
    core.load(recovery.records, recovery.policies, now_wall=now)
    core.check_integrity()
    if not any(info.digest == NAMESPACE for info in core.namespaces()):
        return [0] * len(chains)
    return [
        core.lookup(
            NAMESPACE,
            [block.key for block in blocks],
            prompt_tokens=BLOCKS * B + 1,
            costs=EAGER,
            session="s",
            now_mono=0.0,
            now_wall=now,
            lease=False,
        ).coverage.blocks
        for blocks in chains
    ]


def test_chains_are_usable_up_to_what_was_acknowledged() -> None:
    first = random.SystemRandom().randrange(2**32)
    for seed in [*range(60), *range(first, first + 60)]:
        chance = random.Random(seed)
        device = SimDevice(seed, short_writes=bool(seed % 2))
        catalog: Catalog = SimCatalog(device)
        chains = [chain(number) for number in range(4)]
        acknowledged = [0] * len(chains)
        device.cut_at(chance.randint(8, 90))
        try:
            log, _ = open_sim(device, catalog)
            log.append([DESCRIPTION])
            while min(acknowledged) < BLOCKS:
                number = chance.choice([at for at, done in enumerate(acknowledged) if done < BLOCKS])
                begin = acknowledged[number]
                part = chains[number][begin : begin + chance.randint(1, 5)]
                log.append(part)
                acknowledged[number] += len(part)
                if chance.random() < 0.1:
                    log.close()
                    log, _ = open_sim(device, catalog)
        except (PowerCut, NoSpace):
            pass
        device.crash()
        for fate in (catalog, SimCatalog(device)):
            log, recovery = open_sim(device, fate)
            lengths = usable(recovery, chains, now=1_800_000_000.0)
            assert all(map(int.__le__, acknowledged, lengths)), (seed, acknowledged, lengths)
            log.close()
