"""`kvstore chaos`: try to break the store on this machine, and say what was found."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from pathlib import Path

from kvstore.chaos.base import Check, Outcome, Progress
from kvstore.cli.output import STDOUT, add_json_flag, check_json_target, emit, table
from kvstore.cli.stopping import stoppable
from kvstore.errors import InvalidArgument

_COUNT_MAX = 100_000_000
_SHOWN_MAX = 20

Attack = Callable[[argparse.Namespace, Path, Progress, Check], Outcome]


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("chaos", help="try to break the store, thousands of times")
    attacks = parser.add_subparsers(title="attacks", metavar="ATTACK", required=True)

    kill = _attack(attacks, "kill", "kill -9 of a process that works on a store", _kill)
    _count(kill, "--rounds", 100, "kills")
    kill.add_argument(
        "--target",
        choices=("store", "service"),
        default="store",
        help="what is killed: a process that works on a log (default), or `kvstore serve` below clients that write",
    )

    cut = _attack(
        attacks, "powercut", "power cuts below ext4 and xfs, from a logged block device (needs root)", _cut
    )
    _count(cut, "--states", 100, "states after cuts, over both file systems")
    cut.add_argument("--no-sync", action="store_true", help=argparse.SUPPRESS)

    _attack(attacks, "nospace", "full disks, quotas, limits, read-only file systems (needs root)", _nospace)
    _attack(attacks, "eio", "a device that fails writes, flushes, reads (needs root)", _eio)

    flip = _attack(attacks, "bitflip", "single bits flipped in every file of a store", _flip)
    _count(flip, "--flips", 10_000, "flips, over files of all kinds")


def _attack(
    attacks: argparse._SubParsersAction[argparse.ArgumentParser], name: str, about: str, attack: Attack
) -> argparse.ArgumentParser:
    parser = attacks.add_parser(name, help=about, description=about)
    parser.add_argument("--seed", type=int, default=None, help="repeat a run; random and printed by default")
    parser.add_argument(
        "--dir", default=None, metavar="FOLDER", help="where scratch files go (default: /dev/shm, in memory)"
    )
    add_json_flag(parser)
    parser.set_defaults(run=run, attack=attack)
    return parser


def _count(parser: argparse.ArgumentParser, flag: str, default: int, what: str) -> None:
    parser.add_argument(
        flag, dest="count", type=int, default=default, metavar="N", help=f"{what} (default {default:,})"
    )


def run(args: argparse.Namespace) -> int:
    from kvstore.chaos.mounts import scratch_folder

    count = getattr(args, "count", 1)
    if not 1 <= count <= _COUNT_MAX:
        raise InvalidArgument(
            "that many are not possible", field="N", value=count, allowed=f"1 to {_COUNT_MAX:,}"
        )
    check_json_target(args)
    if args.seed is None:
        args.seed = random.SystemRandom().randrange(2**32)
    attack: Attack = args.attack

    def work(check: Check) -> Outcome:
        def progress(line: str) -> None:
            check()
            _progress(line)

        # A stop in order unmounts and removes everything.
        with scratch_folder(args.dir) as scratch:
            return attack(args, scratch, progress, check)

    try:
        outcome = stoppable(
            work, leaves="scratch folders kvstore-chaos-*, mounts in them and helpers may be left"
        )
    finally:
        _progress("")
    emit(args, outcome.as_json(), _text(outcome))
    if args.json == STDOUT:
        print(outcome.summary, file=sys.stderr)
    return 1 if outcome.violations else 0


def _progress(line: str) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{line}")
        sys.stderr.flush()


def _text(outcome: Outcome) -> str:
    lines = []
    if outcome.figures:
        rows = [(name, _figure(value)) for name, value in outcome.figures.items()]
        lines.append(table(rows, head=("figure", "value")))
        shown = {name for value in outcome.figures.values() if isinstance(value, dict) for name in value}
        lines += [f"{name}: {meaning}" for name, meaning in outcome.legend.items() if name in shown]
    lines += outcome.violations[:_SHOWN_MAX]
    if len(outcome.violations) > _SHOWN_MAX:
        lines.append(f"... and {len(outcome.violations) - _SHOWN_MAX:,} more; --json FILE has all")
    return "\n".join([*lines, outcome.summary])


def _figure(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_figure(one)}" for name, one in value.items())
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def _kill(args: argparse.Namespace, scratch: Path, progress: Progress, check: Check) -> Outcome:
    if args.target == "service":
        from kvstore.chaos.kill_service import kill_service_rounds

        return kill_service_rounds(
            args.count, seed=args.seed, scratch=scratch, progress=progress, check=check
        )
    from kvstore.chaos.kill import kill_rounds

    return kill_rounds(args.count, seed=args.seed, scratch=scratch, progress=progress, check=check)


def _cut(args: argparse.Namespace, scratch: Path, progress: Progress, check: Check) -> Outcome:
    from kvstore.chaos.powercut import power_cuts

    return power_cuts(
        args.count, seed=args.seed, scratch=scratch, progress=progress, check=check, no_sync=args.no_sync
    )


def _nospace(args: argparse.Namespace, scratch: Path, progress: Progress, check: Check) -> Outcome:
    from kvstore.chaos.nospace import run_out

    return run_out(seed=args.seed, scratch=scratch, progress=progress, check=check)


def _eio(args: argparse.Namespace, scratch: Path, progress: Progress, check: Check) -> Outcome:
    from kvstore.chaos.eio import failing_device

    return failing_device(seed=args.seed, scratch=scratch, progress=progress, check=check)


def _flip(args: argparse.Namespace, scratch: Path, progress: Progress, check: Check) -> Outcome:
    from kvstore.chaos.bitflip import bit_flips

    return bit_flips(args.count, seed=args.seed, scratch=scratch, progress=progress, check=check)
