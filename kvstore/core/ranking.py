"""Which block goes first: by an eviction policy, which may be changed while others work, and by age, for whatever must end
when its time is over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.core.index import NO_SLOT, BlockIndex
from kvstore.core.steps import ITEMS_AT_ONCE, VISITS_AT_ONCE, Steps
from kvstore.errors import InvalidArgument
from kvstore.policy.base import EvictionPolicy, Handles
from kvstore.policy.leaves import LeafPolicy
from kvstore.policy.lru import LruPolicy

_TAG_BYTES = 8


class Ranking:
    """Ranks the blocks of an index twice, by age and by the policy, or once where the policy is LRU itself.

    Blocks that come, leave or are read while a policy is on its way in are told to both: each is taken over with its chain
    when it is first heard of, and all others one after another."""

    def __init__(self, index: BlockIndex, policy: EvictionPolicy) -> None:
        self._index = index
        self._policy = policy
        self._ages = policy if isinstance(policy, LruPolicy) else LruPolicy()
        self._coming: LeafPolicy | None = None

    @property
    def name(self) -> str:
        """Of the policy in force."""
        return self._policy.name

    @property
    def hear_requests(self) -> bool:
        """Whether on_request does anything: to ages alone touches say all."""
        return self._coming is not None or self._policy is not self._ages

    # ---- going first ----------------------------------------------------------------------------------------

    def victims(self, start: int = NO_SLOT) -> Iterator[int]:
        """As EvictionPolicy.victims, by the policy."""
        return self._policy.victims(start)

    def mark(self, slot: int) -> tuple[str, int]:
        """Another one as soon as the block goes before or after others, or another policy decides."""
        policy = self._policy
        rank = policy.key_of(slot) if isinstance(policy, LeafPolicy) else self._index.used[slot]
        return policy.name, rank

    def oldest(self) -> Iterator[int]:
        """All blocks, least recently used first, children before parents. As with victims, the last one may be removed."""
        return self._ages.victims()

    # ---- what happens ---------------------------------------------------------------------------------------

    def start(self, slots: Sequence[int] | NDArray[np.integer[Any]]) -> None:
        """All blocks of the index, oldest first. Nothing is ranked yet."""
        order = np.asarray(slots, np.int64)
        parents = np.frombuffer(self._index.parent, np.int32)[order]
        for policy in self._each():
            policy.start(order, parents)

    def on_request(self, chain: Handles, now: float) -> None:
        if self._coming is not None and len(chain):
            self._adopt(self._coming, int(chain[-1]))
            self._coming.on_request(chain, now)
        self._policy.on_request(chain, now)

    def on_insert(self, slot: int, below: int) -> None:
        if self._coming is not None:
            self._adopt(self._coming, below)
            self._coming.on_insert(slot, below, self._tag(slot, self._coming))
        if self._policy is self._ages:
            self._ages.on_insert(slot, below)
            return
        for policy in self._each():
            policy.on_insert(slot, below, self._tag(slot, policy))

    def on_remove(self, slot: int) -> None:
        """It is in the index still."""
        if self._coming is not None and self._coming.has(slot):
            self._coming.on_remove(slot, self._tag(slot, self._coming))
        if self._policy is self._ages:
            self._ages.on_remove(slot)
            return
        for policy in self._each():
            policy.on_remove(slot, self._tag(slot, policy))

    def on_touch(self, slots: Iterable[int], below: int) -> None:
        for policy in self._each():
            policy.on_touch(slots, below)

    def on_touch_many(self, slots: Handles, below: int) -> None:
        for policy in self._each():
            policy.on_touch_many(slots, below)

    # ---- another policy -------------------------------------------------------------------------------------

    def switching(self, policy: EvictionPolicy) -> Steps[None, None]:
        """From its end on `policy`, which is empty, decides, over everything that is held then. One at a time:
        InvalidArgument."""
        if self._coming is not None:
            raise InvalidArgument(
                "another eviction policy is on its way in",
                field="eviction",
                value=policy.name,
                allowed=f"any, once {self._coming.name} is in force",
            )
        if not isinstance(policy, LeafPolicy):
            # Ages are LRU's own order, and have been kept all along.
            self._policy = self._ages
            return
        self._coming = policy
        try:
            yield from self._adopting(policy)
            self._policy = policy
        finally:
            self._coming = None

    def _adopting(self, policy: LeafPolicy) -> Steps[None, None]:
        index, slot, looked = self._index, 0, 0
        taken = 0
        while slot < len(index.parent):
            before = len(policy)
            if index.is_live(slot):
                self._adopt(policy, slot)
            taken, looked = taken + len(policy) - before, looked + 1
            slot += 1
            if taken >= ITEMS_AT_ONCE or looked >= VISITS_AT_ONCE:
                yield
                taken = looked = 0

    def _adopt(self, policy: LeafPolicy, slot: int) -> None:
        """The block and what is above it, where the policy has not got it yet. By last uses, and deeper ones first where those
        are equal."""
        index, path = self._index, []
        while slot != NO_SLOT and not policy.has(slot):
            path.append(slot)
            slot = index.parent[slot]
        for each in reversed(path):
            depth = min(index.number[each], (1 << 20) - 1)
            policy.adopt(each, index.parent[each], (index.used[each] << 20) + (1 << 20) - 1 - depth)

    # ---- seen from outside ----------------------------------------------------------------------------------

    def memory_bytes(self) -> int:
        coming = () if self._coming is None else (self._coming,)
        return sum(policy.memory_bytes() for policy in (*self._each(), *coming))

    def check_integrity(self) -> None:
        """Raise AssertionError unless every policy agrees with itself and the index."""
        for policy in self._each():
            policy.check_integrity()
            assert len(policy) == len(self._index), f"{policy.name} ranks {len(policy)} of {len(self._index)}"
            if isinstance(policy, LeafPolicy):
                assert all(policy.has(slot) for slot in self._index.slots()), "every block is ranked"
        if self._coming is not None:
            self._coming.check_integrity()
            assert len(self._coming) <= len(self._index), "what is taken over is held"

    def _each(self) -> tuple[EvictionPolicy, ...]:
        return (self._ages,) if self._policy is self._ages else (self._ages, self._policy)

    def _tag(self, slot: int, policy: EvictionPolicy) -> int:
        return int.from_bytes(self._index.key(slot)[-_TAG_BYTES:], "little") if policy.remembers else 0
