"""kvstore beside LMCache, Mooncake and AIBrix: the same payloads, in one run, in turns.

    python benchmarks/peers/run.py [--quick] [--json FILE]

Makes the rivals' environment (once, in --dir), then gives every store its turn in every round. A turn is a process of its own
with a store of its own that begins empty: a pass to warm up, a pass that is measured, reading, and the end of all of it. Only
one store runs at a time. What cannot be installed or started is a row that says why.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "clients")]

from benchmarks.peers.environments import Environment, NotInstalled, Rivals, last_line  # noqa: E402
from benchmarks.peers.report import text_of  # noqa: E402
from benchmarks.peers.rules import CONTENDERS, LINES, OURS, RAW, Contender, Turn, compare, order  # noqa: E402
from kvstore.cli.output import add_json_flag, check_json_target, emit  # noqa: E402
from kvstore.errors import ConfigError, InvalidArgument, KvstoreError  # noqa: E402
from kvstore.units import parse_size, size_text  # noqa: E402

TIERS = ("memory", "disk")
ROUNDS, MEMORY_BYTES, DISK_BYTES, PROMPT_BLOCKS = 5, 1 << 30, 2 << 30, 64
QUICK_ROUNDS, QUICK_MEMORY_BYTES, QUICK_DISK_BYTES = 1, 256 << 20, 512 << 20
SIZE_MIN, SIZE_MAX, ROUNDS_MAX = 64 << 20, 64 << 30, 100
TURN_SECONDS = 600.0
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Task:
    """What all turns of a run have in common. `sizes`: bytes of a pass for each tier."""

    rounds: int
    sizes: dict[str, int]
    seed: int
    turn_seconds: float
    scratch: Path


class Runner:
    """Runs turns as child processes, each in a folder of its own that is removed afterwards."""

    def __init__(self, task: Task, rivals: Rivals, tell: Callable[[str], None]) -> None:
        self._task, self._rivals, self._tell = task, rivals, tell

    def run(self, contenders: Sequence[Contender], tiers: Sequence[str]) -> list[Turn]:
        turns = []
        for tier in tiers:
            for number in range(self._task.rounds):
                for contender in order(contenders, tier, number):
                    turn = self._turn(contender, tier, number)
                    turns.append(turn)
                    self._tell(_told(turn))
        return turns

    def _turn(self, contender: Contender, tier: str, number: int) -> Turn:
        try:
            environment = self._environment(contender)
            answer = self._answer(contender, tier, number, environment)
        except NotInstalled as error:
            answer = {"failed": f"not installed: {error}"}
        return Turn(contender.name, tier, number, answer.get("rates", {}), answer.get("failed", ""))

    def _environment(self, contender: Contender) -> Environment:
        if not contender.rival:
            return Environment(Path(sys.executable), {})
        return self._rivals.environment(contender.rival)

    def _answer(
        self, contender: Contender, tier: str, number: int, environment: Environment
    ) -> dict[str, Any]:
        folder = Path(tempfile.mkdtemp(prefix="kvstore-bench-peers-", dir=self._task.scratch))
        spec = {
            "module": f"benchmarks.peers.{contender.module}",
            "options": {**contender.options, "threads": contender.threads},
            "tier": tier,
            "set_bytes": self._task.sizes[tier],
            "prompt_blocks": PROMPT_BLOCKS,
            "directory": str(folder),
            "scripts": str(environment.scripts),
            "seed": self._task.seed + number,
        }
        try:
            return run_turn(spec, environment, self._task.turn_seconds)
        finally:
            shutil.rmtree(folder)


def run_turn(spec: dict[str, Any], environment: Environment, seconds: float) -> dict[str, Any]:
    """The child's answer, or {"failed": why} where it gave none in time. It and its own children are gone on return."""
    command = [str(environment.python), "-m", "benchmarks.peers.turn", json.dumps(spec)]
    variables = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'clients'}", **environment.variables}
    child = subprocess.Popen(
        command,
        cwd=ROOT,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"failed": f"it took more than {seconds:g} s"}
    finally:
        _end_group(child)
        _remove_shared_memory(child.pid)
    return answer_of(output, errors, child.returncode)


def answer_of(output: str, errors: str, status: int) -> dict[str, Any]:
    """The last line that is an object in JSON: some clients write to stdout, too."""
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            return found
    return {"failed": f"it ended with {status}: {last_line(errors)}"}


def _end_group(child: subprocess.Popen[str]) -> None:
    """The child began a group of its own, in which its servers are."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.communicate()


def _remove_shared_memory(pid: int) -> None:
    """What a rival's client or server named after the child and left behind."""
    for pattern in (f"lmcache_kv_{pid}_*", f"lmcache_l1_pool_bench{pid}"):
        for path in SHARED_MEMORY.glob(pattern):
            path.unlink()


