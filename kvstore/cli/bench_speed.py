"""`kvstore bench storage` and `kvstore bench small`: how fast blocks are written and read on this machine's disk."""

from __future__ import annotations

import argparse
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvstore.bench import small, storage, through
from kvstore.bench.pairs import PAIRS
from kvstore.cli.output import check_json_target, emit, table
from kvstore.cli.stopping import Check, stoppable
from kvstore.errors import ConfigError, InvalidArgument
from kvstore.units import parse_size

SIZE_MIN = 64 << 20
SIZE_MAX = 64 << 30
PAIRS_MAX = 1_000
BLOCKS_MAX = 10_000_000
LEAVES = "a scratch folder kvstore-bench-* may be left"


def register(
    actions: argparse._SubParsersAction[argparse.ArgumentParser],
    add_place_flags: Callable[[argparse.ArgumentParser], None],
) -> None:
    large = actions.add_parser(
        "storage", help="large blocks: durable writes and cold reads beside the raw disk"
    )
    large.add_argument(
        "--size", default="1GiB", metavar="SIZE", help="written and read per pass (default 1GiB)"
    )
    large.add_argument(
        "--pairs", type=int, default=PAIRS, metavar="N", help=f"pairs to measure (default {PAIRS})"
    )
    large.add_argument(
        "--through",
        choices=("log", "client"),
        default="log",
        help="the log in this process, or a service and its clients, durable commits and mapped reads (default log)",
    )
    add_place_flags(large)
    large.set_defaults(run=run_storage)
    little = actions.add_parser("small", help="blocks of 4 KiB in batches: written and read per second")
    little.add_argument(
        "--blocks", type=int, default=65_536, metavar="N", help="written and read per pass (default 65536)"
    )
    little.add_argument("--passes", type=int, default=PAIRS, metavar="N", help=f"passes (default {PAIRS})")
    add_place_flags(little)
    little.set_defaults(run=run_small)


def run_storage(args: argparse.Namespace) -> int:
    check_json_target(args)
    size = parse_size(args.size, name="--size")
    refuse_outside("--size", size, SIZE_MIN, SIZE_MAX)
    refuse_outside("--pairs", args.pairs, 1, PAIRS_MAX)
    seed = secrets.randbits(32) if args.seed is None else args.seed

    measure = through.measure if args.through == "client" else storage.measure
    report = through.report if args.through == "client" else storage.report

    def work(check: Check) -> storage.Rates:
        with scratch(Path.cwd() if args.dir is None else args.dir) as directory:
            return measure(directory, size=size, pairs=args.pairs, seed=seed, tell=tell, check=check)

    found = stoppable(work, leaves=LEAVES)
    answer = report(found, size=size, seed=seed)
    emit(args, answer, _storage_text(answer))
    return 0


def run_small(args: argparse.Namespace) -> int:
    check_json_target(args)
    refuse_outside("--blocks", args.blocks, 1, BLOCKS_MAX)
    refuse_outside("--passes", args.passes, 1, PAIRS_MAX)
    seed = secrets.randbits(32) if args.seed is None else args.seed

    def work(check: Check) -> small.Passes:
        with scratch(Path.cwd() if args.dir is None else args.dir) as directory:
            return small.measure(
                directory, blocks=args.blocks, passes=args.passes, seed=seed, tell=tell, check=check
            )

    found = stoppable(work, leaves=LEAVES)
    answer = small.report(found, blocks=args.blocks, seed=seed)
    emit(args, answer, _small_text(answer))
    return 1 if answer["missed"] else 0


@contextmanager
def scratch(beside: Path | None) -> Iterator[Path]:
    """A folder of its own, below `beside` or where temporary ones are, which are often in memory; removed afterwards."""
    if beside is not None and not beside.is_dir():
        raise ConfigError(
            "no such directory", field="--dir", value=beside, allowed="a folder of the disk to measure"
        )
    directory = Path(tempfile.mkdtemp(prefix="kvstore-bench-", dir=beside))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def refuse_outside(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidArgument(
            "not a size that can be measured", field=field, value=value, allowed=f"{low} to {high}"
        )


def _storage_text(answer: dict[str, Any]) -> str:
    rows = []
    for what in ("write", "read"):
        found = answer[what]
        low, high = found["interval"]
        rows.append((what, f"{found['ratio']:.3f}", f"[{low:.3f}, {high:.3f}]", f"{found['raw']:,.0f} MB/s"))
    detail = answer["detail"]
    return "\n".join(
        [
            table(rows, head=("", "of raw", "95 %", "raw")),
            f"{answer['device_bytes_per_payload_byte']:.4f} device bytes a payload byte, from {detail['device_bytes_from']}; "
            f"{detail['pairs']} pairs of {detail['size_bytes']:,} bytes, {detail['threads']} threads, seed {detail['seed']}",
        ]
    )


def _small_text(answer: dict[str, Any]) -> str:
    device = "device_bytes_per_payload_byte"
    rows = [
        (
            what,
            f"{answer[name]['median']:,.0f}",
            "[{:,.0f}, {:,.0f}]".format(*answer[name]["interval"]),
            f"{answer['bars'][name]:,}",
            "NO" if name in answer["missed"] else "yes",
        )
        for what, name in (("written", "written_per_second"), ("read", "read_per_second"))
    ]
    detail = answer["detail"]
    return "\n".join(
        [
            table(rows, head=("blocks", "a second", "95 %", "wanted", "within bar")),
            f"{answer['device_bytes_per_payload_byte']:.4f} device bytes a payload byte, from {detail['device_bytes_from']}, "
            f"{answer['bars'][device]:g} at most: {'NO' if device in answer['missed'] else 'yes'}; "
            f"{detail['passes']} passes of {detail['blocks_per_pass']:,} blocks, seed {detail['seed']}",
        ]
    )


def tell(line: str) -> None:
    """For people who watch."""
    if sys.stderr.isatty():
        print(line, file=sys.stderr)
