"""`kvstore bench beside`: what others wait while a service with a million blocks does its longest work."""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Callable
from typing import Any

from kvstore.bench import beside
from kvstore.cli.bench_memory import LEAVES
from kvstore.cli.bench_speed import refuse_outside, scratch, tell
from kvstore.cli.output import check_json_target, emit, table
from kvstore.cli.stopping import Check, stoppable

BLOCKS = 1_000_000
BLOCKS_MAX = 10_000_000


def register(
    actions: argparse._SubParsersAction[argparse.ArgumentParser],
    add_place_flags: Callable[[argparse.ArgumentParser], None],
) -> None:
    parser = actions.add_parser(
        "beside", help="what others wait while many blocks are cleared, verified, committed and expire"
    )
    parser.add_argument(
        "--blocks", type=int, default=BLOCKS, metavar="N", help=f"blocks of 4 KiB (default {BLOCKS:,})"
    )
    add_place_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    check_json_target(args)
    refuse_outside("--blocks", args.blocks, 1, BLOCKS_MAX)
    seed = secrets.randbits(32) if args.seed is None else args.seed

    def work(check: Check) -> list[beside.Reading]:
        with scratch(args.dir) as directory:
            return beside.measure(directory, blocks=args.blocks, seed=seed, tell=tell, check=check)

    answer = beside.report(stoppable(work, leaves=LEAVES), blocks=args.blocks, seed=seed)
    emit(args, answer, _text(answer))
    return 1 if answer["missed"] else 0


def _text(answer: dict[str, Any]) -> str:
    detail = answer["detail"]
    rows = [
        (
            each["what"],
            f"{each['seconds']:.1f}",
            *(f"{1e3 * each[name]:.0f}" for name in ("health", "lookup", "loop_gap", "own_gap")),
            "NO" if each["what"] in answer["missed"] else "yes",
        )
        for each in detail["works"]
    ]
    head = ("work", "seconds", "health, ms", "lookup, ms", "loop, ms", "own, ms", "within bar")
    return "\n".join([table(rows, head=head), f"{detail['blocks']:,} blocks, seed {detail['seed']}"])