def _told(turn: Turn) -> str:
    rates = ", ".join(f"{name} {rate / 1e6:,.0f}" for name, rate in turn.rates.items() if name != "warm")
    found = f"{rates} MB/s" if rates else "no number"
    return f"{turn.tier} {turn.round + 1}, {turn.contender}: {found}" + (
        f" ({turn.failed})" if turn.failed else ""
    )


def report(
    task: Task, contenders: Sequence[Contender], turns: Sequence[Turn], detail: dict[str, Any]
) -> dict[str, Any]:
    """missed: lines whose bar was not reached; the rest of the keys are those of `rules.compare` and all samples."""
    tiers = {turn.tier for turn in turns}
    lines = [compare(line, contenders, turns) for line in LINES if line.tier in tiers]
    return {
        "lines": lines,
        "missed": [line["line"] for line in lines if line["met"] is False],
        "detail": {
            "rounds": task.rounds,
            "seed": task.seed,
            "memory_bytes": task.sizes["memory"],
            "disk_bytes": task.sizes["disk"],
            "prompt_blocks": PROMPT_BLOCKS,
            "processors": os.cpu_count(),
            **detail,
            "turns": [
                {
                    "contender": turn.contender,
                    "tier": turn.tier,
                    "round": turn.round,
                    "bytes_per_second": dict(turn.rates),
                    "failed": turn.failed,
                }
                for turn in turns
            ],
        },
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--dir",
        type=Path,
        default=None,
        metavar="DIR",
        help="folder of the rivals' environment (default kvstore-peers in the user's cache folder)",
    )
    parser.add_argument(
        "--scratch",
        type=Path,
        default=None,
        metavar="DIR",
        help="folder on the disk to measure (default --dir)",
    )
    parser.add_argument("--rounds", type=int, default=None, metavar="N", help=f"default {ROUNDS}")
    parser.add_argument(
        "--size",
        default=None,
        metavar="SIZE",
        help=f"of a pass in memory (default {size_text(MEMORY_BYTES)})",
    )
    parser.add_argument(
        "--disk-size",
        default=None,
        metavar="SIZE",
        help=f"of a pass on disk (default {size_text(DISK_BYTES)})",
    )
    parser.add_argument("--tier", choices=TIERS, action="append", help="only this one; may be given twice")
    parser.add_argument(
        "--only",
        action="append",
        choices=[each.name for each in CONTENDERS[2:]],
        help="of the rivals only this one; may be given again",
    )
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument(
        "--turn-seconds",
        type=float,
        default=TURN_SECONDS,
        metavar="S",
        help="a turn that takes longer has failed",
    )
    parser.add_argument(
        "--quick", action="store_true", help="one round of small passes: whether all of it works"
    )
    add_json_flag(parser)
    return parser


def task_of(args: argparse.Namespace, scratch: Path) -> Task:
    """InvalidArgument for what cannot be measured."""
    quick = args.quick
    rounds = args.rounds if args.rounds is not None else QUICK_ROUNDS if quick else ROUNDS
    sizes = {}
    for tier, flag, given, default in (
        ("memory", "--size", args.size, QUICK_MEMORY_BYTES if quick else MEMORY_BYTES),
        ("disk", "--disk-size", args.disk_size, QUICK_DISK_BYTES if quick else DISK_BYTES),
    ):
        sizes[tier] = default if given is None else parse_size(given, name=flag)
        _refuse_outside(flag, sizes[tier], SIZE_MIN, SIZE_MAX)
    _refuse_outside("--rounds", rounds, 1, ROUNDS_MAX)
    seed = secrets.randbits(32) if args.seed is None else args.seed
    return Task(rounds, sizes, seed, args.turn_seconds, scratch)


def _refuse_outside(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InvalidArgument(
            "not what can be measured", field=field, value=value, allowed=f"{low} to {high}"
        )


def main() -> int:
    args = _parser().parse_args()
    check_json_target(args)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = (args.dir or cache / "kvstore-peers").absolute()
    scratch = (args.scratch or home).absolute()
    task = task_of(args, scratch)
    scratch.mkdir(parents=True, exist_ok=True)
    contenders = [each for each in CONTENDERS if each.name in (OURS, RAW, *(args.only or [each.name]))]
    before, begin = os.getloadavg()[0], time.monotonic()
    tell(f"seed {task.seed}; the rivals' environment is in {home}")
    turns = Runner(task, Rivals(home), tell).run(contenders, args.tier or TIERS)
    detail = {
        "load_before": before,
        "load_after": os.getloadavg()[0],
        "seconds": time.monotonic() - begin,
    }
    answer = report(task, contenders, turns, detail)
    emit(args, answer, text_of(answer))
    return 1 if answer["missed"] else 0


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (ConfigError, KvstoreError) as error:
        sys.exit(f"run.py: {error}")
