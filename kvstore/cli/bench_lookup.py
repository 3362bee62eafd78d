"""`kvstore bench lookup`: what a lookup costs the service, its caller and everyone else."""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Callable
from typing import Any

from kvstore.bench import lookup
from kvstore.bench.pairs import PAIRS
from kvstore.cli.bench_speed import PAIRS_MAX, refuse_outside, scratch, tell
from kvstore.cli.output import check_json_target, emit, table
from kvstore.cli.stopping import Check, stoppable
from kvstore.errors import InvalidArgument
from kvstore.units import parse_time

LEAVES = "a scratch folder kvstore-bench-* and the processes in it may be left"


def register(
    actions: argparse._SubParsersAction[argparse.ArgumentParser],
    add_place_flags: Callable[[argparse.ArgumentParser], None],
) -> None:
    parser = actions.add_parser(
        "lookup", help="lookups: of a million tokens, beside others, and beside a bare echo"
    )
    parser.add_argument(
        "--blocks",
        type=int,
        default=lookup.LONG_BLOCKS,
        metavar="N",
        help=f"blocks of the long prompt (default {lookup.LONG_BLOCKS})",
    )
    parser.add_argument(
        "--pairs", type=int, default=PAIRS, metavar="N", help=f"pairs to measure (default {PAIRS})"
    )
    parser.add_argument(
        "--time", default="1s", metavar="TIME", help="each half of a pair, at most 10s (default 1s)"
    )
    add_place_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    check_json_target(args)
    refuse_outside("--blocks", args.blocks, lookup.BLOCKS_MIN, lookup.BLOCKS_MAX)
    refuse_outside("--pairs", args.pairs, 1, PAIRS_MAX)
    seconds = parse_time(args.time, name="--time")
    if not lookup.SECONDS_MIN <= seconds <= lookup.SECONDS_MAX:
        raise InvalidArgument(
            "not a time to measure for",
            field="--time",
            value=args.time,
            allowed=f"{lookup.SECONDS_MIN:g}s to {lookup.SECONDS_MAX:g}s",
        )
    seed = secrets.randbits(32) if args.seed is None else args.seed

    def work(check: Check) -> lookup.Readings:
        with scratch(args.dir) as directory:
            return lookup.measure(
                directory,
                long_blocks=args.blocks,
                pairs=args.pairs,
                seconds=seconds,
                seed=seed,
                tell=tell,
                check=check,
            )

    answer = lookup.report(stoppable(work, leaves=LEAVES), seconds=seconds, seed=seed)
    emit(args, answer, _text(answer))
    return 1 if answer["missed"] else 0


def _text(answer: dict[str, Any]) -> str:
    detail = answer["detail"]
    rows = []
    for held, value in answer["service_ms"].items():
        rows.append(
            _row(
                f"in the service, {held} held, ms",
                value,
                detail["service_ms"][held],
                "<",
                answer["bars"]["service_ms"],
            )
        )
    name = "others_p99_growth_ms"
    rows.append(_row("growth of others' p99, ms", answer[name], detail[name], "<", answer["bars"][name]))
    name = "echo_ratio"
    rows.append(_row("of a bare echo's rate", answer[name], detail[name], ">=", answer["bars"][name]))
    through = detail["client_echo_ratio"]
    rows.append(_row("the same through CacheClient", through["median"], through, "", None))
    return "\n".join(
        [
            table(rows, head=("", "median", "95 %", "wanted", "within bar")),
            f"{detail['pairs']} pairs of {detail['seconds']:g} s, {detail['long_blocks']:,} and {detail['short_blocks']} "
            f"blocks, {detail['clients']} clients, seed {detail['seed']}",
        ]
    )


def _row(what: str, value: float, found: dict[str, Any], sign: str, bar: float | None) -> tuple[str, ...]:
    low, high = found["interval"]
    wanted = "-" if bar is None else f"{sign} {bar:g}"
    within = "-" if bar is None else "yes" if (value < bar if sign == "<" else value >= bar) else "NO"
    return what, f"{value:.3f}", f"[{low:.3f}, {high:.3f}]", wanted, within
