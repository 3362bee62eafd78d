"""`kvstore bench stream`: what a client on another machine gets of what the wire can carry."""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Callable
from typing import Any

from kvstore.bench import stream
from kvstore.cli.bench_memory import LEAVES
from kvstore.cli.bench_speed import PAIRS_MAX, SIZE_MIN, refuse_outside, scratch, tell
from kvstore.cli.output import check_json_target, emit, table
from kvstore.cli.stopping import Check, stoppable
from kvstore.units import parse_size

SIZE_MAX = 3 << 30
"""Of one prompt: a service takes no longer ones unless it is told to."""
PAIRS = 31
"""Each takes less than a second, and processors that others use too make single ones doubtful."""


def register(
    actions: argparse._SubParsersAction[argparse.ArgumentParser],
    add_place_flags: Callable[[argparse.ArgumentParser], None],
) -> None:
    parser = actions.add_parser("stream", help="blocks from memory over TCP, beside a bare gRPC stream")
    parser.add_argument(
        "--size", default="256MiB", metavar="SIZE", help="of the blocks that are fetched (default 256MiB)"
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

    def work(check: Check) -> stream.Readings:
        with scratch(args.dir) as directory:
            return stream.measure(directory, size=size, pairs=args.pairs, seed=seed, tell=tell, check=check)

    answer = stream.report(stoppable(work, leaves=LEAVES), seed=seed)
    emit(args, answer, _text(answer))
    return 1 if answer["missed"] else 0


def _text(answer: dict[str, Any]) -> str:
    detail = answer["detail"]
    low, high = detail["ratio"]["interval"]
    rows = [
        (
            "fetch, of a bare stream",
            f"{answer['ratio']:.3f}",
            f"[{low:.3f}, {high:.3f}]",
            f"{answer['bars']['ratio']:g}",
            "NO" if answer["missed"] else "yes",
        )
    ]
    bare = sorted(detail["bare_mb_per_second"])
    return "\n".join(
        [
            table(rows, head=("", "median", "95 %", "at least", "within bar")),
            f"{detail['pairs']} pairs of {detail['blocks']:,} blocks, {detail['size_bytes']:,} bytes, "
            f"bare {bare[len(bare) // 2]:,.0f} MB/s, seed {detail['seed']}",
        ]
    )
