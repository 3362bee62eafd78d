"""How much host memory the block cache and the pool may take: told, and changed in a running service."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from kvstore.budget import Parts
from kvstore.errors import LimitExceeded, MemoryUnavailable
from kvstore.memory import BlockCache
from kvstore.memory.cache import EXTENT_BYTES, extent_bytes_for
from kvstore.pool.states import StatePool
from kvstore.units import rounded, size_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """Bytes. `cache_allocated` may be more than its budget while sessions map what it has shrunk by."""

    cache_budget: int
    cache_allocated: int
    pool_budget: int
    pool_held: int


class MemoryBudget:
    """The event loop's. `memory` is None where nothing can be mapped. Both together stay within what the other parts leave of
    `parts.memory`."""

    def __init__(self, parts: Parts, memory: BlockCache | None, pool: StatePool) -> None:
        self._most = parts.memory - (parts.sum - parts.cache - parts.pool)
        self._memory = memory
        self._pool = pool

    def budgets(self) -> Budgets:
        memory, pool = self._memory, self._pool.statistics()
        return Budgets(
            cache_budget=0 if memory is None else memory.budget_bytes,
            cache_allocated=0 if memory is None else memory.allocated_bytes,
            pool_budget=pool.budget_bytes,
            pool_held=pool.bytes,
        )

    async def change(self, *, cache: int | None, pool: int | None) -> Budgets:
        """New budgets in bytes; None leaves one as it is. LimitExceeded, and nothing changed, where both are more than the
        service's memory has for them."""
        now = self.budgets()
        wanted = {
            "cache": now.cache_budget if cache is None else cache,
            "pool": now.pool_budget if pool is None else pool,
        }
        if sum(wanted.values()) > self._most:
            raise LimitExceeded(
                "the block cache and the pool together would be more than the service's memory has for them",
                field="cache + pool",
                value=" + ".join(map(size_text, wanted.values())),
                allowed=f"up to {rounded(self._most)} together, {self._most} bytes; `serve --memory` sets it",
            )
        if cache is not None:
            if self._memory is None:
                raise MemoryUnavailable(
                    "this service has no memory that clients may map, and so no block cache",
                    field="cache",
                    value=size_text(cache),
                    allowed="changing the pool only",
                )
            await self._resize(self._memory, cache)
        if pool is not None:
            self._pool.resize(pool)
        return self.budgets()

    async def _resize(self, memory: BlockCache, budget: int) -> None:
        """An extent at a time: the kernel takes milliseconds to take one back, in which nobody is served."""
        step = min(memory.budget_bytes, memory.allocated_bytes) - EXTENT_BYTES
        while step > budget:
            memory.resize(step)
            await asyncio.sleep(0)
            step -= EXTENT_BYTES
        memory.resize(budget, extent_bytes=extent_bytes_for(budget))
