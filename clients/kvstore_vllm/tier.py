"""The tier as vLLM calls it: `"secondary_tiers": [{"type": "kvstore", "address": "/run/kv"}]`, see ops/vllm.md."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, ClassVar

from kvstore.clock import SystemClock
from kvstore_client import CacheClient, Deadlines, Dock, KeyedStore
from kvstore_client.address import LocalAddress
from kvstore_vllm.compat import (
    JobResult,
    Locality,
    LookupResult,
    Medium,
    OffloadingConnectorStats,
    OffloadingCounterMetadata,
    OffloadingEvent,
    RequestOffloadingContext,
    SecondaryTierManager,
    in_prompt_order,
    rows_of,
)
from kvstore_vllm.figures import FIGURES, metric_of
from kvstore_vllm.identity import identity_of, name_of
from kvstore_vllm.lookups import Verdict
from kvstore_vllm.rows import RowTier
from kvstore_vllm.settings import read_settings

_VERDICTS = {
    Verdict.HIT: LookupResult.HIT,
    Verdict.MISS: LookupResult.MISS,
    Verdict.LATER: LookupResult.RETRY,
}


CONTROL_SECONDS = 2.0
MOVE_SECONDS = 5.0
"""A request waits for its load as long as that takes: a service that stands still costs it this, once."""


class KvstoreTier(SecondaryTierManager):
    """Translates between vLLM's calls and kvstore_vllm.rows.RowTier, which decides. Its constructor reaches for nothing: an
    engine starts without the service. ConfigError for keys of its configuration that are wrong."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        locality: str | None = None,
        **own: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        settings = read_settings(own)
        self.locality = None if locality is None else Locality(locality)
        assert primary_kv_view.strides is not None, "the pool is one array of rows"
        row_bytes = primary_kv_view.strides[0]
        identity = identity_of(
            rows_of(offloading_spec, row_bytes), revision=settings.revision, salt=settings.salt
        )
        half = settings.lookup_seconds / 2
        deadlines = Deadlines(
            connect=half, lookup=half, control=CONTROL_SECONDS, fetch=MOVE_SECONDS, write=MOVE_SECONDS
        )
        where = settings.where()
        client = CacheClient(where, owner=settings.owner, deadlines=deadlines)
        is_lent = settings.pool_file and isinstance(where, LocalAddress)
        self._dock = Dock.behind(primary_kv_view.cast("B")) if is_lent else None
        self._tier = RowTier(
            KeyedStore(client, identity, name=name_of(identity), dock=self._dock),
            primary_kv_view,
            row_bytes=row_bytes,
            settings=settings,
            clock=SystemClock(),
            close=client.close,
        )
        tells = settings.enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events
        self._events: list[OffloadingEvent] | None = [] if tells else None

    # ---- requests -------------------------------------------------------------------------------------------

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        return _VERDICTS[self._tier.lookup(key, req_context.req_id)]

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        self._tier.touch(keys)

    def on_request_finished(self, req_context: Any) -> None:
        self._tier.request_ended(req_context.req_id)

    def on_schedule_end(self, context: Any) -> None:
        self._tier.step_ended()

    # ---- jobs -----------------------------------------------------------------------------------------------

    def submit_store(self, job_metadata: Any) -> None:
        # What is given first goes last where room is wanted: a prompt from its end on.
        keys, rows = in_prompt_order(
            list(job_metadata.keys), list(job_metadata.chunk_ids), job_metadata.req_context
        )
        self._tier.store(job_metadata.job_id, keys, rows)

    def submit_load(self, job_metadata: Any) -> None:
        keys, rows = in_prompt_order(
            list(job_metadata.keys), list(job_metadata.chunk_ids), job_metadata.req_context
        )
        self._tier.load(job_metadata.job_id, keys, rows)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results = []
        for each in self._tier.finished():
            is_load = each.job.is_load
            if self._events is not None and not is_load and each.done:
                self._events.append(
                    OffloadingEvent(
                        keys=list(each.done), medium=self.medium, removed=False, locality=self.locality
                    )
                )
            results.append(
                JobResult(
                    job_id=each.job.number,
                    success=each.success,
                    successful_keys=tuple(each.done) if is_load and each.done and not each.success else None,
                    transfer_time=each.seconds,
                    transfer_bytes=len(each.done) * self.block_size_bytes,
                )
            )
        return results

    def has_pending_work(self) -> bool:
        return self._tier.has_work

    def drain_jobs(self) -> None:
        self._tier.drain()

    def shutdown(self) -> None:
        self._tier.shutdown()
        if self._dock is not None:
            self._dock.close()

    # ---- seen from outside ----------------------------------------------------------------------------------

    def take_events(self) -> Iterable[OffloadingEvent]:
        if not self._events:
            return ()
        taken, self._events = self._events, []
        return taken

    def get_stats(self) -> OffloadingConnectorStats | None:
        counts = self._tier.take_counts()
        if not counts:
            return None
        stats = OffloadingConnectorStats()
        for name, count in counts.items():
            stats.increase_counter(metric_of(name), count)
        return stats

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return {
            metric_of(name): OffloadingCounterMetadata(documentation=text) for name, text in FIGURES.items()
        }
