"""`kvstore bench`: measures the store on this machine's disk."""

from __future__ import annotations

import argparse
import secrets
from pathlib import Path

from kvstore.bench import restart
from kvstore.cli import bench_beside, bench_lookup, bench_memory, bench_speed, bench_stream, bench_tenants
from kvstore.cli.output import add_json_flag, check_json_target, emit, table
from kvstore.cli.stopping import Check, stoppable
from kvstore.errors import InvalidArgument

EXTRAPOLATED_BLOCKS = 10_000_000


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("bench", help="measure the store on this machine's disk")
    actions = parser.add_subparsers(title="benches", metavar="BENCH", required=True)
    start = actions.add_parser("restart", help="seconds and memory of a start, by what it has to go on")
    start.add_argument(
        "--blocks",
        type=int,
        nargs="+",
        default=[1_000_000],
        metavar="N",
        help="blocks of 4 KiB in the store; several sizes are extrapolated from (default 1000000)",
    )
    add_place_flags(start)
    start.set_defaults(run=run_restart)
    bench_speed.register(actions, add_place_flags)
    bench_memory.register(actions, add_place_flags)
    bench_lookup.register(actions, add_place_flags)
    bench_stream.register(actions, add_place_flags)
    bench_beside.register(actions, add_place_flags)
    bench_tenants.register(actions, add_place_flags)


def add_place_flags(parser: argparse.ArgumentParser) -> None:
    """Where a bench writes, what it is seeded with, and how it answers."""
    parser.add_argument(
        "--dir",
        type=Path,
        metavar="DIR",
        help="write below this folder of the disk to measure (default: temporary)",
    )
    parser.add_argument("--seed", type=int, help="repeat a run (default: a new one, printed)")
    add_json_flag(parser)


def run_restart(args: argparse.Namespace) -> int:
    check_json_target(args)
    for blocks in args.blocks:
        if not 1 <= blocks <= 2 * EXTRAPOLATED_BLOCKS:
            raise InvalidArgument(
                "a store that can be built",
                field="--blocks",
                value=blocks,
                allowed=f"1 to {2 * EXTRAPOLATED_BLOCKS}",
            )
    seed = secrets.randbits(32) if args.seed is None else args.seed

    def work(check: Check) -> list[restart.Start]:
        starts = []
        for blocks in args.blocks:
            with bench_speed.scratch(args.dir) as directory:
                starts += restart.measure(directory, blocks, seed=seed, tell=bench_speed.tell, check=check)
        return starts

    starts = stoppable(work, leaves=bench_speed.LEAVES)
    answer = restart.report(starts, seed=seed, extrapolated_blocks=EXTRAPOLATED_BLOCKS)
    emit(args, answer, _restart_text(starts, answer["extrapolated"]["starts"]))
    return 1 if any(start.within_bar is False for start in starts) else 0


def _restart_text(starts: list[restart.Start], extrapolated: dict[str, dict[str, float]]) -> str:
    rows: list[tuple[object, ...]] = [
        (
            start.what,
            f"{start.blocks:,}",
            f"{start.seconds:.2f} s",
            f"{start.open_seconds:.2f} s",
            f"{start.load_seconds:.2f} s",
            f"{start.peak_bytes_per_block:,.0f} B",
            f"{start.kept_bytes_per_block:,.0f} B",
            f"{start.index_bytes_per_block:,.0f} B",
            {True: "yes", False: "NO", None: "-"}[start.within_bar],
        )
        for start in starts
    ]
    rows += [
        (
            what,
            f"{EXTRAPOLATED_BLOCKS:,}",
            f"~{each['seconds']:.1f} s",
            "",
            "",
            f"{each['peak_bytes'] / EXTRAPOLATED_BLOCKS:,.0f} B",
            "",
            "",
            "-",
        )
        for what, each in extrapolated.items()
    ]
    head = (
        "start",
        "blocks",
        "in all",
        "open",
        "load",
        "peak/block",
        "kept/block",
        "index/block",
        "within bar",
    )
    text = table(rows, head=head)
    if any(start.within_bar is None for start in starts) or extrapolated:
        text += f"\n-: no bar for so many blocks; there is one for {restart.BAR_BLOCKS:,}, measured"
    return text
