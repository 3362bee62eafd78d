"""What `kvstore top` shows of one look, given the one before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvstore.cli.output import table
from kvstore.units import rounded, time_text

BAR_CHARS = 20
PLANS_SHOWN = 5
CALLS_SHOWN = 5

# A figure that counts, as what it is a second.
RATES = {
    "lookups": "lookups_total",
    "lookup_tokens": "lookup_tokens_total",
    "lookup_hit_tokens": "lookup_hit_tokens_total",
    "ssd_read_bytes": "disk_read_payload_bytes_total",
    "memory_hits": "memory_hits_total",
    "stored_bytes": "log_appended_bytes_total",
    "stored_blocks": "stored_blocks_total",
    "commits": "commits_total",
    "evicted_blocks": "evicted_blocks_total",
}

# What a tier is called, the figures that fill it, and its budget.
TIERS: Sequence[tuple[str, tuple[str, ...], str]] = (
    (
        "ssd",
        ("disk_live_bytes", "disk_dead_bytes", "disk_padded_bytes", "disk_other_bytes"),
        "disk_budget_bytes",
    ),
    ("  of it states", ("states_ssd_bytes",), "states_ssd_budget_bytes"),
    ("block cache", ("memory_held_bytes",), "memory_budget_bytes"),
    ("pool", ("states_pool_bytes",), "states_pool_budget_bytes"),
    ("handoffs", ("handoff_bytes",), "handoff_budget_bytes"),
    ("staging", ("staged_bytes",), "staged_budget_bytes"),
    ("arenas", ("arena_bytes",), "arena_budget_bytes"),
)
SOURCES = ("pool", "checkpoint", "rows", "replay", "none")


def rates(now: Mapping[str, float], before: Mapping[str, float] | None) -> dict[str, float] | None:
    """By name, a second. None where there is nothing to compare with: no look before, or of a service that has started
    anew since."""
    if before is None:
        return None
    seconds = now["uptime_seconds"] - before["uptime_seconds"]
    if seconds <= 0:
        return None
    return {
        name: max(0.0, now.get(figure, 0.0) - before.get(figure, 0.0)) / seconds
        for name, figure in RATES.items()
    }


def view(status: Mapping[str, Any], a_second: Mapping[str, float] | None) -> list[str]:
    """Lines for people."""
    figures: Mapping[str, float] = status["figures"]
    lines = [_headline(figures), ""]
    lines += _tiers(figures)
    lines += ["", *_hits(figures)]
    lines += ["", *_a_second(a_second)]
    lines += ["", _retention(figures), _device(figures), _trouble(figures)]
    if "plans" in status:
        lines += ["", "last plans", *(_plan(each) for each in status["plans"][:PLANS_SHOWN])]
    if "slowest_calls" in status:
        lines += ["", "slowest calls of the last ten minutes"]
        lines += [
            f"  {each['call']:<14} {_time(each['seconds']):>9}  {_time(each['seconds_ago'])} ago"
            for each in status["slowest_calls"][:CALLS_SHOWN]
        ]
    return lines


def _headline(figures: Mapping[str, float]) -> str:
    state = "draining" if figures["draining"] else "ready" if figures["ready"] else "loading"
    counted = ", ".join(
        f"{figures[name]:,.0f} {name}"
        for name in ("namespaces", "blocks", "sessions", "leases", "reservations")
    )
    return f"kvstore {state}, up {_time(figures['uptime_seconds'])}: {counted}"


def _tiers(figures: Mapping[str, float]) -> list[str]:
    rows = []
    for name, parts, budget in TIERS:
        if not figures.get(budget):
            continue
        used, most = sum(figures[part] for part in parts), figures[budget]
        full = min(1.0, used / most)
        # What holds something shows something.
        marks = max(round(full * BAR_CHARS), 1 if used else 0)
        bar = "#" * marks + "." * (BAR_CHARS - marks)
        rows.append((name, bar, f"{100 * full:.1f} %", rounded(int(used)), rounded(int(most))))
    return table(rows, head=("tier", "", "full", "holds", "of")).splitlines()


def _hits(figures: Mapping[str, float]) -> list[str]:
    asked, hit = figures["lookup_tokens_total"], figures["lookup_hit_tokens_total"]
    plans = {source: figures[f"plans_{source}_total"] for source in SOURCES}
    whole = sum(plans.values())
    rows = [[source.upper(), f"{count:,.0f}", _share(count, whole)] for source, count in plans.items()]
    return [
        f"{figures['lookups_total']:,.0f} lookups, {_share(hit, asked)} of their tokens restored; window states from:",
        *table(rows, head=("source", "plans", "share")).splitlines(),
    ]


def _a_second(values: Mapping[str, float] | None) -> list[str]:
    if values is None:
        return ["a second: known from the next look on"]
    return [
        f"a second: {values['lookups']:,.1f} lookups of {values['lookup_tokens']:,.0f} tokens, "
        f"{_share(values['lookup_hit_tokens'], values['lookup_tokens'])} restored; "
        f"{values['commits']:,.1f} commits, {values['evicted_blocks']:,.1f} blocks evicted",
        f"          {rounded(int(values['ssd_read_bytes']))} read from SSD, {values['memory_hits']:,.0f} payloads "
        f"found in memory, {rounded(int(values['stored_bytes']))} stored",
    ]


def _retention(figures: Mapping[str, float]) -> str:
    attained = figures.get("retention_attained_share")
    text = "nothing has left yet" if attained is None else f"{100 * attained:.2f} %"
    return f"retention attained: {text}; {figures['retention_shortfall_total']:,.0f} blocks left before their time"


def _device(figures: Mapping[str, float]) -> str:
    each = figures.get("device_bytes_per_payload_byte")
    text = f"device: {rounded(int(figures['log_written_bytes_total']))} written"
    if each is not None:
        text += f", {each:.3f} for each byte stored"
    if figures.get("wear_budget_bytes_per_day"):
        left, budget = figures["wear_left_bytes"], figures["wear_budget_bytes_per_day"]
        text += f"; {rounded(int(left))} may be written now, {rounded(int(budget))} a day"
    return text if figures["direct_io"] else f"{text}; segments pass through the page cache"


def _trouble(figures: Mapping[str, float]) -> str:
    found = {
        "damaged": "damaged_total",
        "device errors": "log_device_errors_total",
        "failed commits": "commits_failed_total",
        "calls without a token": "unauthenticated_total",
    }
    counted = ", ".join(f"{figures[name]:,.0f} {words}" for words, name in found.items())
    return f"trouble: {counted}; longest stall {_time(figures['loop_gap_seconds_max'])}"


def _plan(plan: Mapping[str, Any]) -> str:
    way, other = plan["chosen"], plan["runner_up"]
    text = f"  {way['state_source']:<10} {way['compute_from']:>11,} of {plan['prompt_tokens']:,} tokens"
    if way["replay_tokens"]:
        text += f", {way['replay_tokens']:,} replayed"
    text += f", {_time(way['seconds'])}"
    if other is not None:
        text += f"; not {other['state_source']}: {_time(max(0.0, other['seconds'] - way['seconds']))} more"
    return text


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _time(seconds: float) -> str:
    """With three digits below a minute, whole units above."""
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 60 else time_text(60 * round(seconds / 60))
