"""A double for one part of vLLM, which refuses the CPU platform: the worker that copies between the device's blocks and the host
pool. Here both are host memory. All else of vLLM's offloading is its own."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyingWorker(OffloadingWorker):
    """Copies at once, in the caller's thread. A row holds, block after block, the pages of each of the caches' tensors."""

    def __init__(self, caches: Any, region: Any, *, row_bytes: int, blocks_per_row: int) -> None:
        self._caches = caches
        self._region = region
        self._rows = region._base.view(-1, row_bytes)
        self._blocks_per_row = blocks_per_row
        self._begins = []
        at = 0
        for tensor in caches.tensors:
            self._begins.append(at)
            at += tensor.page_size_bytes * blocks_per_row
        self._done: list[Any] = []

    def _pairs(self, device: Any, host: Any) -> Any:
        """(page on the device, its place in a row) of every block of a transfer."""
        block = row = 0
        for group, count in enumerate(device.group_sizes):
            if not count:
                continue
            first = device.block_indices[group]
            for number in range(first, first + count):
                place = number // self._blocks_per_row - first // self._blocks_per_row
                here = self._rows[int(host.block_ids[row + place])]
                for ref in self._caches.group_data_refs[group]:
                    tensor = self._caches.tensors[ref.tensor_idx]
                    size = tensor.page_size_bytes
                    begin = self._begins[ref.tensor_idx] + number % self._blocks_per_row * size
                    there = tensor.tensor[int(device.block_ids[block + number - first])]
                    yield there.view(torch.int8).reshape(-1), here[begin : begin + size]
            block += count
            row += (first + count - 1) // self._blocks_per_row - first // self._blocks_per_row + 1

    def _copied(self, job_id: int, pairs: Any) -> bool:
        size = 0
        for source, target in pairs:
            target.copy_(source)
            size += target.numel()
        self._done.append(TransferResult(job_id, True, size, 1e-6))
        return True

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copied(job_id, self._pairs(src_spec, dst_spec))

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:
        return self._copied(job_id, ((here, there) for there, here in self._pairs(dst_spec, src_spec)))

    def get_finished(self) -> list[Any]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever under way."""

    def shutdown(self) -> None:
        """Who made the pool's file removes it."""
        self._rows = None
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):
    def get_worker(self, kv_caches: Any) -> Any:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CopyingWorker(
                kv_caches, region, row_bytes=self.kv_bytes_per_chunk, blocks_per_row=self.blocks_per_chunk
            )
        return self._worker
