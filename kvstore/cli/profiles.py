"""`kvstore profiles`: every profile's arithmetic."""

from __future__ import annotations

import argparse
from typing import Any

from kvstore.cli.output import add_json_flag, emit, table
from kvstore.profile.registry import PROFILES, get_profile
from kvstore.profile.report import layout_report, profile_report


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("profiles", help="layers, bytes and replay of each model profile")
    parser.add_argument("name", nargs="?", help=f"one of {', '.join(PROFILES)}; all of them if left out")
    parser.add_argument(
        "--layout", action="store_true", help="payload offsets of a block and of a state at an edge"
    )
    add_json_flag(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    chosen = [get_profile(args.name)] if args.name else list(PROFILES.values())
    report = {p.name: profile_report(p) for p in chosen}
    if args.layout:
        for p in chosen:
            report[p.name]["layout"] = layout_report(p)
    emit(args, report, "\n\n".join(_text(name, figures) for name, figures in report.items()))
    return 0


def _text(name: str, r: dict[str, Any]) -> str:
    replay, old = r["replay"], r["without_scales"]
    layers = ", ".join(f"{count} {kind}" for kind, count in r["layers"].items() if kind != "total")
    rows = [
        ("layers", f"{r['layers']['total']}: {layers}"),
        ("block", f"{r['block_tokens']} tokens, {r['block_bytes']:,} B"),
        (
            "entries and keys",
            f"{r['bytes_per_token']:,.2f} B/token, {r['gib_per_1048576_tokens']:.3f} GiB per 1,048,576 tokens",
        ),
        (
            "row formats",
            ", ".join(f"{what} {fmt} ({r[what + '_bytes']} B)" for what, fmt in r["formats"].items()),
        ),
        ("window", f"{r['window_tokens']} tokens"),
        (
            "state at an edge",
            f"{r['state_bytes']:,} B = {r['window_bytes']:,} window + {r['overlap_bytes']:,} overlap",
        ),
        (
            "exact replay",
            f"{replay['exact_tokens']:,} tokens -> {replay['exact_tokens_whole_blocks']:,} in whole blocks; "
            f"{replay['exact_layer_tokens']:,} layer-tokens = {replay['exact_token_equivalents']:,.1f} token-equivalents",
        ),
    ]
    if "encoder_exact_tokens" in replay:
        rows.append(
            (
                "  encoder only",
                f"{replay['encoder_exact_tokens']:,} tokens -> {replay['encoder_exact_tokens_whole_blocks']:,}; "
                f"{replay['encoder_exact_layer_tokens']:,} layer-tokens",
            )
        )
    trained = "trained for" if replay["bounded_is_trained"] else "by opt-in only"
    rows += [
        ("bounded replay", f"{replay['bounded_tokens']} tokens, approximate ({trained})"),
        (
            "without scales",
            f"{old['bytes_per_token']:,.0f} B/token; {old['bytes_per_token_with_window']:,.0f} with the window rows spread "
            f"over 1,048,576 tokens = {old['gib_per_1048576_tokens']:.3f} GiB, {old['percent_of_bf16_gqa']:.2f} % of bf16 GQA",
        ),
    ]
    width = max(len(label) for label, _ in rows)
    lines = [name, *(f"  {label.ljust(width)}  {value}" for label, value in rows), "  window-state policies:"]
    policies = [
        (policy, f"{figures['bytes_per_token']:,.2f}", f"{figures['times_blocks']:.2f}")
        for policy, figures in r["policies"].items()
        if "bytes_per_token" in figures
    ]
    policies.append(
        ("endpoints", f"{r['policies']['endpoints']['bytes_per_request']:,.0f} B per request", "")
    )
    lines += [
        "    " + line for line in table(policies, head=("policy", "B/token more", "x blocks")).splitlines()
    ]
    if "layout" in r:
        for what, sections in r["layout"].items():
            lines.append(f"  {what} layout:")
            cells = [
                (
                    s["offset"],
                    s["part"],
                    s["layer"],
                    s.get("field", ""),
                    s["rows"],
                    s["row_bytes"],
                    s["bytes"],
                )
                for s in sections
            ]
            head = ("offset", "part", "layer", "field", "rows", "row bytes", "bytes")
            lines += ["    " + line for line in table(cells, head=head).splitlines()]
    return "\n".join(lines)
