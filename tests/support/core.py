"""A core with a clock and a log of places, for tests that decide without a service."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count

from kvstore.clock import ManualClock
from kvstore.core import CommitReport, Core, Limits, LookupResult, ReserveItem, ReserveResult, Written
from kvstore.core.changes import Journal
from kvstore.plan import Costs
from kvstore.pool import StatePool
from kvstore.prefix import NamespaceIdentity, block_keys
from kvstore.profile.registry import get_profile
from kvstore.store.base import Place
from kvstore.types import BlockKey, Checks, ItemId, ItemKind, Lineage, NamespaceDigest

EAGER = Costs(seconds_per_layer_token=1.0)
"""A price of computing at which every plan restores all it can."""

TINY = get_profile("tiny")
B = TINY.block_tokens


def identity(**changed: str) -> NamespaceIdentity:
    return NamespaceIdentity(TINY, **{"weights_revision": "w1", "numerics": "n1", **changed})


def checks_of(key: bytes) -> Checks:
    return Checks(int.from_bytes(key[:4], "little"), int.from_bytes(key[4:12], "little"), True)


class CoreRig:
    """One namespace `main` is open. Items get places of `per_segment` to a segment, in the order of their commits."""

    def __init__(
        self,
        *,
        pool_states: int = 100,
        per_segment: int = 8,
        policy: str = "endpoints",
        limits: Limits | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.clock = ManualClock()
        self.pool = StatePool(
            pool_states * TINY.state_bytes, 600.0, on_change=None if journal is None else journal.pooled
        )
        self.core = Core(pool=self.pool, limits=limits, journal=journal)
        self.main = self.core.open_namespace("main", identity(), policy).digest
        self.per_segment = per_segment
        self._places = count()

    @property
    def now(self) -> dict[str, float]:
        return {"now_mono": self.clock.monotonic(), "now_wall": self.clock.wall()}

    def keys(self, tokens: Iterable[int], namespace: NamespaceDigest | None = None) -> list[BlockKey]:
        return block_keys(namespace or self.main, list(tokens), block_tokens=B)

    def place(self, length: int) -> Place:
        number = next(self._places)
        return Place(1 + number // self.per_segment, 4096 * (1 + number % self.per_segment), length)

    def block_items(
        self,
        keys: Sequence[BlockKey],
        *,
        lineage: Lineage = Lineage.EXACT,
        namespace: NamespaceDigest | None = None,
    ) -> list[ReserveItem]:
        parents = [namespace or self.main, *keys]
        return [
            ReserveItem(key, ItemKind.BLOCK, parents[i], (i + 1) * B, TINY.block_bytes, lineage=lineage)
            for i, key in enumerate(keys)
        ]

    def state_item(
        self,
        keys: Sequence[BlockKey],
        position: int,
        *,
        pool: bool = False,
        ssd: bool = True,
        lineage: Lineage = Lineage.EXACT,
    ) -> ReserveItem:
        return ReserveItem(
            keys[position // B - 1],
            ItemKind.STATE,
            b"",
            position,
            TINY.state_bytes,
            to_pool=pool,
            to_ssd=ssd,
            lineage=lineage,
        )

    def rows_item(
        self,
        keys: Sequence[BlockKey],
        number: int,
        *,
        overlap: bool = False,
        lineage: Lineage = Lineage.EXACT,
    ) -> ReserveItem:
        """The window rows of block `number`."""
        length = TINY.rows_overlap_block_bytes if overlap else TINY.rows_block_bytes
        return ReserveItem(keys[number], ItemKind.ROWS, b"", (number + 1) * B, length, lineage=lineage)

    def reserve(
        self, items: Sequence[ReserveItem], *, session: str = "w", namespace: NamespaceDigest | None = None
    ) -> ReserveResult:
        return self.core.reserve(session, namespace or self.main, items, **self.now)

    def written(self, item: ReserveItem) -> Written:
        return Written(
            checks_of(item.key),
            self.place(item.length) if item.to_ssd else None,
            bytes(item.length) if item.to_pool else None,
        )

    def commit(
        self, reservation_id: int, *, session: str = "w", without: Iterable[ItemId] = ()
    ) -> CommitReport:
        granted = self.core.commit_list(reservation_id, session)
        results = {
            each.item.item_id: self.written(each.item)
            for each in granted
            if each.item.item_id not in set(without)
        }
        return self.core.committed(reservation_id, session, results, **self.now)

    def write(
        self, items: Sequence[ReserveItem], *, session: str = "w", namespace: NamespaceDigest | None = None
    ) -> CommitReport:
        made = self.reserve(items, session=session, namespace=namespace)
        if made.reservation_id is None:
            return CommitReport([], [], 0)
        return self.commit(made.reservation_id, session=session)

    def store(
        self,
        tokens: Iterable[int],
        *,
        ssd: Iterable[int] = (),
        pool: Iterable[int] = (),
        rows: Iterable[int] = (),
        overlap: bool = False,
        lineage: Lineage = Lineage.EXACT,
        namespace: NamespaceDigest | None = None,
    ) -> list[BlockKey]:
        """All whole blocks of `tokens`, states at the positions named, and the rows of the blocks numbered."""
        keys = self.keys(tokens, namespace)
        edges = sorted({*ssd, *pool})
        items = self.block_items(keys, lineage=lineage, namespace=namespace)
        items += [
            self.state_item(keys, at, pool=at in set(pool), ssd=at in set(ssd), lineage=lineage)
            for at in edges
        ]
        items += [self.rows_item(keys, number, overlap=overlap, lineage=lineage) for number in rows]
        self.write(items, namespace=namespace)
        return keys

    def lookup(
        self,
        keys: Sequence[bytes],
        tokens: int,
        *,
        lease: bool = True,
        session: str = "r",
        costs: Costs = EAGER,
        exact_only: bool = True,
        namespace: NamespaceDigest | None = None,
    ) -> LookupResult:
        return self.core.lookup(
            namespace or self.main,
            keys,
            prompt_tokens=tokens,
            costs=costs,
            session=session,
            lease=lease,
            exact_only=exact_only,
            **self.now,
        )

    def evict(self, blocks: int, *, prefer_states: bool = False) -> list[ItemId]:
        gone = self.core.plan_eviction(
            blocks * TINY.block_bytes, prefer_states=prefer_states, now_wall=self.clock.wall()
        )
        return [each.item for each in gone]
