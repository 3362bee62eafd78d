"""The pool: window states in host memory, addressed by (namespace, key of the block that ends there)."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvstore.errors import InvalidArgument
from kvstore.types import BlockKey, BytesLike, Checks, Lineage, NamespaceDigest

StateId = tuple[NamespaceDigest, BlockKey]


@dataclass(frozen=True, slots=True)
class PooledState:
    """A state as its writer made it. `position` is tokens; the payload is held by reference and never changed."""

    payload: BytesLike
    position: int
    lineage: Lineage
    checks: Checks

    @property
    def length(self) -> int:
        return memoryview(self.payload).nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatistics:
    """`bytes` <= `budget_bytes`, but for pinned ones after a `resize`. What follows `pinned_bytes` counts events since the start."""

    states: int
    bytes: int
    budget_bytes: int
    pinned: int
    pinned_bytes: int
    stored: int
    refused: int
    evicted: int
    expired: int


@dataclass(slots=True)
class _Entry:
    state: PooledState
    length: int
    used: float
    pins: int = 0
    successors: int = 0


@dataclass(frozen=True, slots=True)
class StatePin:
    """One pin of one state. It names the very entry: a state put later under the same key is another."""

    namespace: NamespaceDigest
    key: BlockKey
    entry: _Entry


class StatePool:
    """At most `budget_bytes` of states, least recently used out first, each for `ttl_seconds` since its last use.

    A state from which exactly one deeper state has been made goes before those that are the last of their branch: the
    branch resumes at the deeper one, so that an idle branch keeps one boundary for as long as there is room for one.
    Two deeper states make it a branch point, which ranks with the last ones. Pinned states are neither evicted nor
    expired. `now` is monotonic seconds, never decreasing. Not thread-safe: one owner.
    """

    def __init__(
        self,
        budget_bytes: int,
        ttl_seconds: float,
        *,
        on_change: Callable[[NamespaceDigest, BlockKey, int, bool], None] | None = None,
    ) -> None:
        """`on_change` is told (namespace, key, position in tokens, whether it is held now) of each state that comes or goes; it must
        not raise."""
        if budget_bytes < 0:
            raise InvalidArgument(
                "a budget is a size", field="budget_bytes", value=budget_bytes, allowed=">= 0"
            )
        if not ttl_seconds > 0:
            raise InvalidArgument(
                "a life time is positive", field="ttl_seconds", value=ttl_seconds, allowed="> 0"
            )
        self._budget = budget_bytes
        self._ttl = ttl_seconds
        self._on_change = on_change
        self._spaces: dict[NamespaceDigest, dict[BlockKey, _Entry]] = {}
        # Unpinned states, oldest use first; every one is in exactly one of the two.
        self._passed: OrderedDict[StateId, _Entry] = OrderedDict()
        self._last: OrderedDict[StateId, _Entry] = OrderedDict()
        self._latest = -math.inf
        self._bytes = self._pinned = self._pinned_bytes = 0
        self._stored = self._refused = self._evicted = self._expired = 0

    def put(
        self,
        namespace: NamespaceDigest,
        key: BlockKey,
        state: PooledState,
        *,
        now: float,
        after: BlockKey | None = None,
    ) -> bool:
        """Whether the state is held now. `after` is the key of the nearest earlier state of the same prompt, if pooled.

        The first writer wins, except that an EXACT state replaces a BOUNDED one that nobody pins. False, and nothing
        evicted, when it is larger than the budget or than all that may be evicted.
        """
        length = state.length
        held = self._find(namespace, key)
        if held is not None and not self._is_over(held, now) and not _may_replace(held, state.lineage):
            return True
        if length > self._budget - self._pinned_bytes:
            self._refused += 1
            return False
        if held is not None:
            self._drop(namespace, key, held)
        self._evict_to(self._budget - length)
        entry = _Entry(
            state, length, self._moment(now), successors=held.successors if held is not None else 0
        )
        self._spaces.setdefault(namespace, {})[key] = entry
        self._bytes += length
        self._stored += 1
        if self._on_change is not None:
            self._on_change(namespace, key, state.position, True)
        self._rank((namespace, key), entry)
        if after is not None and held is None:
            self._follow(namespace, after, now)
        return True

    def resize(self, budget_bytes: int) -> None:
        """Another budget from now on. Of what is more than that, pinned states stay until they are unpinned."""
        self._budget = budget_bytes
        self._evict_to(budget_bytes)

    def get(self, namespace: NamespaceDigest, key: BlockKey, *, now: float) -> PooledState | None:
        """The state, or None. A use: its life time starts anew."""
        entry = self._find(namespace, key)
        if entry is None or self._is_over(entry, now):
            return None
        entry.used = self._moment(now)
        self._rank((namespace, key), entry)
        return entry.state

    def lacks(self, namespace: NamespaceDigest, key: BlockKey, lineage: Lineage, *, now: float) -> bool:
        """Whether a `put` of this lineage would be taken in: nothing is held there, or what EXACT bytes may replace."""
        entry = self._find(namespace, key)
        return entry is None or self._is_over(entry, now) or _may_replace(entry, lineage)

    def has(self, namespace: NamespaceDigest) -> bool:
        """Whether any state of the namespace is here."""
        return namespace in self._spaces

    def held_along(
        self, namespace: NamespaceDigest, keys: Sequence[BlockKey], *, block_tokens: int, now: float
    ) -> list[tuple[int, Lineage]]:
        """Which of a prompt's blocks end at a state that `get` would return: (index in `keys`, lineage), ascending."""
        space = self._spaces.get(namespace)
        if not space:
            return []
        if len(space) < len(keys):
            found = []
            for key, entry in space.items():
                index = entry.state.position // block_tokens - 1
                if index < len(keys) and keys[index] == key and not self._is_over(entry, now):
                    found.append((index, entry.state.lineage))
            return sorted(found)
        hits = [(index, space[key]) for index, key in enumerate(keys) if key in space]
        return [(index, entry.state.lineage) for index, entry in hits if not self._is_over(entry, now)]

    def keys(self, namespace: NamespaceDigest) -> list[tuple[BlockKey, int]]:
        """(Key, position) of every state of a namespace."""
        return [(key, entry.state.position) for key, entry in self._spaces.get(namespace, {}).items()]

    def nearest(self, namespace: NamespaceDigest, keys: Iterable[BlockKey]) -> BlockKey | None:
        """The first of `keys` that has a state here. Costs nothing where the namespace has none."""
        space = self._spaces.get(namespace)
        return next((key for key in keys if key in space), None) if space else None

    def pin(self, namespace: NamespaceDigest, key: BlockKey, *, now: float) -> StatePin | None:
        """Keep the state until `unpin` of what this returns; a use. None when it is not here."""
        entry = self._find(namespace, key)
        if entry is None or self._is_over(entry, now):
            return None
        if not entry.pins:
            self._unrank((namespace, key))
            self._pinned += 1
            self._pinned_bytes += entry.length
        entry.pins += 1
        entry.used = self._moment(now)
        return StatePin(namespace, key, entry)

    def pinned(self, pin: StatePin) -> PooledState | None:
        """The state that `pin` keeps, or None when it was removed all the same (`remove`, `clear`)."""
        return pin.entry.state if self._find(pin.namespace, pin.key) is pin.entry else None

    def unpin(self, pin: StatePin, *, now: float) -> None:
        """End a pin; each is ended once. Of a state that was removed meanwhile nothing is left to do."""
        entry = pin.entry
        if self._find(pin.namespace, pin.key) is not entry:
            return
        assert entry.pins > 0, "a pin is ended once"
        entry.pins -= 1
        entry.used = self._moment(now)
        if not entry.pins:
            self._pinned -= 1
            self._pinned_bytes -= entry.length
            self._rank((pin.namespace, pin.key), entry)
            self._evict_to(self._budget)

    def remove(self, namespace: NamespaceDigest, key: BlockKey) -> bool:
        """Drop one state, pinned or not: who holds its payload keeps those bytes. Whether it was here."""
        entry = self._find(namespace, key)
        if entry is None:
            return False
        self._drop(namespace, key, entry)
        return True

    def clear(
        self, namespace: NamespaceDigest | None = None, *, spare_pinned: bool = False
    ) -> tuple[int, int]:
        """Drop all states of one namespace or of all. (Dropped, left because they are pinned.)"""
        dropped = left = 0
        for digest in list(self._spaces) if namespace is None else [namespace]:
            for key, entry in list(self._spaces.get(digest, {}).items()):
                if spare_pinned and entry.pins:
                    left += 1
                else:
                    self._drop(digest, key, entry)
                    dropped += 1
        return dropped, left

    def expire(self, now: float) -> int:
        """Drop what nobody used for the life time; how many."""
        before = self._expired
        for order in (self._passed, self._last):
            while order:
                name, entry = next(iter(order.items()))
                if not self._is_over(entry, now):
                    break
                self._drop(*name, entry)
                self._expired += 1
        return self._expired - before

    def statistics(self) -> PoolStatistics:
        return PoolStatistics(
            states=sum(map(len, self._spaces.values())),
            bytes=self._bytes,
            budget_bytes=self._budget,
            pinned=self._pinned,
            pinned_bytes=self._pinned_bytes,
            stored=self._stored,
            refused=self._refused,
            evicted=self._evicted,
            expired=self._expired,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless totals, ranks and pins agree and the budget holds."""
        entries = {
            (digest, key): entry for digest, space in self._spaces.items() for key, entry in space.items()
        }
        assert sum(entry.length for entry in entries.values()) == self._bytes, "bytes"
        assert self._bytes <= max(self._budget, self._pinned_bytes), "the budget, and what is pinned"
        pinned = {name for name, entry in entries.items() if entry.pins}
        assert len(pinned) == self._pinned, "pinned states"
        assert sum(entries[name].length for name in pinned) == self._pinned_bytes, "pinned bytes"
        assert not self._passed.keys() & self._last.keys(), "ranked twice"
        assert self._passed.keys() | self._last.keys() == entries.keys() - pinned, "ranked states"
        for order in (self._passed, self._last):
            uses = [entry.used for entry in order.values()]
            assert uses == sorted(uses), "ranks do not follow uses"
        assert all(self._spaces.values()), "an empty namespace is kept"

    def _find(self, namespace: NamespaceDigest, key: BlockKey) -> _Entry | None:
        space = self._spaces.get(namespace)
        return None if space is None else space.get(key)

    def _moment(self, now: float) -> float:
        """What a use counts for: never before an earlier one, so that ranks follow uses though work in steps tells when it
        began."""
        self._latest = max(self._latest, now)
        return self._latest

    def _is_over(self, entry: _Entry, now: float) -> bool:
        return not entry.pins and entry.used + self._ttl <= now

    def _evict_to(self, most_bytes: int) -> None:
        """Evict unpinned states until the pool holds so many bytes at most."""
        while self._bytes > most_bytes and (order := self._passed or self._last):
            name, entry = next(iter(order.items()))
            self._drop(*name, entry)
            self._evicted += 1

    def _follow(self, namespace: NamespaceDigest, earlier: BlockKey, now: float) -> None:
        entry = self._find(namespace, earlier)
        if entry is None:
            return
        entry.successors += 1
        entry.used = self._moment(now)
        if not entry.pins:
            self._unrank((namespace, earlier))
            self._rank((namespace, earlier), entry)

    def _rank(self, name: StateId, entry: _Entry) -> None:
        order = self._passed if entry.successors == 1 else self._last
        order[name] = entry
        order.move_to_end(name)

    def _unrank(self, name: StateId) -> None:
        self._passed.pop(name, None)
        self._last.pop(name, None)

    def _drop(self, namespace: NamespaceDigest, key: BlockKey, entry: _Entry) -> None:
        self._unrank((namespace, key))
        space = self._spaces[namespace]
        del space[key]
        if not space:
            del self._spaces[namespace]
        self._bytes -= entry.length
        if entry.pins:
            self._pinned -= 1
            self._pinned_bytes -= entry.length
        if self._on_change is not None:
            self._on_change(namespace, key, entry.state.position, False)


def _may_replace(entry: _Entry, lineage: Lineage) -> bool:
    return lineage is Lineage.EXACT and entry.state.lineage is Lineage.BOUNDED and not entry.pins
