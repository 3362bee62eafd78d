"""What `kvstore simulate` tells people: a table, a page, images."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvstore.cli.output import check_target, table, write_document
from kvstore.errors import ConfigError
from kvstore.simulate.pictures.base import Section
from kvstore.simulate.pictures.page import about_log, page
from kvstore.simulate.pictures.png import check_drawing, png
from kvstore.simulate.pictures.sections import sections, sources_words
from kvstore.simulate.reuse import reuse_of
from kvstore.simulate.study import INFINITE, Study
from kvstore.units import rounded

Answer = dict[str, Any]
"""What JSON says: log, rows, recommendation."""


def check_pictures(html: str | None, png_path: str | None) -> None:
    """Refuse, before long work, what could not be drawn or written."""
    if html is not None:
        check_target(html, option="--html")
    if png_path is None:
        return
    check_drawing(png_path)
    if _is_image(png_path):
        check_target(png_path, option="--png")
    elif Path(png_path).exists() and not Path(png_path).is_dir():
        raise ConfigError(
            "neither an image nor a folder", field="--png", value=png_path, allowed="FILE.png, or a folder"
        )


def sections_of(study: Study, answer: Answer, check: Callable[[], None]) -> list[Section]:
    return sections(
        answer["rows"], answer["log"], reuse_of(study.loaded.log, check), answer["recommendation"]
    )


def write_pictures(
    drawn: Sequence[Section],
    answer: Answer,
    *,
    logs: Sequence[Path],
    words: Sequence[str],
    html: str | None,
    png_path: str | None,
) -> None:
    """Each file whole, or as it was before."""
    names = [each.name for each in logs]
    title = f"Request log {', '.join(names)}"
    if html is not None:
        advice = answer["recommendation"]
        document = page(
            drawn,
            title=title,
            about=about_log(answer["log"], names),
            command=shlex.join(["kvstore", *words]),
            advice=None if advice is None else f"at {advice['where']}: {advice['line']}",
        )
        write_document(html, document.encode(), option="--html")
    if png_path is None or not drawn:
        return
    if _is_image(png_path):
        write_document(png_path, png(drawn, title=title), option="--png")
        return
    folder = Path(png_path)
    images = {each.key: png([each], title=title) for each in drawn}
    folder.mkdir(parents=True, exist_ok=True)
    for key, image in images.items():
        write_document(str(folder / f"{key}.png"), image, option="--png")


def _is_image(path: str) -> bool:
    return path.endswith(".png")


def about_lines(about: dict[str, Any]) -> list[str]:
    """What the log is, and how it was read."""
    rekeyed = ", named by their parents too" if about["rekeyed_by_parent"] else ""
    grouped = f" ({about['group']} ids of {about['id_tokens']})" if about["group"] > 1 else ""
    lines = [
        f"{about['format']} log: {about['requests']:,} requests in {about['span_seconds'] / 3600:.2f} h, "
        f"{about['input_tokens']:,} input tokens, {about['footprint_blocks']:,} different blocks",
        f"blocks of {about['block_tokens']} tokens{grouped}{rekeyed}; rule: {about['rule']}; no warm-up; "
        f"outputs count {about['outputs_count']}",
    ]
    if about["skipped_lines"]:
        kinds = ", ".join(f"{name}: {count}" for name, count in about["skipped"].items())
        lines.append(f"skipped {about['skipped_lines']} lines ({kinds})")
    return lines


def _sizeless(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row of `infinite` for all sizes, which make no difference to it."""
    shown: list[dict[str, Any]] = []
    sizes = {row["size"] for row in rows if row["policy"] == INFINITE}
    seen = set[tuple[Any, ...]]()
    for row in rows:
        if row["policy"] != INFINITE or len(sizes) < 2:
            shown.append(row)
            continue
        case = tuple(row[name] for name in ("ttl", "windows", "admission"))
        if case not in seen:
            seen.add(case)
            shown.append({**row, "size": "any"})
    return shown


def text(answer: Answer) -> str:
    about, rows, advice = answer["log"], _sizeless(answer["rows"]), answer["recommendation"]
    lines = about_lines(about)
    shown = ["policy", "size"] + [name for name in ("ttl", "windows") if any(row[name] for row in rows)]
    shown += ["admission"] if len({row["admission"] for row in rows}) > 1 else []
    weighs = any(row["written_bytes_per_day"] for row in rows)
    keeps = any(row["windows"] for row in rows)
    head = [*shown, "hit rate", "held", "stored", "evicted"]
    if keeps:
        head += ["states/request", "B/token", "restored", "state from"]
    if weighs:
        head += ["written a day"]
    on_disk = any(row["segment_bytes"] for row in rows)
    if on_disk:
        head += ["on the device", "a byte stored"]
    ends = any(row["drive_years"] for row in rows)
    if ends:
        head += ["drive"]
    cells = [
        [
            *(row[name] or "-" for name in shown),
            f"{row['token_hit_rate']:.2f} %",
            f"{row['held_share']:.2f} %",
            f"{row['blocks_stored']:,}",
            f"{row['blocks_evicted']:,}",
            *(_states(row) if keeps else ()),
            *((_size(row["written_bytes_per_day"]),) if weighs else ()),
            *(_on_disk(row) if on_disk else ()),
            *((_years(row["drive_years"]),) if ends else ()),
        ]
        for row in rows
    ]
    lines += ["", table(cells, head=head)]
    if about["profile"] is not None and keeps:
        lines += ["", f"model: {about['profile']}; {_REPLAY_WORDS[rows[0]['replay']]}"]
    if advice is not None:
        lines.append(f"recommended at {advice['where']}: {advice['line']}")
    return "\n".join(lines)


_REPLAY_WORDS = {
    "none": "a hit ends at a state; B/token: bytes of states per token of the blocks stored",
    "exact": "a hit is what was not computed, exact replays are; B/token: bytes of states per token of the blocks stored",
    "bounded": "a hit is what was not computed, replays of one window are; B/token: bytes of states per token of the blocks stored",
}


def _size(size: float | None) -> str:
    return "-" if size is None else rounded(int(size))


def _on_disk(row: dict[str, Any]) -> tuple[str, ...]:
    times = row["write_amplification"]
    return _size(row["device_bytes_per_day"]), "-" if times is None else f"{times:.3f}"


def _years(years: float | None) -> str:
    return "-" if years is None else f"{years:.1f} years"


def _states(row: dict[str, Any]) -> tuple[str, ...]:
    weight = row["state_bytes_per_token"]
    return (
        f"{row['states_per_request']:.2f}",
        "-" if weight is None else f"{weight:,.0f}",
        f"{row['restored_rate']:.2f} %",
        sources_words(row["state_sources"]),
    )
