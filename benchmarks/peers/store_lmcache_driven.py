"""LMCache's server as it is by default: the client's memory is shared with it, and the server copies out of it and into it
(lmcache-driven), so that a payload is copied once in each direction, by the server.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.peers.base import BLOCK_TOKENS, PeerFailed, Place, Prompt
from benchmarks.peers.payloads import address_of
from benchmarks.peers.store_lmcache import CALL_SECONDS, INSTANCE, MODEL, TOKEN_BYTES, Served


class Store(Served):
    def __init__(self, place: Place, *, threads: int) -> None:
        super().__init__(place, mode="lmcache_driven", threads=threads)
        self._blocks = self.place.set_bytes // self.block_bytes
        self._transfer: Any = None
        self._cache: Any = None

    def connect(self) -> None:
        import torch
        from lmcache.utils import EngineType
        from lmcache.v1.multiprocess.group_view import EngineGroupInfo
        from lmcache.v1.multiprocess.transfer_context import create_transfer_context

        if self._cache is None:
            # Block 0 stands for none; then come those that are written from, and those that are read into.
            shape = (1 + 2 * self._blocks, BLOCK_TOKENS, TOKEN_BYTES)
            self._cache = {"layer.0": torch.zeros(shape, dtype=torch.uint8)}
        self._transfer = create_transfer_context(
            self._cache, mode="lmcache_driven", instance_id=INSTANCE, req_client=self._client
        )
        self._transfer.register(
            self._cache,
            MODEL,
            1,
            1,
            CALL_SECONDS,
            layout_hints={"kv_layout": "NHD"},
            engine_group_infos=[
                EngineGroupInfo(engine_group_id=0, layer_indices=(0,), tokens_per_block=BLOCK_TOKENS)
            ],
            engine_type=EngineType.VLLM,
        )

    def memory(self, blocks: int) -> tuple[memoryview, memoryview] | None:
        whole = memoryview(self._cache["layer.0"].view(-1).numpy())
        first, size = self.block_bytes, blocks * self.block_bytes
        return whole[first : first + size], whole[first + size : first + 2 * size]

    def put(self, prompt: Prompt, payloads: Sequence[memoryview]) -> None:
        key = self.key(prompt)
        event = self._transfer.create_recorded_event()
        done = self._transfer.submit_store(
            key.request_id, key, self._cache, [self._numbers(payloads)], event, 1
        )
        if not done.result(timeout=CALL_SECONDS):
            raise PeerFailed(f"lmcache did not store {len(payloads)} blocks")
        self.end(key)
        self.stored(len(payloads))

    def get(
        self, prompt: Prompt, rooms: Sequence[memoryview], got: Callable[[int], None], *, verify: bool
    ) -> None:
        key = self.key(prompt)
        self.look_up(key, len(rooms))
        event = self._transfer.create_recorded_event()
        done = self._transfer.submit_retrieve(
            key.request_id, key, self._cache, [self._numbers(rooms)], event, 1, skip_first_n_tokens=0
        )
        if not done.result(timeout=CALL_SECONDS):
            raise PeerFailed(f"lmcache did not bring {len(rooms)} blocks")
        for number in range(len(rooms)):
            got(number)
        self.end(key)

    def _numbers(self, pieces: Sequence[memoryview]) -> list[int]:
        """Of the cache's blocks that the pieces are."""
        first = self._cache["layer.0"].data_ptr()
        return [(address_of(piece) - first) // self.block_bytes for piece in pieces]
