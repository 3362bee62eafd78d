"""AIBrix's KV cache in this process: its memory tier alone (MEMORY), or RocksDB without it (DISK).

Copies: a put goes from the client's memory into a block of the cache's own, and on DISK from there through Python bytes into
RocksDB; a get is copied once out of the cache's block. RocksDB writes its log without syncing it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.peers.base import BLOCK_TOKENS, Peer, PeerFailed, Place, Prompt, Tier

TOKEN_BYTES = 3514
"""The profile's 3,514.25 rounded down: a cache of tensors holds whole bytes a token. Half of them stand for keys."""
BATCH_TOKENS = 16_384
"""Tokens of one put or get at most: the cache sets memory aside for so many."""
_GIB = 1 << 30


class Store(Peer):
    block_bytes = BLOCK_TOKENS * TOKEN_BYTES

    def __init__(self, place: Place, *, threads: int) -> None:
        super().__init__(place)
        self.threads = threads
        self._cache: Any = None

    def start(self) -> None:
        # Read at the import.
        os.environ.update(self._settings())
        import torch
        from aibrix_kvcache import (
            BaseKVCacheManager,
            KVCacheBlockLayout,
            KVCacheBlockSpec,
            KVCacheConfig,
            KVCacheTensorSpec,
            ModelSpec,
            cache_manager,
        )

        # There is no device whose transfers would need it.
        cache_manager.TESTING_DISABLE_PIN_MEMORY = True
        tensor = KVCacheTensorSpec(heads=[0], layers=[0], head_size=TOKEN_BYTES // 2)
        spec = KVCacheBlockSpec(BLOCK_TOKENS, torch.uint8, KVCacheBlockLayout.LCND, tensor)
        if spec.block_nbytes != self.block_bytes:
            raise PeerFailed(f"aibrix's block has {spec.block_nbytes} bytes, not {self.block_bytes}")
        config = KVCacheConfig(
            block_spec=spec, model_spec=ModelSpec(1 << 20, BATCH_TOKENS), multi_threaded=self.threads > 1
        )
        self._cache = BaseKVCacheManager(config=config)

    def _settings(self) -> dict[str, str]:
        on_disk = self.place.tier is Tier.DISK
        # What it evicts it may not have had room for: twice what is kept, since nothing can be cleared.
        gigabytes = (self.place.set_bytes * 5 // 2 + _GIB) / _GIB
        settings = {
            "L1_CACHE_ENABLED": "0" if on_disk else "1",
            "L1_CACHE_CAPACITY_GB": f"{gigabytes:.3f}",
            "DEVICE": "cpu",
            "L2_CACHE_BACKEND": "ROCKSDB" if on_disk else "",
            "L2_CACHE_INGESTION_MAX_INFLIGHT_TOKENS": "0",
            "L2_CACHE_PER_TOKEN_TIMEOUT_MS": "100",
            "ROCKSDB_ROOT": str(self.place.directory / "rocksdb"),
            "ROCKSDB_TTL_S": "86400",
        }
        return {f"AIBRIX_KV_CACHE_OL_{name}": value for name, value in settings.items()}

    def stop(self) -> None:
        if self._cache is not None:
            self._cache.close()
            self._cache = None

    def put(self, prompt: Prompt, payloads: Sequence[memoryview]) -> None:
        tokens = _listed(prompt)
        allocated = self._cache.allocate_for(None, tokens)
        if not allocated.is_ok():
            raise PeerFailed(f"aibrix has no memory for {len(payloads)} blocks: {allocated}")
        tensors = allocated.value.to_tensors()
        if len(tensors) != len(payloads):
            allocated.value.release()
            raise PeerFailed(f"aibrix has memory for {len(tensors)} of {len(payloads)} blocks")
        for tensor, payload in zip(tensors, payloads, strict=True):
            tensor.view(-1).numpy()[:] = payload
        stored = self._cache.put(None, tokens, allocated.value)
        if not stored.is_ok() or stored.value != len(tokens):
            raise PeerFailed(f"aibrix stored {stored} of {len(tokens)} tokens")

    def get(
        self, prompt: Prompt, rooms: Sequence[memoryview], got: Callable[[int], None], *, verify: bool
    ) -> None:
        tokens = _listed(prompt)
        found = self._cache.acquire(None, tokens)
        if not found.is_ok():
            raise PeerFailed(f"aibrix found nothing of {len(rooms)} blocks: {found}")
        held, handle = found.value
        try:
            if held != len(tokens):
                raise PeerFailed(f"aibrix found {held} of {len(tokens)} tokens")
            for number, (room, tensor) in enumerate(zip(rooms, handle.to_tensors(), strict=True)):
                room[:] = memoryview(tensor.reshape(-1).numpy())
                got(number)
        finally:
            handle.release()

    def settle(self) -> None:
        self._cache.flush()

    def restart(self) -> None:
        """Nothing: what its memory tables hold (192 MiB by its defaults) would not all be found again by a new start in the
        same process. The set is to be larger than twice that."""

    def forget(self) -> None:
        """Nothing: there is room for two passes, and the next has other keys."""


def _listed(prompt: Prompt) -> Any:
    from aibrix_kvcache import TokenListView

    return TokenListView(prompt.tokens())
