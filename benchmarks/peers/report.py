"""The answer as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvstore.cli.output import table


def text_of(answer: Mapping[str, Any]) -> str:
    parts = [_line_text(line) for line in answer["lines"]]
    detail = answer["detail"]
    parts.append(
        f"{detail['rounds']} rounds, seed {detail['seed']}; memory {detail['memory_bytes'] >> 20} MiB, "
        f"disk {detail['disk_bytes'] >> 20} MiB a pass, prompts of {detail['prompt_blocks']} blocks; "
        f"load {detail['load_before']:.1f} before, {detail['load_after']:.1f} after, {detail['processors']} processors.\n"
        "Medians, and bootstrap intervals of the median at 95 %; `kvstore x`: median of the rounds' own ratios."
    )
    return "\n\n".join(parts)


def _line_text(line: Mapping[str, Any]) -> str:
    rows = [_cells(row, line["best"]) for row in line["rows"]]
    lines = [
        line["line"],
        table(rows, head=("", "threads", "MB/s", "95 %", "kvstore x", "95 %", "")),
        _verdict_text(line),
        *(f"note: {note}." for note in line["notes"]),
    ]
    return "\n".join(lines)


def _cells(row: Mapping[str, Any], best: str | None) -> Sequence[object]:
    if "mb_per_second" not in row:
        return (row["name"], row["threads"], "-", "", "", "", row["failed"])
    remarks = [
        "best" if row["name"] == best else "",
        f"not counted: {row['why_not']}" if "why_not" in row else "",
        f"failed in a round: {row['failed']}" if "failed" in row else "",
    ]
    times = row.get("kvstore_times")
    return (
        row["name"],
        row["threads"],
        f"{row['mb_per_second']:,.0f}",
        _interval(row["interval"], "{:,.0f}"),
        "" if times is None else f"{times:.2f}",
        "" if times is None else _interval(row["kvstore_times_interval"], "{:.2f}"),
        "; ".join(filter(None, remarks)),
    )


def _interval(ends: Sequence[float], form: str) -> str:
    low, high = ends
    return f"[{form.format(low)}, {form.format(high)}]"


def _verdict_text(line: Mapping[str, Any]) -> str:
    if line["met"] is None:
        return f"bar {line['bar']}: nothing to compare with"
    found = f"{line['times_best']:.2f} x the best"
    if line["of_raw"] is not None:
        found += f", {line['of_raw']:.2f} of raw"
    return f"bar {line['bar']}: {found}: {'met' if line['met'] else 'MISSED'}"
