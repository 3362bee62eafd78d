"""`kvstore bench tenants`: whether the time of its calls tells one tenant what another holds."""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Callable
from typing import Any

from kvstore.bench import tenants
from kvstore.cli.bench_speed import refuse_outside, scratch, tell
from kvstore.cli.output import check_json_target, emit, table
from kvstore.cli.stopping import Check, stoppable

CALLS_MIN, CALLS, CALLS_MAX = 200, 10_000, 1_000_000
LEAVES = "a scratch folder kvstore-bench-* and the service in it may be left"


def register(
    actions: argparse._SubParsersAction[argparse.ArgumentParser],
    add_place_flags: Callable[[argparse.ArgumentParser], None],
) -> None:
    parser = actions.add_parser(
        "tenants", help="two tenants: whether the time of lookups tells one what the other holds"
    )
    parser.add_argument(
        "--calls", type=int, default=CALLS, metavar="N", help=f"lookups of each kind (default {CALLS})"
    )
    add_place_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    check_json_target(args)
    refuse_outside("--calls", args.calls, CALLS_MIN, CALLS_MAX)
    seed = secrets.randbits(32) if args.seed is None else args.seed

    def work(check: Check) -> dict[str, tenants.Reading]:
        with scratch(args.dir) as directory:
            return tenants.measure(directory, count=args.calls, seed=seed, tell=tell, check=check)

    answer = tenants.report(stoppable(work, leaves=LEAVES), seed=seed)
    emit(args, answer, _text(answer))
    return 1 if answer["missed"] else 0


def _text(answer: dict[str, Any]) -> str:
    rows = [
        (
            each["about"],
            f"{each['calls']:,}",
            f"{each['median_held_us']:.1f}",
            f"{each['median_absent_us']:.1f}",
            f"{each['distance_p']:.4f}",
            f"{each['ranks_p']:.4f}",
            _told(name, each, answer),
        )
        for name, each in [*answer["questions"].items(), ("control", answer["control"])]
    ]
    seen = min(answer["control"]["distance_p"], answer["control"]["ranks_p"]) < answer["p_least"]
    note = "" if seen else "\nthe last one can be told apart, and was not: make more calls"
    head = ("asked", "calls", "held, us", "absent, us", "p (distance)", "p (ranks)", "told apart")
    return f"{table(rows, head=head)}\ntold apart: p < {answer['p_least']:g}; seed {answer['seed']}{note}"


def _told(name: str, each: dict[str, Any], answer: dict[str, Any]) -> str:
    if name != "control":
        return "YES" if name in answer["missed"] else "no"
    return "yes, as it should" if min(each["distance_p"], each["ranks_p"]) < answer["p_least"] else "no"
