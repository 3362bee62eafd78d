"""What the demo found: one table for people, one object for programs, one verdict for the exit code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kvstore.cli.output import table
from kvstore.v1 import cache_pb2
from kvstore_workers.demo.script import PLANNED_SOURCES
from kvstore_workers.demo.session import TurnResult

_ORDER = ("POOL", "CHECKPOINT", "ROWS", "REPLAY", "NONE")


def build_report(
    results: Sequence[TurnResult], *, kills: int, profile: str, layers: int, wall_s: float
) -> dict[str, Any]:
    turns = [_turn(result) for result in results]
    prompt = sum(t["prompt_tokens"] for t in turns)
    restored = sum(t["restored_tokens"] for t in turns)
    replay_layer_tokens = sum(r.answer.prefix.replay_layer_tokens for r in results)
    # The first turn is cold on both sides: only what came after can be sooner.
    later = turns[1:]
    ttft, cold = sum(t["ttft_s"] for t in later), sum(t["cold_ttft_s"] for t in later)
    return {
        "profile": profile,
        "turns": turns,
        "checks": {
            "all_identical": all(t["identical"] for t in turns),
            "max_logit_difference": max(t["max_logit_difference"] for t in turns),
            "kills": kills,
            "killed_during_store": sum(r.killed_during_store for r in results),
            "sources_seen": [s for s in _ORDER if any(t["state_source"] == s for t in turns)],
            "sources_planned": [source.value for source in PLANNED_SOURCES],
        },
        "totals": {
            "prompt_tokens": prompt,
            "restored_tokens": restored,
            "replayed_tokens": sum(t["replayed_tokens"] for t in turns),
            "computed_tokens": sum(t["computed_tokens"] for t in turns),
            # Restored tokens were not computed, but for what the replays ran again.
            "tokens_saved": restored - replay_layer_tokens / layers,
            "saved_share": (restored - replay_layer_tokens / layers) / prompt,
            "generated_tokens": sum(len(r.answer.tokens) for r in results),
            "bytes_ssd": sum(t["bytes_ssd"] for t in turns),
            "bytes_memory": sum(t["bytes_memory"] for t in turns),
            "ttft_s": ttft,
            "cold_ttft_s": cold,
            "ttft_speedup": cold / ttft,
            "wall_s": wall_s,
        },
    }


def _turn(result: TurnResult) -> dict[str, Any]:
    prefix = result.answer.prefix
    return {
        "turn": result.turn.number,
        "event": event_text(result),
        "prompt_tokens": result.prompt_tokens,
        "restored_tokens": prefix.restored_tokens,
        "replayed_tokens": prefix.replayed_tokens,
        "computed_tokens": prefix.computed_tokens,
        "state_source": result.state_source,
        "exactness": cache_pb2.Exactness.Name(prefix.exactness),
        "bytes_ssd": prefix.bytes_ssd,
        "bytes_memory": prefix.bytes_memory,
        "ttft_s": result.answer.ttft_s,
        "cold_ttft_s": result.cold.ttft_s,
        "identical": result.identical,
        "max_logit_difference": result.max_logit_difference,
        "blocks_stored": result.answer.blocks_stored,
        "blocks_failed": result.answer.blocks_failed,
        "miss_reason": prefix.miss_reason,
    }


def event_text(result: TurnResult) -> str:
    events = [str(result.turn.before)] if result.turn.before else []
    if result.killed:
        events.append("service killed -9 while it stored this turn")
    return "; ".join(events)


def failures(report: dict[str, Any]) -> list[str]:
    """Why the demo does not count as passed; empty when it does."""
    checks = report["checks"]
    found = []
    if not checks["all_identical"]:
        turns = [t["turn"] for t in report["turns"] if not t["identical"]]
        found.append(f"answers differ from the run without a store in turns {turns}")
    missing = [source for source in checks["sources_planned"] if source not in checks["sources_seen"]]
    if missing:
        found.append(f"planned sources not taken: {', '.join(missing)}")
    if not checks["killed_during_store"]:
        found.append("the kill did not fall into a store")
    if checks["kills"] < 2:
        found.append(f"the service was killed {checks['kills']} times, planned were 2")
    if not math.isfinite(checks["max_logit_difference"]):
        found.append("logits are missing or not numbers")
    elif checks["max_logit_difference"] != 0:
        turns = [t["turn"] for t in report["turns"] if t["max_logit_difference"] != 0]
        found.append(f"logits differ from the run without a store in turns {turns}")
    return found


def text(report: dict[str, Any]) -> str:
    head = (
        "turn",
        "prompt",
        "restored",
        "replayed",
        "computed",
        "state",
        "first token",
        "cold",
        "sooner",
        "same",
        "max |dlogit|",
        "before or during the turn",
    )
    rows = [
        (
            t["turn"],
            f"{t['prompt_tokens']:,}",
            f"{t['restored_tokens']:,}",
            f"{t['replayed_tokens']:,}",
            f"{t['computed_tokens']:,}",
            t["state_source"],
            f"{t['ttft_s'] * 1e3:,.0f} ms",
            f"{t['cold_ttft_s'] * 1e3:,.0f} ms",
            f"{t['cold_ttft_s'] / t['ttft_s']:.1f}x",
            "yes" if t["identical"] else "NO",
            f"{t['max_logit_difference']:.3g}",
            t["event"],
        )
        for t in report["turns"]
    ]
    totals, checks = report["totals"], report["checks"]
    verdict = (
        "every answer equals the answer of the run without a store"
        if checks["all_identical"]
        else "ANSWERS DIFFER"
    )
    return "\n".join(
        [
            table(rows, head=head),
            "",
            f"{totals['prompt_tokens']:,} prompt tokens: {totals['restored_tokens']:,} restored, {totals['computed_tokens']:,} computed, "
            f"{totals['replayed_tokens']:,} touched again by replays; {totals['saved_share']:.1%} of the prompt work was not done.",
            f"First token after turn 1: {totals['ttft_s']:.2f} s in all instead of {totals['cold_ttft_s']:.2f} s, "
            f"{totals['ttft_speedup']:.1f}x sooner. {totals['bytes_ssd']:,} B came from disk, {totals['bytes_memory']:,} B from memory.",
            f"{totals['generated_tokens']} generated tokens: {verdict}; largest logit difference "
            f"{checks['max_logit_difference']:.3g}. Service killed {checks['kills']} times; sources: {', '.join(checks['sources_seen'])}.",
        ]
    )
