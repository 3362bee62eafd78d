"""All figures of a running service, in one snapshot: what Stats answers and what the metrics page shows."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from kvstore.service.engine import Engine

PLAN_SOURCES = ("pool", "checkpoint", "rows", "replay", "none")


def _version() -> str:
    try:
        return version("kvstore")
    except PackageNotFoundError:
        return "unknown"


VERSION = _version()


def figures(engine: Engine) -> dict[str, float]:
    """Numbers by name; names end in their unit, counts since the start in `_total`. Event loop's thread only."""
    core = engine.core.statistics()
    pool = core.pool
    handoffs = engine.handoffs.statistics()
    space = engine.writer.room.space
    counts = engine.counts
    flights = engine.flights
    values: dict[str, float] = {
        "ready": engine.ready,
        "draining": engine.draining,
        "uptime_seconds": engine.time.uptime(),
        "namespaces": core.namespaces,
        "blocks": core.blocks,
        "block_bytes": core.block_bytes,
        "bounded_blocks": core.bounded_blocks,
        "states_ssd": core.ssd_states,
        "states_ssd_bytes": core.ssd_state_bytes,
        "states_ssd_budget_bytes": engine.config.states_share_bytes,
        "rows_ssd": core.rows,
        "rows_ssd_bytes": core.rows_bytes,
        "accepted_blocks": core.accepted_blocks,
        "accepted_states": core.accepted_states,
        "accepted_bytes": core.accepted_bytes,
        "states_pool": pool.states,
        "states_pool_bytes": pool.bytes,
        "states_pool_budget_bytes": pool.budget_bytes,
        "states_pool_pinned": pool.pinned,
        "states_pool_stored_total": pool.stored,
        "states_pool_refused_total": pool.refused,
        "states_pool_evicted_total": pool.evicted,
        "states_pool_expired_total": pool.expired,
        "handoffs": handoffs.tickets,
        "handoff_bytes": handoffs.bytes,
        "handoff_budget_bytes": handoffs.budget_bytes,
        "handoff_takes_out": handoffs.out,
        "handoffs_stored_total": handoffs.stored,
        "handoffs_confirmed_total": handoffs.confirmed,
        "handoffs_returned_total": handoffs.returned,
        "handoffs_expired_total": handoffs.expired,
        "handoffs_refused_total": handoffs.refused,
        "sessions": len(engine.sessions),
        "sessions_opened_total": engine.sessions.opened_total,
        "sessions_refused_total": engine.sessions.refused_total,
        "leases": core.leases,
        "reservations": core.reservations,
        "reserved_items": core.in_flight,
        "flights": len(flights.table),
        "flight_blocks": flights.table.keys,
        "flights_waiting": flights.waiting,
        "flights_total": flights.table.announced_total,
        "flights_refused_total": flights.table.unannounced_total,
        "flights_waited_total": flights.waited_total,
        "flights_inherited_total": flights.inherited_total,
        "uploads": len(engine.uploads),
        "staged_bytes": engine.staging.held_bytes,
        "staged_budget_bytes": engine.staging.limit_bytes,
        "staging_refused_total": engine.staging.refused_total,
        "arenas": len(engine.arenas),
        "arena_bytes": engine.arenas.held_bytes,
        "arena_budget_bytes": engine.arenas.budget_bytes,
        "arenas_refused_total": engine.arenas.refused_total,
        "docks": len(engine.docks),
        "docks_refused_total": engine.docks.refused_total,
        "fetching_bytes": engine.reader.gate.held_bytes,
        "fetch_refused_total": engine.reader.gate.refused_total,
        "disk_read_payload_bytes_total": engine.reader.read_bytes_total,
        "ssd_read_seconds_per_byte": engine.reader.rate.seconds_per_byte,
        **_memory(engine),
        "loop_gap_seconds_max": engine.loop.longest_seconds,
        "loop_gap_own_seconds_max": engine.loop.longest_own_seconds,
        "loop_gaps_long_total": engine.loop.long_total,
        "jobs_waiting": engine.writer.waiting,
        "commits_total": engine.writer.commits_total,
        "commits_failed_total": engine.writer.failed_commits_total,
        "appends_total": engine.writer.appends_total,
        "index_bytes": core.index_bytes,
        "index_bytes_per_block": core.index_bytes_per_block,
        "disk_budget_bytes": space.budget,
        "disk_allocated_bytes": space.allocated,
        "disk_other_bytes": space.other,
        "disk_live_bytes": space.live,
        "disk_dead_bytes": space.dead,
        "disk_padded_bytes": space.padded,
        "disk_reserved_bytes": space.reserved,
        "disk_spare_bytes": space.spare,
        "segments": space.segments,
    }
    if core.retention_attained is not None:
        values["retention_attained_share"] = core.retention_attained
    reloading = engine.reloading
    values["erasing_files"] = engine.erasing.progress.files_left
    values["erasing_stopped"] = engine.erasing.is_stopped
    values["reload_failing"] = reloading is not None and reloading.is_failing
    values["reloads_total"] = 0 if reloading is None else reloading.reloaded_total
    values["reloads_failed_total"] = 0 if reloading is None else reloading.failed_total
    for name in (
        "audit_failed_total",
        "erased_tenants_total",
        "tenant_rate_refused_total",
        "tenant_in_flight_refused_total",
        "tenant_quota_refused_total",
        "tenant_forbidden_total",
        "unknown_namespaces_total",
        "lookups_total",
        "lookup_hits_total",
        "lookup_misses_total",
        "lookup_tokens_total",
        "lookup_hit_tokens_total",
        "contains_total",
        "contains_keys_total",
        "contains_held_total",
        "arena_written_bytes_total",
        "dock_written_bytes_total",
        "dock_fetched_bytes_total",
        "accepted_items_total",
        "accepted_bytes_total",
        "accepted_as_durable_total",
        "accepted_copied_bytes_total",
        "committed_items_total",
        "committed_bytes_total",
        "damaged_total",
        "mapped_items_total",
        "expired_leases_total",
        "upkeep_errors_total",
        "unauthenticated_total",
        *(f"plans_{source}_total" for source in PLAN_SOURCES),
    ):
        values[name] = counts[name]
    values["lookup_seconds_total"] = engine.lookup_seconds
    values.update(core.totals)
    counters = engine.log.counters()
    for name, value in counters.items():
        values[f"log_{name}_total"] = value
    if counters["appended_bytes"]:
        values["device_bytes_per_payload_byte"] = counters["written_bytes"] / counters["appended_bytes"]
    values.update(_wear(engine))
    if engine.events is not None:
        values.update(engine.events.figures())
    values["direct_io"] = not engine.log.buffered_because
    return {name: float(value) for name, value in values.items()}


def _memory(engine: Engine) -> dict[str, float]:
    """What lies in memory for clients to map, where there is any."""
    memory, pins = engine.reader.memory, engine.pins
    if memory is None or pins is None:
        return {}
    return {
        "memory_budget_bytes": memory.budget_bytes,
        "memory_allocated_bytes": memory.allocated_bytes,
        "memory_held_bytes": memory.held_bytes,
        "memory_items": len(memory),
        "memory_hits_total": memory.hits_total,
        "memory_misses_total": memory.misses_total,
        "memory_evicted_total": memory.evicted_total,
        "memory_refused_total": memory.refused_total,
        "mapped_items": pins.slots,
    }


def _wear(engine: Engine) -> dict[str, float]:
    """What was copied though something could have gone instead; and the drive's budget, where it has one."""
    writer = engine.writer
    values: dict[str, float] = {"copied_for_hits_bytes_total": writer.room.copied_for_hits_total}
    if writer.wear.limited:
        writer.note_wear()
        values["wear_budget_bytes_per_day"] = writer.wear.bytes_per_day
        values["wear_left_bytes"] = max(0, writer.wear.left_bytes)
        values["wear_refused_total"] = writer.wear_refused_total
    return values
