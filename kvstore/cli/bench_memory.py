"""`kvstore bench memory`: what a client pays for reading from memory that the service shares."""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Callable
from typing import Any

from kvstore.bench import memory
from kvstore.cli.bench_speed import PAIRS_MAX, SIZE_MIN, refuse_outside, scratch, tell
from kvstore.cli.output import check_json_target, emit, table
from kvstore.cli.stopping import Check, stoppable
from kvstore.units import parse_size

SIZE_MAX = 3 << 30
"""Of one prompt: a service takes no longer ones unless it is told to."""
PAIRS = 31
"""Each takes less than a second, and processors that others use too make single ones doubtful."""
LEAVES = "a scratch folder kvstore-bench-* and the service in it may be left"


def register(
    actions: argparse._SubParsersAction[argparse.ArgumentParser],
    add_place_flags: Callable[[argparse.ArgumentParser], None],
) -> None:
    parser = actions.add_parser(
        "memory", help="shared memory: until all places are known, and verified copies beside plain ones"
    )
    parser.add_argument(
        "--size", default="1GiB", metavar="SIZE", help="of the blocks that are read (default 1GiB)"
    )
    parser.add_argument(
        "--pairs", type=int, default=PAIRS, metavar="N", help=f"pairs to measure (default {PAIRS})"
    )
    add_place_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    check_json_target(args)
    size = parse_size(args.size, name="--size")
    refuse_outside("--size", size, SIZE_MIN, SIZE_MAX)
    refuse_outside("--pairs", args.pairs, 1, PAIRS_MAX)
    seed = secrets.randbits(32) if args.seed is None else args.seed

    def work(check: Check) -> memory.Readings:
        with scratch(args.dir) as directory:
            return memory.measure(directory, size=size, pairs=args.pairs, seed=seed, tell=tell, check=check)

    answer = memory.report(stoppable(work, leaves=LEAVES), seed=seed)
    emit(args, answer, _text(answer))
    return 1 if answer["missed"] else 0


def _text(answer: dict[str, Any]) -> str:
    detail = answer["detail"]
    rows = []
    for what, name in (
        ("places known, ms", "descriptors_ms"),
        ("verified, of a copy's time", "verified_ratio"),
    ):
        low, high = detail[name]["interval"]
        rows.append(
            (
                what,
                f"{answer[name]:.3f}",
                f"[{low:.3f}, {high:.3f}]",
                f"{answer['bars'][name]:g}",
                "NO" if name in answer["missed"] else "yes",
            )
        )
    return "\n".join(
        [
            table(rows, head=("", "median", "95 %", "at most", "within bar")),
            f"{detail['pairs']} pairs of {detail['blocks']:,} blocks, {detail['size_bytes']:,} bytes, seed {detail['seed']}",
        ]
    )
