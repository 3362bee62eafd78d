"""All pictures on one page, which needs nothing outside itself: light and dark, on a phone and on paper."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from kvstore.simulate.pictures.base import Section
from kvstore.simulate.pictures.svg import drawn

WIDE, NARROW = 760, 324
"""Pixels of the two drawings of each picture; the page shows one."""

_LIGHT = (
    "--paper:#fff;--ink:#1b1f24;--soft:#57606a;--grid:#d8dee4;--fill:#f6f8fa;"
    "--c0:#0b62c4;--c1:#b8420a;--c2:#157347;--c3:#8a2be2;--c4:#b01e3c;--c5:#0b7285;--c6:#8a6100;--c7:#b0307f"
)
_DARK = (
    "--paper:#101418;--ink:#e6edf3;--soft:#9aa7b4;--grid:#313a44;--fill:#1a2129;"
    "--c0:#6cb2ff;--c1:#ff9d66;--c2:#5fd394;--c3:#c79bff;--c4:#ff8a9e;--c5:#62d3e6;--c6:#e3b84d;--c7:#ff8fcf"
)
_STYLE = (
    f":root{{color-scheme:light dark;{_LIGHT}}}"
    f"@media screen and (prefers-color-scheme:dark){{:root{{{_DARK}}}}}"
    """
*{box-sizing:border-box}
body{margin:0 auto;padding:16px;max-width:792px;background:var(--paper);color:var(--ink);
 font:15px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.5rem;line-height:1.25;margin:0 0 .5rem}
h2{font-size:1.15rem;margin:2rem 0 .25rem}
p{margin:.25rem 0 .75rem}
.advice{border-left:4px solid var(--c0);padding:.5rem .75rem;background:var(--fill)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 14px;margin:.75rem 0}
dt{color:var(--soft)}dd{margin:0}
pre{margin:.25rem 0;padding:.5rem .75rem;background:var(--fill);white-space:pre-wrap;font-size:13px}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums;overflow-wrap:normal}
th,td{padding:3px 12px 3px 0;text-align:right;border-bottom:1px solid var(--grid);white-space:nowrap}
th{color:var(--soft);font-weight:600}
th:last-child,td:last-child{padding-right:2px}
.words{text-align:left}
td.words:last-child{white-space:normal;min-width:13em}
.scroll{margin-top:.5rem}
svg{display:block;max-width:100%;height:auto}
.narrow svg{width:100%}
svg text{font:12px system-ui,sans-serif;fill:var(--ink)}
svg .t{fill:var(--soft)}
svg .name{font-weight:600}
.grid{stroke:var(--grid)}
.line{fill:none;stroke-width:2;stroke-linejoin:round}
.again{stroke-dasharray:7 3}
.level{stroke-dasharray:2 4}
.leader{opacity:.45}
.dot{stroke:none}
.bar{fill:var(--c0)}
.narrow{display:none}
@media screen and (max-width:640px){.wide{display:none}.narrow{display:block}
 th,td{padding-right:8px}}
@media print{body{max-width:none;padding:0;font-size:11pt}section{break-inside:avoid}.scroll{overflow:visible}
 table{font-size:8.5pt}th,td{white-space:normal;overflow-wrap:normal}*{-webkit-print-color-adjust:exact;print-color-adjust:exact}}
"""
    + "".join(
        f"line.c{n},polyline.c{n}{{stroke:var(--c{n})}}circle.c{n}{{fill:var(--c{n})}}svg text.c{n}{{fill:var(--c{n})}}"
        for n in range(8)
    )
)


def page(
    sections: Sequence[Section],
    *,
    title: str,
    about: Sequence[tuple[str, str]],
    command: str,
    advice: str | None,
) -> str:
    """A whole document, also well-formed XML. `about`: what was read and how, as pairs of words; `command` asks again."""
    parts = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>',
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
    ]
    if advice is not None:
        parts.append(
            f'<p class="advice"><strong>Recommended</strong> {escape(advice).replace(" %", "&#160;%")}</p>'
        )
    parts.append("<dl>")
    parts += [f"<dt>{escape(name)}</dt><dd>{escape(words)}</dd>" for name, words in about]
    parts.append(f"</dl><pre>{escape(command)}</pre>")
    parts += [_section(each) for each in sections]
    parts.append("</body></html>\n")
    return "".join(parts)


def _section(section: Section) -> str:
    pictures = "".join(
        f'<div class="{kind}">{drawn(section.picture, width=width, title=section.title)}</div>'
        for kind, width in (("wide", WIDE), ("narrow", NARROW))
    )
    return (
        f'<section id="{section.key}"><h2>{escape(section.title)}</h2><p>{escape(section.words)}</p>{pictures}</section>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="numbers of {escape(section.title)}">'
        f"{_table(section)}</div>"
    )


def _table(section: Section) -> str:
    columns = [[row[at] for row in section.cells] for at in range(len(section.head))]
    kinds = ["" if all(map(_is_number, column)) else ' class="words"' for column in columns]
    head = "".join(f"<th{kind}>{escape(name)}</th>" for name, kind in zip(section.head, kinds, strict=True))
    rows = "".join(
        "<tr>"
        + "".join(f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(row, kinds, strict=True))
        + "</tr>"
        for row in section.cells
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _is_number(cell: str) -> bool:
    return cell[:1].isdigit() or cell in ("-", "all")


def about_log(log: dict[str, Any], names: Sequence[str]) -> list[tuple[str, str]]:
    """What the log is, and by which rule it was read."""
    block = f"{log['block_tokens']} tokens"
    if log["group"] > 1:
        block += f", {log['group']} ids of {log['id_tokens']}"
    if log["rekeyed_by_parent"]:
        block += "; named by their parents too"
    rule = {
        "ids": "blocks as the log names them, a partly filled last one too; nothing held back",
        "as served": "whole blocks only, and one token at least is computed, as the service answers",
    }[log["rule"]]
    facts = [
        ("log", ", ".join(names)),
        ("format", log["format"]),
        ("requests", f"{log['requests']:,} in {log['span_seconds'] / 3600:.2f} h"),
        ("input tokens", f"{log['input_tokens']:,}"),
        ("different blocks", f"{log['footprint_blocks']:,}, asked for {log['block_accesses']:,} times"),
        ("block", block),
        ("rule", rule),
        ("warm-up", "none: the store is empty at first, and all requests count"),
        ("outputs", f"count {log['outputs_count']}"),
    ]
    if log["profile"] is not None:
        facts.append(("model", log["profile"]))
    if log["skipped_lines"]:
        facts.append(
            ("skipped lines", ", ".join(f"{name}: {count}" for name, count in log["skipped"].items()))
        )
    return facts
