"""`kvstore demo`: parse, run the session, print."""

from __future__ import annotations

import argparse
import signal
import sys

from kvstore.cli.output import add_json_flag, check_json_target, emit
from kvstore.clock import SystemClock
from kvstore.errors import ConfigError
from kvstore.profile.registry import get_profile
from kvstore.units import parse_count
from kvstore_workers.runtime.values import MAX_PROMPT_TOKENS

PROFILES_RUN = ("tiny", "flash-slim")
TURN_TOKENS = {"tiny": 900}
TURN_TOKENS_OTHER = 300
OVERHEAD_TOKENS = 300
"""A question and marks around a turn's file text: a file's name has at most 255 bytes."""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="an agent session over real files, with and without the store",
        description="Runs a cache service, a prefill worker, a decode worker and a gateway, kills the service twice, and "
        "compares every generated token with a run that has no store.",
    )
    parser.add_argument(
        "--profile", default="tiny", help=f"model profile, one of {', '.join(PROFILES_RUN)} (default tiny)"
    )
    parser.add_argument(
        "--files",
        nargs="+",
        default=[],
        metavar="PATH",
        help="text files to read (default: Python's own library)",
    )
    parser.add_argument("--turns", default="10", help="turns, at least 9 (default 10)")
    parser.add_argument("--turn-tokens", default=None, help="tokens of file text per turn")
    parser.add_argument("--answer-tokens", default="24", help="tokens generated per turn (default 24)")
    parser.add_argument("--seed", default="1", help="seed of weights and sampling (default 1)")
    parser.add_argument("--threads", default="1", help="torch threads per worker (default 1)")
    parser.add_argument(
        "--trace",
        default=None,
        metavar="FILE",
        help="write what every part did when, for a trace viewer (Chrome trace format)",
    )
    add_json_flag(parser)
    parser.set_defaults(run=run)


def _count(args: argparse.Namespace, name: str, *, low: int, high: int) -> int:
    flag = f"--{name.replace('_', '-')}"
    value = parse_count(getattr(args, name), name=flag)
    if not low <= value <= high:
        raise ConfigError("out of range", field=flag, value=value, allowed=f"{low} to {high}")
    return value


def _check_length(tokens: int) -> None:
    """Refuse now what the last turn's prompt would be refused for."""
    if tokens > MAX_PROMPT_TOKENS:
        raise ConfigError(
            "the session becomes too long",
            field="--turns x (--turn-tokens + --answer-tokens)",
            value=tokens,
            allowed=f"{MAX_PROMPT_TOKENS} tokens in all",
        )


def run(args: argparse.Namespace) -> int:
    from kvstore_workers.demo import report as reporting
    from kvstore_workers.demo.material import choose_files
    from kvstore_workers.demo.processes import ENDING_SIGNALS, Cluster
    from kvstore_workers.demo.script import ROWS_TURN, aim, plan_turns
    from kvstore_workers.demo.session import Session, TurnResult
    from kvstore_workers.demo.timeline import check_trace_target, write_trace

    profile = get_profile(args.profile)
    if profile.name not in PROFILES_RUN:
        raise ConfigError(
            "no model for this profile",
            field="--profile",
            value=profile.name,
            allowed=", ".join(PROFILES_RUN),
        )
    turns = plan_turns(parse_count(args.turns, name="--turns"))
    default_tokens = TURN_TOKENS.get(profile.name, TURN_TOKENS_OTHER)
    if args.turn_tokens is None:
        args.turn_tokens = str(default_tokens)
    turn_tokens = _count(args, "turn_tokens", low=64, high=65_536)
    answer_tokens = _count(args, "answer_tokens", low=1, high=4096)
    longest = len(turns) * (turn_tokens + answer_tokens + OVERHEAD_TOKENS) + default_tokens
    _check_length(longest)
    seed = _count(args, "seed", low=0, high=2**31)
    threads = _count(args, "threads", low=1, high=256)
    files = choose_files(args.files)
    check_json_target(args)
    check_trace_target(args.trace)

    # As Ctrl-C does: five processes and a directory are to go first.
    for number in ENDING_SIGNALS:
        signal.signal(number, signal.default_int_handler)
    clock = SystemClock()
    begun = clock.monotonic()
    _say(
        "starting the service, a prefill worker, a decode worker, a gateway, and a worker without a store ..."
    )
    with Cluster(profile=profile.name, seed=seed, threads=threads, prompt_tokens=longest) as cluster:
        cluster.start_all()
        _say(f"all five serve after {clock.monotonic() - begun:.1f} s")
        session = Session(
            cluster,
            files,
            turn_tokens=turn_tokens,
            answer_tokens=answer_tokens,
            seed=seed,
            shot_tokens=default_tokens,
            trace=args.trace is not None,
        )
        results: list[TurnResult] = []
        missed = False
        try:
            for turn in turns:
                lacking = turn.number > ROWS_TURN and all(r.state_source != "ROWS" for r in results)
                result = session.play(aim(turn, missed=missed, lacking=lacking))
                missed = result.turn.kill_during_store and not result.killed_during_store
                results.append(result)
                prefix = result.answer.prefix
                event = reporting.event_text(result)
                _say(
                    f"turn {turn.number}/{len(turns)}: {prefix.restored_tokens:,} of {result.prompt_tokens:,} tokens restored "
                    f"({result.state_source}), first token {result.answer.ttft_s * 1e3:,.0f} ms, cold {result.cold.ttft_s * 1e3:,.0f} ms, "
                    f"{'same answer' if result.identical else 'DIFFERENT ANSWER'}{' [' + event + ']' if event else ''}"
                )
        finally:
            session.close()
        kills = cluster.kills
    report = reporting.build_report(
        results,
        kills=kills,
        profile=profile.name,
        layers=profile.layer_count,
        wall_s=clock.monotonic() - begun,
    )
    if args.trace is not None:
        write_trace(args.trace, results)
    emit(args, report, reporting.text(report))
    found = reporting.failures(report)
    for failure in found:
        print(f"kvstore demo: {failure}", file=sys.stderr)
    return 1 if found else 0


def _say(text: str) -> None:
    """Progress, for people who watch; a pipe gets the result only."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)
